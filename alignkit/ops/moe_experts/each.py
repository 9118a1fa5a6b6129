"""Generic backend: expert by expert, through the GEMMs of linear layers.

It synchronizes with a GPU, because the host needs the number of rows of each expert. grouped.py and cuda_backend.py
have the same functions and bits.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import torch

from ...errors import UnsupportedError
from ...runtime import dispatch, families
from ..linear import matmul
from .problem import Matrices


def _experts(offsets: torch.Tensor) -> Iterator[tuple[int, slice]]:
    """Return an iterator over (expert, slice of its pairs); synchronizes."""
    if not families.on_host(offsets.device) and torch.cuda.is_current_stream_capturing():
        raise UnsupportedError(
            "moe_experts: unsupported during CUDA graph capture: no grouped GEMM kernel supports the operands, so the "
            "host must read row counts. Pass stacked gate_up and down, of at most 4096 experts per rank"
        )
    return enumerate(slice(*both) for both in itertools.pairwise(offsets.tolist()))


def _rows(t: torch.Tensor, row: torch.Tensor | None, pairs: slice) -> torch.Tensor:
    return t[pairs] if row is None else t[row[pairs]]


def products(
    a: torch.Tensor, row: torch.Tensor | None, b: Matrices, offsets: torch.Tensor, leaves: int, out: torch.Tensor
) -> None:
    """Compute out [pairs, N] = a [.., K] . b[e] [N, K]^T for each expert e, rounded to out's dtype.

    The pairs of expert e are `offsets[e]` to `offsets[e + 1]`. `row` holds the row of a for each pair; None if a is in
    the order of pairs.
    """
    for e, pairs in _experts(offsets):
        if pairs.start < pairs.stop:
            matmul(_rows(a, row, pairs), b[e], leaves=leaves, to=out[pairs])


def gated(
    a: torch.Tensor, row: torch.Tensor | None, b: Matrices, offsets: torch.Tensor, h: torch.Tensor | None
) -> torch.Tensor:
    """Compute h [pairs, 2F] = `products` with matrices [2F, K]; return silu_mul of its halves, [pairs, F].

    h receives gate and up if it is not None.
    """
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
    """Compute out [experts, N, K] = a [pairs, N]^T . b [pairs, K] over each expert's pairs, rounded.

    An expert without pairs gets 0. `a_row` and `b_row` are as `row` in `products`.
    """
    for e, pairs in _experts(offsets):
        if pairs.start < pairs.stop:
            matmul(_rows(a, a_row, pairs).t(), _rows(b, b_row, pairs).t(), to=out[e])
        else:
            out[e].zero_()
