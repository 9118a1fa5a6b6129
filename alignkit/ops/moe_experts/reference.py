"""What is done with rows, as the formulas, in torch."""

from __future__ import annotations

import torch

from .._calls import in_torch
from .._common import lane_sum as _lane_sum
from .._experts import tree_over_experts

MOST = 2**26
"""Numbers of a block of rows, each with all experts."""


def combined(y, place, ids, weights, experts: int, out) -> None:
    across = max(MOST // (experts * y.shape[1]), 1)
    for rows in torch.arange(len(out), device=out.device).split(across):
        pair, expert = place[rows], ids[rows].to(torch.int64)
        here = pair >= 0
        leaves = torch.zeros(len(rows), y.shape[1], experts, dtype=torch.float32, device=y.device)
        if len(y):
            parts = y[pair.clamp(min=0)].float()
            parts = parts if weights is None else weights[rows, :, None] * parts
            row, nth = here.nonzero(as_tuple=True)
            leaves[row, :, expert[row, nth]] = parts[row, nth]
        out[rows] = tree_over_experts(leaves).to(out.dtype)


def weighed(g, a, w, lane_sum):
    dtype, a, w = a.dtype, a.float(), w[:, None]
    return lane_sum(g, a) + 0.0, (w * g).to(dtype), (w * a).to(dtype)


@in_torch
def combine(y, place, ids, weights, experts, out) -> None:
    """out [rows, H] <- the tree over `experts` of weights [rows, k] (1 if None) times y [pairs, H], of which `place` [rows, k]
    says which belongs to each of ids [rows, k]."""
    combined(y, place, ids, weights, experts, out)


@in_torch
def weigh(g, a, w) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Of pairs with weights w: the sums of g times a, fp32 [pairs], and w times g and w times a, in a's type [pairs, F]."""
    return weighed(g, a, w, _lane_sum)
