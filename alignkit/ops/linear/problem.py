"""A product as it is described to those who may compute it."""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch

from ...runtime.families import SM90
from ...runtime.operands import Operand, operand


class Product(NamedTuple):  # made and hashed in every call: a tuple is both in C
    """out [m, n] = a [m, k] . b [n, k]^T by `leaves` chains and their tree, plus out if `accumulate`, or a bias."""

    backend: str
    """The fastest that may compute it."""
    device: int | None
    """Number of the GPU; None: one of the family, of which there need be none here."""
    a: Operand
    b: Operand
    bias: Operand | None
    out: Operand
    leaves: int
    accumulate: bool
    spare: int = 0
    """Multiprocessors that are left to what runs beside it, by a way that can."""

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
    def multiprocessors(self) -> int:
        return SM90.multiprocessors if self.device is None else _multiprocessors(self.device)


@functools.cache
def _multiprocessors(device: int) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count
