"""Product of rows with the sigmoids of their gates: one gate per row, for shared experts, or one per element.

Contract: docs/contract.md, "Mixture of experts" and "Gated DeltaNet".
Public: `sigmoid_mul` (docs/api/ops.md). ops/library.py calls `check` and `forward`.
"""

from __future__ import annotations

import torch

from ...runtime import dispatch
from .._calls import differentiable_once, op
from .._common import as_rows, check_device, check_like, check_same_device, check_tensor, require


@differentiable_once("sigmoid_mul")
class _SigmoidMul(torch.autograd.Function):
    @staticmethod
    def forward(ctx, gate, x):
        ctx.save_for_backward(gate, x)
        return forward(gate, x)

    @staticmethod
    def backward(ctx, dy):
        gate, x = ctx.saved_tensors
        kernel = dispatch.select("sigmoid_mul", dy.device)
        if not _by_row(gate):
            dgate, dx = kernel.backward_each(as_rows(gate), as_rows(x), as_rows(dy).contiguous())
            return dgate.view(x.shape), dx.view(x.shape)
        flat = gate.reshape(-1).contiguous(), as_rows(x).contiguous(), as_rows(dy).contiguous()
        dgate, dx = kernel.backward(*flat)
        return dgate.reshape(gate.shape), dx.reshape(x.shape)


def _by_row(gate: torch.Tensor) -> bool:
    """Return whether a checked gate has one value per row."""
    return gate.shape[-1] == 1 and gate.dtype == torch.float32


def forward(gate: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """Compute `sigmoid_mul` from checked arguments, without gradients."""
    if not _by_row(gate):
        kernel = dispatch.select("sigmoid_mul", x.device)
        return kernel.forward_each(as_rows(gate.detach()), as_rows(x.detach())).view(x.shape)
    flat = gate.detach().reshape(-1).contiguous(), as_rows(x.detach()).contiguous()
    return dispatch.select("sigmoid_mul", x.device).forward(*flat).reshape(x.shape)


@op
def sigmoid_mul(gate: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """Compute ``sigmoid(gate) * x = 1 / (1 + exp(-gate)) * x`` in fp32, with one rounding.

    Args:
        gate: one gate per row: [..., 1] fp32 on x's device, such as the result of
            ``linear(x, weight, out_dtype=torch.float32)``. Or one per element: x's shape, dtype and device.
        x: [..., H], fp32 or bf16. With one gate per element, views of x and gate are read in place if the last
            dimension has unit stride and the leading dimensions merge into one; everything else is copied.

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
    check_tensor("gate", gate)
    check_same_device("gate", gate, "x", x)
    rows = (*x.shape[:-1], 1)
    if tuple(gate.shape) == rows and (x.shape[-1] != 1 or gate.dtype == torch.float32):
        check_tensor("gate", gate, dtypes=(torch.float32,))
        return
    require(
        gate.shape == x.shape,
        f"gate: shape must be {rows} with fp32 values, one gate per row of x, or x's {tuple(x.shape)}, "
        f"got {tuple(gate.shape)} of {gate.dtype}",
    )
    check_like("gate", gate, "x", x)
