"""SwiGLU's activation. docs/contract.md, "SiLU times up"."""

from __future__ import annotations

import torch

from ...errors import InputError
from ...runtime import dispatch
from .._calls import differentiable_once, op
from .._common import check_device, check_like, check_tensor, rows


@differentiable_once("silu_mul")
class _SiluMul(torch.autograd.Function):
    @staticmethod
    def forward(ctx, gate, up):
        ctx.save_for_backward(gate, up)
        return dispatch.select("silu_mul", gate.device).forward(rows(gate), rows(up)).reshape(gate.shape)

    @staticmethod
    def backward(ctx, dy):
        gate, up = ctx.saved_tensors
        grads = dispatch.select("silu_mul", dy.device).backward(rows(gate), rows(up), rows(dy).contiguous())
        return tuple(g.reshape(gate.shape) for g in grads)


@op
def silu_mul(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """``silu(gate) * up = gate / (1 + exp(-gate)) * up`` in fp32, one rounding.

    Args:
        gate, up: [..., F], fp32 or bf16, of one shape and type; views of a joint tensor are fine.

    Returns:
        [..., F] of their type. Differentiable in both.

    Raises:
        InputError: shapes, types or devices differ.
    """
    check(gate, up)
    return _SiluMul.apply(gate, up)


def check(gate, up) -> None:
    """Raise InputError unless `silu_mul` takes these arguments."""
    check_tensor("gate", gate)
    check_device("gate", gate)
    check_tensor("up", up)
    check_like("up", up, "gate", gate)
    if gate.shape != up.shape:
        raise InputError(f"up: shape {tuple(up.shape)} differs from gate's {tuple(gate.shape)}")
