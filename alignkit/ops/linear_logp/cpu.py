"""C++: a row at a time, tiles vectorised."""
from __future__ import annotations

import torch

from ... import native
from ...contract import VOCAB_TILE
from ...native import exp, logits_grad, lse, soft_cap
from .host import finish, gradient, gradient_type, join, pick, put, spread, statistics, take, transform

__all__ = ["exp", "finish", "gradient", "gradient_type", "join", "logits_grad", "lse", "pick", "put", "soft_cap",
           "spread", "statistics", "take", "tile_stats", "transform"]


def tile_stats(z: torch.Tensor, entropy: bool):
    shape = z.shape[0], -(-z.shape[1] // VOCAB_TILE)
    m, q = torch.empty(shape, dtype=torch.float32), torch.empty(shape, dtype=torch.int32)
    u = torch.empty(shape, dtype=torch.int32) if entropy else None
    native.tile_stats(z, VOCAB_TILE, m, q, u)
    return m, q, u
