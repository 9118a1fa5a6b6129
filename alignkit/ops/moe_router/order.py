"""Kernels of the router, one per backend, fastest first.

`dispatch.order` reads `ORDER` by the op names of `dispatch.OPS`.
"""

from __future__ import annotations

from ...runtime.dispatch import ONE_PER_BACKEND

ORDER = {"moe_router": ONE_PER_BACKEND}
