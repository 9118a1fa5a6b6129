"""A norm as it is described to those who may compute it."""

from __future__ import annotations

from typing import NamedTuple

from ...runtime.operands import Operand


class Norm(NamedTuple):
    backend: str
    """The fastest that may compute it."""
    tensors: tuple[Operand, ...]
    """x, and others of bf16 or fp32: the weight; backwards the gradients that come in."""
