"""Rows divided by their Euclidean norm, for the queries and keys of Gated DeltaNet layers.

Contract: docs/contract.md, "Gated DeltaNet".
Public: `l2_norm` (docs/api/ops.md).
"""

from __future__ import annotations

import torch

from ...errors import InputError
from ...runtime import dispatch
from .._calls import differentiable_once, op
from .._common import check_device, check_number, check_tensor


@differentiable_once("l2_norm")
class _L2Norm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, eps):
        y, scale = dispatch.select("l2_norm", x.device).forward(x, eps)
        ctx.save_for_backward(x, scale)
        return y

    @staticmethod
    def backward(ctx, dy):
        x, scale = ctx.saved_tensors
        return dispatch.select("l2_norm", dy.device).backward(dy.contiguous(), x, scale), None


@op
def l2_norm(x: torch.Tensor, eps: float) -> torch.Tensor:
    """Compute ``x * rsqrt(sum(x^2) + eps)`` over the last dimension, in fp32 with one rounding.

    Args:
        x: [..., H], fp32 or bf16. A GPU reads views with H contiguous in place, such as the query heads of a fused
            projection, if the leading dimensions merge into at most two; other layouts are copied.
        eps: added to the sum of squares; positive.

    Returns:
        x's shape and dtype. Differentiable once in x.

    Raises:
        InputError: the shape, dtype or device is invalid, or eps is not a positive finite number.
        UnsupportedError: a gradient is differentiated again.
    """
    eps = check_number("eps", eps)
    check_tensor("x", x)
    check_device("x", x)
    if not x.shape[-1]:
        raise InputError(f"x: last dimension must be at least 1, got shape {tuple(x.shape)}")
    return _L2Norm.apply(x, eps)
