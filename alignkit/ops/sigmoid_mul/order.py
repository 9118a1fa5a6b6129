"""Table of the kernels of sigmoid_mul (`dispatch.OPS`): one per backend, fastest first."""

from __future__ import annotations

from ...runtime.dispatch import ONE_PER_BACKEND

ORDER = {"sigmoid_mul": ONE_PER_BACKEND}
