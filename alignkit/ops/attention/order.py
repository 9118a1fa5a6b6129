"""The ways to compute attention, fastest first."""

from __future__ import annotations

from ...runtime.dispatch import Kernel
from ...runtime.families import NATIVE, REFERENCE, TRITON

ORDER = {
    "attention": (
        Kernel("triton", TRITON, "triton"),
        Kernel("cpu", NATIVE, "cpu"),
        Kernel("reference", REFERENCE, "reference"),
    )
}
