"""Table of the kernels of rope (`dispatch.OPS`): one per backend, fastest first."""

from __future__ import annotations

from ...runtime.dispatch import ONE_PER_BACKEND

ORDER = {"rope": ONE_PER_BACKEND}
