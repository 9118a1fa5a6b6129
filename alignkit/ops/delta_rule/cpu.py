"""Calls of the C++ kernels of the gated delta rule (csrc/cpu/kernels.inl), with the bits of reference.py."""

from __future__ import annotations

import torch

from ...runtime import native


def _sizes(q, v) -> tuple:
    return v.shape[1], q.shape[1], q.shape[2], v.shape[2], v.dtype


def forward(q, k, v, g, beta, starts, scale: float) -> torch.Tensor:
    out = torch.empty(v.shape, dtype=v.dtype, device=v.device)
    native.call_threaded("delta_rule", starts.numel() - 1, *_sizes(q, v), q, k, v, g, beta, starts, scale, out)
    return out


def paged(q, k, v, g, beta, pages, slots, starts, lens, scale: float) -> torch.Tensor:
    """Return o of the new rows; advance the pages of their sequences in place."""
    out = torch.zeros(v.shape, dtype=v.dtype, device=v.device)
    rows = q, k, v, g, beta, starts, lens, scale
    native.call_threaded(
        "paged_delta_rule", starts.numel() - 1, *_sizes(q, v), *rows, pages, *pages.stride()[:2], slots, out
    )
    return out
