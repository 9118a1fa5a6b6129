"""CUDA: products and what becomes of them in one kernel (csrc/sm90/head), so that logits reach no memory. Everything else,
and what these kernels do not take, is Triton's: the same bits."""

from __future__ import annotations

import ctypes

import torch

from ...runtime import cuda
from ...runtime.operands import Operand
from ..linear.cuda import takes
from .problem import Head, HeadGradient, HeadProducts

FEW = 256
"""Up to so many rows a tile of the kernels is mostly empty."""


@cuda.mirrors("AlignkitHead")
class _Head(ctypes.Structure):
    """AlignkitHead of csrc/sm90/head/linear_logp.cu."""

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


def _unfit(hidden: Operand, weight: Operand) -> str | None:
    """Why the kernels are not for these operands; None: they may be."""
    if hidden[0][0] <= FEW:
        return f"{hidden[0][0]} rows, of more than {FEW}"
    if not weight[0][0]:
        return "no ids"
    if not takes(hidden) or not takes(weight):
        return "hidden or weight is not bf16 of rows that the copy engine takes"
    return None


def head_statistics_refuses(p: Head) -> str | None:
    if p.products is not None and (p.products[1][0] % 4 or not p.products[3]):
        return "products are kept where the kernel cannot write them"
    return _unfit(p.hidden, p.weight)


def head_gradient_refuses(p: HeadGradient) -> str | None:
    if not takes(p.out) or p.out[1][0] - p.out[0][1] >= 8:
        return "the gradient's memory is not bf16, or its rows lie apart"
    return _unfit(p.hidden, p.weight)


def head_products_refuses(p: HeadProducts) -> str | None:
    (n, c), d = p.dz[0], p.hidden[0][1]
    if not n or not c or d % 8:
        return f"{n} rows, {c} ids and {d} columns: none is 0, and the last a multiple of 8"
    if not all(map(takes, (p.dz, p.hidden, p.weight))):
        return "operands that are not bf16 of rows that the copy engine takes"
    if not _written(p.dhidden) or not _written(p.dweight):
        return "results in memory that the kernel cannot write to"
    return None


def _head(hidden, weight, how, temperature, target, first: int, count, before: int) -> _Head:
    cap, scale = how.soft_cap, how.logit_scale
    return _Head(
        hidden.data_ptr(),
        weight.data_ptr(),
        hidden.stride(0),
        weight.stride(0),
        len(hidden),
        *weight.shape,
        cuda.pointer(count),
        before,
        cuda.pointer(how.bias),
        cuda.pointer(temperature),
        cap or 0.0,
        1.0 if scale is None else scale,
        cap is not None,
        scale is not None,
        cuda.pointer(target),
        first,
    )


def head_statistics(
    hidden, weight, how, temperature, target, first: int, m, q, u, z_target, count=None, before: int = 0, products=None
) -> None:
    """`statistics` of hidden [n, K] . weight [C, K]^T, which are also written to `products` [n, C] if that is given.

    Of the rows, `before` of a batch come before these; the first count[0] of the batch (int32, on the device) are
    computed; None: all. Something is written for the others too."""
    head = _head(hidden, weight, how, temperature, target, first, count, before)
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
    how,
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
    """`gradient` of hidden . weight^T to out [n, C], whose rows lie C elements apart, or the next multiple of 8: those between
    are zeroed. `count` and `before` as above; rows that are not
    computed get zeros."""
    head = _head(hidden, weight, how, temperature, target, first, count, before)
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
    """AlignkitHeadProducts of csrc/sm90/head/linear_logp_backward.cu."""

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


def _written(out: Operand | None) -> bool:
    """Whether the kernels write to this fp32 or bf16 tensor, or need not."""
    if out is None:
        return True
    (rows, columns), (row, column), dtype, aligned = out
    if dtype == torch.float32:
        return column == 1 and row % 4 == 0 and aligned
    dense = (column == 1 or columns == 1) and (row == columns or rows == 1)
    return (dense or not rows * columns) and aligned


def head_products(dz, hidden, weight, dhidden, dweight, resume: bool, add: bool, count=None, before: int = 0) -> None:
    """dhidden fp32 [n, D] = dz [n, C] . weight [C, D], chains that go on from what it holds if `resume`; and dweight [C, D] =
    dz^T . hidden [n, D], chains that are rounded for bf16, added to what it holds if it is fp32 and `add`. Either may be
    None. `count` and `before` as above; rows that do not count
    are taken for zeros."""
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
