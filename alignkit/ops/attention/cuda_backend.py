"""CUDA attention (WGMMA and TMA, csrc/sm90/attention): training and paged prefill in bf16, head dimensions of DIMS.

triton_backend.py computes decode and the problems that these kernels reject, to the same bits (docs/contract.md,
"Attention"). The bounds below are limits of the kernels: a stricter bound is always valid, a looser one needs a change
of the kernels.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import torch

from ...runtime import cuda
from ...runtime.families import SM90
from ...runtime.operands import tma_rejects
from ...runtime.shared import KERNELS
from . import triton_backend
from .common import DECODE_CONTEXT, DECODE_QUERIES, PAD
from .problem import Attention, Relaunch

DIMS = (64, 96, 128, 256)  # schedule: head dimensions, a limit that the kernels check
SPILL_BYTES = {256: KERNELS["kSpillBytes256"]}
"""Bytes per CTA for merged accumulators in global memory, by head dimension; 0 for the others."""
MAX_ROWS = 1 << 30
"""schedule: bound of rows of q times heads, a limit that the kernels check: they count tiles in 32 bits."""
MAX_GROUP = 64
"""schedule: the largest GQA group (query heads per KV head), a limit that the forward kernel checks."""
PAGE_MULTIPLE = 16
"""schedule: the page size must be a multiple of this many rows, a limit that the forward kernel checks.

It is the smallest TMA box of the kernel. A multiple of it is valid too.
"""


def rejects(p: Attention) -> str | None:
    """Return why the CUDA kernels do not support a problem, or None if they do."""
    rows, heads, dim = p.q[0]
    kv_rows, kv_heads, _ = p.k[0]
    if dim not in DIMS:
        return f"head_dim: must be {', '.join(map(str, DIMS[:-1]))} or {DIMS[-1]}, got {dim}"
    if heads // kv_heads > MAX_GROUP:
        return f"heads / kv_heads: must be at most {MAX_GROUP}, got {heads // kv_heads}"
    if not 0 < rows * heads < MAX_ROWS:
        return f"rows * heads: must be in [1, {MAX_ROWS}), got {rows} * {heads} = {rows * heads}"
    if not 0 < kv_rows < 2**31:
        return f"k: number of rows must be in [1, 2^31), got {kv_rows}"
    for name, t in (("q", p.q), ("k", p.k), ("v", p.v)):
        if (why := tma_rejects(name, t, torch.bfloat16)) is not None:
            return why
    return None


def paged_rejects(p: Attention) -> str | None:
    """Return why the CUDA kernels do not support a paged problem, or None if they do."""
    if p.page % PAGE_MULTIPLE:
        return f"page: the cache's block_size must be a multiple of {PAGE_MULTIPLE}, got {p.page}"
    return rejects(p)


def _ints(t: torch.Tensor) -> ctypes.Structure:
    return cuda.struct("AlignkitInts")(data=t, wide=t.dtype == torch.int64)


def _heads(t: torch.Tensor) -> ctypes.Structure:
    return cuda.struct("AlignkitHeads")(data=t, token=t.stride(0), head=t.stride(1))


def arguments(
    q, k, v, out, starts, scale: float, tile_heads: int, *, shift=None, pads=0, kv_len=None, table=None, page=0, most=0
) -> Any:
    """Return the arguments of the forward kernel; tile_heads (schedule): 1 or the size of the GQA group.

    A packed call may pass `shift` and `pads` for its statistics. A paged call passes lengths, block table, block size
    and the maximum queries of a sequence.
    """
    tokens, heads, dim = q.shape
    null = cuda.struct("AlignkitInts")(data=None, wide=0)
    return cuda.struct("AlignkitAttention")(
        q=_heads(q),
        k=_heads(k),
        v=_heads(v),
        out=out,
        shift=shift,
        starts=_ints(starts),
        kv_len=null if kv_len is None else _ints(kv_len),
        table=null if table is None else _ints(table),
        table_row=0 if table is None else table.stride(0),
        kv_rows=k.shape[0],
        page=page,
        width=0 if table is None else table.shape[1],
        most=most,
        few=0 if table is None else DECODE_QUERIES.value,
        far=0 if table is None else DECODE_CONTEXT.value,
        tokens=tokens,
        sequences=starts.shape[0] - 1,
        heads=heads,
        kv_heads=k.shape[1],
        dim=dim,
        pads=pads,
        together=tile_heads,
        factor=triton_backend._score_factor(scale),
    )


def spill_bytes(dim: int) -> int:
    """Return the bytes of workspace of the forward pass for head_dim `dim`."""
    return SPILL_BYTES.get(dim, 0) * SM90.sm_count


def _attend(a: Any, device: torch.device) -> Callable[[], None]:
    """Launch the forward kernel, and return a function that launches it again with the current contents of `a`."""
    size = spill_bytes(a.dim)

    def attend() -> None:
        workspace = torch.empty(size, dtype=torch.uint8, device=device) if size else None
        cuda.call("alignkit_attention_forward", device, ctypes.byref(a), workspace, size)

    attend()
    return attend


def forward(q, k, v, starts, scale: float, tile_heads: int = 1):
    """Return the output and the statistics for the backward pass; tile_heads: see `arguments`."""
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    pads = triton_backend._pads(q.shape[0], starts.shape[0] - 1)
    shift = torch.full((q.shape[1], pads * PAD.value), float("-inf"), dtype=torch.float32, device=q.device)
    _attend(arguments(q, k, v, out, starts, scale, tile_heads, shift=shift, pads=pads), q.device)
    return out, shift


def gradients(q, k, v, d_out, shift, delta, grads, starts, scale: float) -> Any:
    """Return the arguments of the backward kernels; `grads`: contiguous dq, dk and dv."""
    dq, dk, dv = grads
    return cuda.struct("AlignkitAttentionBackward")(
        q=_heads(q),
        k=_heads(k),
        v=_heads(v),
        grad=_heads(d_out),
        shift=shift,
        delta=delta,
        dq=dq,
        dk=dk,
        dv=dv,
        starts=_ints(starts),
        tokens=q.shape[0],
        sequences=starts.shape[0] - 1,
        heads=q.shape[1],
        kv_heads=k.shape[1],
        dim=q.shape[2],
        pads=shift.shape[1] // PAD.value,
        factor=triton_backend._score_factor(scale),
        scale=scale,
    )


def backward_function(dim: int) -> str:
    """Return the name of the library's backward function for head_dim `dim`."""
    return "alignkit_attention_backward_256" if dim == 256 else "alignkit_attention_backward"


