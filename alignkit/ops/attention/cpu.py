"""CPU backend of attention: calls of the C++ kernels (csrc/cpu/kernels.inl).

reference.py has the same functions and bits; it shows the order of summation, which is the contract's
(docs/contract.md, "Attention").
"""

from __future__ import annotations

import torch

from ...runtime import native
from .._common import rounded
from .paging import by_rows


def _forward(q, k, v, q_start, kv_start, kv_rows, scale):
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    m, l = (torch.empty(q.shape[:2], dtype=torch.float32, device=q.device) for _ in range(2))
    native.attention(q, k, v, q_start, kv_start, kv_rows, scale, out, m, l)
    return out, m, l


forward, paged = by_rows(_forward)


def backward(q, k, v, starts, out, m, l, d_out, scale):
    dq, dk, dv = (torch.zeros(t.shape, dtype=torch.float32, device=t.device) for t in (q, k, v))
    native.attention_grad(q, k, v, starts, scale, out, m, l, d_out, dq, dk, dv)
    return rounded(dq, q.dtype), rounded(dk, k.dtype), rounded(dv, v.dtype)
