"""Tile statistics, their logarithm and the gradient of the logits, as the formulas."""
from __future__ import annotations

import math

import torch

from ...contract import VOCAB_TILE
from .._common import exp
from .host import finish, gradient, gradient_type, join, pick, put, spread, statistics, take, transform

__all__ = ["exp", "finish", "gradient", "gradient_type", "join", "logits_grad", "lse", "pick", "put", "soft_cap",
           "spread", "statistics", "take", "tile_stats", "transform"]

INF = float("inf")


def tile_stats(z: torch.Tensor, entropy: bool):
    """Per row and tile of z [n, C]: m = max, q = sum of rint(2^23 e), u = sum of rint(2^23 e (m - z)), with
    e = exp(z - m). A tile without a finite maximum has q = u = 0."""
    tiles = torch.nn.functional.pad(z, (0, -z.shape[1] % VOCAB_TILE), value=-INF).unflatten(1, (-1, VOCAB_TILE))
    m = tiles.amax(dim=2)
    finite = m.isfinite()
    d = torch.where(finite[..., None], tiles - m[..., None], -INF)
    e = exp(d)

    def fixed(v):
        return (v.double() * 2**23).round().to(torch.int32).sum(dim=2, dtype=torch.int32)
    return m, fixed(e), fixed(torch.where(e > 0, e * -d, 0.0)) if entropy else None


def lse(m: torch.Tensor, s: torch.Tensor) -> torch.Tensor:
    """float64 m + log(2^-39 s), the logarithm of the C library."""
    return torch.tensor([a + (math.log(b * 2.0**-39) if b > 0 else -INF) for a, b in zip(m.tolist(), s.tolist())],
                        dtype=torch.float64)


def soft_cap(z: torch.Tensor, cap: float) -> None:
    """z <- cap * tanh(z / cap), tanh in double by the C library, rounded once."""
    scaled = z / cap
    z.copy_(torch.tensor([math.tanh(v) for v in scaled.flatten().tolist()], dtype=torch.float64).float()
            .reshape(z.shape) * cap)


def logits_grad(z, lse, entropy, g_logp, g_entropy, column) -> None:
    """z <- g_logp (1[target] - p) - g_entropy p (log p + entropy)."""
    log_p = z - lse[:, None]
    p = exp(log_p)
    grad = -(g_logp[:, None] * p)
    if g_entropy is not None:
        grad = torch.where(p > 0, grad - g_entropy[:, None] * (p * (log_p + entropy[:, None])), 0.0)
    here = column >= 0
    grad[here, column[here]] += g_logp[here]
    z.copy_(grad)
