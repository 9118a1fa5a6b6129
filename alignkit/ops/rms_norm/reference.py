"""RMSNorm as the formula, with the contract's order of summation."""
from __future__ import annotations

import torch

from .._common import fma, lane_sum


def forward(x: torch.Tensor, weight: torch.Tensor, eps: float, residual: torch.Tensor | None):
    """The normalised sum x + residual (x itself without one), y, and rstd fp32 [rows]."""
    x = x if residual is None else x + residual
    v = x.float()
    mean = lane_sum(v, v) / x.shape[1]
    rstd = 1.0 / (mean + eps).double().sqrt().float()  # torch's fp32 sqrt may be off by a bit
    return x, (v * rstd[:, None] * weight.float()).to(x.dtype), rstd


def backward(dy, x, weight, rstd) -> tuple[torch.Tensor, torch.Tensor]:
    g, v = dy.float() * weight.float(), x.float()
    c = lane_sum(g, v) / x.shape[1] * rstd * rstd
    dx = rstd[:, None] * fma(-c[:, None].expand_as(v), v, g)
    dw = torch.zeros(x.shape[1], dtype=torch.float32)
    for r in range(x.shape[0]):
        dw = fma(dy[r].float(), v[r] * rstd[r], dw)
    return dx.to(x.dtype), dw
