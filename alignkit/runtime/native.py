"""ctypes bindings of the C++ kernels of csrc/cpu: `call`, and functions for kernels that several ops use.

The library has a plain C interface, so one build serves every torch and Python version. The functions take CPU tensors
whose shapes the ops have already checked.

The order of arguments is that of csrc/cpu/entries.inl and api.cpp; the library reports their types and the fields of
structs. An op's cpu.py calls its own kernels with `call` or `call_threaded`.
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
from .shared import KERNELS

LIBRARY = families.CPU.library
DTYPES = {torch.float32: KERNELS["F32"], torch.bfloat16: KERNELS["BF16"]}
"""Dtype codes of the library."""
ROUNDED = DTYPES | {torch.float16: KERNELS["F16"]}
"""Codes of the dtypes that fp32 can be rounded to."""


@functools.cache
def library() -> built.Library:
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


def call(name: str, *arguments) -> None:
    """Call the function `name` of the library; their order is that of csrc/cpu/entries.inl. Dtypes become codes."""
    codes = [DTYPES[a] if isinstance(a, torch.dtype) else a for a in arguments]
    getattr(library(), f"alignkit_{name}")(*codes)


def call_threaded(name: str, *arguments) -> None:
    """Call a function that runs on torch's number of threads."""
    call(name, *arguments, torch.get_num_threads())


def gemm(a: torch.Tensor, b: torch.Tensor, leaves: int, out: torch.Tensor, accumulate: bool) -> None:
    """Compute fp32 out [M, N] (+)= a [M, K] . b [N, K]^T by `leaves` chains over k and their tree."""
    (m, k), n = a.shape, b.shape[0]
    operands = (a, a.dtype, *a.stride(), b, b.dtype, *b.stride())
    call_threaded("gemm", m, n, k, leaves, *operands, out, out.stride(0), accumulate)


def round(x: torch.Tensor, y: torch.Tensor, bias: torch.Tensor | None = None) -> None:
    """Compute y [M, N] = fp32 x (+ fp32 bias [N]), rounded to y's dtype; x has unit column stride and may be y."""
    call_threaded("round", *x.shape, x, x.stride(0), bias, ROUNDED[y.dtype], y, *y.stride())


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


def _routing(experts, options):
    names = "top_k", "groups", "top_groups", "sigmoid", "normalize", "scale"
    return ctypes.byref(
        library().constructor("Routing")(experts=experts, **{name: getattr(options, name) for name in names})
    )


def route(z, bias, options, weights, ids) -> None:
    call_threaded("route", z.shape[0], _routing(z.shape[1], options), z, bias, weights, ids)


def route_grad(z, ids, grad, options, dz) -> None:
    call_threaded("route_grad", z.shape[0], _routing(z.shape[1], options), z, ids, grad, dz)


def _attention(q, k, v, q_start, kv_start, kv_rows, scale):
    strides = {
        f"{n}_{d}": t.stride(i) for n, t in (("q", q), ("k", k), ("v", v)) for i, d in enumerate(("row", "head"))
    }
    made = library().constructor("Attention")(
        dtype=DTYPES[q.dtype],
        threads=torch.get_num_threads(),
        heads_q=q.shape[1],
        heads_kv=k.shape[1],
        dim=q.shape[2],
        seqs=q_start.numel() - 1,
        scale=scale,
        q=q,
        k=k,
        v=v,
        **strides,
        q_start=q_start,
        kv_start=kv_start,
        kv_rows=kv_rows,
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
