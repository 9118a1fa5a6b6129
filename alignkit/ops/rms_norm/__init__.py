"""RMSNorm, with and without a residual. docs/contract.md, "RMSNorm"."""
from __future__ import annotations

import torch

from ... import backends
from .._common import check_like, check_tensor, require


def _rows(t: torch.Tensor) -> torch.Tensor:
    t = t.reshape(-1, t.shape[-1])
    return t if t.stride(1) == 1 else t.contiguous()


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, residual, weight, eps):
        total, y, rstd = backends.select("rms_norm", x.device).forward(
            _rows(x), weight.contiguous(), eps, None if residual is None else _rows(residual))
        ctx.save_for_backward(total, weight, rstd)
        ctx.set_materialize_grads(False)
        y = y.reshape(x.shape)
        return y if residual is None else (y, total.reshape(x.shape))

    @staticmethod
    def backward(ctx, dy, d_total=None):
        total, weight, rstd = ctx.saved_tensors
        has_residual = ctx.needs_input_grad[1]
        if dy is None:
            return d_total, d_total if has_residual else None, None, None
        dx, dw = backends.select("rms_norm", dy.device).backward(
            _rows(dy).contiguous(), total.contiguous(), weight.contiguous(), rstd)
        dx = dx.reshape(dy.shape) if d_total is None else dx.reshape(dy.shape) + d_total
        return dx, dx if has_residual else None, dw.to(weight.dtype), None


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
    if residual is not None:
        check_tensor("residual", residual)
        check_like("residual", residual, "x", x)
        require(residual.shape == x.shape,
                f"residual: shape {tuple(residual.shape)} differs from x's {tuple(x.shape)}")
    return _RMSNorm.apply(x, residual, weight, eps)
