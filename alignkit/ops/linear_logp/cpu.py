"""CPU backend of the LM head: calls of the C++ kernels (csrc/cpu/kernels.inl).

reference.py documents the functions and has the same bits, the contract's.
"""

from __future__ import annotations

import torch

from ...contract import VOCAB_TILE
from ...runtime import native
from .._common import rounded

INF = float("inf")


def _empty(like: torch.Tensor, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device=like.device)


def gather_rows(x, order, target, out) -> None:
    """Gather out [n, D] = x[order], with zeros where the target is negative."""
    torch.index_select(x, 0, order, out=out).masked_fill_((target < 0)[:, None], 0.0)


def scatter_rows(x, order, target, out) -> None:
    """Scatter x [n, D] to the rows `order` of out [N, D], rounded; zeros elsewhere."""
    out.zero_().index_copy_(0, order, rounded(x, out.dtype))


def apply_transform(z: torch.Tensor, transform) -> None:
    """Convert products z to logits before temperature, in place."""
    native.logits(z, transform.bias, transform.soft_cap, transform.logit_scale, None, z, None)


def _unit(z: torch.Tensor) -> torch.Tensor:
    return z if z.stride(1) == 1 else z.contiguous()


def statistics(z, transform, temperature, target, first: int, m, q, u, z_target) -> None:
    """Compute tile statistics of products z; see reference.py."""
    x = _unit(z)
    if x.dtype != torch.float32 or any(
        v is not None for v in (transform.bias, transform.soft_cap, transform.logit_scale, temperature)
    ):
        x = _empty(z, *z.shape)
        native.logits(_unit(z), transform.bias, transform.soft_cap, transform.logit_scale, temperature, x, None)
    shape = len(x), -(-x.shape[1] // VOCAB_TILE)
    found = [_empty(z, *shape), *(None if t is None else _empty(z, *shape, dtype=torch.int32) for t in (q, u))]
    native.tile_stats(x, VOCAB_TILE, *found)
    for out, stats in zip((m, q, u), found, strict=True):
        if out is not None:
            out.copy_(stats)
    if target is not None:
        column = target - first
        here = (column >= 0) & (column < x.shape[1])
        z_target[here] = x[here, column[here]]


def merge_tiles(m, q, u, z_target, top: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
    """Merge the tile statistics of each row; see reference.py."""
    n = len(m)
    sums = torch.zeros(3, n, dtype=torch.int64, device=m.device)
    highest = _empty(m, n) if top is None else top
    native.join(m, q, u, top, highest, sums[0], sums[1])
    if z_target is not None:
        sums[2] = z_target.view(torch.int32)
    return highest, sums


def finish(m, sums, target, entropy: bool):
    """Return logp, lse and entropy (or None), fp32 [n]."""
    logp, lse, ent = _empty(m, len(m)), _empty(m, len(m)), _empty(m, len(m)) if entropy else None
    native.finish(m, sums[0], sums[1], sums[2].int().view(torch.float32), logp, lse, ent)
    return logp, lse, ent


def all_logp(z, temperature, m, sums, out) -> None:
    """Compute out [n, width]: the logprob of every id of logits z [n, C]; -inf from C on."""
    native.log_probs(_unit(z), temperature, native.lse(m, sums[0]), out)
    out[:, z.shape[1] :] = -INF


def selected_logp(z, temperature, ids, m, q, out) -> None:
    """Compute out [n, k]: logprobs of ids [n, k] under logits z [n, C] with tile statistics m and q."""
    top, sums = merge_tiles(m, q, None, None, None)
    native.log_probs(z.gather(1, ids.to(torch.int64)), temperature, native.lse(top, sums[0]), out)


def gradient(z, transform, first: int, out, temperature, target, lse, entropy, g_logp, g_entropy) -> None:
    """Compute out [n, C]: the gradient of the products z; column 0 is the id `first`. `out` may be z."""
    x = out if out.dtype == torch.float32 and out.stride(1) == 1 else _empty(z, *z.shape)
    capped = None if transform.soft_cap is None else _empty(z, *z.shape)
    native.logits(_unit(z), transform.bias, transform.soft_cap, transform.logit_scale, temperature, x, capped)
    column = target - first
    native.logits_grad(
        x,
        lse,
        entropy,
        g_logp.contiguous(),
        None if g_entropy is None else g_entropy.contiguous(),
        torch.where((column >= 0) & (column < x.shape[1]), column, -1),
    )
    if any(v is not None for v in (transform.soft_cap, transform.logit_scale, temperature)):
        native.logits_back(x, transform.soft_cap, transform.logit_scale, temperature, capped)
    if x is not out:
        native.round(x, out)


def gradient_type(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which the logits' gradient enters the GEMMs."""
    return torch.float32
