"""ctypes bindings of the C++ kernels of csrc/cpu: `call`, and functions for kernels that several ops use.

The library has a plain C interface, so one build serves every torch and Python version. The functions take CPU tensors
whose shapes the ops have already checked.

The order and types of arguments are those of csrc/cpu/entries.inl and api.cpp; only struct layouts are compared at load
time. An op's cpu.py calls its own kernels with `call` or `call_threaded`.
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
"""mirrors csrc/cpu/prelude.h:DType: dtype codes of the library."""
ROUNDED = DTYPES | {torch.float16: 2}
"""mirrors csrc/cpu/prelude.h:DType: codes of the dtypes that fp32 can be rounded to."""


@functools.cache
def library() -> ctypes.CDLL:
    """Return the kernel library.

    Raises:
        BackendError: the library is missing or was built from different sources, or this machine does not support
            the instruction set in ALIGNKIT_CPU_ISA.
    """
    if not LIBRARY.exists():
        raise BackendError(
            "alignkit's CPU kernels were not built: reinstall alignkit with a C++17 compiler on the PATH, "
            "or set ALIGNKIT_BACKEND=reference (same bits, very slow)"
        )
    lib = built.load(LIBRARY, families.CPU.part)
    built.check_layout(lib, "Attention", _Attention)
    built.check_layout(lib, "Routing", _Routing)
    lib.alignkit_isa.restype = ctypes.c_char_p
    wanted = config.cpu_isa
    if not lib.alignkit_choose_isa(wanted.encode()):
        raise BackendError(
            f"ALIGNKIT_CPU_ISA: must be avx512, avx2 or generic, and supported by this machine, got {wanted!r}. Unset "
            "ALIGNKIT_CPU_ISA to use the best instruction set"
        )
    return lib


def available() -> bool:
    """Return whether the kernels are built; raise BackendError as `library` does if they cannot be used."""
    return LIBRARY.exists() and library() is not None


def isa() -> str:
    """Return the active instruction set: from `use_isa`, ALIGNKIT_CPU_ISA, or the best that the machine supports."""
    return library().alignkit_isa().decode()


@contextlib.contextmanager
def use_isa(name: str) -> Iterator[None]:
    """Use the instruction set `avx512`, `avx2` or `generic` within the block; all give the same bits."""
    before = isa()
    if not library().alignkit_choose_isa(name.encode()):
        raise BackendError(f"isa: must be avx512, avx2 or generic, and supported by this machine, got {name!r}")
    try:
        yield
    finally:
        library().alignkit_choose_isa(before.encode())


def _argument(v):
    """Convert an argument: tensor to address, None to null, dtype to code, bool to int, int to int64."""
    if v is None or isinstance(v, torch.Tensor):
        return ctypes.c_void_p(None if v is None else v.data_ptr())
    if isinstance(v, torch.dtype):
        return ctypes.c_int(DTYPES[v])
    if isinstance(v, bool):
        return ctypes.c_int(v)
    return ctypes.c_int64(v) if isinstance(v, int) else v


def call(name: str, *arguments) -> None:
    """Call the C function alignkit_`name` with converted arguments; their order is that of csrc/cpu/entries.inl."""
    getattr(library(), f"alignkit_{name}")(*[_argument(v) for v in arguments])


def call_threaded(name: str, *arguments) -> None:
    """Call a function that runs on torch's number of threads."""
    call(name, *arguments, ctypes.c_int(torch.get_num_threads()))


def gemm(a: torch.Tensor, b: torch.Tensor, leaves: int, out: torch.Tensor, accumulate: bool) -> None:
    """Compute fp32 out [M, N] (+)= a [M, K] . b [N, K]^T by `leaves` chains over k and their tree."""
    (m, k), n = a.shape, b.shape[0]
    operands = (a, a.dtype, *a.stride(), b, b.dtype, *b.stride())
    call_threaded("gemm", m, n, k, leaves, *operands, out, out.stride(0), bool(accumulate))


def round(x: torch.Tensor, y: torch.Tensor, bias: torch.Tensor | None = None) -> None:
    """Compute y [M, N] = fp32 x (+ fp32 bias [N]), rounded to y's dtype; x has unit column stride and may be y."""
    call_threaded("round", *x.shape, x, x.stride(0), bias, ctypes.c_int(ROUNDED[y.dtype]), y, *y.stride())


def add(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Return contiguous a + b, both of one shape and dtype, rounded to that dtype."""
    a, b = a.contiguous(), b.contiguous()
    y = torch.empty(a.shape, dtype=a.dtype, device=a.device)
    call_threaded("add", a.numel(), a.dtype, a, b, y)
    return y


def _float(v: float | None):
    """Return a pointer to a C float, or None (null)."""
    return None if v is None else ctypes.byref(ctypes.c_float(v))


def logits(x, bias, cap, scale, temperature, z, capped) -> None:
    factors = _float(cap), _float(scale), temperature
    call_threaded("logits", *x.shape, x.dtype, x, x.stride(0), bias, *factors, z, z.stride(0), capped)


def logits_back(g, cap, scale, temperature, capped) -> None:
    call_threaded("logits_back", *g.shape, g, g.stride(0), _float(cap), _float(scale), temperature, capped)


def join(m, q, u, given, top, s, v) -> None:
    call_threaded("join", *m.shape, m, q, u, given, top, s, v)


def finish(m, s, u, z, logp, lse, entropy) -> None:
    call("finish", m.numel(), m, s, u, z, logp, lse, entropy)


def log_probs(z, temperature, lse, out) -> None:
    call_threaded("log_probs", *z.shape, z.dtype, z, z.stride(0), temperature, lse, out, out.stride(0))


def tile_stats(z, tile, m, q, u) -> None:
    call_threaded("tile_stats", *z.shape, tile, z, z.stride(0), m, q, u, m.shape[1])


def logits_grad(z, lse, entropy, g_logp, g_entropy, column) -> None:
    call_threaded("logits_grad", *z.shape, z, z.stride(0), lse, entropy, g_logp, g_entropy, column)


class _Routing(ctypes.Structure):
    _fields_ = (
        [(n, ctypes.c_int64) for n in ("experts", "top_k", "groups", "top_groups")]
        + [(n, ctypes.c_int) for n in ("sigmoid", "normalize")]
        + [("scale", ctypes.c_float)]
    )


def _routing(experts, options):
    made = _Routing(
        experts, options.top_k, options.groups, options.top_groups, options.sigmoid, options.normalize, options.scale
    )
    return ctypes.byref(made)


def route(z, bias, options, weights, ids) -> None:
    call_threaded("route", z.shape[0], _routing(z.shape[1], options), z, bias, weights, ids)


def route_grad(z, ids, grad, options, dz) -> None:
    call_threaded("route_grad", z.shape[0], _routing(z.shape[1], options), z, ids, grad, dz)


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
    call("attention", _attention(q, k, v, q_start, kv_start, kv_rows, scale), out, m, l)


def attention_grad(q, k, v, starts, scale, out, m, l, d_out, dq, dk, dv) -> None:
    given = _attention(q, k, v, starts, starts, None, scale)
    call("attention_grad", given, out, m, l, d_out, dq, dk, dv)


def exp(x: torch.Tensor) -> torch.Tensor:
    x = x.contiguous()
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    call("exp", x.numel(), x, y)
    return y


def lse(m: torch.Tensor, s: torch.Tensor) -> torch.Tensor:
    out = torch.empty(m.shape, dtype=torch.float64, device=m.device)
    call("lse", m.numel(), m, s, out)
    return out
