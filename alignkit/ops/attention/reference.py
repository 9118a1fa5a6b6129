"""Reference attention in torch, one query at a time, in the order of the contract (docs/contract.md, "Attention").

Leaves of keys and the blocks within a leaf are visited in ascending order. A leaf's exponents are relative to its first
score plus RESERVE, a headroom that is raised only if a probability reaches 2. Each leaf's state is merged into the
state of the earlier leaves. Every operation is the contract's; csrc/cpu/kernels.inl computes the same bits.
"""

from __future__ import annotations

import torch

from ...runtime.families import CPU
from .._calls import in_torch
from .._common import chain, exp, fma
from .paging import by_rows

KV_BLOCK, KV_LEAF, RESERVE = CPU.kv_block, CPU.kv_leaf, CPU.reserve  # contract: runtime.families


def _leaf(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: torch.Tensor):
    """Return the fp32 state m [Hq], l [Hq], acc [Hq, D] of q [Hq, D] over one leaf k, v [n, Hq, D]."""
    heads, dim = q.shape
    m, l, acc = (torch.zeros(heads, n, dtype=torch.float32, device=q.device) for n in (1, 1, dim))
    for b in range(0, k.shape[0], KV_BLOCK):
        kb, vb = k[b : b + KV_BLOCK].float(), v[b : b + KV_BLOCK].float()
        zeros = torch.zeros(heads, kb.shape[0], dtype=torch.float32, device=q.device)
        s = chain(q.float(), kb.permute(1, 2, 0), zeros) * scale
        row_max = s.amax(1, keepdim=True)
        if b == 0:
            m = s[:, :1] + RESERVE
        rescale = exp(row_max - m).to(q.dtype) >= 2
        alpha, m = torch.where(rescale, exp(m - (row_max + RESERVE)), 1.0), torch.where(rescale, row_max + RESERVE, m)
        p = exp(s - m).to(q.dtype).float()
        l = chain(p, torch.ones_like(p)[..., None], l * alpha)
        acc = chain(p, vb.transpose(0, 1), acc * alpha)
    return m[:, 0], l[:, 0], acc


def _query(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale):
    """Return fp32 out [Hq, D], m [Hq], l [Hq] of q [Hq, D] over its keys k, v [n, Hq, D]."""
    scale = torch.tensor(scale, dtype=torch.float32, device=q.device)
    m, l, acc = _leaf(q, k[:KV_LEAF], v[:KV_LEAF], scale)
    for begin in range(KV_LEAF, k.shape[0], KV_LEAF):
        m_leaf, l_leaf, acc_leaf = _leaf(q, k[begin : begin + KV_LEAF], v[begin : begin + KV_LEAF], scale)
        merged = torch.where(m_leaf - m <= RESERVE, m, m_leaf)
        alpha, beta = exp(m - merged), exp(m_leaf - merged)
        l = fma(l_leaf, beta, l * alpha)
        acc = fma(acc_leaf, beta[:, None].expand_as(acc), acc * alpha[:, None])
        m = merged
    return acc / l[:, None] + 0.0, m, l


@in_torch
def _forward(q, k, v, q_start, kv_start, kv_rows, scale):
    group = q.shape[1] // k.shape[1]
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    m, l = (torch.empty(q.shape[:2], dtype=torch.float32, device=q.device) for _ in range(2))
    for s in range(q_start.numel() - 1):
        rows = torch.arange(int(kv_start[s]), int(kv_start[s + 1]), device=q.device)
        if kv_rows is not None:
            rows = kv_rows[rows]
        ks, vs = (t[rows].repeat_interleave(group, dim=1) for t in (k, v))
        first, last = int(q_start[s]), int(q_start[s + 1])
        for t in range(first, last):
            n = rows.numel() - (last - 1 - t)
            o, m[t], l[t] = _query(q[t], ks[:n], vs[:n], scale)
            out[t] = o.to(q.dtype)
    return out, m, l


forward, paged = by_rows(_forward)


@in_torch
def backward(q, k, v, starts, out, m, l, d_out, scale):
    """Recompute the probabilities from m and l, then dq, dk and dv by the chain rule, in fp32."""
    group = q.shape[1] // k.shape[1]
    dq, dk, dv = (torch.zeros(t.shape, dtype=torch.float32, device=q.device) for t in (q, k, v))
    for first, last in zip(starts[:-1].tolist(), starts[1:].tolist(), strict=True):
        n = last - first
        causal = torch.ones(n, n, dtype=torch.bool, device=q.device).tril()
        for h in range(q.shape[1]):
            i, hk = slice(first, last), h // group
            qh, kh, vh, g = q[i, h].float(), k[i, hk].float(), v[i, hk].float(), d_out[i, h].float()

            def product(a, b, acc):  # acc + a @ b
                return chain(a, b.expand(a.shape[0], *b.shape), acc)

            zeros, factor = (
                torch.zeros(n, n, dtype=torch.float32, device=q.device),
                torch.tensor(scale, dtype=torch.float32, device=q.device),
            )
            s = product(qh, kh.t(), zeros) * factor
            p = torch.where(causal, exp(s - m[i, h, None]) / l[i, h, None], 0.0)
            delta = chain(g, out[i, h].float()[..., None], torch.zeros(n, 1, dtype=torch.float32, device=q.device))
            ds = p * (product(g, vh.t(), zeros) - delta) * factor
            dq[i, h] = product(ds, kh, torch.zeros_like(qh))
            dk[i, hk] = product(ds.t(), qh, dk[i, hk])
            dv[i, hk] = product(p.t(), g, dv[i, hk])
    dq, dk, dv = (t + 0.0 for t in (dq, dk, dv))  # a sum that underflows is +0, as in the forward pass
    return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype)
