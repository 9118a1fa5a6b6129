"""CUDA: down's products of few rows an expert, as fast as its matrix can be read (csrc/sm90/experts/few.cu)."""

from __future__ import annotations

import torch

from . import cuda
from .problem import Grouped, Matrices


def refuses(p: Grouped) -> str | None:
    if cuda.few(p, cuda.FEW) is None:
        return f"{p.pairs} rows for {p.experts} experts, of up to {cuda.FEW} each"
    return cuda.products_unfit(p) if p.pairs else "no rows"


def products(
    a: torch.Tensor, row: torch.Tensor | None, b: Matrices, offsets: torch.Tensor, leaves: int, out: torch.Tensor
) -> None:
    """As each.py's."""
    cuda.products(a, row, b, offsets, leaves, out, "alignkit_experts_few_down", "alignkit_experts_few_map")
