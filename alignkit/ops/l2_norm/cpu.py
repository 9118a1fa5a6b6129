"""Calls of the C++ l2_norm kernels (csrc/cpu/kernels.inl), with the bits of reference.py."""

from __future__ import annotations

import torch

from ...runtime import native
from .._common import as_rows


def forward(x: torch.Tensor, eps: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Return y [..., H] and the fp32 factor of each row."""
    flat = as_rows(x)
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    scale = torch.empty(flat.shape[0], dtype=torch.float32, device=x.device)
    native.call_threaded("l2_norm", *flat.shape, x.dtype, flat, flat.stride(0), eps, y, scale)
    return y, scale


def backward(dy: torch.Tensor, x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """Return dx [..., H], for contiguous dy."""
    flat, dx = as_rows(x), torch.empty(x.shape, dtype=x.dtype, device=x.device)
    native.call_threaded("l2_norm_grad", *flat.shape, x.dtype, as_rows(dy), flat, flat.stride(0), scale, dx)
    return dx
