"""Reference router in torch: `forward` and `backward` for CPUs, and `route` and `route_back` with any family's `exp`.

Every operation is the contract's (docs/contract.md, "Mixture of experts").
"""

from __future__ import annotations

import torch

from .._calls import in_torch
from .._common import exp as _exp
from .._experts import tree_over_experts
from .problem import Routing

LEAST = 1e-20
"""contract: added to the sum of the chosen sigmoid scores."""


def _best_first(values: torch.Tensor) -> torch.Tensor:
    """Return indices along the last dim by descending value; NaN first, ties by ascending index."""
    return values.sort(dim=-1, descending=True, stable=True).indices


def _chosen(values: torch.Tensor, routing: Routing) -> torch.Tensor:
    """Return the ids [N, top_k], ascending, of the best experts by `values` [N, n] within the best groups."""
    order = _best_first(values)
    if routing.groups > 1:
        grouped = values.unflatten(1, (routing.groups, -1))
        best = grouped.gather(2, _best_first(grouped)[..., :2])
        best = best[..., 0] + best[..., 1] if best.shape[2] == 2 else best[..., 0]
        kept = torch.zeros_like(best, dtype=torch.bool).scatter_(1, _best_first(best)[:, : routing.top_groups], True)
        dropped = ~kept.gather(1, order // grouped.shape[2])
        order = order.gather(1, dropped.to(torch.int8).sort(dim=1, stable=True).indices)
    return order[:, : routing.top_k].sort(dim=1).values


def _scores(z: torch.Tensor, sigmoid: bool, exp) -> torch.Tensor:
    if sigmoid:
        return 1.0 / (1.0 + exp(-z))
    return exp(z - z.amax(dim=1, keepdim=True))


def _weights(scores: torch.Tensor, ids: torch.Tensor, routing: Routing) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return the unscaled weights of all experts [N, n], and the normalizer [N, 1] or None."""
    if routing.sigmoid and not routing.normalize:
        return scores, None
    among = torch.zeros_like(scores).scatter_(1, ids, scores.gather(1, ids)) if routing.normalize else scores
    total = tree_over_experts(among)[:, None]
    if routing.sigmoid:
        total = total + LEAST
    return scores / total, total


def route(z: torch.Tensor, bias: torch.Tensor | None, routing: Routing, exp) -> tuple[torch.Tensor, torch.Tensor]:
    """Return weights and ids [N, top_k], with the given `exp`."""
    scores = _scores(z, routing.sigmoid, exp)
    values = scores if routing.sigmoid else z
    ids = _chosen(values if bias is None else values + bias, routing)
    weights = _weights(scores, ids, routing)[0].gather(1, ids)
    return weights if routing.scale == 1.0 else weights * routing.scale, ids


def route_back(z: torch.Tensor, ids: torch.Tensor, grad: torch.Tensor, routing: Routing, exp) -> torch.Tensor:
    """Return the gradient of the logits, with the given `exp`."""
    scores = _scores(z, routing.sigmoid, exp)
    weights, total = _weights(scores, ids, routing)
    g = torch.zeros_like(z).scatter_(1, ids, grad if routing.scale == 1.0 else grad * routing.scale)
    chosen = torch.zeros_like(z, dtype=torch.bool).scatter_(1, ids, True)
    if total is not None:
        terms = torch.where(chosen, weights * g, 0.0)
        g = g - tree_over_experts(terms)[:, None]
    if not routing.sigmoid:
        return torch.where(chosen, weights * g, 0.0) if routing.normalize else weights * g
    ds = g if total is None else g / total
    return torch.where(chosen, ds * scores * (1.0 - scores), 0.0)


@in_torch
def sigmoid(z: torch.Tensor) -> torch.Tensor:
    """Return the sigmoid scores of logits."""
    return _scores(z, True, _exp)


@in_torch
def forward(z, bias, routing) -> tuple[torch.Tensor, torch.Tensor]:
    """Return weights (fp32) and ids (int64), [N, top_k], of logits z [N, n]."""
    return route(z, bias, routing, _exp)


@in_torch
def backward(z, ids, grad, routing) -> torch.Tensor:
    """Return the gradient of the logits from the gradient of the weights."""
    return route_back(z, ids, grad, routing, _exp)
