"""Calls of the C++ RoPE kernels (csrc/cpu/kernels.inl), with the bits of reference.py.

GPUs use copies of the table that `table` computes.
"""

from __future__ import annotations

import ctypes

import torch

from ...runtime import native


def table(frequencies: list[float], max_position: int, factor: float) -> torch.Tensor:
    out = torch.empty(max_position, 2 * len(frequencies), dtype=torch.float32, device="cpu")
    given = (ctypes.c_double * len(frequencies))(*frequencies)
    native.call("rope_table", max_position, len(frequencies), given, factor, out)
    return out


def apply(x: torch.Tensor, positions: torch.Tensor, table: torch.Tensor, inverse: bool) -> torch.Tensor:
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    strides = x.stride()[:2]
    options = table.shape[1], x.dtype, inverse
    native.call_threaded("rope", *x.shape, *options, x, *strides, positions, table, y)
    return y


def apply_qk(
    q: torch.Tensor, k: torch.Tensor, positions: torch.Tensor, table: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Rotate q and k."""
    return apply(q, positions, table, False), apply(k, positions, table, False)
