"""CUDA: gradients of bf16 rows, and long rows without a residual, at the speed of memory
(csrc/sm90/rms_norm/rms_norm.cu). Everything else is Triton's: the same bits."""

from __future__ import annotations

import ctypes
import math

import torch

from ...runtime import cuda
from . import triton
from .problem import Norm

NARROW, LONG, WIDE, ROWS = 32, 2048, 16384, 1 << 27
"""Rows are longer than the first, forward than the second, no longer than the third; at most so many."""
EVEN = 4096
"""Forward, a length that Triton need not pad to a power of two, and copies as fast as memory."""


@cuda.mirrors("AlignkitNormRows")
class _Rows(ctypes.Structure):
    """AlignkitNormRows of csrc/sm90/rms_norm/rms_norm.cu."""

    _fields_ = [("data", ctypes.c_void_p), ("token", ctypes.c_int64), ("head", ctypes.c_int64)]


@cuda.mirrors("AlignkitNorm")
class _Norm(ctypes.Structure):
    """AlignkitNorm of csrc/sm90/rms_norm/rms_norm.cu."""

    _fields_ = [
        ("x", _Rows),
        *((name, ctypes.c_void_p) for name in ("weight", "y", "rstd")),
        *((name, ctypes.c_int) for name in ("rows", "heads", "h", "zero_centered")),
        ("eps", ctypes.c_float),
    ]


@cuda.mirrors("AlignkitNormGrad")
class _NormGrad(ctypes.Structure):
    """AlignkitNormGrad of csrc/sm90/rms_norm/rms_norm.cu."""

    _fields_ = [
        ("x", _Rows),
        *((name, ctypes.c_void_p) for name in ("dy", "d_total", "weight", "rstd", "dx", "dweight", "workspace")),
        *((name, ctypes.c_int) for name in ("rows", "heads", "h", "zero_centered", "rounded", "chains")),
    ]


def forward_refuses(p: Norm) -> str | None:
    if p.tensors[0][0][-1] == EVEN:
        return f"rows of {EVEN}, which Triton need not pad"
    return _unfit(p, LONG)


def backward_refuses(p: Norm) -> str | None:
    return _unfit(p, NARROW)


def _unfit(p: Norm, above: int) -> str | None:
    """Why the kernels are not for these rows, of more than `above` elements; None: they are."""
    shape = p.tensors[0][0]
    h = shape[-1]
    if not above < h <= WIDE or h % 8:
        return f"rows of {h}, which is not a multiple of 8 of more than {above} and at most {WIDE}"
    if not 0 < math.prod(shape[:-1]) <= ROWS:
        return f"{math.prod(shape[:-1])} rows, of 1 to {ROWS}"
    for _, strides, dtype, aligned in p.tensors:
        if dtype != torch.bfloat16 or not aligned or any(s % 8 for s in strides[:-1]):
            return "tensors that are not bf16 that can be read 16 bytes at a time"
    return None


def _rows(t: torch.Tensor) -> tuple[torch.Tensor, _Rows, int]:
    """t, or a copy of it, which must be kept until the launch; its rows, and how many a token has."""
    t, heads, token, head = triton.by_head(t)
    return t, _Rows(t.data_ptr(), token, head), heads


def forward(
    x: torch.Tensor, weight: torch.Tensor, eps: float, residual: torch.Tensor | None, zero_centered: bool = False
):
    """x, y [..., H], and rstd fp32 [rows]; there is no residual."""
    h = x.shape[-1]
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    rstd = torch.empty(x.numel() // h, dtype=torch.float32, device=x.device)
    _kept, x_rows, heads = _rows(x)
    p = _Norm(x_rows, weight.data_ptr(), y.data_ptr(), rstd.data_ptr(), len(rstd), heads, h, zero_centered, eps)
    cuda.call("alignkit_rms_norm", x.device, ctypes.byref(p))
    return x, y, rstd


def backward(
    dy, x, weight, rstd, d_total=None, zero_centered: bool = False, dweight_dtype=torch.bfloat16, chains: int = 0
) -> tuple[torch.Tensor, torch.Tensor]:
    """dx + d_total [..., H] and dweight [H], rounded to `dweight_dtype`; dy and d_total are contiguous. chains: a schedule, on
    which no bit depends: of how many chains of dweight one sum in memory is, 1, 2, 4 or 8, if the kernel has so many; -n: of
    n, then of fewer, as for a device that holds one block; 0: as is best."""
    h = x.shape[-1]
    dx = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    dweight = torch.empty(h, dtype=dweight_dtype, device=x.device)
    sums = -(-len(rstd) // triton.DW_ROWS)
    workspace = torch.empty((sums + -(-sums // 1024)) * h + -(-h // 32) + 1, dtype=torch.float32, device=x.device)
    _kept, x_rows, heads = _rows(x)
    p = _NormGrad(
        x_rows,
        dy.data_ptr(),
        cuda.pointer(d_total),
        weight.data_ptr(),
        rstd.data_ptr(),
        dx.data_ptr(),
        dweight.data_ptr(),
        workspace.data_ptr(),
        len(rstd),
        heads,
        h,
        zero_centered,
        dweight_dtype == torch.bfloat16,
        chains,
    )
    cuda.call("alignkit_rms_norm_grad", x.device, ctypes.byref(p))
    return dx, dweight
