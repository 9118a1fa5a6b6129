"""RMSNorm, with and without a residual. docs/contract.md, "RMSNorm"."""
from __future__ import annotations

import torch

from ... import backends
from .._common import check_like, check_tensor, require


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, eps):
        x2 = x.reshape(-1, x.shape[-1])
        if x2.stride(1) != 1:
            x2 = x2.contiguous()
        y, rstd = backends.select("rms_norm", x.device).forward(x2, weight.contiguous(), eps)
        ctx.save_for_backward(x2, weight, rstd)
        return y.reshape(x.shape)

    @staticmethod
    def backward(ctx, dy):
        x2, weight, rstd = ctx.saved_tensors
        dx, dw = backends.select("rms_norm", dy.device).backward(
            dy.reshape(x2.shape).contiguous(), x2.contiguous(), weight.contiguous(), rstd)
        return dx.reshape(dy.shape), dw.to(weight.dtype), None


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float, residual: torch.Tensor | None = None):
    """``x * rsqrt(mean(x^2) + eps) * weight`` over the last dim; fp32 inside, one rounding.

    Args:
        x: [..., H], fp32 or bf16.
        weight: [H], x's type.
        eps: added to the mean of squares; positive.
        residual: None, or x's shape and type: ``x + residual`` is rounded to the model type first and normalised
            from there.

    Returns:
        y [..., H]; with `residual`, (y, x + residual). Differentiable in x, weight and residual.

    Raises:
        InputError: shapes, types or devices do not fit.
    """
    check_tensor("x", x)
    check_tensor("weight", weight, 1)
    check_like("weight", weight, "x", x)
    require(weight.shape[0] == x.shape[-1] > 0,
            f"weight: shape {tuple(weight.shape)} does not fit x of shape {tuple(x.shape)}")
    require(eps > 0, f"eps: {eps} is not positive")
    if residual is None:
        return _RMSNorm.apply(x, weight, eps)
    check_tensor("residual", residual)
    check_like("residual", residual, "x", x)
    require(residual.shape == x.shape,
            f"residual: shape {tuple(residual.shape)} differs from x's {tuple(x.shape)}")
    total = x + residual
    return _RMSNorm.apply(total, weight, eps), total
