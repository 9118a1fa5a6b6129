"""The chain and the k-tree, one fused multiply-add at a time."""
from __future__ import annotations

import torch

from .._common import fma, in_fp32


def _chain(a: torch.Tensor, b: torch.Tensor, acc: torch.Tensor) -> torch.Tensor:
    for k in range(a.shape[1]):
        acc = fma(a[:, k, None].float(), b[None, :, k].float(), acc)
    return acc


def matmul(a, b, leaves, bias, out, accumulate) -> None:
    parts = [_chain(x, w, out if accumulate else torch.zeros(out.shape, dtype=torch.float32))
             for x, w in zip(a.chunk(leaves, dim=1), b.chunk(leaves, dim=1))]
    while len(parts) > 1:
        parts = [left + right for left, right in zip(parts[::2], parts[1::2])]
    with in_fp32(out, bias) as acc:
        acc.copy_(parts[0])


def resume(a, b, out) -> None:
    matmul(a, b, 1, None, out, True)
