"""The SwiGLU activation.

Contract: docs/contract.md, "SiLU times up".
Public: `silu_mul` (docs/api/ops.md). ops/library.py calls `check`.
"""

from __future__ import annotations

import torch

from ...errors import InputError
from ...runtime import dispatch
from .._calls import differentiable_once, op
from .._common import as_rows, check_device, check_like, check_tensor


@differentiable_once("silu_mul")
class _SiluMul(torch.autograd.Function):
    @staticmethod
    def forward(ctx, gate, up):
        ctx.save_for_backward(gate, up)
        g, u = _halves(gate, up)
        return dispatch.select("silu_mul", g.device).forward(as_rows(g), as_rows(u)).reshape(g.shape)

    @staticmethod
    def backward(ctx, dy):
        gate, up = ctx.saved_tensors
        # A joint [gate, up] input gets a joint gradient, whose halves are written in place.
        d_gate, d_up = (None if t is None else torch.empty(t.shape, dtype=t.dtype, device=t.device) for t in (gate, up))
        inputs, grads = _halves(gate, up), _halves(d_gate, d_up)
        backward = dispatch.select("silu_mul", dy.device).backward
        backward(*map(as_rows, inputs), as_rows(dy).contiguous(), *map(as_rows, grads))
        return d_gate, d_up


def _halves(gate, up) -> tuple[torch.Tensor, torch.Tensor]:
    """Return gate and up, which are the halves of gate if up is None."""
    return gate.chunk(2, dim=-1) if up is None else (gate, up)


@op
def silu_mul(gate: torch.Tensor, up: torch.Tensor | None = None) -> torch.Tensor:
    """Compute ``silu(gate) * up = gate / (1 + exp(-gate)) * up`` in fp32, with one rounding.

    Args:
        gate: [..., F], fp32 or bf16; or [..., 2 F] without `up`, whose second half is then up. Views of a joint tensor
            are read in place if the last dimension has unit stride and the leading dimensions merge into one.
        up: None, or gate's shape, dtype and device.

    Returns:
        [..., F], gate's dtype. Differentiable once in gate and up.

    Raises:
        InputError: shapes, dtypes or devices differ; or, without `up`, gate's last dimension is odd.
        UnsupportedError: a gradient is differentiated again.
    """
    check(gate, up)
    return _SiluMul.apply(gate, up)


def check(gate, up) -> None:
    """Raise InputError for invalid arguments of `silu_mul`."""
    check_tensor("gate", gate)
    check_device("gate", gate)
    if up is None:
        if gate.shape[-1] % 2:
            raise InputError(f"gate: last dimension must be even if up is None, got {gate.shape[-1]}")
        return
    check_tensor("up", up)
    check_like("up", up, "gate", gate)
    if gate.shape != up.shape:
        raise InputError(f"up: shape must equal gate's {tuple(gate.shape)}, got {tuple(up.shape)}")
