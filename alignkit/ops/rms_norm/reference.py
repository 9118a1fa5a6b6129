"""Reference RMSNorm in torch, in the CPU family's order of summation (docs/contract.md, "RMSNorm").

cpu.py has the same bits. triton_backend.py and cuda_backend.py sum in the order of Hopper GPUs.
"""

from __future__ import annotations

import torch

from .._calls import in_torch
from .._common import as_rows, fma, lane_sum


def scale(weight: torch.Tensor, zero_centered: bool) -> torch.Tensor:
    """Return the fp32 factor of the rows: weight, or weight + 1 if zero-centered."""
    return weight.float() + 1.0 if zero_centered else weight.float()


def add_gradient(dx: torch.Tensor, d_total: torch.Tensor | None) -> torch.Tensor:
    """Return dx plus d_total, the gradient of the returned sum, unless that is None."""
    return dx if d_total is None else dx + d_total


@in_torch
def forward(
    x: torch.Tensor, weight: torch.Tensor, eps: float, residual: torch.Tensor | None, zero_centered: bool = False
):
    """Return the normalized sum x + residual (x if residual is None) and y, both [..., H], and fp32 rstd [rows]."""
    x = x if residual is None else (x + residual).contiguous()
    v = as_rows(x).float()
    mean = lane_sum(v, v) / v.shape[1]
    rstd = 1.0 / (mean + eps).double().sqrt().float()  # torch's fp32 sqrt is not always correctly rounded
    return x, (v * rstd[:, None] * scale(weight, zero_centered)).to(x.dtype).view(x.shape), rstd


@in_torch
def backward(dy, x, weight, rstd, d_total=None, zero_centered: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
    """Return dx + d_total [..., H] and fp32 dweight [H], for contiguous dy."""
    dy, v = as_rows(dy), as_rows(x).float()
    g = dy.float() * scale(weight, zero_centered)
    c = lane_sum(g, v) / v.shape[1] * rstd * rstd
    dx = rstd[:, None] * fma(-c[:, None].expand_as(v), v, g)
    dw = torch.zeros(v.shape[1], dtype=torch.float32, device=v.device)
    for r in range(v.shape[0]):
        dw = fma(dy[r].float(), v[r] * rstd[r], dw)
    return add_gradient(dx.to(x.dtype).view(x.shape), d_total), dw
