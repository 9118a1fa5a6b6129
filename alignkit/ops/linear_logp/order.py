"""Kernels of each op of the LM head, fastest first. The order affects speed alone.

`dispatch.order` reads `ORDER` by the op names of `dispatch.OPS`.
The `head_*` kernels fuse the GEMM with its epilogue. Otherwise the products go through memory and a `linear_logp`
kernel reads them.
"""

from __future__ import annotations

from ...runtime.dispatch import ONE_PER_BACKEND, Kernel
from ...runtime.families import CUDA

ORDER = {
    "linear_logp": ONE_PER_BACKEND,
    **{
        op: (Kernel("cuda", CUDA, "cuda", rule=f"{op}_rejects"), *ONE_PER_BACKEND)
        for op in ("head_statistics", "head_gradient", "head_products")
    },
}
