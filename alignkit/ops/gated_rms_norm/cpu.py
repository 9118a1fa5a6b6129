"""Calls of the C++ gated_rms_norm kernels (csrc/cpu/kernels.inl), with the bits of reference.py."""

from __future__ import annotations

import torch

from ...runtime import native


def forward(x: torch.Tensor, weight: torch.Tensor, gate: torch.Tensor, eps: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Return y and fp32 rstd [rows], for x and gate [rows, H]."""
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    rstd = torch.empty(x.shape[0], dtype=torch.float32, device=x.device)
    operands = x, x.stride(0), weight.float(), gate, gate.stride(0), eps
    native.call_threaded("gated_rms_norm", *x.shape, x.dtype, *operands, y, rstd)
    return y, rstd


def backward(dy, x, weight, gate, rstd) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return dx [rows, H], fp32 dweight [H] and dgate [rows, H], for contiguous dy."""
    dx, dgate = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for _ in range(2))
    dw = torch.zeros(x.shape[1], dtype=torch.float32, device=x.device)
    operands = dy, x, x.stride(0), weight.float(), gate, gate.stride(0), rstd
    native.call_threaded("gated_rms_norm_grad", *x.shape, x.dtype, *operands, dx, dw, dgate)
    return dx, dw, dgate
