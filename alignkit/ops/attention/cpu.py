"""C++: tiles of queries against blocks of keys."""
from __future__ import annotations

import torch

from ... import native
from .paging import cache_rows


def forward(q, k, v, starts, scale):
    return _forward(q, k, v, starts, starts, None, scale)


def paged(q, k, v, block_table, q_start, seq_lens, block_size, scale):
    kv_start, rows = cache_rows(block_table, seq_lens, q_start.diff(), block_size, k.shape[0] // block_size)
    return _forward(q, k, v, q_start, kv_start, rows, scale)[0]


def _forward(q, k, v, q_start, kv_start, kv_rows, scale):
    out = torch.empty(q.shape, dtype=q.dtype)
    m, l = (torch.empty(q.shape[:2], dtype=torch.float32) for _ in range(2))
    native.attention(q, k, v, q_start, kv_start, kv_rows, scale, out, m, l)
    return out, m, l


def backward(q, k, v, starts, out, m, l, d_out, scale):
    dq, dk, dv = (torch.zeros(t.shape, dtype=torch.float32) for t in (q, k, v))
    native.attention_grad(q, k, v, starts, scale, out, m, l, d_out, dq, dk, dv)
    return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype)
