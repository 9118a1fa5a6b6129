"""CUDA backend of `linear` for skinny GEMMs (small M), whose run time is the time to read the weight.

- `few` (csrc/sm90/gemm/skinny_wide.cu): one chain per output, fp32, for many outputs: the logits of decoding.
- `narrow` (csrc/sm90/gemm/skinny_narrow.cu): one chain per output, for few outputs and large k.
- `tree` (csrc/sm90/gemm/skinny_split_k.cu): k-trees of 2, 4 or 8 leaves.

Other GEMMs on a GPU use cublaslt.py, hopper.py (Gluon) or triton_backend.py. All give the contract's bits
(docs/contract.md, "Linear"), so the choice of kernel and of split affects speed alone. A constant that is a limit of a
kernel may be lowered freely, but raised only together with the kernel.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import NamedTuple

import torch

from ...runtime import cuda
from ...runtime.families import SM90
from ...runtime.operands import dtype_name, tma_rejects
from ...runtime.shared import KERNELS
from . import cost
from .cublaslt import round_up_rows
from .problem import Product

TREE_ROWS = 256
"""schedule: maximum rows of `tree`. The limit of skinny_split_k.cu is 65535, which it checks."""
FEW_ROWS, FEW_MIN_OUTPUTS = 64, 128 * SM90.sm_count
"""schedule: maximum rows of `few`, a limit of skinny_wide.cu, which checks it; and minimum outputs, one tile per SM."""
NARROW_OUTPUTS, NARROW_MIN_K = 16 * SM90.sm_count, 2048
"""schedule: maximum outputs (one tile per SM) and minimum k of `narrow`, for which the chain's latency dominates."""
NARROW_ROWS = 32
"""schedule: maximum rows of `narrow`, a limit of skinny_narrow.cu, which checks it: each CTA holds all rows."""
QUARTERED_ROWS = KERNELS["kQuarterWidth"]
"""Maximum rows of an unsplit `tree`, a limit of skinny_split_k.cu:quarter_gemm.

The kernel checks it. A cluster computes all leaves, a quarter in each of its four warpgroups.
"""
MMA_K = 16
"""hardware: k extent of one MMA instruction; leaf lengths are multiples of it."""
CLUSTER_OUTPUTS = 256
"""schedule: the row pitch of partial sums is a multiple of this, a requirement of skinny_split_k.cu.

A cluster of two CTAs writes 2 * 128 outputs, also beyond the last column. Only multiples of 256 are valid, which the
kernel checks.
"""


def unsupported(p: Product, rows: int | None = None) -> str | None:
    """Return why none of the kernels supports a GEMM of at most `rows` rows (None for any number), or None."""
    if p.accumulate:
        return "accumulate: must be no, got yes"
    if not p.m or (rows is not None and p.m > rows):
        return f"rows: must be {f'in [1, {rows}]' if rows else 'at least 1'}, got {p.m}"
    if not p.k:
        return "k: must be at least 1, got 0"
    for name, t in (("x", p.a), ("weight", p.b)):
        if (why := tma_rejects(name, t, torch.bfloat16)) is not None:
            return why
    if p.out[2] not in (torch.float32, torch.bfloat16):
        return f"out_dtype: must be fp32 or bf16, got {dtype_name(p.out[2])}"
    return None if p.out[1][1] == 1 else f"out: stride of the last dimension must be 1, got {p.out[1][1]}"


def _unsupported_bias(p: Product) -> str | None:
    if p.bias is not None and p.bias[2] != torch.bfloat16:
        return f"bias: dtype must be bf16, got {dtype_name(p.bias[2])}"
    return None if p.bias is None or p.bias_is_dense else f"bias: stride must be 1, got {p.bias[1][0]}"


def few_rejects(p: Product) -> str | None:
    """Return why `few` is not used for a GEMM, or None."""
    if p.n < FEW_MIN_OUTPUTS:
        return f"n: must be at least {FEW_MIN_OUTPUTS}, got {p.n}"
    if p.out[2] != torch.float32:
        return f"out_dtype: must be fp32, got {dtype_name(p.out[2])}"
    if p.leaves > 1:
        return f"leaves: must be 1, got {p.leaves}"
    return "bias: must be no, got yes" if p.bias is not None else unsupported(p, FEW_ROWS)


def narrow_rejects(p: Product) -> str | None:
    """Return why `narrow` is not used for a GEMM, or None."""
    if p.n > NARROW_OUTPUTS:
        return f"n: must be at most {NARROW_OUTPUTS}, got {p.n}"
    return f"k: must be at least {NARROW_MIN_K}, got {p.k}" if p.k < NARROW_MIN_K else narrow_unsupported(p)


def narrow_unsupported(p: Product) -> str | None:
    """Return why `narrow` cannot compute a GEMM, or None."""
    if p.leaves > 1:
        return f"leaves: must be 1, got {p.leaves}"
    return _unsupported_bias(p) or unsupported(p, NARROW_ROWS)


