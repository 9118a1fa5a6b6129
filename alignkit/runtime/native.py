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


def _argument(v):
    """As the library takes it: of a tensor its address, null without one; of a type its number; a flag of 32 bits; a number of
    64. Others are of ctypes already."""
    if v is None or isinstance(v, torch.Tensor):
        return ctypes.c_void_p(None if v is None else v.data_ptr())
    if isinstance(v, torch.dtype):
        return ctypes.c_int(DTYPES[v])
    if isinstance(v, bool):
        return ctypes.c_int(v)
    return ctypes.c_int64(v) if isinstance(v, int) else v


def _call(name: str, *arguments) -> None:
    getattr(library(), f"alignkit_{name}")(*[_argument(v) for v in arguments])


def _shared(name: str, *arguments) -> None:
    """A call whose work is shared by torch's threads."""
    _call(name, *arguments, ctypes.c_int(torch.get_num_threads()))


def gemm(a: torch.Tensor, b: torch.Tensor, leaves: int, out: torch.Tensor, accumulate: bool) -> None:
    (m, k), n = a.shape, b.shape[0]
    operands = (a, a.dtype, *a.stride(), b, b.dtype, *b.stride())
    _shared("gemm", m, n, k, leaves, *operands, out, out.stride(0), bool(accumulate))


def round(x: torch.Tensor, y: torch.Tensor, bias: torch.Tensor | None = None) -> None:
    """y [M, N] <- fp32 x (+ fp32 bias [N]), rounded to y's type; x has unit stride in its last dim, and may be y."""
    _shared("round", *x.shape, x, x.stride(0), bias, ctypes.c_int(ROUNDED[y.dtype]), y, *y.stride())


