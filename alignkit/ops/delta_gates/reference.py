"""Reference delta_gates in torch; every operation is the CPU family's contract (docs/contract.md, "Gated DeltaNet").

cpu.py has the same bits. triton_backend.py has those of Hopper GPUs, whose `exp` and log1p differ.
"""

from __future__ import annotations

import math

import torch

from .._calls import in_torch
from .._common import exp, fma

LINEAR = 20.0  # contract: softplus(x) is x above


def _softplus(x: torch.Tensor) -> torch.Tensor:
    """Return log(1 + exp(x)): log1p in double by the C library, rounded once to fp32."""
    e = exp(x.clamp(max=LINEAR)).double()
    logs = torch.tensor([math.log1p(v) for v in e.flatten().tolist()], dtype=torch.float64, device=x.device)
    return torch.where(x > LINEAR, x, logs.view(x.shape).float())


@in_torch
def forward(a, b, a_log, dt_bias) -> tuple[torch.Tensor, torch.Tensor]:
    """Return fp32 g and beta [rows, H], for a and b [rows, H] and fp32 a_log and dt_bias [H]."""
    g = -exp(a_log) * _softplus(a.float() + dt_bias)
    return g, 1.0 / (1.0 + exp(-b.float()))


@in_torch
def backward(dg, dbeta, a, a_log, dt_bias, g, beta):
    """Return da and db [rows, H], and the fp32 gradients [H] of a_log and dt_bias, for contiguous dg and dbeta."""
    x = a.float() + dt_bias
    slope = torch.where(x > LINEAR, 1.0, 1.0 / (1.0 + exp(-x)))
    dx = dg * -exp(a_log) * slope
    d_log, d_bias = (torch.zeros(x.shape[1], dtype=torch.float32, device=x.device) for _ in range(2))
    for r in range(x.shape[0]):
        d_log = fma(dg[r], g[r], d_log)
        d_bias = d_bias + dx[r]
    return dx.to(a.dtype), (dbeta * beta * (1.0 - beta)).to(a.dtype), d_log, d_bias
