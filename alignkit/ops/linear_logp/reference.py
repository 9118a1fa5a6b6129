"""Reference implementation in torch: tile statistics, their merge into rows, and gradients.

All backends define the functions without a leading underscore, with the same signatures. Every operation is the
contract's (docs/contract.md, "Log-softmax over the vocabulary").
"""

from __future__ import annotations

import math

import torch

from ...contract import VOCAB_TILE
from .._calls import in_torch
from .._common import exp

INF = float("inf")


def _tile_stats(z: torch.Tensor, entropy: bool):
    """Return m = max z, q = sum of rint(2^23 e) and u = sum of rint(2^23 e (m - z)) per row and tile of z [n, C].

    e = exp(z - m). A tile without a finite maximum has q = u = 0.
    """
    tiles = torch.nn.functional.pad(z, (0, -z.shape[1] % VOCAB_TILE), value=-INF).unflatten(1, (-1, VOCAB_TILE))
    m = tiles.amax(dim=2)
    finite = m.isfinite()
    d = torch.where(finite[..., None], tiles - m[..., None], -INF)
    e = exp(d)

    def fixed_point_sum(v):
        return (v.double() * 2**23).round().to(torch.int32).sum(dim=2, dtype=torch.int32)

    return m, fixed_point_sum(e), fixed_point_sum(torch.where(e > 0, e * -d, 0.0)) if entropy else None


def _lse(m: torch.Tensor, s: torch.Tensor) -> torch.Tensor:
    """Return float64 m + log(2^-39 s), with the C library's logarithm."""
    return torch.tensor(
        [a + (math.log(b * 2.0**-39) if b > 0 else -INF) for a, b in zip(m.tolist(), s.tolist(), strict=True)],
        dtype=torch.float64,
        device=m.device,
    )


def _soft_cap(z: torch.Tensor, cap: float) -> None:
    """Compute z = cap * tanh(z / cap) in place; tanh in double by the C library, rounded once."""
    scaled = z / cap
    z.copy_(
        torch.tensor([math.tanh(v) for v in scaled.flatten().tolist()], dtype=torch.float64, device=z.device)
        .float()
        .reshape(z.shape)
        * cap
    )


def _logits_grad(z, lse, entropy, g_logp, g_entropy, column) -> None:
    """Compute z = g_logp (1[target] - p) - g_entropy p (log p + entropy) in place."""
    log_p = z - lse[:, None]
    p = exp(log_p)
    grad = -(g_logp[:, None] * p)
    if g_entropy is not None:
        grad = torch.where(p > 0, grad - g_entropy[:, None] * (p * (log_p + entropy[:, None])), 0.0)
    here = column >= 0
    grad[here, column[here]] += g_logp[here]
    z.copy_(grad)


@in_torch
def gather_rows(x, order, target, out) -> None:
    """Gather out [n, D] = x[order], with zeros where the target is negative."""
    torch.index_select(x, 0, order, out=out).masked_fill_((target < 0)[:, None], 0.0)


@in_torch
def scatter_rows(x, order, target, out) -> None:
    """Scatter x [n, D] to the rows `order` of out [N, D], rounded; zeros elsewhere."""
    out.zero_().index_copy_(0, order, x.to(out.dtype))


@in_torch
def apply_transform(z: torch.Tensor, transform) -> torch.Tensor | None:
    """Convert products z to logits before temperature, in place; return the capped values, or None without a cap."""
    if transform.bias is not None:
        z += transform.bias
    capped = None
    if transform.soft_cap is not None:
        _soft_cap(z, transform.soft_cap)
        capped = z.clone()
    if transform.logit_scale is not None:
        z *= transform.logit_scale
    return capped


def _logits(z: torch.Tensor, transform, temperature: torch.Tensor | None) -> torch.Tensor:
    z = z.to(torch.float32, memory_format=torch.contiguous_format, copy=True)
    apply_transform(z, transform)
    return z if temperature is None else z.div_(temperature[:, None])


