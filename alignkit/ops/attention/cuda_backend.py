"""CUDA attention (WGMMA and TMA, csrc/sm90/attention): training and paged prefill in bf16, head dimensions of DIMS.

triton_backend.py computes decode and the problems that these kernels reject, to the same bits (docs/contract.md,
"Attention"). The names and order of the fields of ctypes structures must equal the library's, which is checked at
import. The bounds below are limits of the kernels: a stricter bound is always valid, a looser one needs a change of the
kernels.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable

import torch

from ...runtime import cuda
from ...runtime.families import SM90
from ...runtime.operands import tma_rejects
from . import triton_backend
from .common import DECODE_CONTEXT, DECODE_QUERIES, PAD
from .problem import Attention, Relaunch

DIMS = (64, 96, 128, 256)  # schedule: head dimensions, a limit that the kernels check
SPILL_BYTES_256 = 102400
"""mirrors csrc/sm90/attention/forward.cu:kSpillBytes256: bytes per CTA for merged accumulators in global memory."""
SPILL_BYTES = {256: SPILL_BYTES_256}
"""schedule: bytes per CTA for merged accumulators in global memory, by head dimension; 0 for the others."""
MAX_ROWS = 1 << 30
"""schedule: bound of rows of q times heads, a limit that the kernels check: they count tiles in 32 bits."""
MAX_GROUP = 64
"""schedule: the largest GQA group (query heads per KV head), a limit that the forward kernel checks."""
PAGE_MULTIPLE = 16
"""schedule: the page size must be a multiple of this many rows, a limit that the forward kernel checks.

It is the smallest TMA box of the kernel. A multiple of it is valid too.
"""


@cuda.mirrors("AlignkitInts")
class _Ints(ctypes.Structure):
    """Mirror of AlignkitInts in csrc/sm90/attention/heads.cuh."""

    _fields_ = [("data", ctypes.c_void_p), ("wide", ctypes.c_int)]


@cuda.mirrors("AlignkitHeads")
class _Heads(ctypes.Structure):
    """Mirror of AlignkitHeads in csrc/sm90/attention/heads.cuh."""

    _fields_ = [("data", ctypes.c_void_p), ("token", ctypes.c_int64), ("head", ctypes.c_int64)]


@cuda.mirrors("AlignkitAttention")
class Arguments(ctypes.Structure):
    """Mirror of AlignkitAttention in csrc/sm90/attention/forward.cu."""

    _fields_ = [
        *((name, _Heads) for name in ("q", "k", "v")),
        *((name, ctypes.c_void_p) for name in ("out", "shift")),
        *((name, _Ints) for name in ("starts", "kv_len", "table")),
        *((name, ctypes.c_int64) for name in ("table_row", "kv_rows")),
        *((name, ctypes.c_int) for name in ("page", "width", "most", "few", "far")),
        *((name, ctypes.c_int) for name in ("tokens", "sequences", "heads", "kv_heads", "dim", "pads", "together")),
        ("factor", ctypes.c_float),
    ]


@cuda.mirrors("AlignkitAttentionBackward")
class Gradients(ctypes.Structure):
    """Mirror of AlignkitAttentionBackward in csrc/sm90/attention/backward.cuh."""

    _fields_ = [
        *((name, _Heads) for name in ("q", "k", "v", "grad")),
        *((name, ctypes.c_void_p) for name in ("shift", "delta", "dq", "dk", "dv")),
        ("starts", _Ints),
        *((name, ctypes.c_int) for name in ("tokens", "sequences", "heads", "kv_heads", "dim", "pads")),
        *((name, ctypes.c_float) for name in ("factor", "scale")),
    ]


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


def _ints(t: torch.Tensor) -> _Ints:
    return _Ints(t.data_ptr(), t.dtype == torch.int64)


def _heads(t: torch.Tensor) -> _Heads:
    return _Heads(t.data_ptr(), t.stride(0), t.stride(1))


def arguments(q, k, v, out, starts, scale: float, tile_heads: int) -> Arguments:
    """Return the arguments shared by packed and paged calls; tile_heads (schedule): 1 or the size of the GQA group."""
    tokens, heads, dim = q.shape
    a = Arguments(*(_heads(t) for t in (q, k, v)), out.data_ptr())
    a.starts = _ints(starts)
    a.kv_rows, a.tokens, a.sequences, a.heads = k.shape[0], tokens, starts.shape[0] - 1, heads
    a.kv_heads, a.dim, a.together, a.factor = k.shape[1], dim, tile_heads, triton_backend._score_factor(scale)
    return a


def spill_bytes(dim: int) -> int:
    """Return the bytes of workspace of the forward pass for head_dim `dim`."""
    return SPILL_BYTES.get(dim, 0) * SM90.sm_count


def _attend(a: Arguments, device: torch.device) -> Callable[[], None]:
    """Launch the forward kernel, and return a function that launches it again with the current contents of `a`."""
    size = spill_bytes(a.dim)

    def attend() -> None:
        workspace = torch.empty(size, dtype=torch.uint8, device=device) if size else None
        cuda.call("alignkit_attention_forward", device, ctypes.byref(a), workspace, ctypes.c_int64(size))

    attend()
    return attend


def forward(q, k, v, starts, scale: float, tile_heads: int = 1):
    """Return the output and the statistics for the backward pass; tile_heads: see `arguments`."""
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    pads = triton_backend._pads(q.shape[0], starts.shape[0] - 1)
    shift = torch.full((q.shape[1], pads * PAD.value), float("-inf"), dtype=torch.float32, device=q.device)
    a = arguments(q, k, v, out, starts, scale, tile_heads)
    a.shift, a.pads = shift.data_ptr(), pads
    _attend(a, q.device)
    return out, shift


def gradients(q, k, v, d_out, shift, delta, grads, starts, scale: float) -> Gradients:
    """Return the arguments of the backward kernels; `grads`: contiguous dq, dk and dv."""
    statistics = shift.data_ptr(), delta.data_ptr()
    g = Gradients(*(_heads(t) for t in (q, k, v, d_out)), *statistics, *(t.data_ptr() for t in grads), _ints(starts))
    g.tokens, g.sequences, g.heads, g.kv_heads, g.dim = q.shape[0], starts.shape[0] - 1, q.shape[1], *k.shape[1:]
    g.pads, g.factor, g.scale = shift.shape[1] // PAD.value, triton_backend._score_factor(scale), scale
    return g


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
    seqs, width = block_table.shape
    decode_all = q.shape[0] <= seqs  # most likely one query per sequence
    max_queries, relaunch_decode = triton_backend.decode(
        q, k, v, block_table, starts, seq_lens, page, scale, out, decode_all=decode_all
    )
    if decode_all:
        return relaunch_decode
    a = arguments(q, k, v, out, starts, scale, tile_heads or q.shape[1] // k.shape[1])
    a.kv_len, a.table, a.table_row = _ints(seq_lens), _ints(block_table), block_table.stride(0)
    a.page, a.width, a.most, a.few, a.far = page, width, max_queries, DECODE_QUERIES.value, DECODE_CONTEXT.value
    relaunch_prefill = _attend(a, q.device)

    def relaunch(q, k, v, out):
        relaunch_decode(q, k, v, out)
        a.q.data, a.k.data, a.v.data, a.out = (t.data_ptr() for t in (q, k, v, out))
        relaunch_prefill()

    return relaunch
