"""CUDA backend of the LM head's GEMMs, with fused epilogues (csrc/sm90/head): logits need not be written to memory.

- `head_statistics`: tile statistics of the products of hidden and weight, which are stored only with `keep_logits`.
- `head_gradient`: gradient of the logits, recomputed from hidden and weight.
- `head_products`: gradients of hidden and weight, from the gradient of the logits.

triton_backend.py has the other functions. For operands that these kernels reject, a GEMM of ../linear writes the
products to memory and triton_backend.py reads them. The bits are equal (docs/contract.md, "Log-softmax over the
vocabulary"). The names and order of the fields of ctypes structures must equal the library's, which is checked when
this file is imported.
"""

from __future__ import annotations

import ctypes

import torch

from ...runtime import cuda
from ...runtime.operands import Operand, tma_rejects
from .problem import Head, HeadGradient, HeadProducts

FEW = 256
"""schedule: up to so many rows these kernels are not used, because most of a tile would be empty."""


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
        return f"rows: must be at least {FEW + 1}, got {hidden[0][0]}"
    if not weight[0][0]:
        return "ids: must be at least 1, got 0"
    return tma_rejects("hidden", hidden, torch.bfloat16) or tma_rejects("weight", weight, torch.bfloat16)


def head_statistics_rejects(p: Head) -> str | None:
    """Return why `head_statistics` is not used for a problem, or None."""
    if p.products is not None and p.products[1][0] % 4:
        stride = 4 * p.products[1][0]
        return f"keep_logits: row stride of the kept logits must be a multiple of 16 bytes, got {stride} bytes"
    if p.products is not None and not p.products[3]:
        return "keep_logits: address of the kept logits must be a multiple of 16 bytes"
    return _unsupported(p.hidden, p.weight)


def head_gradient_rejects(p: HeadGradient) -> str | None:
    """Return why `head_gradient` is not used for a problem, or None."""
    if (why := tma_rejects("logits' gradient", p.out, torch.bfloat16)) is not None:
        return why
    (_, ids), (stride, _) = p.out[:2]
    if stride - ids >= 8:
        return (
            f"logits' gradient: row stride must be ids rounded up to a multiple of 8 = {ids + -ids % 8}, got {stride}"
        )
    return _unsupported(p.hidden, p.weight)


def head_products_rejects(p: HeadProducts) -> str | None:
    """Return why `head_products` is not used for a problem, or None."""
    (n, c), d = p.dz[0], p.hidden[0][1]
    if not n or not c:
        return f"{'ids' if n else 'rows'}: must be at least 1, got 0"
    if d % 8:
        return f"k: must be a multiple of 8, got {d}"
    for name, t in (("logits' gradient", p.dz), ("hidden", p.hidden), ("weight", p.weight)):
        if (why := tma_rejects(name, t, torch.bfloat16)) is not None:
            return why
    return _unwritable("hidden's gradient", p.dhidden) or _unwritable("weight's gradient", p.dweight)


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

    `count` is an int32 device scalar: the rows of the whole batch to compute, None for all. `before` is the index, in
    the batch, of hidden's first row. Rows beyond the count get undefined results.
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


def _unwritable(name: str, out: Operand | None) -> str | None:
    """Return why the kernels cannot write this fp32 or bf16 result (out is None: not requested), or None."""
    if out is None:
        return None
    (rows, columns), (row, column), dtype, aligned = out
    if dtype == torch.float32 and column != 1:
        return f"{name}: stride of the last dimension must be 1, got {column}"
    if dtype == torch.float32 and row % 4:
        return f"{name}: row stride must be a multiple of 16 bytes, got {4 * row} bytes"
    dense = (column == 1 or columns == 1) and (row == columns or rows == 1)
    if dtype != torch.float32 and not dense and rows * columns:
        return f"{name}: must be contiguous, got strides {(row, column)} for shape {(rows, columns)}"
    return None if aligned else f"{name}: address must be a multiple of 16 bytes"


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
