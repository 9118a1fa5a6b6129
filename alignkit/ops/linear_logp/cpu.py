"""C++: a row at a time, tiles vectorised."""
from __future__ import annotations

import torch

from ... import native
from ...contract import VOCAB_TILE
from ...native import exp, logits_grad, lse, soft_cap

__all__ = ["exp", "logits_grad", "lse", "round_grad", "soft_cap", "tile_stats"]


def tile_stats(z: torch.Tensor, entropy: bool):
    shape = z.shape[0], -(-z.shape[1] // VOCAB_TILE)
    m, q = torch.empty(shape, dtype=torch.float32), torch.empty(shape, dtype=torch.int32)
    u = torch.empty(shape, dtype=torch.int32) if entropy else None
    native.tile_stats(z, VOCAB_TILE, m, q, u)
    return m, q, u


def round_grad(dz: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The gradient of the logits stays fp32 in the products."""
    return dz
