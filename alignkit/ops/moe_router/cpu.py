"""Calls of the C++ router kernels (csrc/cpu/kernels.inl).

reference.py documents the functions and has the same bits.
"""

from __future__ import annotations

import torch

from ...runtime import native


def forward(z, bias, routing) -> tuple[torch.Tensor, torch.Tensor]:
    shape = len(z), routing.top_k
    weights, ids = (torch.empty(shape, dtype=dtype, device=z.device) for dtype in (torch.float32, torch.int64))
    native.route(z, bias, routing, weights, ids)
    return weights, ids


def backward(z, ids, grad, routing) -> torch.Tensor:
    dz = torch.empty(z.shape, dtype=z.dtype, device=z.device)
    native.route_grad(z, ids, grad, routing, dz)
    return dz
