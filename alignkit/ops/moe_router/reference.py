"""The choice of experts and their weights as the formulas, in torch. `exp` is the device family's."""

from __future__ import annotations

import torch

from .._calls import in_torch
from .._common import exp as _exp
from .._experts import tree_over_experts
from .problem import Routing

LEAST = 1e-20
"""Added to the sum of the chosen sigmoids."""


def _best_first(values: torch.Tensor) -> torch.Tensor:
    """Indices along the last dim: the greater value first, NaN above all, of equal ones the lower index."""
    return values.sort(dim=-1, descending=True, stable=True).indices


def _chosen(values: torch.Tensor, how: Routing) -> torch.Tensor:
    """Ids [N, top_k] of the best experts by `values` [N, n], ascending, of the best groups alone."""
    order = _best_first(values)
    if how.groups > 1:
        of_group = values.unflatten(1, (how.groups, -1))
        best = of_group.gather(2, _best_first(of_group)[..., :2])
        best = best[..., 0] + best[..., 1] if best.shape[2] == 2 else best[..., 0]
        stays = torch.zeros_like(best, dtype=torch.bool).scatter_(1, _best_first(best)[:, : how.top_groups], True)
        leaves = ~stays.gather(1, order // of_group.shape[2])
        order = order.gather(1, leaves.to(torch.int8).sort(dim=1, stable=True).indices)
    return order[:, : how.top_k].sort(dim=1).values


def _scores(z: torch.Tensor, sigmoid: bool, exp) -> torch.Tensor:
    if sigmoid:
        return 1.0 / (1.0 + exp(-z))
    return exp(z - z.amax(dim=1, keepdim=True))


def _weights(scores: torch.Tensor, ids: torch.Tensor, how: Routing) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Of all experts [N, n], before the scale, and what scores were divided by, [N, 1] or None."""
    if how.sigmoid and not how.normalize:
        return scores, None
    among = torch.zeros_like(scores).scatter_(1, ids, scores.gather(1, ids)) if how.normalize else scores
    total = tree_over_experts(among)[:, None]
    if how.sigmoid:
        total = total + LEAST
    return scores / total, total


def route(z: torch.Tensor, bias: torch.Tensor | None, how: Routing, exp) -> tuple[torch.Tensor, torch.Tensor]:
    scores = _scores(z, how.sigmoid, exp)
    values = scores if how.sigmoid else z
    ids = _chosen(values if bias is None else values + bias, how)
    weights = _weights(scores, ids, how)[0].gather(1, ids)
    return weights if how.scale == 1.0 else weights * how.scale, ids


def route_back(z: torch.Tensor, ids: torch.Tensor, grad: torch.Tensor, how: Routing, exp) -> torch.Tensor:
    scores = _scores(z, how.sigmoid, exp)
    weights, total = _weights(scores, ids, how)
    g = torch.zeros_like(z).scatter_(1, ids, grad if how.scale == 1.0 else grad * how.scale)
    chosen = torch.zeros_like(z, dtype=torch.bool).scatter_(1, ids, True)
    if total is not None:
        terms = torch.where(chosen, weights * g, 0.0)
        g = g - tree_over_experts(terms)[:, None]
    if not how.sigmoid:
        return torch.where(chosen, weights * g, 0.0) if how.normalize else weights * g
    ds = g if total is None else g / total
    return torch.where(chosen, ds * scores * (1.0 - scores), 0.0)


@in_torch
def sigmoid(z: torch.Tensor) -> torch.Tensor:
    """The scores of logits."""
    return _scores(z, True, _exp)


@in_torch
def forward(z, bias, how) -> tuple[torch.Tensor, torch.Tensor]:
    """Weights fp32 and ids int64, [N, top_k], of logits z [N, n]."""
    return route(z, bias, how, _exp)


@in_torch
def backward(z, ids, grad, how) -> torch.Tensor:
    """The gradient of the logits, from that of the weights."""
    return route_back(z, ids, grad, how, _exp)
