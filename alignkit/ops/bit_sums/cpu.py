"""Calls of the C++ kernel of bit_sums (csrc/cpu/kernels.inl)."""

from __future__ import annotations

import torch

from ...runtime import native


def sums(bits: list[torch.Tensor], weights: torch.Tensor) -> torch.Tensor:
    out = torch.empty(len(bits), bits[0].shape[0], dtype=torch.int64, device=weights.device)
    for x, y in zip(bits, out, strict=True):
        native.call_threaded("bit_sums", *x.shape, x.element_size(), x, x.stride(0), weights, y)
    return out