def add(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """a + b of one shape and type, rounded to it; contiguous."""
    a, b = a.contiguous(), b.contiguous()
    y = torch.empty(a.shape, dtype=a.dtype, device=a.device)
    _shared("add", a.numel(), a.dtype, a, b, y)
    return y


def _float(v: float | None):
    """Points to a number; None: a null pointer."""
    return None if v is None else ctypes.byref(ctypes.c_float(v))


def logits(x, bias, cap, scale, temperature, z, capped) -> None:
    factors = _float(cap), _float(scale), temperature
    _shared("logits", *x.shape, x.dtype, x, x.stride(0), bias, *factors, z, z.stride(0), capped)


def logits_back(g, cap, scale, temperature, capped) -> None:
    _shared("logits_back", *g.shape, g, g.stride(0), _float(cap), _float(scale), temperature, capped)


def join(m, q, u, given, top, s, v) -> None:
    _shared("join", *m.shape, m, q, u, given, top, s, v)


def finish(m, s, u, z, logp, lse, entropy) -> None:
    _call("finish", m.numel(), m, s, u, z, logp, lse, entropy)


def log_probs(z, temperature, lse, out) -> None:
    _shared("log_probs", *z.shape, z.dtype, z, z.stride(0), temperature, lse, out, out.stride(0))


def tile_stats(z, tile, m, q, u) -> None:
    _shared("tile_stats", *z.shape, tile, z, z.stride(0), m, q, u, m.shape[1])


def logits_grad(z, lse, entropy, g_logp, g_entropy, column) -> None:
    _shared("logits_grad", *z.shape, z, z.stride(0), lse, entropy, g_logp, g_entropy, column)


def rms_norm(x, weight, zero_centered, eps, y, rstd) -> None:
    how = bool(zero_centered), ctypes.c_float(eps)
    _shared("rms_norm", *x.shape, x.dtype, x, x.stride(0), weight, *how, y, rstd)


def rms_norm_grad(dy, x, weight, zero_centered, rstd, dx, dw) -> None:
    _shared("rms_norm_grad", *x.shape, x.dtype, dy, x, weight, bool(zero_centered), rstd, dx, dw)


def rope(x, positions, table, inverse, y) -> None:
    strides = x.stride()[:2]
    _shared("rope", *x.shape, table.shape[1], x.dtype, bool(inverse), x, *strides, positions, table, y)


def rope_table(positions: int, frequencies: list[float], factor: float, table) -> None:
    """`frequencies` are of the first half of a head's dimensions."""
    given = (ctypes.c_double * len(frequencies))(*frequencies)
    _call("rope_table", positions, len(frequencies), given, ctypes.c_double(factor), table)


def silu_mul(gate, up, y) -> None:
    _shared("silu_mul", *gate.shape, gate.dtype, gate, gate.stride(0), up, up.stride(0), y)


def silu_mul_grad(gate, up, dy, dgate, dup) -> None:
    operands = gate, gate.stride(0), up, up.stride(0), dy, dgate, dgate.stride(0), dup, dup.stride(0)
    _shared("silu_mul_grad", *gate.shape, gate.dtype, *operands)


def sigmoid_mul(gate, x, y) -> None:
    _shared("sigmoid_mul", *x.shape, x.dtype, gate, x, y)


def sigmoid_mul_grad(gate, x, dy, dgate, dx) -> None:
    _shared("sigmoid_mul_grad", *x.shape, x.dtype, gate, x, dy, dgate, dx)


class _Routing(ctypes.Structure):
    _fields_ = (
        [(n, ctypes.c_int64) for n in ("experts", "top_k", "groups", "top_groups")]
        + [(n, ctypes.c_int) for n in ("sigmoid", "normalize")]
        + [("scale", ctypes.c_float)]
    )


def _routing(experts, how):
    made = _Routing(experts, how.top_k, how.groups, how.top_groups, how.sigmoid, how.normalize, how.scale)
    return ctypes.byref(made)


def route(z, bias, how, weights, ids) -> None:
    _shared("route", z.shape[0], _routing(z.shape[1], how), z, bias, weights, ids)


def route_grad(z, ids, grad, how, dz) -> None:
    _shared("route_grad", z.shape[0], _routing(z.shape[1], how), z, ids, grad, dz)


def combine(y, place, ids, weights, experts, out) -> None:
    _shared("combine", *out.shape, ids.shape[1], experts, y.dtype, y, place, ids, weights, out.dtype, out)


def weigh(g, a, w, dw, wg, wa) -> None:
    _shared("weigh", *a.shape, a.dtype, g, a, w, dw, wg, wa)


class _Attention(ctypes.Structure):
    _fields_ = (
        [("dtype", ctypes.c_int), ("threads", ctypes.c_int)]
        + [(n, ctypes.c_int64) for n in ("heads_q", "heads_kv", "dim", "seqs")]
        + [("scale", ctypes.c_float)]
        + [(n, ctypes.c_void_p) for n in ("q", "k", "v")]
        + [(n, ctypes.c_int64) for n in ("q_row", "q_head", "k_row", "k_head", "v_row", "v_head")]
        + [(n, ctypes.c_void_p) for n in ("q_start", "kv_start", "kv_rows")]
    )


def _attention(q, k, v, q_start, kv_start, kv_rows, scale):
    made = _Attention(
        DTYPES[q.dtype],
        torch.get_num_threads(),
        q.shape[1],
        k.shape[1],
        q.shape[2],
        q_start.numel() - 1,
        scale,
        *(t.data_ptr() for t in (q, k, v)),
        *(stride for t in (q, k, v) for stride in t.stride()[:2]),
        *(None if t is None else t.data_ptr() for t in (q_start, kv_start, kv_rows)),
    )
    return ctypes.byref(made)


def attention(q, k, v, q_start, kv_start, kv_rows, scale, out, m, l) -> None:
    _call("attention", _attention(q, k, v, q_start, kv_start, kv_rows, scale), out, m, l)


def attention_grad(q, k, v, starts, scale, out, m, l, d_out, dq, dk, dv) -> None:
    given = _attention(q, k, v, starts, starts, None, scale)
    _call("attention_grad", given, out, m, l, d_out, dq, dk, dv)


def exp(x: torch.Tensor) -> torch.Tensor:
    x = x.contiguous()
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    _call("exp", x.numel(), x, y)
    return y


def lse(m: torch.Tensor, s: torch.Tensor) -> torch.Tensor:
    out = torch.empty(m.shape, dtype=torch.float64, device=m.device)
    _call("lse", m.numel(), m, s, out)
    return out
