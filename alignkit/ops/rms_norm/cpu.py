"""C++: a row at a time; dw a chain over rows with columns in parallel."""

from __future__ import annotations

import torch

from ...runtime import native
from .._common import rows


def forward(
    x: torch.Tensor, weight: torch.Tensor, eps: float, residual: torch.Tensor | None, zero_centered: bool = False
):
    """The normalised sum x + residual (x itself without one) and y, [..., H], and rstd fp32 [rows]."""
    x = x if residual is None else native.add(x, residual)
    flat = rows(x)
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    rstd = torch.empty(flat.shape[0], dtype=torch.float32, device=x.device)
    native.rms_norm(flat, weight.float(), zero_centered, eps, y.view(flat.shape), rstd)
    return x, y, rstd


def backward(dy, x, weight, rstd, d_total=None, zero_centered: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
    """dx + d_total [..., H] and dweight fp32 [H]; dy is contiguous."""
    flat = rows(x).contiguous()
    dx = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    dw = torch.zeros(x.shape[-1], dtype=torch.float32, device=x.device)
    native.rms_norm_grad(rows(dy), flat, weight.float(), zero_centered, rstd, dx.view(flat.shape), dw)
    return dx if d_total is None else native.add(dx, d_total), dw
