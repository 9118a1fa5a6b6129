"""Table of the kernels of silu_mul (`dispatch.OPS`): one per backend, fastest first."""

from __future__ import annotations

from ...runtime.dispatch import ONE_PER_BACKEND

ORDER = {"silu_mul": ONE_PER_BACKEND}
