"""CUDA backend: GEMMs with fused epilogues (csrc/sm90/head), so that logits are not written to memory.

Triton computes everything else, and unsupported operands, to the same bits. The names and order of the fields of ctypes
structures must equal the library's, which is checked when this file is imported.
"""

from __future__ import annotations

import ctypes

import torch

from ...runtime import cuda
from ...runtime.operands import Operand
from ..linear.cuda import tma_bf16
from .problem import Head, HeadGradient, HeadProducts

FEW = 256
"""schedule: rows up to which the kernels' tiles would be mostly empty."""


@cuda.mirrors("AlignkitHead")
class _Head(ctypes.Structure):
    """The struct AlignkitHead of csrc/sm90/head/linear_logp.cu."""

    _fields_ = [
        ("hidden", ctypes.c_void_p),
        ("weight", ctypes.c_void_p),
        ("hidden_pitch", ctypes.c_int64),
        ("weight_pitch", ctypes.c_int64),
        ("rows", ctypes.c_int),
        ("ids", ctypes.c_int),
        ("k", ctypes.c_int),
        ("count", ctypes.c_void_p),
        ("before", ctypes.c_int),
        ("bias", ctypes.c_void_p),
        ("temperature", ctypes.c_void_p),
        ("cap", ctypes.c_float),
        ("scale", ctypes.c_float),
        ("capped", ctypes.c_int),
        ("scaled", ctypes.c_int),
        ("target", ctypes.c_void_p),
        ("first", ctypes.c_int64),
    ]


def _unsupported(hidden: Operand, weight: Operand) -> str | None:
    """Return why the kernels are not used for these operands, or None."""
    if hidden[0][0] <= FEW:
        return f"rows: must be more than {FEW}, got {hidden[0][0]}"
    if not weight[0][0]:
        return "vocabulary: must have at least 1 id, got 0"
    if not tma_bf16(hidden) or not tma_bf16(weight):
        return "hidden, weight: must be bf16 with contiguous, 16-byte aligned rows (TMA)"
    return None


def head_statistics_rejects(p: Head) -> str | None:
    """Return why `head_statistics` is not used for a problem, or None."""
    if p.products is not None and (p.products[1][0] % 4 or not p.products[3]):
        return "logits: rows must be 16-byte aligned"
    return _unsupported(p.hidden, p.weight)


def head_gradient_rejects(p: HeadGradient) -> str | None:
    """Return why `head_gradient` is not used for a problem, or None."""
    if not tma_bf16(p.out) or p.out[1][0] - p.out[0][1] >= 8:
        return "gradient: must be bf16 with rows padded to a multiple of 8"
    return _unsupported(p.hidden, p.weight)


def head_products_rejects(p: HeadProducts) -> str | None:
    """Return why `head_products` is not used for a problem, or None."""
    (n, c), d = p.dz[0], p.hidden[0][1]
    if not n or not c or d % 8:
        return f"rows, ids and columns: must be nonzero, and columns a multiple of 8, got {n}, {c} and {d}"
    if not all(map(tma_bf16, (p.dz, p.hidden, p.weight))):
        return "operands: must be bf16 with contiguous, 16-byte aligned rows (TMA)"
    if not _is_writable(p.dhidden) or not _is_writable(p.dweight):
        return "results: must have a layout that the kernel can write"
    return None


def _head(hidden, weight, transform, temperature, target, first: int, count, before: int) -> _Head:
    cap, scale = transform.soft_cap, transform.logit_scale
    return _Head(
        hidden.data_ptr(),
        weight.data_ptr(),
        hidden.stride(0),
        weight.stride(0),
        len(hidden),
        *weight.shape,
        cuda.pointer(count),
        before,
        cuda.pointer(transform.bias),
        cuda.pointer(temperature),
        cap or 0.0,
        1.0 if scale is None else scale,
        cap is not None,
        scale is not None,
        cuda.pointer(target),
        first,
    )


