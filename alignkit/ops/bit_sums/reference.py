"""Reference bit_sums in torch (docs/contract.md, "Sums of bits")."""

from __future__ import annotations

import torch

from .._calls import in_torch


@in_torch
def sums(bits: list[torch.Tensor], weights: torch.Tensor) -> torch.Tensor:
    mask = (1 << 8 * bits[0].element_size()) - 1
    return torch.stack([((x.long() & mask) * weights).sum(1) for x in bits])
