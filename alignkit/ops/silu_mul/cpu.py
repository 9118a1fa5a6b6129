"""Calls of the C++ silu_mul kernels (csrc/cpu/kernels.inl), with the bits of reference.py."""

from __future__ import annotations

import torch

from ...runtime import native


def forward(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    y = torch.empty(gate.shape, dtype=gate.dtype, device=gate.device)
    operands = gate, gate.stride(0), up, up.stride(0), y
    native.call_threaded("silu_mul", *gate.shape, gate.dtype, *operands)
    return y


def backward(gate, up, dy, dgate, dup) -> None:
    operands = gate, gate.stride(0), up, up.stride(0), dy, dgate, dgate.stride(0), dup, dup.stride(0)
    native.call_threaded("silu_mul_grad", *gate.shape, gate.dtype, *operands)
