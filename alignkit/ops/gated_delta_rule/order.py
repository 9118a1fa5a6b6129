"""Kernels of the gated delta rule's backward pass, fastest first. The order affects speed alone.

`dispatch.order` reads `ORDER` by the op names of `dispatch.OPS`.
The CPU has only the reference.
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
