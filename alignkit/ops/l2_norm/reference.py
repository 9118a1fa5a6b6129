"""Reference l2_norm in torch, in the CPU family's order of summation (docs/contract.md, "Gated DeltaNet").

cpu.py has the same bits. triton_backend.py sums in the order of Hopper GPUs.
"""

from __future__ import annotations

import torch

from .._calls import in_torch
from .._common import as_rows, fma, lane_sum


@in_torch
def forward(x: torch.Tensor, eps: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Return y [..., H] and the fp32 factor of each row."""
    v = as_rows(x).float()
    scale = 1.0 / (lane_sum(v, v) + eps).double().sqrt().float()  # torch's fp32 sqrt is not always correctly rounded
    return (v * scale[:, None]).to(x.dtype).view(x.shape), scale


@in_torch
def backward(dy: torch.Tensor, x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """Return dx [..., H], for contiguous dy."""
    g, v = as_rows(dy).float(), as_rows(x).float()
    c = lane_sum(g, v) * scale * scale
    return (scale[:, None] * fma(-c[:, None].expand_as(v), v, g)).to(x.dtype).view(x.shape)
