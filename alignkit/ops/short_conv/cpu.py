"""Calls of the C++ short_conv kernels (csrc/cpu/kernels.inl), with the bits of reference.py."""

from __future__ import annotations

import torch

from ...runtime import native


def forward(x: torch.Tensor, weight: torch.Tensor, starts: torch.Tensor) -> torch.Tensor:
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    sizes = starts.numel() - 1, *weight.shape
    native.call_threaded("short_conv", *sizes, x.dtype, x, x.stride(0), weight, starts, y)
    return y


def backward(dy, x, weight, starts) -> tuple[torch.Tensor, torch.Tensor]:
    """Return dx [T, C] and fp32 dweight [C, taps], for contiguous dy."""
    dx, dc = (torch.empty(x.shape, dtype=t, device=x.device) for t in (x.dtype, torch.float32))
    dw = torch.zeros(weight.shape, dtype=torch.float32, device=x.device)
    sizes = starts.numel() - 1, *weight.shape
    native.call_threaded("short_conv_grad", *sizes, x.dtype, dy, x, x.stride(0), weight, starts, dc, dx, dw)
    return dx, dw


def paged(x, weight, state, slots, starts, lens) -> torch.Tensor:
    """Return the result of the new rows, and write the last rows of each sequence to its slot."""
    y = torch.zeros(x.shape, dtype=x.dtype, device=x.device)
    operands = x, x.stride(0), weight, starts, lens, state, *state.stride()[:2], slots
    native.call_threaded("paged_short_conv", starts.numel() - 1, *weight.shape, x.dtype, *operands, y)
    return y
