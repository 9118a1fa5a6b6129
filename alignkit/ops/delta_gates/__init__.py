"""Gates of a Gated DeltaNet layer: the logarithm of the decay, and the step size beta.

Contract: docs/contract.md, "Gated DeltaNet".
Public: `delta_gates` (docs/api/ops.md).
"""

from __future__ import annotations

import torch

from ...runtime import dispatch
from .._calls import differentiable_once, op
from .._common import as_rows, check_device, check_like, check_same_device, check_tensor, require, rounded


@differentiable_once("delta_gates")
class _DeltaGates(torch.autograd.Function):
    @staticmethod
    def forward(ctx, a, b, a_log, dt_bias):
        flat = as_rows(a), as_rows(b), a_log.float(), dt_bias.float()
        g, beta = dispatch.select("delta_gates", a.device).forward(*flat)
        ctx.save_for_backward(a, a_log, dt_bias, g, beta)
        return g.view(a.shape), beta.view(a.shape)

    @staticmethod
    def backward(ctx, dg, dbeta):
        a, a_log, dt_bias, g, beta = ctx.saved_tensors
        flat = as_rows(a), a_log.float(), dt_bias.float(), g.contiguous(), beta.contiguous()
        grads = as_rows(dg).contiguous(), as_rows(dbeta).contiguous()
        da, db, d_log, d_bias = dispatch.select("delta_gates", a.device).backward(*grads, *flat)
        return da.view(a.shape), db.view(a.shape), rounded(d_log, a_log.dtype), rounded(d_bias, dt_bias.dtype)


@op
def delta_gates(
    a: torch.Tensor, b: torch.Tensor, A_log: torch.Tensor, dt_bias: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute ``g = -exp(A_log) * softplus(a + dt_bias)`` and ``beta = sigmoid(b)`` in fp32, without rounding.

    Args:
        a: [..., H], fp32 or bf16: one value per token and value head. Views whose last dimension has unit stride are
            read in place if the leading dimensions merge into one.
        b: a's shape, dtype and device; read like a.
        A_log: [H], fp32 or bf16, on a's device.
        dt_bias: [H], fp32 or bf16, on a's device.

    Returns:
        g and beta, fp32, a's shape; g <= 0 is the logarithm of the state's decay. Differentiable once in all arguments.

    Raises:
        InputError: a shape, dtype or device is invalid.
        UnsupportedError: a gradient is differentiated again.
    """
    check_tensor("a", a)
    check_device("a", a)
    check_tensor("b", b)
    check_like("b", b, "a", a)
    require(b.shape == a.shape, f"b: shape must equal a's {tuple(a.shape)}, got {tuple(b.shape)}")
    for name, t in (("A_log", A_log), ("dt_bias", dt_bias)):
        check_tensor(name, t, 1)
        check_same_device(name, t, "a", a)
        require(
            t.shape[0] == a.shape[-1],
            f"{name}: shape must be ({a.shape[-1]},) to match a's last dimension, got {tuple(t.shape)}",
        )
    return _DeltaGates.apply(a, b, A_log, dt_bias)
