"""Reference sigmoid_mul in torch; every operation is the contract's (docs/contract.md).

triton_backend.py calls `product` and `product_back` with the sm90 family's `exp` and sum.
"""

from __future__ import annotations

import torch

from .._calls import in_torch
from .._common import exp as _exp
from .._common import lane_sum as _lane_sum


def product(gate, x, exp) -> torch.Tensor:
    """Return sigmoid(gate) * x [rows, H], for fp32 gate [rows]."""
    s = 1.0 / (1.0 + exp(-gate))
    return (s[:, None] * x.float()).to(x.dtype)


def product_back(gate, x, dy, exp, lane_sum) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the gradients of gate and x for the gradient dy of `product`."""
    s = 1.0 / (1.0 + exp(-gate))
    d = dy.float()
    return lane_sum(d, x.float()) * s * (1.0 - s), (s[:, None] * d).to(x.dtype)


@in_torch
def forward(gate: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """Return sigmoid(gate) * x [rows, H], for fp32 gate [rows]."""
    return product(gate, x, _exp)


@in_torch
def forward_each(gate: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """Return sigmoid(gate) * x [rows, H], for gate [rows, H] of x's dtype."""
    return (1.0 / (1.0 + _exp(-gate.float())) * x.float()).to(x.dtype)


@in_torch
def backward_each(gate, x, dy) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the gradients of gate and x, for gate [rows, H]."""
    s, d = 1.0 / (1.0 + _exp(-gate.float())), dy.float()
    return (d * x.float() * s * (1.0 - s)).to(x.dtype), (s * d).to(x.dtype)


@in_torch
def backward(gate, x, dy) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the gradients of gate and x."""
    return product_back(gate, x, dy, _exp, _lane_sum)
