"""Reference `combine` and `weigh` in torch, in the contract's order (docs/contract.md, "Mixture of experts").

sm90 tests use `combined` and `weighed_back` with the functions of their family.
"""

from __future__ import annotations

import torch

from .._calls import in_torch
from .._common import lane_sum as _lane_sum
from .._experts import tree_over_experts
from ..silu_mul import reference as silu_mul

MAX_ELEMENTS = 2**26
"""schedule: maximum elements of a block of rows with all experts."""


def combined(y, place, ids, weights, experts: int, out) -> None:
    """Compute `combine` in the caller's floating-point settings."""
    block_rows = max(MAX_ELEMENTS // (experts * y.shape[1]), 1)
    for rows in torch.arange(len(out), device=out.device).split(block_rows):
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
    """Return the weights' gradients, w * g and w * a; `lane_sum` is the device family's."""
    dtype, a, w = a.dtype, a.float(), w[:, None]
    return lane_sum(g, a) + 0.0, (w * g).to(dtype), (w * a).to(dtype)


@in_torch
def combine(y, place, ids, weights, experts, out) -> None:
    """Compute out [rows, H]: the sum over experts of weights [rows, k] (1 if None) times y [pairs, H].

    `place` [rows, k] holds the pair of each of ids [rows, k], -1 for none.
    """
    combined(y, place, ids, weights, experts, out)


def weighed_back(g, h, w, lane_sum, silu_mul):
    """Compute `weigh` with the device family's `lane_sum` and `silu_mul`."""
    gate, up = h.chunk(2, dim=1)
    dw, da, wa = weighed(g, silu_mul.forward(gate, up), w, lane_sum)
    dh = torch.empty_like(h)
    silu_mul.backward(gate, up, da, *dh.chunk(2, dim=1))
    return dw, dh, wa


@in_torch
def weigh(g, h, w) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Compute the backward pass between the down and gate-up GEMMs.

    Args:
        g: fp32 [pairs, F]: the gradient of a = silu_mul(h), without the weights.
        h: [pairs, 2F]: gate and up.
        w: fp32 [pairs]: router weights.

    Returns:
        The gradient of w, fp32 [pairs]; the gradient of h; and w * a. The last two have h's dtype.
    """
    return weighed_back(g, h, w, _lane_sum, silu_mul)
