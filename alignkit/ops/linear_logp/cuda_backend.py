"""CUDA backend of the LM head's GEMMs, with fused epilogues (csrc/sm90/head): logits need not be written to memory.

- `head_statistics`: tile statistics of the products of hidden and weight, which are stored only with `keep_logits`.
- `head_gradient`: gradient of the logits, recomputed from hidden and weight.
- `head_products`: gradients of hidden and weight, from the gradient of the logits.

triton_backend.py has the other functions. For operands that these kernels reject, a GEMM of ../linear writes the
products to memory and triton_backend.py reads them. The bits are equal (docs/contract.md, "Log-softmax over the
vocabulary").
"""

from __future__ import annotations

import ctypes

import torch

from ...runtime import cuda
from ...runtime.operands import Operand, tma_rejects
from .problem import Head, HeadGradient, HeadProducts

FEW = 256
"""schedule: up to so many rows these kernels are not used, because most of a tile would be empty."""


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


def _head(hidden, weight, transform, temperature, target, first: int, count, before: int) -> ctypes.Structure:
    cap, scale, (ids, k) = transform.soft_cap, transform.logit_scale, weight.shape
    return cuda.struct("AlignkitHead")(
        hidden=hidden,
        weight=weight,
        hidden_pitch=hidden.stride(0),
        weight_pitch=weight.stride(0),
        rows=len(hidden),
        ids=ids,
        k=k,
        count=count,
        before=before,
        bias=transform.bias,
        temperature=temperature,
        cap=cap or 0.0,
        scale=1.0 if scale is None else scale,
        capped=cap is not None,
        scaled=scale is not None,
        target=target,
        first=first,
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
        m.stride(0),
        z_target,
        products,
        0 if products is None else products.stride(0),
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
        "alignkit_head_gradient", hidden.device, ctypes.byref(head), lse, entropy, g_logp, g_entropy, out, out.stride(0)
    )


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
    n, c = dz.shape
    products = cuda.struct("AlignkitHeadProducts")(
        dz=dz,
        weight=weight,
        hidden=hidden,
        dz_pitch=dz.stride(0),
        weight_pitch=weight.stride(0),
        hidden_pitch=hidden.stride(0),
        rows=n,
        ids=c,
        d=hidden.shape[1],
        count=count,
        before=before,
        dhidden=dhidden,
        dhidden_pitch=0 if dhidden is None else dhidden.stride(0),
        resume=resume,
        dweight=dweight,
        dweight_pitch=0 if dweight is None else dweight.stride(0),
        rounded=dweight is not None and dweight.dtype == torch.bfloat16,
        add=add,
    )
    cuda.call("alignkit_head_products", dz.device, ctypes.byref(products))