def backward(q, k, v, starts, out, shift, d_out, scale: float):
    if d_out.data_ptr() % 16:  # TMA needs 16-byte alignment
        d_out = d_out.clone()
    delta = triton_backend.compute_delta(out, d_out, starts)
    grads = tuple(torch.empty(t.shape, dtype=t.dtype, device=t.device) for t in (q, k, v))
    g = gradients(q, k, v, d_out, shift, delta, grads, starts, scale)
    cuda.call(backward_function(g.dim), q.device, ctypes.byref(g))
    return grads


def paged(q, k, v, block_table, starts, seq_lens, page: int, scale: float, out, tile_heads: int = 0) -> Relaunch:
    """Compute paged attention into `out`, and return its relaunch; tile_heads: see `arguments`; 0: the group's size."""
    decode_all = q.shape[0] <= len(block_table)  # most likely one query per sequence
    max_queries, relaunch_decode = triton_backend.decode(
        q, k, v, block_table, starts, seq_lens, page, scale, out, decode_all=decode_all
    )
    if decode_all:
        return relaunch_decode
    paging = {"kv_len": seq_lens, "table": block_table, "page": page, "most": max_queries}
    a = arguments(q, k, v, out, starts, scale, tile_heads or q.shape[1] // k.shape[1], **paging)
    relaunch_prefill = _attend(a, q.device)

    def relaunch(q, k, v, out):
        relaunch_decode(q, k, v, out)
        a.q.data, a.k.data, a.v.data, a.out = (t.data_ptr() for t in (q, k, v, out))
        relaunch_prefill()

    return relaunch
