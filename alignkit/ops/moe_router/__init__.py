"""Which experts a token goes to, and with what weights. docs/contract.md, "Mixture of experts"."""

from __future__ import annotations

import torch

from ...runtime import dispatch
from .._calls import differentiable_once, op
from .._common import check_device, check_flag, check_int, check_number, check_tensor, looks, require, rows
from .problem import Routing

SCORES = ("softmax", "sigmoid")


@differentiable_once("moe_router")
class _Router(torch.autograd.Function):
    @staticmethod
    def forward(ctx, logits, bias, how):
        weights, ids = route(logits, bias, how)
        ctx.save_for_backward(logits, ids)
        ctx.how = how
        ctx.mark_non_differentiable(ids)
        return weights, ids

    @staticmethod
    def backward(ctx, grad, _):
        logits, ids = ctx.saved_tensors
        flat = rows(logits).contiguous(), rows(ids).contiguous(), rows(grad).contiguous()
        dz = dispatch.select("moe_router", logits.device).backward(*flat, ctx.how)
        return dz.reshape(logits.shape), None, None


def route(logits: torch.Tensor, bias: torch.Tensor | None, how: Routing) -> tuple[torch.Tensor, torch.Tensor]:
    bias = None if bias is None else bias.detach().contiguous()
    weights, ids = dispatch.select("moe_router", logits.device).forward(rows(logits).contiguous(), bias, how)
    shape = (*logits.shape[:-1], how.top_k)
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
    """The `top_k` best experts of each row, of equal ones those with the lower ids, and their weights.

    Args:
        logits: [..., n] fp32, of all n experts: ``linear(x, gate, out_dtype=torch.float32)``. A NaN makes its row's
            weights NaN, and no other row's.
        score: "softmax": the best are those with the greatest logits, and scores are the softmax. "sigmoid": scores
            are the sigmoids of the logits, and the best are those with the greatest score, plus `bias`.
        normalize: divide a row's scores by the sum of the chosen ones.
        bias: fp32 [n] or None; added to sigmoid scores for the choice alone. It gets no gradient.
        groups, top_groups: for sigmoid scores: the experts are `groups` equal runs of ids, of which the `top_groups`
            best stay, by the sum of a group's two best.
        scale: weights are multiplied by it at the end.

    Returns:
        weights fp32 and ids int64, both [..., top_k], ids ascending. Weights are differentiable in logits.

    Raises:
        InputError: an argument is outside the above.
    """
    how = check(logits, top_k, score, normalize, bias, groups, top_groups, scale)
    return _Router.apply(logits, bias, how)


def check(logits, top_k, score, normalize, bias, groups, top_groups, scale) -> Routing:
    """What is asked for; raises InputError unless `moe_router` takes these arguments."""
    require(isinstance(score, str) and score in SCORES, f"score: {score!r} is none of {', '.join(SCORES)}")
    normalize, scale = check_flag("normalize", normalize), check_number("scale", scale)
    check_tensor("logits", logits, dtypes=(torch.float32,))
    check_device("logits", logits)
    n, sigmoid = logits.shape[-1], score == "sigmoid"
    top_k, groups, top_groups = (
        check_int(name, value, 1) for name, value in (("top_k", top_k), ("groups", groups), ("top_groups", top_groups))
    )
    require(sigmoid or groups == 1, "groups: are for sigmoid scores")
    require(n % groups == 0, f"groups: {groups} do not divide {n} experts")
    require(top_groups <= groups, f"top_groups: {top_groups} of {groups}")
    among = n // groups * top_groups
    require(top_k <= among, f"top_k: {top_k} of {among} experts" + " in the best groups" * (groups > 1))
    if bias is not None:
        require(sigmoid, "bias: is for sigmoid scores")
        check_tensor("bias", bias, 1, (torch.float32,))
        require(tuple(bias.shape) == (n,), f"bias: expected shape ({n},), got {tuple(bias.shape)}")
        require(bias.device == logits.device, f"bias: device {bias.device} differs from logits' {logits.device}")
        require(not looks(bias.device) or bool(bias.isfinite().all()), "bias: has NaN or infinite values")
    return Routing(top_k, sigmoid, normalize, groups, top_groups, scale)
