"""A shared expert's gate. docs/contract.md, "Mixture of experts"."""

from __future__ import annotations

import torch

from ...runtime import dispatch
from .._calls import differentiable_once, op
from .._common import check_device, check_tensor, require, rows


@differentiable_once("sigmoid_mul")
class _SigmoidMul(torch.autograd.Function):
    @staticmethod
    def forward(ctx, gate, x):
        ctx.save_for_backward(gate, x)
        return forward(gate, x)

    @staticmethod
    def backward(ctx, dy):
        gate, x = ctx.saved_tensors
        flat = gate.reshape(-1).contiguous(), rows(x).contiguous(), rows(dy).contiguous()
        dgate, dx = dispatch.select("sigmoid_mul", dy.device).backward(*flat)
        return dgate.reshape(gate.shape), dx.reshape(x.shape)


def forward(gate: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    flat = gate.detach().reshape(-1).contiguous(), rows(x.detach()).contiguous()
    return dispatch.select("sigmoid_mul", x.device).forward(*flat).reshape(x.shape)


@op
def sigmoid_mul(gate: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """``sigmoid(gate) * x = 1 / (1 + exp(-gate)) * x`` in fp32, one rounding: a gate for each row.

    Args:
        gate: [..., 1] fp32, such as ``linear(x, weight, out_dtype=torch.float32)`` gives.
        x: [..., H], fp32 or bf16.

    Returns:
        As x. Differentiable in both.

    Raises:
        InputError: shapes, types or devices do not fit.
    """
    check(gate, x)
    return _SigmoidMul.apply(gate, x)


def check(gate, x) -> None:
    """Raise InputError unless `sigmoid_mul` takes these arguments."""
    check_tensor("x", x)
    check_device("x", x)
    check_tensor("gate", gate, dtypes=(torch.float32,))
    require(gate.device == x.device, f"gate: device {gate.device} differs from x's {x.device}")
    require(
        tuple(gate.shape) == (*x.shape[:-1], 1),
        f"gate: shape {tuple(gate.shape)} does not fit x of shape {tuple(x.shape)}",
    )
