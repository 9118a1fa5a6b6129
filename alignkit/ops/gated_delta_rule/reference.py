"""The recurrence as it is written, a sequence, a head and a chunk at a time, in fp32; on any device."""

from __future__ import annotations

from itertools import pairwise

import torch

from .._calls import in_torch
from . import CHUNK


@in_torch
def bwd_dhu(
    q,
    k,
    w,
    do,
    dv,
    g,
    gk,
    dht,
    scale: float,
    cu_seqlens,
    state_v_first: bool,
    base2: bool,
    dh,
    dh0,
    dv2,
    dtype: torch.dtype = torch.float32,
) -> None:
    """Fills dh, dh0 (or None) and dv2. dtype: what is computed in."""
    exp = torch.exp2 if base2 else torch.exp
    heads, group = do.shape[2], do.shape[2] // q.shape[2]
    if state_v_first:
        dh, dh0, dht = (t if t is None else t.transpose(-1, -2) for t in (dh, dh0, dht))

    def rows_of(t: torch.Tensor, batch: int, head: int, rows: range) -> torch.Tensor:
        return t[batch, rows.start : rows.stop, head].to(dtype).contiguous()

    def go_back(sequence: int, batch: int, rows: range, first_chunk: int, head: int) -> None:
        """One sequence, whose rows lie in `batch`, and one head."""
        D = torch.zeros(q.shape[3], do.shape[3], dtype=dtype, device=q.device)
        if dht is not None:
            D += dht[sequence, head]
        for chunk in reversed(range(-(-len(rows) // CHUNK))):
            now = rows[chunk * CHUNK : (chunk + 1) * CHUNK]
            q_, k_ = (rows_of(t, batch, head // group, now) for t in (q, k))
            w_, do_, dv_ = (rows_of(t, batch, head, now) for t in (w, do, dv))
            decay = one = two = torch.ones(1, 1, dtype=dtype, device=q.device)
            if g is not None:
                g_ = rows_of(g, batch, head, now)[:, None]
                one, two, decay = exp(g_[-1] - g_), exp(g_), exp(g_[-1:])
            if gk is not None:
                decay = decay * exp(rows_of(gk, batch, head, now)[-1])[:, None]
            dh[batch, first_chunk + chunk, head] = D
            dv2_ = dv_ + one * (k_ @ D)
            dv2[batch, now.start : now.stop, head] = dv2_
            D = decay * D + scale * (two * q_).t() @ do_ - w_.t() @ dv2_
        if dh0 is not None:
            dh0[sequence, head] = D

    if cu_seqlens is None:
        batches = [(b, range(q.shape[1]), 0) for b in range(q.shape[0])]
    else:
        starts, batches, chunk = cu_seqlens.tolist(), [], 0
        for begin, end in pairwise(starts):
            batches.append((0, range(begin, end), chunk))
            chunk += -(-(end - begin) // CHUNK)
    for sequence, (batch, rows, first_chunk) in enumerate(batches):
        for head in range(heads):
            go_back(sequence, batch, rows, first_chunk, head)
