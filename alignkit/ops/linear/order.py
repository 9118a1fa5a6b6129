"""Kernels of each GEMM op, fastest first.

`ORDER` maps an op name of `runtime.dispatch.OPS` to its kernels, in the order in which `dispatch.choose` tries them.
Another order changes no bit. `alignkit explain` prints the kernels' names.
Tests and tests/ops/choices.json hold the kernels' names too.
"""

from __future__ import annotations

from ...runtime.dispatch import Kernel
from ...runtime.families import CUDA, NATIVE, REFERENCE, TRITON

ORDER = {
    "linear": (
        Kernel("tree", CUDA, "cuda", rule="tree_rejects", prepare="prepare_tree"),
        Kernel("few", CUDA, "cuda", rule="few_rejects", prepare="prepare_few"),
        Kernel("narrow", CUDA, "cuda", rule="narrow_rejects", prepare="prepare_narrow"),
        Kernel(
            "cublaslt",
            TRITON,
            "cublaslt",
            rule="rejects",
            prepare="prepare",
            declines="none of its algorithms gives the chain's bits in a trial on the GPU",
        ),
        Kernel("hopper", TRITON, "hopper", rule="rejects", prepare="prepare"),
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
