"""torch backend: the sort of ids by expert, without synchronization.

cuda_backend.py and ranked.py compute the same `Pairs`. The order of pairs, by expert, then by row, is the contract's
order of weight-gradient sums (docs/contract.md, "Mixture of experts").
"""

from __future__ import annotations

import torch

from .problem import Pairs


def pairs(ids: torch.Tensor, first: int, experts: int) -> Pairs:
    """Return the pairs of ids [rows, k] for the `experts` experts from id `first` on."""
    local = ids.reshape(-1).to(torch.int64) - first
    local = torch.where((local >= 0) & (local < experts), local, experts)
    in_order, choice = local.sort(stable=True)
    numbers = torch.arange(max(len(local), experts + 1), device=ids.device)
    offsets = torch.searchsorted(in_order, numbers[: experts + 1])
    place = torch.empty_like(local).index_copy_(0, choice, numbers[: len(local)])
    place.masked_fill_(local == experts, -1)
    return Pairs(choice // ids.shape[1], choice, place.view(ids.shape), offsets)
