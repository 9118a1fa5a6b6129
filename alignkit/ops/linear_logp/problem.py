"""Descriptions of the fused LM head problems for kernel selection.

The rules in cuda_backend.py read the fields; alignkit/explain.py fills them from words.
"""

from __future__ import annotations

from typing import NamedTuple

from ...runtime.operands import Operand


class Head(NamedTuple):
    """Tile statistics of the products hidden . weight^T, which are also stored to `products` if given."""

    backend: str
    hidden: Operand
    weight: Operand
    products: Operand | None


class HeadGradient(NamedTuple):
    """The gradient of the loss with respect to the products hidden . weight^T."""

    backend: str
    hidden: Operand
    weight: Operand
    out: Operand


class HeadProducts(NamedTuple):
    """The gradients of hidden and weight from dz, the gradient of the products; either may be None."""

    backend: str
    dz: Operand
    hidden: Operand
    weight: Operand
    dhidden: Operand | None
    dweight: Operand | None
