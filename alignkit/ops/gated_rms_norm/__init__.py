"""RMSNorm times the SiLU of a gate, the output norm of Gated DeltaNet layers.

Contract: docs/contract.md, "Gated DeltaNet".
Public: `gated_rms_norm` (docs/api/ops.md).
"""

from __future__ import annotations

import torch

from ...runtime import dispatch
from .._calls import differentiable_once, op
from .._common import as_rows, check_like, check_tensor, require, rounded
from ..rms_norm import check


@differentiable_once("gated_rms_norm")
class _GatedRMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, gate, eps):
        flat = as_rows(x), weight.contiguous(), as_rows(gate)
        y, rstd = dispatch.select("gated_rms_norm", x.device).forward(*flat, eps)
        ctx.save_for_backward(x, weight, gate, rstd)
        return y.view(x.shape)

    @staticmethod
    def backward(ctx, dy):
        x, weight, gate, rstd = ctx.saved_tensors
        flat = as_rows(dy).contiguous(), as_rows(x), weight.contiguous(), as_rows(gate), rstd
        dx, dw, dgate = dispatch.select("gated_rms_norm", dy.device).backward(*flat)
        return dx.view(x.shape), rounded(dw, weight.dtype), dgate.view(x.shape), None


@op
def gated_rms_norm(x: torch.Tensor, weight: torch.Tensor, gate: torch.Tensor, eps: float) -> torch.Tensor:
    """Compute ``x * rsqrt(mean(x^2) + eps) * weight * silu(gate)`` over the last dimension, in fp32 with one rounding.

    Args:
        x: [..., H], fp32 or bf16. Views whose last dimension has unit stride are read in place if the leading
            dimensions merge into one; other layouts are copied.
        weight: [H], x's dtype and device.
        gate: x's shape, dtype and device; read like x.
        eps: added to the mean of squares; positive.

    Returns:
        x's shape and dtype. Differentiable once in x, weight and gate.

    Raises:
        InputError: a shape, dtype or device is invalid, or eps is not a positive finite number.
        UnsupportedError: a gradient is differentiated again.
    """
    check(x, weight, eps)
    check_tensor("gate", gate)
    check_like("gate", gate, "x", x)
    require(gate.shape == x.shape, f"gate: shape must equal x's {tuple(x.shape)}, got {tuple(gate.shape)}")
    return _GatedRMSNorm.apply(x, weight, gate, float(eps))
