"""C++: outputs in blocks of registers, k ascending in each."""

from __future__ import annotations

import torch

from ...runtime import native


def _taken(t: torch.Tensor) -> torch.Tensor:
    """fp16 as fp32, which is exact."""
    return t if t.dtype in native.DTYPES else t.float()


def matmul(a, b, leaves, bias, out, accumulate) -> None:
    acc = out if out.dtype == torch.float32 else torch.empty(out.shape, dtype=torch.float32, device=out.device)
    native.gemm(_taken(a), _taken(b), leaves, acc, accumulate)
    if bias is not None or acc is not out:
        native.round(acc, out, None if bias is None else bias.float().contiguous())


def resume(a, b, out) -> None:
    matmul(a, b, 1, None, out, True)
