"""CUDA: products of few rows, as fast as the weight can be read (csrc/sm90/gemm): logits (few_rows_wide.cu), long chains
with a narrow weight (few_rows_narrow.cu) and k-trees (few_rows_split_k.cu). Everything else is Triton's: the same bits."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable
from typing import NamedTuple

import torch

from ...runtime import cuda
from ...runtime.families import SM90
from ...runtime.operands import Operand, copied
from . import cost
from .cublaslt import rounded
from .problem import Product

FEW = 256
"""At most so many rows."""
FEWER, WIDE = 64, 128 * SM90.multiprocessors
"""`few`: at most so many rows, and at least so many outputs, a tile for each multiprocessor."""
NARROW, LONG = 16 * SM90.multiprocessors, 2048
"""At most so many outputs, likewise, and at least so much k: there the chain takes longer than to read the weight."""
NARROW_ROWS = 32
"""Each block reads all rows; with more, that takes longer than by larger tiles."""
QUARTERED_ROWS = 64
STEP = 16
"""Of k, that the tensor core takes at once: a leaf is a multiple of it."""
IDS = 256
"""Outputs of a cluster at most."""


def takes(t: Operand) -> bool:
    """Whether a matrix may be an operand: bf16 that the copy engine takes."""
    return t[2] == torch.bfloat16 and copied(t)


def unfit(p: Product, rows: int | None = None) -> str | None:
    """Why none of these kernels is for it; None: one of at most so many rows, or of any number, may be."""
    if p.accumulate:
        return "it adds to what out holds"
    if not p.m or (rows is not None and p.m > rows):
        return f"{p.m} rows, of 1 to {rows}" if rows else "no rows"
    if not p.k:
        return "no k"
    for name, t in (("x", p.a), ("weight", p.b)):
        if not takes(t):
            return f"{name} is not bf16 of rows that the copy engine takes: contiguous, at multiples of 16 bytes"
    if p.out[1][1] != 1 or p.out[2] not in (torch.float32, torch.bfloat16):
        return "out is not fp32 or bf16 of contiguous rows"
    return None


def _unfit_bias(p: Product) -> str | None:
    if p.bias is not None and (p.bias[2] != torch.bfloat16 or not p.bias_is_dense):
        return "a bias that is not contiguous bf16"
    return None


def few_refuses(p: Product) -> str | None:
    if p.n < WIDE:
        return f"{p.n} outputs, of at least {WIDE}"
    if p.out[2] != torch.float32:
        return "out is not fp32"
    if p.leaves > 1:
        return f"{p.leaves} leaves: it computes chains"
    return "it adds no bias" if p.bias is not None else unfit(p, FEWER)


def narrow_refuses(p: Product) -> str | None:
    if p.n > NARROW:
        return f"{p.n} outputs, of at most {NARROW}"
    return f"k = {p.k}, of at least {LONG}" if p.k < LONG else narrow_unfit(p)


def narrow_unfit(p: Product) -> str | None:
    """As `narrow_refuses`, of any number of outputs and any k."""
    if p.leaves > 1:
        return f"{p.leaves} leaves: it computes chains"
    return _unfit_bias(p) or unfit(p, NARROW_ROWS)


def tree_unfit(p: Product) -> str | None:
    """Why no way to deal out its leaves is for it."""
    if p.leaves not in (2, 4, 8):
        return f"{p.leaves} leaves: it computes trees of 2, 4 or 8"
    if p.k % (p.leaves * STEP):
        return f"leaves of {p.k // p.leaves} k, no multiple of {STEP}"
    return _unfit_bias(p) or unfit(p)


def tree_refuses(p: Product) -> str | None:
    if (why := tree_unfit(p) or unfit(p, FEW)) is not None:
        return why
    return f"{p.leaves} leaves of {p.m} rows: others are faster" if dealt(p) is None else None


def _matrix(t: torch.Tensor) -> tuple[torch.Tensor, ctypes.c_int64]:
    return t, ctypes.c_int64(t.stride(0))


def _rounded(out: torch.Tensor) -> int:
    return int(out.dtype == torch.bfloat16)


def few(a: torch.Tensor, b: torch.Tensor, bias: None, out: torch.Tensor) -> None:
    """out [M, N], fp32, = a [M, K] . b [N, K]^T, one chain."""
    cuda.call("alignkit_few_product", out.device, *_matrix(a), *_matrix(b), *_matrix(out), *out.shape, a.shape[1])


def narrow(a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor | None, out: torch.Tensor) -> None:
    """As `few`, plus bias [N]; out fp32 or bf16."""
    cuda.call(
        "alignkit_narrow_product",
        out.device,
        *_matrix(a),
        *_matrix(b),
        bias,
        *_matrix(out),
        _rounded(out),
        *out.shape,
        a.shape[1],
    )


def prepare_few(p: Product) -> Callable:
    return few


def prepare_narrow(p: Product) -> Callable:
    return narrow


class Deal(NamedTuple):
    """How the leaves of a tile are dealt out to blocks; no bit depends on it."""

    parts: int
    """Blocks for a tile, whose sums go through memory; 1: a cluster has all leaves of 64 outputs by up to 64 rows."""
    width: int = 64
    """Rows of a block, which has 128 outputs."""
    same_outputs: bool = False
    """The two blocks of a cluster have the same outputs, and rows below each other, instead of the same rows."""


def deals(m: int, leaves: int) -> list[Deal]:
    """All that are possible."""
    whole = [Deal(1)] if m <= QUARTERED_ROWS and leaves >= 4 else []
    widths = [(64, False)] if m <= 64 else [(96, False), (128, False), (96, True), (128, True)]
    return whole + [Deal(parts, *width) for parts in (2, 4, 8) if parts <= leaves <= 4 * parts for width in widths]


def sensible(m: int, leaves: int) -> list[Deal]:
    """Those of `deals` that do not leave half of a block or of a cluster without rows."""
    width = 64 if m <= 64 else 96 if m <= 96 or 128 < m <= 192 else 128
    return [how for how in deals(m, leaves) if how.parts == 1 or how[1:] == (width, m > 128)]


def cost_of(m: int, n: int, k: int, leaves: int, how: Deal) -> float:
    return cost.cluster(n, k, leaves) if how.parts == 1 else cost.parts(m, n, k, leaves, *how)


def deal(m: int, n: int, k: int, leaves: int) -> Deal | None:
    """The fastest by cost.py; None: others than CUDA are. What is chosen for as many rows as `ladder` has is chosen for all
    between them too, so that no tile is compiled at a number of rows that nobody foresaw."""
    m = rounded(m)
    us, how = min((cost_of(m, n, k, leaves, how), how) for how in sensible(m, leaves))
    return how if us <= min(cost.best_of_tiles(m, n, k, leaves)[0], cost.many(m, n, k, leaves)) else None


def dealt(p: Product) -> Deal | None:
    """As `deal`."""
    return deal(p.m, p.n, p.k, p.leaves)


def prepare_tree(p: Product) -> Callable:
    return functools.partial(tree, p.leaves, dealt(p))  # pyright: ignore[reportArgumentType] - `tree_refuses` asked


def tree(
    leaves: int, how: Deal, a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor | None, out: torch.Tensor
) -> None:
    """out [M, N], fp32 or bf16, = a [M, K] . b [N, K]^T by 2, 4 or 8 chains and their tree, plus bias [N]."""
    parts, width, same_outputs = how
    (m, k), n = a.shape, len(b)
    pitch = -(-n // IDS) * IDS
    sums = None if parts == 1 else torch.empty(parts, m, pitch, dtype=torch.float32, device=out.device)
    cuda.call(
        "alignkit_few_tree",
        out.device,
        *_matrix(a),
        *_matrix(b),
        bias,
        *_matrix(out),
        _rounded(out),
        sums,
        ctypes.c_int64(pitch),
        parts,
        width,
        int(same_outputs),
        m,
        n,
        k,
        leaves,
    )