def head_statistics(
    hidden,
    weight,
    transform,
    temperature,
    target,
    first: int,
    m,
    q,
    u,
    z_target,
    count=None,
    before: int = 0,
    products=None,
) -> None:
    """Compute `statistics` of hidden [n, K] . weight [C, K]^T; store the products to `products` [n, C] if given.

    `count` is an int32 device scalar: the rows of the whole batch to compute, None for all. `before` is the index of
    the first row here in the batch. Rows beyond the count get undefined results.
    """
    head = _head(hidden, weight, transform, temperature, target, first, count, before)
    cuda.call(
        "alignkit_head_statistics",
        hidden.device,
        ctypes.byref(head),
        m,
        q,
        u,
        ctypes.c_int64(m.stride(0)),
        z_target,
        products,
        ctypes.c_int64(0 if products is None else products.stride(0)),
    )


def head_gradient(
    hidden,
    weight,
    transform,
    temperature,
    target,
    first: int,
    lse,
    entropy,
    g_logp,
    g_entropy,
    out,
    count=None,
    before: int = 0,
) -> None:
    """Compute `gradient` of hidden . weight^T to out [n, C].

    The row pitch of `out` is C rounded up to a multiple of 8; the padding is zeroed. `count` and `before` as for
    `head_statistics`; rows beyond the count get zeros.
    """
    head = _head(hidden, weight, transform, temperature, target, first, count, before)
    cuda.call(
        "alignkit_head_gradient",
        hidden.device,
        ctypes.byref(head),
        lse,
        entropy,
        g_logp,
        g_entropy,
        out,
        ctypes.c_int64(out.stride(0)),
    )


@cuda.mirrors("AlignkitHeadProducts")
class _Products(ctypes.Structure):
    """The struct AlignkitHeadProducts of csrc/sm90/head/linear_logp_backward.cu."""

    _fields_ = [
        ("dz", ctypes.c_void_p),
        ("weight", ctypes.c_void_p),
        ("hidden", ctypes.c_void_p),
        ("dz_pitch", ctypes.c_int64),
        ("weight_pitch", ctypes.c_int64),
        ("hidden_pitch", ctypes.c_int64),
        ("rows", ctypes.c_int),
        ("ids", ctypes.c_int),
        ("d", ctypes.c_int),
        ("count", ctypes.c_void_p),
        ("before", ctypes.c_int),
        ("dhidden", ctypes.c_void_p),
        ("dhidden_pitch", ctypes.c_int64),
        ("resume", ctypes.c_int),
        ("dweight", ctypes.c_void_p),
        ("dweight_pitch", ctypes.c_int64),
        ("rounded", ctypes.c_int),
        ("add", ctypes.c_int),
    ]


def _is_writable(out: Operand | None) -> bool:
    """Return whether the kernels support the layout of this fp32 or bf16 result (None: not requested)."""
    if out is None:
        return True
    (rows, columns), (row, column), dtype, aligned = out
    if dtype == torch.float32:
        return column == 1 and row % 4 == 0 and aligned
    dense = (column == 1 or columns == 1) and (row == columns or rows == 1)
    return (dense or not rows * columns) and aligned


def head_products(dz, hidden, weight, dhidden, dweight, resume: bool, add: bool, count=None, before: int = 0) -> None:
    """Compute the GEMMs of the gradient dz; either result may be None.

    - dhidden, fp32 [n, D], = dz [n, C] . weight [C, D]; with `resume`, the chains continue from its values.
    - dweight [C, D] = dz^T . hidden [n, D]: bf16, rounded; or fp32, added to its values with `add`.

    `count` and `before` as for `head_statistics`; rows beyond the count are treated as zeros.
    """
    (n, c), d = dz.shape, hidden.shape[1]
    out = [(cuda.pointer(t), 0 if t is None else t.stride(0)) for t in (dhidden, dweight)]
    products = _Products(
        dz.data_ptr(),
        weight.data_ptr(),
        hidden.data_ptr(),
        dz.stride(0),
        weight.stride(0),
        hidden.stride(0),
        n,
        c,
        d,
        cuda.pointer(count),
        before,
        *out[0],
        resume,
        *out[1],
        dweight is not None and dweight.dtype == torch.bfloat16,
        add,
    )
    cuda.call("alignkit_head_products", dz.device, ctypes.byref(products))
