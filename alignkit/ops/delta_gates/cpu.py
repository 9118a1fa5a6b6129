"""Calls of the C++ delta_gates kernels (csrc/cpu/kernels.inl), with the bits of reference.py."""

from __future__ import annotations

import torch

from ...runtime import native


def forward(a, b, a_log, dt_bias) -> tuple[torch.Tensor, torch.Tensor]:
    """Return fp32 g and beta [rows, H], for a and b [rows, H] and fp32 a_log and dt_bias [H]."""
    g, beta = (torch.empty(a.shape, dtype=torch.float32, device=a.device) for _ in range(2))
    operands = a, a.stride(0), b, b.stride(0), a_log, dt_bias
    native.call_threaded("delta_gates", *a.shape, a.dtype, *operands, g, beta)
    return g, beta


def backward(dg, dbeta, a, a_log, dt_bias, g, beta):
    """Return da and db [rows, H], and the fp32 gradients [H] of a_log and dt_bias, for contiguous dg and dbeta."""
    da, db = (torch.empty(a.shape, dtype=a.dtype, device=a.device) for _ in range(2))
    d_log, d_bias = (torch.zeros(a.shape[1], dtype=torch.float32, device=a.device) for _ in range(2))
    operands = dg, dbeta, a, a.stride(0), a_log, dt_bias, g, beta
    native.call("delta_gates_grad", *a.shape, a.dtype, *operands, da, db, d_log, d_bias)
    return da, db, d_log, d_bias
