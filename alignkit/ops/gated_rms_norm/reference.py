"""Reference gated_rms_norm in torch, in the CPU family's order of summation (docs/contract.md, "Gated DeltaNet").

cpu.py has the same bits. triton_backend.py sums in the order of Hopper GPUs.
"""

from __future__ import annotations

import torch

from .._calls import in_torch
from .._common import exp, fma, lane_sum


@in_torch
def forward(x: torch.Tensor, weight: torch.Tensor, gate: torch.Tensor, eps: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Return y and fp32 rstd [rows], for x and gate [rows, H]."""
    v, z = x.float(), gate.float()
    rstd = 1.0 / (lane_sum(v, v) / v.shape[1] + eps).double().sqrt().float()  # torch's fp32 sqrt may round wrongly
    return (v * rstd[:, None] * weight.float() * (z / (1.0 + exp(-z)))).to(x.dtype), rstd


@in_torch
def backward(dy, x, weight, gate, rstd) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return dx [rows, H], fp32 dweight [H] and dgate [rows, H], for contiguous dy."""
    d, v, w, z = dy.float(), x.float(), weight.float(), gate.float()
    s = 1.0 / (1.0 + exp(-z))
    n = v * rstd[:, None]
    dgate = d * (n * w) * (s * fma(z, 1.0 - s, torch.ones_like(z)))
    e = d * (z * s)
    g = e * w
    c = lane_sum(g, v) / v.shape[1] * rstd * rstd
    dx = rstd[:, None] * fma(-c[:, None].expand_as(v), v, g)
    dw = torch.zeros(v.shape[1], dtype=torch.float32, device=v.device)
    for r in range(v.shape[0]):
        dw = fma(e[r], n[r], dw)
    return dx.to(x.dtype), dw, dgate.to(x.dtype)
