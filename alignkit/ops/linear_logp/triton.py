"""Triton: statistics of the tiles of given logits, and their gradient. log and tanh are torch's, elementwise."""
from __future__ import annotations

import torch
import triton
import triton.language as tl

from ...contract import VOCAB_TILE
from .._triton import EXACT, exp as _exp, fixed

__all__ = ["exp", "logits_grad", "lse", "round_grad", "soft_cap", "tile_stats"]

exp = torch.exp


@triton.jit
def _tile_stats(Z, M, Q, U, rows, cols, sz, tiles, TILE: tl.constexpr, R: tl.constexpr, ENTROPY: tl.constexpr):
    t = tl.program_id(1)
    r = tl.program_id(0).to(tl.int64) * R + tl.arange(0, R)
    j = t * TILE + tl.arange(0, TILE)
    ok = (r < rows)[:, None] & (j < cols)[None, :]
    z = tl.load(Z + r[:, None] * sz + j[None, :], mask=ok, other=-float("inf"))
    m = tl.max(z, axis=1)
    nan = tl.max((z != z).to(tl.int32), axis=1) > 0
    m = tl.where(nan, float("nan"), m)
    finite = (m > -float("inf")) & (m < float("inf"))
    d = tl.where(finite[:, None], z - m[:, None], -float("inf"))
    e = _exp(d)
    at = r * tiles + t
    tl.store(M + at, m, mask=r < rows)
    tl.store(Q + at, tl.sum(fixed(e), axis=1), mask=r < rows)
    if ENTROPY:
        tl.store(U + at, tl.sum(fixed(tl.where(e > 0, e * -d, 0.0)), axis=1), mask=r < rows)


def tile_stats(z: torch.Tensor, entropy: bool):
    rows, cols = z.shape
    shape = rows, triton.cdiv(cols, VOCAB_TILE)
    m = torch.empty(shape, dtype=torch.float32, device=z.device)
    q = torch.empty(shape, dtype=torch.int32, device=z.device)
    u = torch.empty(shape, dtype=torch.int32, device=z.device) if entropy else None
    if m.numel():
        r = 16 if rows >= 16 else 1
        _tile_stats[(triton.cdiv(rows, r), shape[1])](z, m, q, u, rows, cols, z.stride(0), shape[1], TILE=VOCAB_TILE, R=r,
                                                      ENTROPY=entropy, num_warps=4 if r > 1 else 1, **EXACT)
    return m, q, u


def lse(m: torch.Tensor, s: torch.Tensor) -> torch.Tensor:
    return m.double() + (s.double() * 2.0**-39).log()


def soft_cap(z: torch.Tensor, cap: float) -> None:
    z.div_(cap).tanh_().mul_(cap)


@triton.jit
def _logits_grad(Z, LSE, ENT, GL, GE, COL, cols, sz, ENTROPY: tl.constexpr, BLOCK: tl.constexpr):
    r = tl.program_id(0).to(tl.int64)
    j = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    z = tl.load(Z + r * sz + j, mask=j < cols, other=-float("inf"))
    g = tl.load(GL + r)
    lp = z - tl.load(LSE + r)
    p = _exp(lp)
    d = -(g * p)
    if ENTROPY:
        d = tl.where(p > 0, d - tl.load(GE + r) * (p * (lp + tl.load(ENT + r))), 0.0)
    d = tl.where(j == tl.load(COL + r), d + g, d)
    tl.store(Z + r * sz + j, d, mask=j < cols)


def logits_grad(z, lse, entropy, g_logp, g_entropy, column) -> None:
    rows, cols = z.shape
    if z.numel():
        _logits_grad[(rows, triton.cdiv(cols, 2048))](z, lse, entropy, g_logp, g_entropy, column, cols, z.stride(0),
                                                      ENTROPY=g_entropy is not None, BLOCK=2048, num_warps=8, **EXACT)


def round_grad(dz: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The gradient of the logits is rounded to the model type, for the tensor core."""
    return dz.to(dtype)
