"""The ways to compute silu_mul, fastest first."""

from __future__ import annotations

from ...runtime.dispatch import Kernel
from ...runtime.families import NATIVE, REFERENCE, TRITON

ORDER = {
    "silu_mul": (
        Kernel("triton", TRITON, "triton"),
        Kernel("cpu", NATIVE, "cpu"),
        Kernel("reference", REFERENCE, "reference"),
    )
}
