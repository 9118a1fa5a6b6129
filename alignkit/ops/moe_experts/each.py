"""Expert by expert, by the products of linear layers."""

from __future__ import annotations

import torch

from ..linear import matmul
from .problem import Matrices


def products(a: torch.Tensor, b: Matrices, counts: list[int], leaves: int, out: torch.Tensor) -> None:
    """out [pairs, N] <- a [pairs, K] . b[e] [N, K]^T for the `counts[e]` next rows of each expert e, rounded to out's type."""
    for e, (x, y) in enumerate(zip(a.split(counts), out.split(counts), strict=True)):
        if len(x):
            matmul(x, b[e], leaves=leaves, to=y)


def gradients(a: torch.Tensor, b: torch.Tensor, counts: list[int], out: Matrices) -> None:
    """out[e] [N, K] <- a [pairs, N]^T . b [pairs, K] over the rows of each expert, rounded; 0 where it has none."""
    for e, (x, y) in enumerate(zip(a.split(counts), b.split(counts), strict=True)):
        if len(x):
            matmul(x.t(), y.t(), to=out[e])
        else:
            out[e].zero_()
