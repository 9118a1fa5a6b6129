"""Expert by expert, by the products of linear layers. A GPU is waited for: the host needs to know how many rows each has."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import torch

from ...errors import UnsupportedError
from ...runtime import dispatch, families
from ..linear import matmul
from .problem import Matrices


def _experts(offsets: torch.Tensor) -> Iterator[tuple[int, slice]]:
    """Each with its pairs."""
    if not families.on_host(offsets.device) and torch.cuda.is_current_stream_capturing():
        raise UnsupportedError(
            "moe_experts: not while a CUDA graph is captured, as the host must know the counts of rows"
        )
    return enumerate(slice(*both) for both in itertools.pairwise(offsets.tolist()))


def _rows(t: torch.Tensor, row: torch.Tensor | None, pairs: slice) -> torch.Tensor:
    return t[pairs] if row is None else t[row[pairs]]


def products(
    a: torch.Tensor, row: torch.Tensor | None, b: Matrices, offsets: torch.Tensor, leaves: int, out: torch.Tensor
) -> None:
    """out [pairs, N] <- a [.., K] . b[e] [N, K]^T for the pairs from `offsets[e]` up to `offsets[e + 1]` of each expert e, rounded
    to out's type. row: which of a's rows is each pair's; None: they are in the order of pairs."""
    for e, pairs in _experts(offsets):
        if pairs.start < pairs.stop:
            matmul(_rows(a, row, pairs), b[e], leaves=leaves, to=out[pairs])


def gated(
    a: torch.Tensor, row: torch.Tensor | None, b: Matrices, offsets: torch.Tensor, h: torch.Tensor | None
) -> torch.Tensor:
    """[pairs, F]: silu_mul of the halves of h [pairs, 2 F] <- `products` with matrices [2 F, K]. h: None if it is not asked
    for."""
    if h is None:
        h = torch.empty(len(a) if row is None else len(row), b.shape[0], dtype=a.dtype, device=a.device)
    products(a, row, b, offsets, 1, h)
    return dispatch.select("silu_mul", h.device).forward(*h.chunk(2, dim=1))


def gradients(
    a: torch.Tensor,
    a_row: torch.Tensor | None,
    b: torch.Tensor,
    b_row: torch.Tensor | None,
    offsets: torch.Tensor,
    out: torch.Tensor,
) -> None:
    """out [experts, N, K] <- a [pairs, N]^T . b [pairs, K] over the pairs of each expert, rounded; 0 where it has none. The
    rows of a and b as in `products`."""
    for e, pairs in _experts(offsets):
        if pairs.start < pairs.stop:
            matmul(_rows(a, a_row, pairs).t(), _rows(b, b_row, pairs).t(), to=out[e])
        else:
            out[e].zero_()
