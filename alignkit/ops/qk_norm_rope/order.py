"""Table of the kernels of qk_norm_rope (`dispatch.OPS`): one per backend, fastest first."""

from __future__ import annotations

from ...runtime.dispatch import ONE_PER_BACKEND

ORDER = {"qk_norm_rope": ONE_PER_BACKEND}
