"""Calls of the C++ GEMM (csrc/cpu/kernels.inl), with the bits of reference.py.

The kernel blocks outputs in registers; each output is a chain over ascending k (docs/contract.md, "Linear").
"""

from __future__ import annotations

import torch

from ...runtime import native


def _widened(t: torch.Tensor) -> torch.Tensor:
    """Convert fp16 to fp32, which is exact; return other dtypes as they are."""
    return t if t.dtype in native.DTYPES else t.float()


def matmul(a, b, leaves, bias, out, accumulate) -> None:
    acc = out if out.dtype == torch.float32 else torch.empty(out.shape, dtype=torch.float32, device=out.device)
    native.gemm(_widened(a), _widened(b), leaves, acc, accumulate)
    if bias is not None or acc is not out:
        native.round(acc, out, None if bias is None else bias.float().contiguous())


def resume(a, b, out) -> None:
    matmul(a, b, 1, None, out, True)
