"""CUDA: chains of few rows with a wide weight, as fast as it can be read (csrc/sm90/few.cu). Everything else is Triton's: the
same bits."""
from __future__ import annotations

import ctypes

import torch

from ... import cuda
from . import triton
from .launch import copied, operand
from .triton import resume

__all__ = ["few", "matmul", "resume", "takes"]

FEW, WIDE = 256, 128 * 132
"""At most so many rows; at least so many outputs, a tile for each multiprocessor."""


def takes(t: torch.Tensor) -> bool:
    """Whether a matrix may be an operand: bf16 that the copy engine takes."""
    return t.dtype == torch.bfloat16 and copied(operand(t))


def few(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor) -> bool:
    """out [M, N], fp32 or bf16, = a [M, K] . b [N, K]^T, one chain. False, and nothing done, if it is not for these operands."""
    (m, k), n = a.shape, len(b)
    if not 0 < m <= FEW or n < WIDE or not k or not takes(a) or not takes(b) or out.stride(1) != 1:
        return False
    if out.dtype not in (torch.float32, torch.bfloat16):
        return False
    cuda.call("alignkit_few_product", out.device, a, ctypes.c_int64(a.stride(0)), b, ctypes.c_int64(b.stride(0)), out,
              ctypes.c_int64(out.stride(0)), int(out.dtype == torch.bfloat16), m, n, k)
    return True


def matmul(a: torch.Tensor, b: torch.Tensor, leaves: int, bias: torch.Tensor | None, out: torch.Tensor,
           accumulate: bool) -> None:
    if leaves > 1 or bias is not None or accumulate or not few(a, b, out):
        triton.matmul(a, b, leaves, bias, out, accumulate)
