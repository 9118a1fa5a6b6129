"""CUDA: products of few rows, as fast as the weight can be read: logits (csrc/sm90/few.cu), long chains with a narrow weight
(narrow.cu) and k-trees (tree.cu). Everything else is Triton's: the same bits."""

from __future__ import annotations

import ctypes
import functools

import torch

from ...runtime import cuda
from ...runtime.families import SM90
from ...runtime.operands import copied, operand
from . import triton
from .triton import resume

__all__ = ["few", "matmul", "narrow", "resume", "takes", "tree"]

FEW = 256
"""At most so many rows."""
FEWER, WIDE = 64, 128 * SM90.multiprocessors
"""`few`: at most so many rows, and at least so many outputs, a tile for each multiprocessor."""
NARROW, LONG = 16 * SM90.multiprocessors, 2048
"""At most so many outputs, likewise, and at least so much k: there the chain takes longer than to read the weight."""
NARROW_ROWS = 32
"""Each block reads all rows; with more, that takes longer than by larger tiles."""
QUARTERED_ROWS = 64
STEP = 64
"""Of k: 128 bytes, of which a leaf is a multiple."""
IDS = 256
"""Outputs of a cluster at most."""


def takes(t: torch.Tensor) -> bool:
    """Whether a matrix may be an operand: bf16 that the copy engine takes."""
    return t.dtype == torch.bfloat16 and copied(operand(t))  # pyright: ignore[reportArgumentType]


def _fits(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor, rows: int) -> bool:
    return (
        0 < len(a) <= rows
        and a.shape[1] > 0
        and takes(a)
        and takes(b)
        and out.stride(1) == 1
        and out.dtype in (torch.float32, torch.bfloat16)
    )


def _matrix(t: torch.Tensor) -> tuple[torch.Tensor, ctypes.c_int64]:
    return t, ctypes.c_int64(t.stride(0))


def _rounded(out: torch.Tensor) -> int:
    return int(out.dtype == torch.bfloat16)


def few(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor) -> bool:
    """out [M, N], fp32, = a [M, K] . b [N, K]^T, one chain. False, and nothing done, if that is not for these operands."""
    if len(b) < WIDE or out.dtype != torch.float32 or not _fits(a, b, out, FEWER):
        return False
    cuda.call("alignkit_few_product", out.device, *_matrix(a), *_matrix(b), *_matrix(out), *out.shape, a.shape[1])
    return True


def narrow(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor) -> bool:
    """As `few`; out fp32 or bf16."""
    if len(b) > NARROW or a.shape[1] < LONG or not _fits(a, b, out, NARROW_ROWS):
        return False
    cuda.call(
        "alignkit_narrow_product",
        out.device,
        *_matrix(a),
        *_matrix(b),
        *_matrix(out),
        _rounded(out),
        *out.shape,
        a.shape[1],
    )
    return True


@functools.cache
def _clusters(device: int) -> int:
    """Of two blocks, that the device holds at once."""
    return torch.cuda.get_device_properties(device).multi_processor_count // 2


def deal(m: int, n: int, leaves: int, clusters: int) -> int | None:
    """Into how many parts the leaves of a tile are dealt out to blocks; 1: a cluster has all of them; None: that is for
    Triton. Parts cost the time of writing and joining them, and with all leaves in a cluster more blocks read each row."""
    if m <= QUARTERED_ROWS:
        if m <= 16 or leaves < 4:
            return None
        return 1 if -(-n // 64) <= clusters else 2
    tiles = -(-n // (IDS if m <= 128 else IDS // 2))
    return min(
        (parts for parts in (2, 4, 8) if parts <= leaves <= 4 * parts),
        key=lambda parts: (-(-tiles * parts // clusters) / parts, parts),
    )


def tree(
    a: torch.Tensor,
    b: torch.Tensor,
    leaves: int,
    bias: torch.Tensor | None,
    out: torch.Tensor,
    parts: int | None = None,
) -> bool:
    """out [M, N], fp32 or bf16, = a [M, K] . b [N, K]^T by 2, 4 or 8 chains and their tree, plus bias [N]. False, and
    nothing done, if that is not for these operands. `parts` overrides the choice of `deal`, and changes no bit."""
    (m, k), n = a.shape, len(b)
    if leaves not in (2, 4, 8) or k % (leaves * STEP) or not _fits(a, b, out, FEW):
        return False
    if bias is not None and (bias.dtype != torch.bfloat16 or not bias.is_contiguous()):
        return False
    parts = parts or deal(m, n, leaves, _clusters(out.get_device()))
    if parts is None:
        return False
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
        m,
        n,
        k,
        leaves,
    )
    return True


def matmul(
    a: torch.Tensor, b: torch.Tensor, leaves: int, bias: torch.Tensor | None, out: torch.Tensor, accumulate: bool
) -> None:
    if leaves > 1:
        done = not accumulate and tree(a, b, leaves, bias, out)
    else:
        done = bias is None and not accumulate and (few(a, b, out) or narrow(a, b, out))
    if not done:
        triton.matmul(a, b, leaves, bias, out, accumulate)
