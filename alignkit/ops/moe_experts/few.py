"""CUDA backend of the down GEMMs with few rows per expert, whose run time is the time to read the weights.

It calls csrc/sm90/experts/skinny.cu; cuda_backend.py has the kernel for many rows. All kernels of `moe_products` give
the same bits. cuda_backend.FEW, the number of rows per expert that separates them, is free (schedule).
"""

from __future__ import annotations

import torch

from . import cuda_backend
from .problem import Grouped, Matrices


def rejects(p: Grouped) -> str | None:
    """Return why this kernel is not used for a problem, or None."""
    most = cuda_backend.FEW
    if cuda_backend.too_few_rows(p, most) is None:
        return f"rows / experts: must be at most {most}, got {p.pairs} / {p.experts} = {p.pairs / p.experts:.4g}"
    return cuda_backend.products_unsupported(p) if p.pairs else "rows: must be at least 1, got 0"


def products(
    a: torch.Tensor, row: torch.Tensor | None, b: Matrices, offsets: torch.Tensor, leaves: int, out: torch.Tensor
) -> None:
    """Compute the GEMMs; see each.py."""
    cuda_backend.products(a, row, b, offsets, leaves, out, "alignkit_experts_few_down", "alignkit_experts_few_map")
