"""Loads the C++ kernels of csrc/cpu through ctypes and wraps each in a call on torch tensors.

The library has a plain C interface, so one build serves every torch and Python version. Wrappers take
CPU tensors whose shapes the ops have already checked; they hold no rules of their own.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
from collections.abc import Iterator

import torch

from ..config import config
from ..errors import BackendError
from . import built, families

LIBRARY = families.CPU.library
DTYPES = {torch.float32: 0, torch.bfloat16: 1}
ROUNDED = DTYPES | {torch.float16: 2}
"""What fp32 is rounded to."""


@functools.cache
def library() -> ctypes.CDLL:
    """The kernel library. Raises BackendError where the package was installed without it, for one that was built from
    other sources, and where ALIGNKIT_CPU_ISA names no instruction set of this machine."""
    if not LIBRARY.exists():
        raise BackendError(
            "alignkit's CPU kernels were not built: install alignkit where a C++17 compiler is "
            "found, or choose ALIGNKIT_BACKEND=reference (same bits, very slow)"
        )
    lib = built.load(LIBRARY, families.CPU.part)
    built.check_layout(lib, "Attention", _Attention)
    built.check_layout(lib, "Routing", _Routing)
    lib.alignkit_isa.restype = ctypes.c_char_p
    wanted = config.cpu_isa
    if not lib.alignkit_choose_isa(wanted.encode()):
        raise BackendError(f"ALIGNKIT_CPU_ISA: {wanted!r}: this machine has no such instruction set")
    return lib


def available() -> bool:
    """Whether the kernels are built. Raises BackendError if they are, but are not for use, as `library` does."""
    return LIBRARY.exists() and library() is not None


def isa() -> str:
    """The instruction set that is chosen: by ALIGNKIT_CPU_ISA or `use_isa`, else the best of this machine."""
    return library().alignkit_isa().decode()


@contextlib.contextmanager
def use_isa(name: str) -> Iterator[None]:
    """Within the block, kernels run on the instruction set `avx512`, `avx2` or `generic`. All give the same bits."""
    before = isa()
    if not library().alignkit_choose_isa(name.encode()):
        raise BackendError(f"isa: this machine has no {name!r}")
    try:
        yield
    finally:
        library().alignkit_choose_isa(before.encode())


def _ptr(t: torch.Tensor | None):
    return ctypes.c_void_p(None if t is None else t.data_ptr())


def _long(v: int):
    return ctypes.c_int64(v)


def _threads():
    return ctypes.c_int(torch.get_num_threads())


def gemm(a: torch.Tensor, b: torch.Tensor, leaves: int, out: torch.Tensor, accumulate: bool) -> None:
    m, k = a.shape
    n = b.shape[0]
    library().alignkit_gemm(
        _long(m),
        _long(n),
        _long(k),
        _long(leaves),
        _ptr(a),
        DTYPES[a.dtype],
        _long(a.stride(0)),
        _long(a.stride(1)),
        _ptr(b),
        DTYPES[b.dtype],
        _long(b.stride(0)),
        _long(b.stride(1)),
        _ptr(out),
        _long(out.stride(0)),
        int(accumulate),
        _threads(),
    )


def round(x: torch.Tensor, y: torch.Tensor, bias: torch.Tensor | None = None) -> None:
    """y [M, N] <- fp32 x (+ fp32 bias [N]), rounded to y's type; x has unit stride in its last dim, and may be y."""
    library().alignkit_round(
        _long(x.shape[0]),
        _long(x.shape[1]),
        _ptr(x),
        _long(x.stride(0)),
        _ptr(bias),
        ROUNDED[y.dtype],
        _ptr(y),
        _long(y.stride(0)),
        _long(y.stride(1)),
        _threads(),
    )


