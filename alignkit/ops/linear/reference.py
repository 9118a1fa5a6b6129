"""The chain and the k-tree, one fused multiply-add at a time."""
from __future__ import annotations

import torch

from .._common import fma


def _chain(a: torch.Tensor, b: torch.Tensor, acc: torch.Tensor) -> torch.Tensor:
    for k in range(a.shape[1]):
        acc = fma(a[:, k, None].float(), b[None, :, k].float(), acc)
    return acc


def matmul(a, b, leaves, out, accumulate) -> None:
    parts = [_chain(x, w, out if accumulate else torch.zeros_like(out))
             for x, w in zip(a.chunk(leaves, dim=1), b.chunk(leaves, dim=1))]
    while len(parts) > 1:
        parts = [left + right for left, right in zip(parts[::2], parts[1::2])]
    out.copy_(parts[0])
