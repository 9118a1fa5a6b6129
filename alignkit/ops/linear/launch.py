"""Launches that are prepared once. From the arguments of every launch Triton works out anew which compiled kernel is meant,
and a product of few rows takes the device less time than that takes the host. What decides it is compared here at once,
with everything else that a schedule depends on: the operands but for their addresses."""

from __future__ import annotations

import torch
import triton

from .._triton import EXACT

MOST = 16384
"""How many schedules are kept: a server meets ever new numbers of rows."""

Operand = tuple[torch.Size, tuple[int, ...], torch.dtype, bool]
"""Shape, strides, type, and whether its address is a multiple of 16 bytes."""


def operand(t: torch.Tensor | None) -> Operand | None:
    return None if t is None else (t.shape, t.stride(), t.dtype, t.data_ptr() % 16 == 0)


def copied(t: Operand) -> bool:
    """Whether the device's copy engine takes it: rows contiguous, not overlapping, and 16-byte aligned."""
    (_, columns), (row, column), dtype, aligned = t
    return aligned and column == 1 and row >= columns and row * dtype.itemsize % 16 == 0


class Launch:
    """`kernel` on `grid` with `rest`, all its arguments after the tensors, in the kernel's order. It is for tensors of one
    `operand` each, on the GPU `device`."""

    def __init__(self, device: int, kernel: triton.JITFunction, grid: tuple[int, int, int], rest: tuple, **options):
        self.device, self.kernel, self.grid, self.rest, self.options = device, kernel, grid, rest, options
        self.again = None

    def __call__(self, *tensors) -> None:
        """Launch on the GPU's current stream; the first time, compile if need be."""
        if self.device != torch.cuda.current_device():  # where Triton would launch it
            with torch.cuda.device(self.device):
                self(*tensors)
        elif self.again is None:
            self.again = self.kernel[self.grid](*tensors, *self.rest, **self.options, **EXACT)[self.grid]
        else:
            self.again(*tensors, *self.rest)
