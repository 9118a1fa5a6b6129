"""Reference RoPE in torch; the table is computed by Python's math module.

Every operation is the contract's (docs/contract.md, "RoPE").
"""

from __future__ import annotations

import math

import torch

from .._calls import in_torch
from .._common import fma


@in_torch
def table(frequencies: list[float], max_position: int, factor: float) -> torch.Tensor:
    rows = [
        [factor * math.cos(t * f) for f in frequencies] + [factor * math.sin(t * f) for f in frequencies]
        for t in range(max_position)
    ]
    return torch.tensor(rows, dtype=torch.float64, device="cpu").float()


@in_torch
def apply(x: torch.Tensor, positions: torch.Tensor, table: torch.Tensor, inverse: bool) -> torch.Tensor:
    rotated, rest = x[..., : table.shape[1]], x[..., table.shape[1] :]
    a, b = rotated.float().chunk(2, dim=-1)
    cos, sin = (t[:, None].expand_as(a) for t in table[positions].chunk(2, dim=-1))
    if inverse:
        sin = -sin
    return torch.cat([fma(a, cos, -(b * sin)).to(x.dtype), fma(b, cos, a * sin).to(x.dtype), rest], dim=-1)


def apply_qk(
    q: torch.Tensor, k: torch.Tensor, positions: torch.Tensor, table: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Rotate q and k."""
    return apply(q, positions, table, False), apply(k, positions, table, False)
