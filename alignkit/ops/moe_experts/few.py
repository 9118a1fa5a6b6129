"""CUDA: products of few rows an expert, as fast as its matrix can be read (csrc/sm90/experts/few.cu)."""

from __future__ import annotations

import torch

from . import cuda
from .problem import Grouped, Matrices

MAPS = "alignkit_experts_few_map"


def _many(p: Grouped) -> str | None:
    if cuda.few(p) is None:
        return f"{p.pairs} rows for {p.experts} experts, of up to {cuda.FEW} each"
    return None if p.pairs else "no rows"


def gated_refuses(p: Grouped) -> str | None:
    return _many(p) or cuda.gated_unfit(p)


def products_refuses(p: Grouped) -> str | None:
    return _many(p) or cuda.products_unfit(p)


def gated(
    a: torch.Tensor, row: torch.Tensor | None, b: Matrices, offsets: torch.Tensor, h: torch.Tensor | None
) -> torch.Tensor:
    """As each.py's, and the next one."""
    return cuda.gated(a, row, b, offsets, h, "alignkit_experts_few_gate_up", MAPS)


def products(
    a: torch.Tensor, row: torch.Tensor | None, b: Matrices, offsets: torch.Tensor, leaves: int, out: torch.Tensor
) -> None:
    cuda.products(a, row, b, offsets, leaves, out, "alignkit_experts_few_down", MAPS)
