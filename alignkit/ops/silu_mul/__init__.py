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
        g, u = _halves(gate, up)
        return dispatch.select("silu_mul", g.device).forward(rows(g), rows(u)).reshape(g.shape)

    @staticmethod
    def backward(ctx, dy):
        gate, up = ctx.saved_tensors
        # Where gate and up are one tensor so is their gradient, and nobody need put its halves together.
        of_gate, of_up = (
            None if t is None else torch.empty(t.shape, dtype=t.dtype, device=t.device) for t in (gate, up)
        )
        given, into = _halves(gate, up), _halves(of_gate, of_up)
        dispatch.select("silu_mul", dy.device).backward(*map(rows, given), rows(dy).contiguous(), *map(rows, into))
        return of_gate, of_up


def _halves(gate, up) -> tuple[torch.Tensor, torch.Tensor]:
    return gate.chunk(2, dim=-1) if up is None else (gate, up)


@op
def silu_mul(gate: torch.Tensor, up: torch.Tensor | None = None) -> torch.Tensor:
    """``silu(gate) * up = gate / (1 + exp(-gate)) * up`` in fp32, one rounding.

    Args:
        gate, up: [..., F], fp32 or bf16, of one shape and type; views of a joint tensor are fine. Without up, gate is
            [..., 2 F], up its second half.

    Returns:
        [..., F] of their type. Differentiable in both.

    Raises:
        InputError: shapes, types or devices differ; or without up, gate's last dimension is odd.
    """
    check(gate, up)
    return _SiluMul.apply(gate, up)


def check(gate, up) -> None:
    """Raise InputError unless `silu_mul` takes these arguments."""
    check_tensor("gate", gate)
    check_device("gate", gate)
    if up is None:
        if gate.shape[-1] % 2:
            raise InputError(f"gate: {gate.shape[-1]} are no two halves, and there is no up")
        return
    check_tensor("up", up)
    check_like("up", up, "gate", gate)
    if gate.shape != up.shape:
        raise InputError(f"up: shape {tuple(up.shape)} differs from gate's {tuple(gate.shape)}")
