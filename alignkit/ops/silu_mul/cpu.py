"""C++: elementwise over rows."""

from __future__ import annotations

import torch

from ...runtime import native


def forward(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    y = torch.empty(gate.shape, dtype=gate.dtype, device=gate.device)
    native.silu_mul(gate, up, y)
    return y


def backward(gate, up, dy) -> tuple[torch.Tensor, torch.Tensor]:
    dgate, dup = (torch.empty(gate.shape, dtype=gate.dtype, device=gate.device) for _ in range(2))
    native.silu_mul_grad(gate, up, dy, dgate, dup)
    return dgate, dup
