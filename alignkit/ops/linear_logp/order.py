"""Kernels of each op of the LM head, fastest first.

`ORDER` maps an op name of `runtime.dispatch.OPS` to its kernels, in the order in which `dispatch.choose` tries them.
Another order changes no bit. `alignkit explain` prints the kernels' names.

The kernels of `head_*` ops fuse the GEMM with its epilogue. Without them, a GEMM writes its products to memory and a
`linear_logp` kernel reads the products.
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
