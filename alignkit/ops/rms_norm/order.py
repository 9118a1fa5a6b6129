"""Kernels of each op of RMSNorm, fastest first.

`ORDER` maps an op name of `runtime.dispatch.OPS` to its kernels, in the order in which `dispatch.choose` tries them.
Another order changes no bit. `alignkit explain` prints the kernels' names.
"""

from __future__ import annotations

from ...runtime.dispatch import ONE_PER_BACKEND, Kernel
from ...runtime.families import CUDA

ORDER = {
    "rms_norm": (Kernel("cuda", CUDA, "cuda", rule="forward_rejects"), *ONE_PER_BACKEND),
    "add_rms_norm": ONE_PER_BACKEND,
    "rms_norm_backward": (Kernel("cuda", CUDA, "cuda", rule="backward_rejects"), *ONE_PER_BACKEND),
}
