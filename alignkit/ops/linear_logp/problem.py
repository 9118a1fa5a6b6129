"""The head's kernels of products and what becomes of them, as problems that are described to those who may compute them."""

from __future__ import annotations

from typing import NamedTuple

from ...runtime.operands import Operand


class Head(NamedTuple):
    """Statistics of the products hidden . weight^T, which are also written to `products` if that is given."""

    backend: str
    hidden: Operand
    weight: Operand
    products: Operand | None


class HeadGradient(NamedTuple):
    """The gradient of the loss by these products, to `out`."""

    backend: str
    hidden: Operand
    weight: Operand
    out: Operand


class HeadProducts(NamedTuple):
    """What dz gives for hidden and for the weight; either may be None."""

    backend: str
    dz: Operand
    hidden: Operand
    weight: Operand
    dhidden: Operand | None
    dweight: Operand | None
