"""Reference recurrence in torch, one sequence, head and chunk at a time, in fp32; runs on any device.

GEMMs and exponentials are torch's, so tests bound its error instead of comparing bits with the kernels.
"""

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
    """Write dh, dh0 (unless None) and dv2; `dtype`: the dtype of the computation."""
    exp = torch.exp2 if base2 else torch.exp
    heads, group = do.shape[2], do.shape[2] // q.shape[2]
    if state_v_first:
        dh, dh0, dht = (t if t is None else t.transpose(-1, -2) for t in (dh, dh0, dht))

    def load_rows(t: torch.Tensor, batch: int, head: int, rows: range) -> torch.Tensor:
        return t[batch, rows.start : rows.stop, head].to(dtype).contiguous()

    def compute_head(sequence: int, batch: int, rows: range, first_chunk: int, head: int) -> None:
        """Compute one head of one sequence, whose rows are in `batch`."""
        D = torch.zeros(q.shape[3], do.shape[3], dtype=dtype, device=q.device)
        if dht is not None:
            D += dht[sequence, head]
        for chunk in reversed(range(-(-len(rows) // CHUNK))):
            chunk_rows = rows[chunk * CHUNK : (chunk + 1) * CHUNK]
            q_, k_ = (load_rows(t, batch, head // group, chunk_rows) for t in (q, k))
            w_, do_, dv_ = (load_rows(t, batch, head, chunk_rows) for t in (w, do, dv))
            decay = dv_factor = do_factor = torch.ones(1, 1, dtype=dtype, device=q.device)
            if g is not None:
                g_ = load_rows(g, batch, head, chunk_rows)[:, None]
                dv_factor, do_factor, decay = exp(g_[-1] - g_), exp(g_), exp(g_[-1:])
            if gk is not None:
                decay = decay * exp(load_rows(gk, batch, head, chunk_rows)[-1])[:, None]
            dh[batch, first_chunk + chunk, head] = D
            dv2_ = dv_ + dv_factor * (k_ @ D)
            dv2[batch, chunk_rows.start : chunk_rows.stop, head] = dv2_
            D = decay * D + scale * (do_factor * q_).t() @ do_ - w_.t() @ dv2_
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
            compute_head(sequence, batch, rows, first_chunk, head)
