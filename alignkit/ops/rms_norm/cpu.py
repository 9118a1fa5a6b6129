"""Calls of the C++ RMSNorm kernels (csrc/cpu/kernels.inl), with the bits of reference.py."""

from __future__ import annotations

import torch

from ...runtime import native
from .._common import as_rows


def forward(
    x: torch.Tensor, weight: torch.Tensor, eps: float, residual: torch.Tensor | None, zero_centered: bool = False
):
    """Return the normalized sum x + residual (x if residual is None) and y, both [..., H], and fp32 rstd [rows]."""
    x = x if residual is None else native.add(x, residual)
    flat = as_rows(x)
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    rstd = torch.empty(flat.shape[0], dtype=torch.float32, device=x.device)
    w, options = weight.float(), (zero_centered, eps)
    native.call_threaded("rms_norm", *flat.shape, x.dtype, flat, flat.stride(0), w, *options, y, rstd)
    return x, y, rstd


def backward(dy, x, weight, rstd, d_total=None, zero_centered: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
    """Return dx + d_total [..., H] and fp32 dweight [H], for contiguous dy."""
    flat = as_rows(x).contiguous()
    dx = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    dw = torch.zeros(x.shape[-1], dtype=torch.float32, device=x.device)
    operands = as_rows(dy), flat, weight.float(), zero_centered, rstd, dx, dw
    native.call_threaded("rms_norm_grad", *flat.shape, x.dtype, *operands)
    return dx if d_total is None else native.add(dx, d_total), dw
