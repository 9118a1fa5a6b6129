"""Kernels of silu_mul, one per backend, fastest first.

`dispatch.order` reads `ORDER` by the op names of `dispatch.OPS`.
"""

from __future__ import annotations

from ...runtime.dispatch import ONE_PER_BACKEND

ORDER = {"silu_mul": ONE_PER_BACKEND}
