"""CPU backend of `combine` and `weigh`: calls of the C++ kernels (csrc/cpu/kernels.inl).

reference.py documents the functions and has the same bits. On a CPU, each.py computes the experts' GEMMs and pairs.py
sorts the ids.
"""

from __future__ import annotations

import torch

from ...runtime import native
from ..silu_mul import cpu as silu_mul


def combine(y, place, ids, weights, experts, out) -> None:
    sizes = *out.shape, ids.shape[1], experts
    operands = y, place, ids.to(torch.int64), weights
    native.call_threaded("combine", *sizes, y.dtype, *operands, out.dtype, out)


def weigh(g, h, w) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    gate, up = h.chunk(2, dim=1)
    a = silu_mul.forward(gate, up)
    dw = torch.empty(len(a), dtype=torch.float32, device=a.device)
    wg, wa = (torch.empty(a.shape, dtype=a.dtype, device=a.device) for _ in range(2))
    native.call_threaded("weigh", *a.shape, a.dtype, g, a, w, dw, wg, wa)
    dh = torch.empty_like(h)
    silu_mul.backward(gate, up, wg, *dh.chunk(2, dim=1))
    return dw, dh, wa
