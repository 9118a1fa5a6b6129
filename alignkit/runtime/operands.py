"""Operand descriptors: the tensor properties that kernel selection and schedules depend on.

A descriptor holds shape, strides, dtype and alignment, without values and addresses. The rules beside the kernels
(ops/<op>/) read descriptors; `tma_rejects` is their common part.
"""

from __future__ import annotations

import torch

MAX_CACHED = 16384
"""schedule: maximum number of cached launches; a server keeps producing new row counts."""

Operand = tuple[torch.Size, tuple[int, ...], torch.dtype, bool]
"""Shape, strides, dtype, and whether the address is a multiple of 16 bytes."""

_SHORT_NAMES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}


def operand(t: torch.Tensor | None) -> Operand | None:
    """Return the descriptor of a tensor, or None for None."""
    return None if t is None else (t.shape, t.stride(), t.dtype, t.data_ptr() % 16 == 0)


def dtype_name(dtype: torch.dtype) -> str:
    """Return the short name of a dtype in the reasons of rules, such as "bf16"."""
    return _SHORT_NAMES.get(dtype, str(dtype))


def tma_rejects(name: str, t: Operand, dtype: torch.dtype | None = None) -> str | None:
    """Return why TMA cannot load the tensor `name` row by row, or None if it can.

    Rows are the last dimension: contiguous, without overlap, 16-byte aligned. If `dtype` is given, t must have it.
    """
    (*_, columns), (*strides, last), own, aligned = t
    if dtype not in (None, own):
        return f"{name}: dtype must be {dtype_name(dtype)}, got {dtype_name(own)}"
    if last != 1:
        return f"{name}: stride of the last dimension must be 1, got {last}"
    for stride in strides:
        if stride < columns:
            return f"{name}: strides must be at least {columns}, the length of a row, got {stride}"
        if stride * own.itemsize % 16:
            return f"{name}: strides must be multiples of 16 bytes (TMA), got {stride * own.itemsize} bytes"
    return None if aligned else f"{name}: address must be a multiple of 16 bytes (TMA)"
