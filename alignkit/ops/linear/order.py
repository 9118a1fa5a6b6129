"""The ways to compute a product, fastest first."""

from __future__ import annotations

from ...runtime.dispatch import Kernel
from ...runtime.families import CUDA, NATIVE, REFERENCE, TRITON

ORDER = {
    "linear": (
        Kernel("tree", CUDA, "cuda", rule="tree_refuses", prepare="prepare_tree"),
        Kernel("pairs", CUDA, "cuda", rule="pairs_refuses", prepare="prepare_pairs"),
        Kernel("few", CUDA, "cuda", rule="few_refuses", prepare="prepare_few"),
        Kernel("narrow", CUDA, "cuda", rule="narrow_refuses", prepare="prepare_narrow"),
        Kernel(
            "cublaslt",
            TRITON,
            "cublaslt",
            rule="refuses",
            prepare="prepare",
            declines="none of its algorithms gives the chain's bits in a trial on the GPU",
        ),
        Kernel("hopper", TRITON, "hopper", rule="refuses", prepare="prepare"),
        Kernel("tiles", TRITON, "triton", prepare="prepare"),
        Kernel("cpu", NATIVE, "cpu"),
        Kernel("reference", REFERENCE, "reference"),
    ),
    "linear_resume": (
        Kernel("tiles", TRITON, "triton"),
        Kernel("cpu", NATIVE, "cpu"),
        Kernel("reference", REFERENCE, "reference"),
    ),
}
