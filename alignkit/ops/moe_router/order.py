"""Kernels of the router, one per backend, fastest first.

`ORDER` maps an op name of `runtime.dispatch.OPS` to its kernels, in the order in which `dispatch.choose` tries them.
Another order changes no bit. `alignkit explain` prints the kernels' names.
"""

from __future__ import annotations

from ...runtime.dispatch import ONE_PER_BACKEND

ORDER = {"moe_router": ONE_PER_BACKEND}
