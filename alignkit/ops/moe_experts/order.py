"""Kernels of each op of the experts, fastest first.

`ORDER` maps an op name of `runtime.dispatch.OPS` to its kernels, in the order in which `dispatch.choose` tries them.
Another order changes no bit. `alignkit explain` prints the kernels' names.

moe_pairs sorts rows by expert; moe_products, moe_gated (with activation) and moe_gradients are grouped GEMMs;
moe_combine sums over a row's experts; moe_weigh is a fused step of the backward pass.
Stored results and benchmarks/moe.py hold the kernels' names too, so a new name needs new results.
"""

from __future__ import annotations

from ...runtime.dispatch import ONE_PER_BACKEND, Kernel
from ...runtime.families import CUDA, NATIVE, REFERENCE, TRITON

_PRODUCTS = (
    Kernel("grouped", TRITON, "grouped", rule="rejects"),
    *(Kernel("each", backend, "each") for backend in (TRITON, NATIVE, REFERENCE)),
)

ORDER = {
    "moe_pairs": (
        Kernel("many", CUDA, "cuda", rule="pairs_rejects"),
        Kernel("triton", TRITON, "ranked", rule="rejects"),
        *(Kernel("torch", backend, "pairs") for backend in (TRITON, NATIVE, REFERENCE)),
    ),
    "moe_products": (
        Kernel("many", CUDA, "cuda", rule="products_rejects"),
        Kernel("few", CUDA, "few", rule="rejects"),
        *_PRODUCTS,
    ),
    "moe_gated": (Kernel("many", CUDA, "cuda", rule="gated_rejects"), *_PRODUCTS),
    "moe_gradients": (Kernel("many", CUDA, "cuda", rule="gradients_rejects"), *_PRODUCTS),
    "moe_combine": (Kernel("vectors", CUDA, "cuda", rule="combine_rejects"), *ONE_PER_BACKEND),
    "moe_weigh": ONE_PER_BACKEND,
}
