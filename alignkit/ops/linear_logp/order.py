"""The ways to compute the head. One kernel takes products and what becomes of them; else products go to memory, and
`linear_logp` of the list takes them from there, fastest first."""

from __future__ import annotations

from ...runtime.dispatch import PLAIN, Kernel
from ...runtime.families import CUDA

ORDER = {
    "linear_logp": PLAIN,
    **{
        op: (Kernel("cuda", CUDA, "cuda", rule=f"{op}_refuses"), *PLAIN)
        for op in ("head_statistics", "head_gradient", "head_products")
    },
}
