"""RMSNorm, with and without a residual.

Contract: docs/contract.md, "RMSNorm".
Public: `rms_norm` (docs/api/ops.md). ops/library.py calls `check` and `forward`; qk_norm_rope calls `check`.
"""

from __future__ import annotations

from types import ModuleType

import torch

from ...errors import InputError
from ...runtime import dispatch
from ...runtime.operands import operand
from .._calls import differentiable_once, op
from .._common import check_device, check_flag, check_like, check_number, check_tensor, rounded
from .problem import Norm


def _kernel(op: str, x: torch.Tensor, *others: torch.Tensor) -> ModuleType:
    """Return the module that computes `op` for these operands."""
    backend = dispatch.backend_of(x.device)
    module = dispatch.static_kernel(op, backend)
    if module is not None:
        return module
    tensors = tuple(operand(t) for t in (x, *others))
    return dispatch.choose(op, Norm(backend, tensors)).load()  # pyright: ignore[reportArgumentType]


def forward(x: torch.Tensor, weight: torch.Tensor, eps: float, residual, zero_centered: bool = False):
    """Compute the forward pass for a contiguous weight.

    Returns the normalized sum x + residual (x itself if residual is None) and y, both [..., H], and fp32 rstd [rows].
    """
    if residual is None:
        return _kernel("rms_norm", x, weight).forward(x, weight, eps, None, zero_centered)
    return dispatch.select("add_rms_norm", x.device).forward(x, weight, eps, residual, zero_centered)


@differentiable_once("rms_norm")
class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, residual, weight, eps, zero_centered):
        total, y, rstd = forward(x, weight.contiguous(), eps, residual, zero_centered)
        ctx.save_for_backward(total, weight, rstd)
        ctx.zero_centered = zero_centered
        ctx.set_materialize_grads(False)
        return y if residual is None else (y, total)

    @staticmethod
    def backward(ctx, dy, d_total=None):
        total, weight, rstd = ctx.saved_tensors
        has_residual = ctx.needs_input_grad[1]
        if dy is None:
            return d_total, d_total if has_residual else None, None, None, None
        dy, weight_, d_total = dy.contiguous(), weight.contiguous(), None if d_total is None else d_total.contiguous()
        kernel = _kernel("rms_norm_backward", total, dy, weight_, *(() if d_total is None else (d_total,)))
        dx, dw = kernel.backward(dy, total, weight_, rstd, d_total, ctx.zero_centered)
        return dx, dx if has_residual else None, rounded(dw, weight.dtype), None, None


def check(x, weight, eps: float, residual=None, name: str = "x", weight_name: str = "weight") -> None:
    """Raise InputError for invalid arguments of `rms_norm`; `name` and weight_name: the caller's names in messages."""
    check_number("eps", eps)
    check_tensor(name, x)
    check_device(name, x)
    check_tensor(weight_name, weight, 1)
    check_like(weight_name, weight, name, x)
    if weight.shape[0] != x.shape[-1]:
        raise InputError(
            f"{weight_name}: shape must be ({x.shape[-1]},) to match {name}'s last dimension, got {tuple(weight.shape)}"
        )
    if not x.shape[-1]:
        raise InputError(f"{name}: last dimension must be at least 1, got shape {tuple(x.shape)}")
    if residual is not None:
        check_tensor("residual", residual)
        check_like("residual", residual, name, x)
        if residual.shape != x.shape:
            raise InputError(f"residual: shape must equal {name}'s {tuple(x.shape)}, got {tuple(residual.shape)}")


@op
def rms_norm(
    x: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    residual: torch.Tensor | None = None,
    *,
    zero_centered: bool = False,
):
    """Compute ``x * rsqrt(mean(x^2) + eps) * weight`` over the last dimension, in fp32 with one rounding.

    Args:
        x: [..., H], fp32 or bf16. A GPU reads views with H contiguous in place, such as the query heads of a fused QKV
            projection, if the leading dimensions merge into at most two; other layouts are copied.
        weight: [H], x's dtype and device.
        eps: added to the mean of squares; positive.
        residual: None, or x's shape, dtype and device. ``x + residual`` is rounded to x's dtype, then normalized.
        zero_centered: `weight` is stored minus one; 1 is added in fp32.

    Returns:
        y [..., H], x's dtype; with `residual`, the pair (y, x + residual). Differentiable once in x, weight and
        residual.

    Raises:
        InputError: a shape, dtype or device is invalid, or eps is not a positive finite number.
        UnsupportedError: a gradient is differentiated again.
    """
    check(x, weight, eps, residual)
    return _RMSNorm.apply(x, residual, weight, float(eps), check_flag("zero_centered", zero_centered))
