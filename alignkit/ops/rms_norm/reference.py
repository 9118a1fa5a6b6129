"""RMSNorm as the formula, with the contract's order of summation."""
from __future__ import annotations

import torch

from .._common import fma, lane_sum, rows


def forward(x: torch.Tensor, weight: torch.Tensor, eps: float, residual: torch.Tensor | None):
    """The normalised sum x + residual (x itself without one) and y, [..., H], and rstd fp32 [rows]."""
    x = x if residual is None else (x + residual).contiguous()
    v = rows(x).float()
    mean = lane_sum(v, v) / v.shape[1]
    rstd = 1.0 / (mean + eps).double().sqrt().float()  # torch's fp32 sqrt may be off by a bit
    return x, (v * rstd[:, None] * weight.float()).to(x.dtype).view(x.shape), rstd


def backward(dy, x, weight, rstd) -> tuple[torch.Tensor, torch.Tensor]:
    """dx [..., H] and dweight fp32 [H]; dy is contiguous."""
    dy, v = rows(dy), rows(x).float()
    g = dy.float() * weight.float()
    c = lane_sum(g, v) / v.shape[1] * rstd * rstd
    dx = rstd[:, None] * fma(-c[:, None].expand_as(v), v, g)
    dw = torch.zeros(v.shape[1], dtype=torch.float32)
    for r in range(v.shape[0]):
        dw = fma(dy[r].float(), v[r] * rstd[r], dw)
    return dx.to(x.dtype).view(x.shape), dw
