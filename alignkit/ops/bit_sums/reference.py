"""Reference bit_sums in torch (docs/contract.md, "Sums of bits")."""

from __future__ import annotations

import torch

from .._calls import in_torch


@in_torch
def sums(bits: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    unsigned = bits.long() & ((1 << 8 * bits.element_size()) - 1)
    return (unsigned * weights).sum(1)
