"""The ways to compute the backward of the gated delta rule's state. On a CPU the reference: models with it are trained
on GPUs, fastest first."""

from __future__ import annotations

from ...runtime.dispatch import Kernel
from ...runtime.families import CUDA, REFERENCE, TRITON

ORDER = {
    "gated_delta_rule": (
        Kernel("cuda", CUDA, "cuda", rule="refuses"),
        Kernel("triton", TRITON, "triton"),
        Kernel("reference", REFERENCE, "reference"),
    )
}
