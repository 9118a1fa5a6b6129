"""RMSNorm as the formula, with the contract's order of summation."""

from __future__ import annotations

import torch

from .._calls import in_torch
from .._common import fma, lane_sum, rows


def scale(weight: torch.Tensor, zero_centered: bool) -> torch.Tensor:
    """What rows are multiplied by, fp32."""
    return weight.float() + 1.0 if zero_centered else weight.float()


def added(dx: torch.Tensor, d_total: torch.Tensor | None) -> torch.Tensor:
    """dx, with the gradient of the normalised sum where there is one."""
    return dx if d_total is None else dx + d_total


@in_torch
def forward(
    x: torch.Tensor, weight: torch.Tensor, eps: float, residual: torch.Tensor | None, zero_centered: bool = False
):
    """The normalised sum x + residual (x itself without one) and y, [..., H], and rstd fp32 [rows]."""
    x = x if residual is None else (x + residual).contiguous()
    v = rows(x).float()
    mean = lane_sum(v, v) / v.shape[1]
    rstd = 1.0 / (mean + eps).double().sqrt().float()  # torch's fp32 sqrt may be off by a bit
    return x, (v * rstd[:, None] * scale(weight, zero_centered)).to(x.dtype).view(x.shape), rstd


@in_torch
def backward(dy, x, weight, rstd, d_total=None, zero_centered: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
    """dx + d_total [..., H] and dweight fp32 [H]; dy is contiguous."""
    dy, v = rows(dy), rows(x).float()
    g = dy.float() * scale(weight, zero_centered)
    c = lane_sum(g, v) / v.shape[1] * rstd * rstd
    dx = rstd[:, None] * fma(-c[:, None].expand_as(v), v, g)
    dw = torch.zeros(v.shape[1], dtype=torch.float32, device=v.device)
    for r in range(v.shape[0]):
        dw = fma(dy[r].float(), v[r] * rstd[r], dw)
    return added(dx.to(x.dtype).view(x.shape), d_total), dw