def tree_unsupported(p: Product) -> str | None:
    """Return why `tree` cannot compute a GEMM with any split, or None."""
    if p.leaves not in (2, 4, 8):
        return f"leaves: must be 2, 4 or 8, got {p.leaves}"
    if p.k % (p.leaves * MMA_K):
        return f"k: must be a multiple of {MMA_K} * leaves = {MMA_K * p.leaves}, got {p.k}"
    return _unsupported_bias(p) or unsupported(p)


def tree_rejects(p: Product) -> str | None:
    """Return why `tree` is not used for a GEMM, or None."""
    if (why := tree_unsupported(p) or unsupported(p, TREE_ROWS)) is not None:
        return why
    if split_of(p) is not None:
        return None
    return f"speed: linear/cost.py predicts a faster kernel for rows = {p.m}, leaves = {p.leaves}"


def _matrix(t: torch.Tensor) -> tuple[torch.Tensor, int]:
    return t, t.stride(0)


def few(a: torch.Tensor, b: torch.Tensor, bias: None, out: torch.Tensor) -> None:
    """Compute fp32 out [M, N] = a [M, K] . b [N, K]^T, one chain per output."""
    cuda.call("alignkit_few_product", out.device, *_matrix(a), *_matrix(b), *_matrix(out), *out.shape, a.shape[1])


def narrow(a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor | None, out: torch.Tensor) -> None:
    """Compute out [M, N], fp32 or bf16, = a [M, K] . b [N, K]^T + bias [N], one chain per output."""
    cuda.call(
        "alignkit_narrow_product",
        out.device,
        *_matrix(a),
        *_matrix(b),
        bias,
        *_matrix(out),
        out.dtype == torch.bfloat16,
        *out.shape,
        a.shape[1],
    )


def prepare_few(p: Product) -> Callable:
    return few


def prepare_narrow(p: Product) -> Callable:
    return narrow


class Split(NamedTuple):
    """A split of a tile's leaves over CTAs (split-K); no bit depends on it."""

    parts: int
    """CTAs per tile, whose partial sums go through memory; 1: a cluster computes 64 outputs x up to 64 rows alone."""
    width: int = 64
    """Rows of a CTA, which has 128 outputs."""
    same_outputs: bool = False
    """True if the two CTAs of a cluster share their outputs and differ in rows; else they share their rows."""


def splits(m: int, leaves: int) -> list[Split]:
    """Return the possible splits."""
    whole = [Split(1)] if m <= QUARTERED_ROWS and leaves >= 4 else []
    widths = [(64, False)] if m <= 64 else [(96, False), (128, False), (96, True), (128, True)]
    return whole + [Split(parts, *width) for parts in (2, 4, 8) if parts <= leaves <= 4 * parts for width in widths]


def candidate_splits(m: int, leaves: int) -> list[Split]:
    """Return the splits that fill at least half of each CTA and cluster with rows."""
    width = 64 if m <= 64 else 96 if m <= 96 or 128 < m <= 192 else 128
    return [split for split in splits(m, leaves) if split.parts == 1 or split[1:] == (width, m > 128)]


def cost_of(m: int, n: int, k: int, leaves: int, split: Split) -> float:
    """Return the modeled time of a split in microseconds."""
    return cost.cluster(n, k, leaves) if split.parts == 1 else cost.parts(m, n, k, leaves, *split)


def best_split(m: int, n: int, k: int, leaves: int) -> Split | None:
    """Return the fastest split by cost.py, or None if triton_backend.py or hopper.py is faster.

    The decision is made for `round_up_rows(m)` rows, so the row counts of `warmup_rows` cover all decisions. No other
    count can trigger a compilation.
    """
    m = round_up_rows(m)
    us, split = min((cost_of(m, n, k, leaves, split), split) for split in candidate_splits(m, leaves))
    return split if us <= min(cost.best_of_tiles(m, n, k, leaves)[0], cost.many(m, n, k, leaves)) else None


def split_of(p: Product) -> Split | None:
    """Return `best_split` for a described GEMM."""
    return best_split(p.m, p.n, p.k, p.leaves)


def prepare_tree(p: Product) -> Callable:
    return functools.partial(tree, p.leaves, split_of(p))  # pyright: ignore[reportArgumentType] - checked by `tree_rejects`


def tree(
    leaves: int, split: Split, a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor | None, out: torch.Tensor
) -> None:
    """Compute out [M, N], fp32 or bf16, = a [M, K] . b [N, K]^T + bias [N] by 2, 4 or 8 chains and their tree."""
    parts, width, same_outputs = split
    (m, k), n = a.shape, len(b)
    pitch = -(-n // CLUSTER_OUTPUTS) * CLUSTER_OUTPUTS
    sums = None if parts == 1 else torch.empty(parts, m, pitch, dtype=torch.float32, device=out.device)
    cuda.call(
        "alignkit_few_tree",
        out.device,
        *_matrix(a),
        *_matrix(b),
        bias,
        *_matrix(out),
        out.dtype == torch.bfloat16,
        sums,
        pitch,
        parts,
        width,
        same_outputs,
        m,
        n,
        k,
        leaves,
    )
