"""The ways to compute experts, fastest first: which rows are whose, products by each expert's matrix, the first of them with its
activation, those of the gradients of matrices, and what is done with rows."""

from __future__ import annotations

from ...runtime.dispatch import PLAIN, Kernel
from ...runtime.families import CUDA, NATIVE, REFERENCE, TRITON

_PRODUCTS = (
    Kernel("grouped", TRITON, "grouped", rule="refuses"),
    *(Kernel("each", backend, "each") for backend in (TRITON, NATIVE, REFERENCE)),
)

ORDER = {
    "moe_pairs": (
        Kernel("many", CUDA, "cuda", rule="pairs_refuses"),
        Kernel("triton", TRITON, "ranked", rule="refuses"),
        *(Kernel("torch", backend, "pairs") for backend in (TRITON, NATIVE, REFERENCE)),
    ),
    "moe_products": (
        Kernel("many", CUDA, "cuda", rule="products_refuses"),
        Kernel("few", CUDA, "few", rule="refuses"),
        *_PRODUCTS,
    ),
    "moe_gated": (Kernel("many", CUDA, "cuda", rule="gated_refuses"), *_PRODUCTS),
    "moe_gradients": (Kernel("many", CUDA, "cuda", rule="gradients_refuses"), *_PRODUCTS),
    "moe_combine": (Kernel("vectors", CUDA, "cuda", rule="combine_refuses"), *PLAIN),
    "moe_weigh": PLAIN,
}
