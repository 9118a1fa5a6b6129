"""CUDA: products and what becomes of them in one kernel (csrc/sm90), so that logits reach no memory. Everything else, and
what these kernels do not take, is Triton's: the same bits."""
from __future__ import annotations

import ctypes

import torch

from ... import cuda
from ..linear.cuda import takes
from .triton import (
    check_rows,
    finish,
    gradient,
    gradient_type,
    join,
    pick,
    spread,
    statistics,
    transform,
)

__all__ = ["check_rows", "finish", "gradient", "gradient_type", "head_gradient", "head_product", "head_statistics",
           "join", "pick", "spread", "statistics", "transform"]

FEW = 256
"""Up to so many rows a tile of the kernels is mostly empty."""


class _Head(ctypes.Structure):
    """AlignkitHead of csrc/sm90/linear_logp.cu."""
    _fields_ = [("hidden", ctypes.c_void_p), ("weight", ctypes.c_void_p),
                ("hidden_pitch", ctypes.c_int64), ("weight_pitch", ctypes.c_int64),
                ("rows", ctypes.c_int), ("ids", ctypes.c_int), ("k", ctypes.c_int),
                ("count", ctypes.c_void_p), ("before", ctypes.c_int),
                ("bias", ctypes.c_void_p), ("temperature", ctypes.c_void_p),
                ("cap", ctypes.c_float), ("scale", ctypes.c_float), ("capped", ctypes.c_int), ("scaled", ctypes.c_int),
                ("target", ctypes.c_void_p), ("first", ctypes.c_int64)]


def _head(hidden, weight, how, temperature, target, first: int, count, before: int) -> _Head | None:
    """None if the kernels are not for these operands."""
    if len(hidden) <= FEW or not len(weight) or not takes(hidden) or not takes(weight):
        return None
    cap, scale = how.soft_cap, how.logit_scale
    return _Head(hidden.data_ptr(), weight.data_ptr(), hidden.stride(0), weight.stride(0), len(hidden),
                 *weight.shape, cuda.pointer(count), before, cuda.pointer(how.bias), cuda.pointer(temperature), cap or 0.0,
                 1.0 if scale is None else scale, cap is not None, scale is not None, cuda.pointer(target), first)


def head_statistics(hidden, weight, how, temperature, target, first: int, m, q, u, z_target, count=None, before: int = 0,
                    products=None) -> bool:
    """`statistics` of hidden [n, K] . weight [C, K]^T, which are also written to `products` [n, C] if that is given; False,
    and nothing done, if it is not for these operands.

    Of the rows, `before` of a batch come before these; the first count[0] of the batch (int32, on the device) are
    computed; None: all. What is written for the others is not defined."""
    head = _head(hidden, weight, how, temperature, target, first, count, before)
    if head is None or products is not None and (products.stride(0) % 2 or products.data_ptr() % 8):
        return False
    cuda.call("alignkit_head_statistics", hidden.device, ctypes.byref(head), m, q, u, ctypes.c_int64(m.stride(0)), z_target,
              products, ctypes.c_int64(0 if products is None else products.stride(0)))
    return True


def head_gradient(hidden, weight, how, temperature, target, first: int, lse, entropy, g_logp, g_entropy, out, count=None,
                  before: int = 0) -> bool:
    """`gradient` of hidden . weight^T to out [n, C], whose rows lie C elements apart, or the next multiple of 8: those between
    are zeroed. False, and nothing done, if it is not for these operands. `count` and `before` as above; rows that are not
    computed get zeros."""
    head = _head(hidden, weight, how, temperature, target, first, count, before)
    if head is None or not takes(out) or out.stride(0) - out.shape[1] >= 8:
        return False
    cuda.call("alignkit_head_gradient", hidden.device, ctypes.byref(head), lse, entropy, g_logp, g_entropy, out,
              ctypes.c_int64(out.stride(0)))
    return True


def head_product(out, a, b, accumulate: bool, count=None, before: int = 0) -> bool:
    """out [M, N] = a [M, K] . b [N, K]^T, one chain, plus `out` (fp32) if `accumulate`, where b's rows are contiguous
    along N. False, and nothing done, if it is not for these operands.

    count and before as above, of the rows of a; or of K, where a's rows are contiguous along M. What does not count is
    taken for zeros."""
    (m, k), n = a.shape, len(b)
    transposed = a.stride(1) != 1
    if not m or not n or not k or not takes(b.t()) or not takes(a.t() if transposed else a):
        return False
    if out.dtype == torch.float32:
        if n % 2 or out.stride(1) != 1 or out.stride(0) % 2 or out.data_ptr() % 8:
            return False
    elif accumulate or n % 8 or not out.is_contiguous() or out.data_ptr() % 16:
        return False
    cuda.call("alignkit_head_product", out.device, a, ctypes.c_int64(a.stride(1) if transposed else a.stride(0)), int(transposed),
              b, ctypes.c_int64(b.stride(1)), out, ctypes.c_int64(out.stride(0)), int(out.dtype == torch.bfloat16),
              int(accumulate), m, n, k, count, before)
    return True
