"""Calls of the C++ kernel of bit_sums (csrc/cpu/kernels.inl)."""

from __future__ import annotations

import torch

from ...runtime import native


def sums(bits: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    out = torch.empty(bits.shape[0], dtype=torch.int64, device=bits.device)
    native.call_threaded("bit_sums", *bits.shape, bits.element_size(), bits, bits.stride(0), weights, out)
    return out
