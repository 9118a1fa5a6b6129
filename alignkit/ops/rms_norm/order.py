"""The ways to compute RMSNorm, fastest first."""

from __future__ import annotations

from ...runtime.dispatch import PLAIN, Kernel
from ...runtime.families import CUDA

ORDER = {
    "rms_norm": (Kernel("cuda", CUDA, "cuda", rule="forward_refuses"), *PLAIN),
    "add_rms_norm": PLAIN,
    "rms_norm_backward": (Kernel("cuda", CUDA, "cuda", rule="backward_refuses"), *PLAIN),
}
