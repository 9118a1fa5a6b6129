"""Product of rows with the sigmoids of their gates, for shared experts.

Contract: docs/contract.md, "Mixture of experts".
Public: `sigmoid_mul` (docs/api/ops.md). ops/library.py calls `check` and `forward`.
"""

from __future__ import annotations

import torch

from ...runtime import dispatch
from .._calls import differentiable_once, op
from .._common import as_rows, check_device, check_same_device, check_tensor, require


@differentiable_once("sigmoid_mul")
class _SigmoidMul(torch.autograd.Function):
    @staticmethod
    def forward(ctx, gate, x):
        ctx.save_for_backward(gate, x)
        return forward(gate, x)

    @staticmethod
    def backward(ctx, dy):
        gate, x = ctx.saved_tensors
        flat = gate.reshape(-1).contiguous(), as_rows(x).contiguous(), as_rows(dy).contiguous()
        dgate, dx = dispatch.select("sigmoid_mul", dy.device).backward(*flat)
        return dgate.reshape(gate.shape), dx.reshape(x.shape)


def forward(gate: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """Compute `sigmoid_mul` from checked arguments, without gradients."""
    flat = gate.detach().reshape(-1).contiguous(), as_rows(x.detach()).contiguous()
    return dispatch.select("sigmoid_mul", x.device).forward(*flat).reshape(x.shape)


@op
def sigmoid_mul(gate: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """Compute ``sigmoid(gate) * x = 1 / (1 + exp(-gate)) * x`` in fp32, with one rounding; one gate per row.

    Args:
        gate: [..., 1] fp32 on x's device, such as the result of ``linear(x, weight, out_dtype=torch.float32)``.
        x: [..., H], fp32 or bf16; copied unless contiguous.

    Returns:
        x's shape and dtype. Differentiable once in gate and x.

    Raises:
        InputError: a shape, dtype or device is invalid.
        UnsupportedError: a gradient is differentiated again.
    """
    check(gate, x)
    return _SigmoidMul.apply(gate, x)


def check(gate, x) -> None:
    """Raise InputError for invalid arguments of `sigmoid_mul`."""
    check_tensor("x", x)
    check_device("x", x)
    check_tensor("gate", gate, dtypes=(torch.float32,))
    check_same_device("gate", gate, "x", x)
    require(
        tuple(gate.shape) == (*x.shape[:-1], 1),
        f"gate: shape must be {(*x.shape[:-1], 1)}, one gate per row of x, got {tuple(gate.shape)}",
    )
