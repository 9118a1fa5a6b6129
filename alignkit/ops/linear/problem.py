"""The description of a GEMM for kernel selection.

The rules in cuda_backend.py, cublaslt.py and hopper.py read the fields; alignkit/explain.py fills them from words.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch

from ...runtime import families
from ...runtime.families import HOPPER, SM90, Gpu
from ...runtime.operands import Operand, operand


class Product(NamedTuple):  # created and hashed in every call: tuples do both in C
    """The GEMM out [m, n] = a [m, k] . b [n, k]^T by `leaves` chains and their tree, plus a bias or `out` itself."""

    backend: str
    """Fastest backend to consider."""
    device: int | None
    """GPU index; None for a hypothetical GPU of the family (`alignkit explain`)."""
    a: Operand
    b: Operand
    bias: Operand | None
    out: Operand
    leaves: int
    accumulate: bool
    """True if the result is added to `out`."""
    spare: int = 0
    """SMs to leave to concurrent kernels, for kernels that support it."""

    @staticmethod
    def of(
        backend: str,
        a: torch.Tensor,
        b: torch.Tensor,
        leaves: int,
        bias: torch.Tensor | None,
        out: torch.Tensor,
        accumulate: bool,
        spare: int = 0,
    ) -> Product:
        """Return the description of these tensors."""
        return Product(
            backend,
            out.get_device(),
            operand(a),  # pyright: ignore[reportArgumentType]
            operand(b),  # pyright: ignore[reportArgumentType]
            operand(bias),
            operand(out),  # pyright: ignore[reportArgumentType]
            leaves,
            accumulate,
            spare,
        )

    @property
    def m(self) -> int:
        return self.a[0][0]

    @property
    def n(self) -> int:
        return self.b[0][0]

    @property
    def k(self) -> int:
        return self.a[0][1]

    @property
    def bias_is_dense(self) -> bool:
        return self.bias is None or self.bias[0][0] <= 1 or self.bias[1] == (1,)

    @property
    def gpu(self) -> Gpu:
        """The kind of GPU."""
        return HOPPER if self.device is None else families.gpu(self.device)

    def needs_hopper(self) -> str | None:
        """Return why a kernel for Hopper GPUs cannot compute the GEMM, or None if it can."""
        return None if self.gpu.hopper else f"device: must have compute capability {HOPPER}, got {self.gpu}"

    @property
    def sm_count(self) -> int:
        return SM90.sm_count if self.device is None else _sm_count(self.device)


@functools.cache
def _sm_count(device: int) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count
