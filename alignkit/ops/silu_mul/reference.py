"""Reference silu_mul in torch; every operation is the CPU family's contract (docs/contract.md, "SiLU times up").

cpu.py has the same bits. triton_backend.py has those of Hopper GPUs, whose `exp` differs.
"""

from __future__ import annotations

import torch

from .._calls import in_torch
from .._common import exp, fma


@in_torch
def forward(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    g = gate.float()
    return (g / (1.0 + exp(-g)) * up.float()).to(gate.dtype)


@in_torch
def backward(gate, up, dy, dgate, dup) -> None:
    g, d = gate.float(), dy.float()
    s = 1.0 / (1.0 + exp(-g))
    slope = s * fma(g, 1.0 - s, torch.ones_like(g))
    dgate.copy_(d * up.float() * slope)
    dup.copy_(d * (g * s))
