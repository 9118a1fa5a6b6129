"""MoE router: the choice of experts per token and their weights.

Contract: docs/contract.md, "Mixture of experts".
Public: `moe_router` (docs/api/ops.md). ops/library.py calls `check` and `route`.
"""

from __future__ import annotations

import torch

from ...runtime import dispatch
from .._calls import differentiable_once, op
from .._common import (
    as_rows,
    check_constant,
    check_device,
    check_finite,
    check_flag,
    check_int,
    check_number,
    check_same_device,
    check_tensor,
    require,
)
from .problem import Routing

SCORES = ("softmax", "sigmoid")


@differentiable_once("moe_router")
class _Router(torch.autograd.Function):
    @staticmethod
    def forward(ctx, logits, bias, routing):
        weights, ids = route(logits, bias, routing)
        ctx.save_for_backward(logits, ids)
        ctx.routing = routing
        ctx.mark_non_differentiable(ids)
        return weights, ids

    @staticmethod
    def backward(ctx, grad, _):
        logits, ids = ctx.saved_tensors
        flat = as_rows(logits).contiguous(), as_rows(ids).contiguous(), as_rows(grad).contiguous()
        dz = dispatch.select("moe_router", logits.device).backward(*flat, ctx.routing)
        return dz.reshape(logits.shape), None, None


def route(logits: torch.Tensor, bias: torch.Tensor | None, routing: Routing) -> tuple[torch.Tensor, torch.Tensor]:
    """Return weights and ids, [..., top_k], of checked arguments; forward only."""
    bias = None if bias is None else bias.detach().contiguous()
    weights, ids = dispatch.select("moe_router", logits.device).forward(as_rows(logits).contiguous(), bias, routing)
    shape = (*logits.shape[:-1], routing.top_k)
    return weights.reshape(shape), ids.reshape(shape)


@op
def moe_router(
    logits: torch.Tensor,
    top_k: int,
    *,
    score: str = "softmax",
    normalize: bool = True,
    bias: torch.Tensor | None = None,
    groups: int = 1,
    top_groups: int = 1,
    scale: float = 1.0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Choose the `top_k` best experts of each token and compute their weights.

    Ties go to the lower id. A row's result depends on that row alone.

    Args:
        logits: fp32 [..., n] over all n experts: ``linear(x, gate, out_dtype=torch.float32)``. A NaN makes the weights
            of its row NaN.
        top_k: Experts per token, in [1, n], or at most the experts of `top_groups` groups.
        score: "softmax": choose by logit; scores are the softmax over all experts. "sigmoid": scores are the sigmoids
            of the logits; choose by score plus `bias`.
        normalize: Divide a token's scores by the sum of the chosen ones.
        bias: fp32 [n] or None; added to sigmoid scores for the choice alone. It has no gradient and must not
            require one.
        groups: Number of equal groups of consecutive ids; divides n. More than 1 needs sigmoid scores.
        top_groups: Groups to choose from, ranked by the sum of their two best values.
        scale: Positive factor, applied to the weights at the end.

    Returns:
        The tuple (weights, ids): fp32 and int64, both [..., top_k], ids ascending. Weights are differentiable once in
        logits.

    Raises:
        InputError: an argument is outside of its documented range.
        UnsupportedError: a torch mode or transform without real tensors is active; double backward.
        BackendError: no backend for the device.
    """
    routing = check(logits, top_k, score, normalize, bias, groups, top_groups, scale)
    return _Router.apply(logits, bias, routing)


def check(logits, top_k, score, normalize, bias, groups, top_groups, scale) -> Routing:
    """Check the arguments of `moe_router` and return its options; raise InputError if they are invalid."""
    require(isinstance(score, str) and score in SCORES, f"score: must be one of {', '.join(SCORES)}, got {score!r}")
    normalize, scale = check_flag("normalize", normalize), check_number("scale", scale)
    check_tensor("logits", logits, dtypes=(torch.float32,))
    check_device("logits", logits)
    n, sigmoid = logits.shape[-1], score == "sigmoid"
    top_k, groups, top_groups = (
        check_int(name, value, 1) for name, value in (("top_k", top_k), ("groups", groups), ("top_groups", top_groups))
    )
    require(sigmoid or groups == 1, f"groups: must be 1 unless score is 'sigmoid', got {groups}")
    require(n % groups == 0, f"groups: must divide the {n} experts, got {groups}")
    require(top_groups <= groups, f"top_groups: must be at most groups ({groups}), got {top_groups}")
    among = n // groups * top_groups
    require(
        top_k <= among,
        f"top_k: must be at most {among}, the number of experts"
        f"{f' in top_groups = {top_groups} groups' * (groups > 1)}, got {top_k}",
    )
    if bias is not None:
        require(sigmoid, f"bias: must be None unless score is 'sigmoid', got a bias with score {score!r}")
        check_tensor("bias", bias, 1, (torch.float32,))
        require(tuple(bias.shape) == (n,), f"bias: expected shape ({n},), got {tuple(bias.shape)}")
        check_same_device("bias", bias, "logits", logits)
        check_finite("bias", bias)
        check_constant("bias", bias)
    return Routing(top_k, sigmoid, normalize, groups, top_groups, scale)