def add(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """a + b of one shape and type, rounded to it; contiguous."""
    a, b = a.contiguous(), b.contiguous()
    y = torch.empty(a.shape, dtype=a.dtype, device=a.device)
    library().alignkit_add(_long(a.numel()), DTYPES[a.dtype], _ptr(a), _ptr(b), _ptr(y), _threads())
    return y


def _float(v: float | None):
    """Points to a number; None: a null pointer."""
    return None if v is None else ctypes.byref(ctypes.c_float(v))


def logits(x, bias, cap, scale, temperature, z, capped) -> None:
    library().alignkit_logits(
        _long(x.shape[0]),
        _long(x.shape[1]),
        DTYPES[x.dtype],
        _ptr(x),
        _long(x.stride(0)),
        _ptr(bias),
        _float(cap),
        _float(scale),
        _ptr(temperature),
        _ptr(z),
        _long(z.stride(0)),
        _ptr(capped),
        _threads(),
    )


def logits_back(g, cap, scale, temperature, capped) -> None:
    library().alignkit_logits_back(
        _long(g.shape[0]),
        _long(g.shape[1]),
        _ptr(g),
        _long(g.stride(0)),
        _float(cap),
        _float(scale),
        _ptr(temperature),
        _ptr(capped),
        _threads(),
    )


def join(m, q, u, given, top, s, v) -> None:
    library().alignkit_join(
        _long(m.shape[0]),
        _long(m.shape[1]),
        _ptr(m),
        _ptr(q),
        _ptr(u),
        _ptr(given),
        _ptr(top),
        _ptr(s),
        _ptr(v),
        _threads(),
    )


def finish(m, s, u, z, logp, lse, entropy) -> None:
    library().alignkit_finish(
        _long(m.numel()), _ptr(m), _ptr(s), _ptr(u), _ptr(z), _ptr(logp), _ptr(lse), _ptr(entropy)
    )


def log_probs(z, temperature, lse, out) -> None:
    library().alignkit_log_probs(
        _long(z.shape[0]),
        _long(z.shape[1]),
        DTYPES[z.dtype],
        _ptr(z),
        _long(z.stride(0)),
        _ptr(temperature),
        _ptr(lse),
        _ptr(out),
        _long(out.stride(0)),
        _threads(),
    )


def tile_stats(z, tile, m, q, u) -> None:
    library().alignkit_tile_stats(
        _long(z.shape[0]),
        _long(z.shape[1]),
        _long(tile),
        _ptr(z),
        _long(z.stride(0)),
        _ptr(m),
        _ptr(q),
        _ptr(u),
        _long(m.shape[1]),
        _threads(),
    )


def logits_grad(z, lse, entropy, g_logp, g_entropy, column) -> None:
    library().alignkit_logits_grad(
        _long(z.shape[0]),
        _long(z.shape[1]),
        _ptr(z),
        _long(z.stride(0)),
        _ptr(lse),
        _ptr(entropy),
        _ptr(g_logp),
        _ptr(g_entropy),
        _ptr(column),
        _threads(),
    )


def rms_norm(x, weight, zero_centered, eps, y, rstd) -> None:
    library().alignkit_rms_norm(
        _long(x.shape[0]),
        _long(x.shape[1]),
        DTYPES[x.dtype],
        _ptr(x),
        _long(x.stride(0)),
        _ptr(weight),
        int(zero_centered),
        ctypes.c_float(eps),
        _ptr(y),
        _ptr(rstd),
        _threads(),
    )


def rms_norm_grad(dy, x, weight, zero_centered, rstd, dx, dw) -> None:
    library().alignkit_rms_norm_grad(
        _long(x.shape[0]),
        _long(x.shape[1]),
        DTYPES[x.dtype],
        _ptr(dy),
        _ptr(x),
        _ptr(weight),
        int(zero_centered),
        _ptr(rstd),
        _ptr(dx),
        _ptr(dw),
        _threads(),
    )


def rope(x, positions, table, inverse, y) -> None:
    t, h, d = x.shape
    library().alignkit_rope(
        _long(t),
        _long(h),
        _long(d),
        _long(table.shape[1]),
        DTYPES[x.dtype],
        int(inverse),
        _ptr(x),
        _long(x.stride(0)),
        _long(x.stride(1)),
        _ptr(positions),
        _ptr(table),
        _ptr(y),
        _threads(),
    )


def rope_table(positions: int, frequencies: list[float], factor: float, table) -> None:
    """`frequencies` are of the first half of a head's dimensions."""
    given = (ctypes.c_double * len(frequencies))(*frequencies)
    library().alignkit_rope_table(
        _long(positions), _long(len(frequencies)), given, ctypes.c_double(factor), _ptr(table)
    )


def silu_mul(gate, up, y) -> None:
    library().alignkit_silu_mul(
        _long(gate.shape[0]),
        _long(gate.shape[1]),
        DTYPES[gate.dtype],
        _ptr(gate),
        _long(gate.stride(0)),
        _ptr(up),
        _long(up.stride(0)),
        _ptr(y),
        _threads(),
    )


def silu_mul_grad(gate, up, dy, dgate, dup) -> None:
    library().alignkit_silu_mul_grad(
        _long(gate.shape[0]),
        _long(gate.shape[1]),
        DTYPES[gate.dtype],
        _ptr(gate),
        _long(gate.stride(0)),
        _ptr(up),
        _long(up.stride(0)),
        _ptr(dy),
        _ptr(dgate),
        _ptr(dup),
        _threads(),
    )


def sigmoid_mul(gate, x, y) -> None:
    library().alignkit_sigmoid_mul(
        _long(x.shape[0]), _long(x.shape[1]), DTYPES[x.dtype], _ptr(gate), _ptr(x), _ptr(y), _threads()
    )


def sigmoid_mul_grad(gate, x, dy, dgate, dx) -> None:
    library().alignkit_sigmoid_mul_grad(
        _long(x.shape[0]),
        _long(x.shape[1]),
        DTYPES[x.dtype],
        _ptr(gate),
        _ptr(x),
        _ptr(dy),
        _ptr(dgate),
        _ptr(dx),
        _threads(),
    )


class _Routing(ctypes.Structure):
    _fields_ = (
        [(n, ctypes.c_int64) for n in ("experts", "top_k", "groups", "top_groups")]
        + [(n, ctypes.c_int) for n in ("sigmoid", "normalize")]
        + [("scale", ctypes.c_float)]
    )


def _routing(experts, how) -> _Routing:
    return _Routing(experts, how.top_k, how.groups, how.top_groups, how.sigmoid, how.normalize, how.scale)


def route(z, bias, how, weights, ids) -> None:
    args = _routing(z.shape[1], how)
    library().alignkit_route(
        _long(z.shape[0]), ctypes.byref(args), _ptr(z), _ptr(bias), _ptr(weights), _ptr(ids), _threads()
    )


def route_grad(z, ids, grad, how, dz) -> None:
    args = _routing(z.shape[1], how)
    library().alignkit_route_grad(
        _long(z.shape[0]), ctypes.byref(args), _ptr(z), _ptr(ids), _ptr(grad), _ptr(dz), _threads()
    )


def combine(y, place, ids, weights, experts, out) -> None:
    library().alignkit_combine(
        _long(out.shape[0]),
        _long(out.shape[1]),
        _long(ids.shape[1]),
        _long(experts),
        DTYPES[y.dtype],
        _ptr(y),
        _ptr(place),
        _ptr(ids),
        _ptr(weights),
        DTYPES[out.dtype],
        _ptr(out),
        _threads(),
    )


def weigh(g, a, w, dw, wg, wa) -> None:
    library().alignkit_weigh(
        _long(a.shape[0]),
        _long(a.shape[1]),
        DTYPES[a.dtype],
        _ptr(g),
        _ptr(a),
        _ptr(w),
        _ptr(dw),
        _ptr(wg),
        _ptr(wa),
        _threads(),
    )


class _Attention(ctypes.Structure):
    _fields_ = (
        [("dtype", ctypes.c_int), ("threads", ctypes.c_int)]
        + [(n, ctypes.c_int64) for n in ("heads_q", "heads_kv", "dim", "seqs")]
        + [("scale", ctypes.c_float)]
        + [(n, ctypes.c_void_p) for n in ("q", "k", "v")]
        + [(n, ctypes.c_int64) for n in ("q_row", "q_head", "k_row", "k_head", "v_row", "v_head")]
        + [(n, ctypes.c_void_p) for n in ("q_start", "kv_start", "kv_rows")]
    )


def _attention(q, k, v, q_start, kv_start, kv_rows, scale) -> _Attention:
    return _Attention(
        DTYPES[q.dtype],
        torch.get_num_threads(),
        q.shape[1],
        k.shape[1],
        q.shape[2],
        q_start.numel() - 1,
        scale,
        q.data_ptr(),
        k.data_ptr(),
        v.data_ptr(),
        q.stride(0),
        q.stride(1),
        k.stride(0),
        k.stride(1),
        v.stride(0),
        v.stride(1),
        q_start.data_ptr(),
        kv_start.data_ptr(),
        None if kv_rows is None else kv_rows.data_ptr(),
    )


def attention(q, k, v, q_start, kv_start, kv_rows, scale, out, m, l) -> None:
    args = _attention(q, k, v, q_start, kv_start, kv_rows, scale)
    library().alignkit_attention(ctypes.byref(args), _ptr(out), _ptr(m), _ptr(l))


def attention_grad(q, k, v, starts, scale, out, m, l, d_out, dq, dk, dv) -> None:
    args = _attention(q, k, v, starts, starts, None, scale)
    library().alignkit_attention_grad(
        ctypes.byref(args), _ptr(out), _ptr(m), _ptr(l), _ptr(d_out), _ptr(dq), _ptr(dk), _ptr(dv)
    )


def exp(x: torch.Tensor) -> torch.Tensor:
    x = x.contiguous()
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    library().alignkit_exp(_long(x.numel()), _ptr(x), _ptr(y))
    return y


def lse(m: torch.Tensor, s: torch.Tensor) -> torch.Tensor:
    out = torch.empty(m.shape, dtype=torch.float64, device=m.device)
    library().alignkit_lse(_long(m.numel()), _ptr(m), _ptr(s), _ptr(out))
    return out
