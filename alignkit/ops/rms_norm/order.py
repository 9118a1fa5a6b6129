"""The ways to compute RMSNorm, fastest first."""

from __future__ import annotations

from ...runtime.dispatch import Kernel
from ...runtime.families import CUDA, NATIVE, REFERENCE, TRITON

PLAIN = (Kernel("triton", TRITON, "triton"), Kernel("cpu", NATIVE, "cpu"), Kernel("reference", REFERENCE, "reference"))
ORDER = {
    "rms_norm": (Kernel("cuda", CUDA, "cuda", rule="forward_refuses"), *PLAIN),
    "add_rms_norm": PLAIN,
    "rms_norm_backward": (Kernel("cuda", CUDA, "cuda", rule="backward_refuses"), *PLAIN),
}
