"""What is done with rows, as the formulas, in torch."""

from __future__ import annotations

import torch

from .._calls import in_torch
from .._common import lane_sum as _lane_sum
from .._experts import tree_over_experts
from ..silu_mul import reference as silu_mul

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


def weighed_back(g, h, w, lane_sum, silu_mul):
    gate, up = h.chunk(2, dim=1)
    dw, da, wa = weighed(g, silu_mul.forward(gate, up), w, lane_sum)
    dh = torch.empty_like(h)
    silu_mul.backward(gate, up, da, *dh.chunk(2, dim=1))
    return dw, dh, wa


@in_torch
def weigh(g, h, w) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Of pairs with weights w, gate and up h [pairs, 2 F] and g [pairs, F], fp32, the gradient of the results by a = silu_mul of
    h if all weights were 1: the weights' gradients, fp32 [pairs]; that of h; and w times a, the last two in h's type."""
    return weighed_back(g, h, w, _lane_sum, silu_mul)
