"""Calls of the C++ sigmoid_mul kernels (csrc/cpu/kernels.inl), with the bits of reference.py."""

from __future__ import annotations

import torch

from ...runtime import native


def forward(gate: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    native.call_threaded("sigmoid_mul", *x.shape, x.dtype, gate, x, y)
    return y


def backward(gate, x, dy) -> tuple[torch.Tensor, torch.Tensor]:
    dgate = torch.empty(gate.shape, dtype=gate.dtype, device=gate.device)
    dx = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    native.call_threaded("sigmoid_mul_grad", *x.shape, x.dtype, gate, x, dy, dgate, dx)
    return dgate, dx


def forward_each(gate: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    native.call_threaded("sigmoid_mul_each", *x.shape, x.dtype, gate, gate.stride(0), x, x.stride(0), y)
    return y


def backward_each(gate, x, dy) -> tuple[torch.Tensor, torch.Tensor]:
    dgate, dx = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for _ in range(2))
    operands = gate, gate.stride(0), x, x.stride(0), dy, dgate, dx
    native.call_threaded("sigmoid_mul_each_grad", *x.shape, x.dtype, *operands)
    return dgate, dx
