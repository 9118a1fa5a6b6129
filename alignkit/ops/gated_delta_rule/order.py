"""Table of the kernels of the gated delta rule's backward pass (`dispatch.OPS`), fastest first.

The order affects speed alone. The CPU has only the reference.
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
