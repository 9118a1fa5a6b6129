"""Kernels of the gated delta rule's backward pass, fastest first. The CPU has only the reference.

`ORDER` maps an op name of `runtime.dispatch.OPS` to its kernels, in the order in which `dispatch.choose` tries them.
Another order changes no bit. `alignkit explain` prints the kernels' names.
"""

from __future__ import annotations

from ...runtime.dispatch import Kernel
from ...runtime.families import CUDA, REFERENCE, TRITON

ORDER = {
    "gated_delta_rule": (
        Kernel("cuda", CUDA, "cuda", rule="rejects"),
        Kernel("triton", TRITON, "triton"),
        Kernel("reference", REFERENCE, "reference"),
    )
}