@in_torch
def statistics(z, transform, temperature, target, first: int, m, q, u, z_target) -> None:
    """Compute tile statistics m, q, u [n, tiles] of the logits of products z [n, C].

    Column 0 is the id `first`, the start of a tile. q and u may be None. z_target[r] receives the logit of target[r] if
    it is among the columns.
    """
    z = _logits(z, transform, temperature)
    for out, stats in zip((m, q, u), _tile_stats(z, u is not None), strict=True):
        if out is not None:
            out.copy_(stats)
    if target is not None:
        column = target - first
        here = (column >= 0) & (column < z.shape[1])
        z_target[here] = z[here, column[here]]


@in_torch
def merge_tiles(m, q, u, z_target, top) -> tuple[torch.Tensor, torch.Tensor]:
    """Merge the tile statistics of each row.

    Returns:
        The maximum, fp32 [n] (`top` if given), and int64 [3, n]: the sums s and u, and the bits of z_target.
    """
    n, tiles = m.shape
    if top is None:
        top = m.amax(dim=1) if tiles else m.new_full((n,), -INF)
    w = exp(torch.where(m == -INF, -INF, m - top[:, None])).double()
    sums = torch.zeros(3, n, dtype=torch.int64, device=m.device)
    sums[0] = _fixed_point_sum(w * q.double())
    if u is not None:
        gap = torch.where(m == -INF, 0.0, top[:, None].double() - m.double())
        sums[1] = _fixed_point_sum(w * (u.double() + q.double() * gap))
    if z_target is not None:
        sums[2] = z_target.view(torch.int32)
    return top, sums


def _fixed_point_sum(terms: torch.Tensor) -> torch.Tensor:
    """Sum terms in units of 2^-23 over tiles as integers in units of 2^-39.

    NaN terms count as 0; then m is NaN, and so is the result.
    """
    return (terms * 65536.0).round().nan_to_num(0.0).to(torch.int64).sum(dim=1)


@in_torch
def finish(m, sums, target, entropy: bool):
    """Return logp, lse and entropy (or None), fp32 [n]."""
    lse64 = _lse(m, sums[0])
    logp = (sums[2].int().view(torch.float32).double() - lse64).float()
    ent = (lse64 - m.double() + sums[1].double() / sums[0].double()).float() if entropy else None
    return logp, lse64.float(), ent


@in_torch
def all_logp(z, temperature, m, sums, out) -> None:
    """Compute out [n, width]: the logprob of every id of logits z [n, C]; -inf from C on."""
    z = z.float() if temperature is None else z.float() / temperature[:, None]
    out[:, : z.shape[1]] = (z.double() - _lse(m, sums[0])[:, None]).float()
    out[:, z.shape[1] :] = -INF


@in_torch
def selected_logp(z, temperature, ids, m, q, out) -> None:
    """Compute out [n, k]: logprobs of ids [n, k] under logits z [n, C] with tile statistics m and q."""
    top, sums = merge_tiles(m, q, None, None, None)
    z = z.gather(1, ids.to(torch.int64)).float()
    z = z if temperature is None else z / temperature[:, None]
    out.copy_(z.double() - _lse(top, sums[0])[:, None])


@in_torch
def gradient(z, transform, first: int, out, temperature, target, lse, entropy, g_logp, g_entropy) -> None:
    """Compute out [n, C]: the gradient of the products z; column 0 is the id `first`. `out` may be z."""
    x = z if z is out else z.to(torch.float32, memory_format=torch.contiguous_format, copy=True)
    capped = apply_transform(x, transform)
    if temperature is not None:
        x /= temperature[:, None]
    column = target - first
    _logits_grad(x, lse, entropy, g_logp, g_entropy, torch.where((column >= 0) & (column < x.shape[1]), column, -1))
    if temperature is not None:
        x /= temperature[:, None]
    if transform.logit_scale is not None:
        x *= transform.logit_scale
    if capped is not None:
        x *= 1.0 - (capped / transform.soft_cap) ** 2
    if x is not out:
        out.copy_(x)


def gradient_type(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which the logits' gradient enters the GEMMs."""
    return torch.float32
