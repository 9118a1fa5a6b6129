"""Reference chain and k-tree in torch, one fused multiply-add at a time.

The order of summation is the contract's (docs/contract.md, "Linear").
"""

from __future__ import annotations

import torch

from .._calls import in_torch
from .._common import fma


def _chain(a: torch.Tensor, b: torch.Tensor, acc: torch.Tensor) -> torch.Tensor:
    for k in range(a.shape[1]):
        acc = fma(a[:, k, None].float(), b[None, :, k].float(), acc)
    return acc


@in_torch
def matmul(a, b, leaves, bias, out, accumulate) -> None:
    parts = [
        _chain(x, w, out if accumulate else torch.zeros(out.shape, dtype=torch.float32, device=out.device))
        for x, w in zip(a.chunk(leaves, dim=1), b.chunk(leaves, dim=1), strict=True)
    ]
    while len(parts) > 1:
        parts = [left + right for left, right in zip(parts[::2], parts[1::2], strict=True)]
    out.copy_(parts[0] if bias is None else parts[0] + bias.float())


def resume(a, b, out) -> None:
    matmul(a, b, 1, None, out, True)
