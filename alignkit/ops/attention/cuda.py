"""CUDA: bf16 with heads of 64, 96, 128 or 256, of training and of the longer parts of sequences in a rollout, by the tensor core's
asynchronous products (csrc/sm90/attention). Everything else is Triton's: the same bits."""

from __future__ import annotations

import ctypes
from collections.abc import Callable

import torch

from ...runtime import cuda
from ...runtime.families import SM90
from . import triton
from .common import FAR, FEW, PAD
from .problem import Again, Attention

DIMS = (64, 96, 128, 256)
JOINED = {256: 102400}
"""Bytes of the sums of a tile over its leaves, those that have no room on the multiprocessor, by the length of a head."""
MOST_HEADS = 1 << 30
"""Rows of q times heads; the kernel counts tiles in 32 bits."""
GROUP = 64
"""Heads of q that share one of k, at most."""
PAGE = 16
"""A page is of a multiple of so many rows, which the copy engine brings at a time."""


@cuda.mirrors("AlignkitInts")
class _Ints(ctypes.Structure):
    """AlignkitInts of csrc/sm90/attention/heads.cuh."""

    _fields_ = [("data", ctypes.c_void_p), ("wide", ctypes.c_int)]


@cuda.mirrors("AlignkitHeads")
class _Heads(ctypes.Structure):
    """AlignkitHeads of csrc/sm90/attention/heads.cuh."""

    _fields_ = [("data", ctypes.c_void_p), ("token", ctypes.c_int64), ("head", ctypes.c_int64)]


@cuda.mirrors("AlignkitAttention")
class Arguments(ctypes.Structure):
    """AlignkitAttention of csrc/sm90/attention/forward.cu."""

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
    """AlignkitAttentionBackward of csrc/sm90/attention/backward.cu."""

    _fields_ = [
        *((name, _Heads) for name in ("q", "k", "v", "grad")),
        *((name, ctypes.c_void_p) for name in ("shift", "delta", "dq", "dk", "dv")),
        ("starts", _Ints),
        *((name, ctypes.c_int) for name in ("tokens", "sequences", "heads", "kv_heads", "dim", "pads")),
        *((name, ctypes.c_float) for name in ("factor", "scale")),
    ]


def refuses(p: Attention) -> str | None:
    """Why the kernel is not for it; None: it is."""
    rows, heads, dim = p.q[0]
    kv_rows, kv_heads, _ = p.k[0]
    if dim not in DIMS:
        return f"heads of {dim}, of {', '.join(map(str, DIMS[:-1]))} or {DIMS[-1]}"
    if heads // kv_heads > GROUP:
        return f"groups of {heads // kv_heads} heads, of at most {GROUP}"
    if not 0 < rows * heads < MOST_HEADS or not 0 < kv_rows < 2**31:
        return f"{rows} rows of {heads} heads over {kv_rows}, of 1 to {MOST_HEADS - 1} in all"
    for _, strides, dtype, aligned in (p.q, p.k, p.v):
        if dtype != torch.bfloat16 or not aligned or strides[2] != 1 or any(s % 8 or s < dim for s in strides[:2]):
            return "tensors that are not bf16 that the copy engine reads"
    return None


def paged_refuses(p: Attention) -> str | None:
    if p.page % PAGE:
        return f"pages of {p.page} rows, not of a multiple of {PAGE}"
    return refuses(p)


def _ints(t: torch.Tensor) -> _Ints:
    return _Ints(t.data_ptr(), t.dtype == torch.int64)


def _heads(t: torch.Tensor) -> _Heads:
    return _Heads(t.data_ptr(), t.stride(0), t.stride(1))


def arguments(q, k, v, out, starts, scale: float, together: int) -> Arguments:
    """All but what is of training or of a cache. `together`, on which no bit depends: heads of a tile, one or a group."""
    tokens, heads, dim = q.shape
    a = Arguments(*(_heads(t) for t in (q, k, v)), out.data_ptr())
    a.starts = _ints(starts)
    a.kv_rows, a.tokens, a.sequences, a.heads = k.shape[0], tokens, starts.shape[0] - 1, heads
    a.kv_heads, a.dim, a.together, a.factor = k.shape[1], dim, together, triton._factor(scale)
    return a


def joined_bytes(dim: int) -> int:
    """Of memory that the forward pass needs beside its arguments, for heads of `dim`."""
    return JOINED.get(dim, 0) * SM90.multiprocessors


def _attend(a: Arguments, device: torch.device) -> Callable[[], None]:
    """Returns what does it again, with what `a` holds then."""
    size = joined_bytes(a.dim)

    def attend() -> None:
        joined = torch.empty(size, dtype=torch.uint8, device=device) if size else None
        cuda.call("alignkit_attention_forward", device, ctypes.byref(a), joined, ctypes.c_int64(size))

    attend()
    return attend


def forward(q, k, v, starts, scale: float, together: int = 1):
    """`together`: see `arguments`."""
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    pads = triton._pads(q.shape[0], starts.shape[0] - 1)
    shift = torch.full((q.shape[1], pads * PAD.value), float("-inf"), dtype=torch.float32, device=q.device)
    a = arguments(q, k, v, out, starts, scale, together)
    a.shift, a.pads = shift.data_ptr(), pads
    _attend(a, q.device)
    return out, shift


def gradients(q, k, v, d_out, shift, delta, grads, starts, scale: float) -> Gradients:
    """`grads`: of q, k and v, contiguous."""
    statistics = shift.data_ptr(), delta.data_ptr()
    g = Gradients(*(_heads(t) for t in (q, k, v, d_out)), *statistics, *(t.data_ptr() for t in grads), _ints(starts))
    g.tokens, g.sequences, g.heads, g.kv_heads, g.dim = q.shape[0], starts.shape[0] - 1, q.shape[1], *k.shape[1:]
    g.pads, g.factor, g.scale = shift.shape[1] // PAD.value, triton._factor(scale), scale
    return g


def differentiator(dim: int) -> str:
    """The function of the library for gradients of heads of `dim`."""
    return "alignkit_attention_backward_256" if dim == 256 else "alignkit_attention_backward"


def backward(q, k, v, starts, out, shift, d_out, scale: float):
    if d_out.data_ptr() % 16:  # part of another tensor
        d_out = d_out.clone()
    delta = triton.sums(out, d_out, starts)
    grads = tuple(torch.empty(t.shape, dtype=t.dtype, device=t.device) for t in (q, k, v))
    g = gradients(q, k, v, d_out, shift, delta, grads, starts, scale)
    cuda.call(differentiator(g.dim), q.device, ctypes.byref(g))
    return grads


def paged(q, k, v, block_table, starts, seq_lens, page: int, scale: float, out, together: int = 0) -> Again:
    """`together`: see `arguments`; 0: a group."""
    seqs, width = block_table.shape
    alone = q.shape[0] <= seqs  # most likely one query each
    most, of_few = triton.few(q, k, v, block_table, starts, seq_lens, page, scale, out, all_of_them=alone)
    if alone:
        return of_few
    a = arguments(q, k, v, out, starts, scale, together or q.shape[1] // k.shape[1])
    a.kv_len, a.table, a.table_row = _ints(seq_lens), _ints(block_table), block_table.stride(0)
    a.page, a.width, a.most, a.few, a.far = page, width, most, FEW.value, FAR.value
    of_many = _attend(a, q.device)

    def again(q, k, v, out):
        of_few(q, k, v, out)
        a.q.data, a.k.data, a.v.data, a.out = (t.data_ptr() for t in (q, k, v, out))
        of_many()

    return again
