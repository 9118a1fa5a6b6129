"""Log-probabilities of target tokens, from hidden states or from logits, with one set of bits.

docs/contract.md, "Log-softmax over the vocabulary". The vocabulary is cut into tiles at fixed global ids; a tile's
statistics are integers, so neither the order of a sum nor the rank that computes it can change a bit. Ranks exchange
statistics, never logits. The [N, V] logits are never stored: rows are taken in chunks.
"""
from __future__ import annotations

from dataclasses import dataclass

import torch

from ... import backends
from ...tp import SINGLE, TP
from .._common import check_tensor, check_weight, require
from ..linear import matmul, row_sum
from .vocab import Shards, merge

CHUNK_BYTES = {"cpu": 1 << 23, "cuda": 1 << 28}
"""Of fp32 logits alive at a time, by device; not in the contract."""


def _chunks(rows: int, columns: int, device: torch.device):
    """Slices of rows whose logits stay below the limit: multiples of 16, so that a chain over rows that goes on from
    chunk to chunk takes the same steps."""
    step = max(1, CHUNK_BYTES[device.type] // (64 * max(columns, 1))) * 16
    return [slice(r, min(r + step, rows)) for r in range(0, rows, step)]


@dataclass(frozen=True)
class _Transform:
    """z = soft_cap(x) * logit_scale / temperature, x the product plus bias; all fp32."""
    soft_cap: float | None
    logit_scale: float

    def forward(self, z: torch.Tensor) -> torch.Tensor:
        if self.soft_cap is not None:
            backends.select("linear_logp", z.device).soft_cap(z, self.soft_cap)
        if self.logit_scale != 1.0:
            z *= self.logit_scale
        return z

    def backward(self, dz: torch.Tensor, capped: torch.Tensor | None) -> torch.Tensor:
        if self.logit_scale != 1.0:
            dz *= self.logit_scale
        if capped is not None:
            dz *= 1.0 - (capped / self.soft_cap) ** 2
        return dz


class _Head:
    """Where logits come from: hidden . weight^T + bias, this rank's columns below the true vocabulary size."""

    def __init__(self, hidden, weight, bias, columns: int, transform: _Transform):
        self.hidden, self.weight, self.transform = hidden, weight[:columns], transform
        self.bias = None if bias is None else bias[:columns].float()

    def logits(self, rows: slice) -> tuple[torch.Tensor, torch.Tensor | None]:
        """fp32 logits of a chunk before temperature, and what the soft cap's gradient needs."""
        z = matmul(self.hidden[rows], self.weight)
        if self.bias is not None:
            z += self.bias
        if self.transform.soft_cap is None:
            return self.transform.forward(z), None
        capped = _Transform(self.transform.soft_cap, 1.0).forward(z).clone()
        return _Transform(None, self.transform.logit_scale).forward(z), capped


class _Given:
    """Where logits come from: a tensor [N, V_local] of them."""

    def __init__(self, logits, columns: int):
        self.given = logits[:, :columns]

    def logits(self, rows: slice):
        return self.given[rows].float().contiguous(), None


def _statistics(source, target, temperature, shards: Shards, tp: TP, entropy: bool):
    """logp, lse, entropy (or None), fp32 [N], of this chunked source on every rank."""
    logp, lse, ent = (torch.empty(target.shape, dtype=torch.float32, device=target.device) for _ in range(3))
    for rows in _chunks(len(target), max(shards.sizes), target.device):
        z, _ = source.logits(rows)
        z /= temperature[rows, None]
        own = shards.local(target[rows], tp.rank)
        z_target = z.gather(1, own.clamp(min=0)[:, None])[:, 0].masked_fill_(own < 0, 0.0) if z.shape[1] else (
            torch.zeros(own.shape, dtype=torch.float32, device=own.device))
        m, s, u = merge(shards.whole_tiles(z, tp), tp, entropy)
        lse64 = backends.select("linear_logp", z.device).lse(m, s)
        logp[rows] = (tp.tree_sum(z_target).double() - lse64).float()
        lse[rows] = lse64.float()
        if entropy:
            ent[rows] = (lse64 - m.double() + u.double() / s.double()).float()
    return logp, lse, ent if entropy else None


def _logits_grad(source, rows, target, temperature, lse, ent, g_logp, g_ent, shards: Shards, tp: TP):
    """d(loss)/d(logits of a chunk) before temperature, and the soft cap's part."""
    z, capped = source.logits(rows)
    z /= temperature[rows, None]
    backends.select("linear_logp", z.device).logits_grad(
        z, lse[rows], None if ent is None else ent[rows], g_logp[rows].contiguous(),
        None if ent is None else g_ent[rows].contiguous(), shards.local(target[rows], tp.rank))
    z /= temperature[rows, None]
    return z, capped


class _LinearLogp(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden, weight, bias, target, temperature, transform, shards, tp, entropy):
        source = _Head(hidden, weight, bias, shards.columns(tp.rank), transform)
        logp, lse, ent = _statistics(source, target, temperature, shards, tp, entropy)
        ctx.save_for_backward(hidden, weight, bias, target, temperature, lse, ent)
        ctx.args = (transform, shards, tp)
        return logp, ent

    @staticmethod
    def backward(ctx, g_logp, g_ent):
        hidden, weight, bias, target, temperature, lse, ent = ctx.saved_tensors
        transform, shards, tp = ctx.args
        columns = shards.columns(tp.rank)
        source = _Head(hidden, weight, bias, columns, transform)
        dh, dw, db = (None if t is None else torch.zeros(t.shape, dtype=torch.float32, device=t.device)
                      for t in (hidden, weight, bias))
        backend = backends.select("linear_logp", hidden.device)
        for rows in _chunks(len(hidden), max(shards.sizes), hidden.device):
            dz, capped = _logits_grad(source, rows, target, temperature, lse, ent, g_logp, g_ent, shards, tp)
            dz = backend.round_grad(transform.backward(dz, capped), weight.dtype)
            matmul(dz, weight[:columns].t(), out=dh[rows])
            matmul(dz.t(), hidden[rows].t(), out=dw[:columns])
            if db is not None:
                row_sum(dz, out=db[:columns])
        dh = tp.tree_sum(dh).to(hidden.dtype)
        return dh, dw.to(weight.dtype), None if db is None else db.to(bias.dtype), *[None] * 6


class _LogitsLogp(torch.autograd.Function):
    @staticmethod
    def forward(ctx, logits, target, temperature, shards, tp, entropy):
        source = _Given(logits, shards.columns(tp.rank))
        logp, lse, ent = _statistics(source, target, temperature, shards, tp, entropy)
        ctx.save_for_backward(logits, target, temperature, lse, ent)
        ctx.args = (shards, tp)
        return logp, ent

    @staticmethod
    def backward(ctx, g_logp, g_ent):
        logits, target, temperature, lse, ent = ctx.saved_tensors
        shards, tp = ctx.args
        source = _Given(logits, shards.columns(tp.rank))
        grad = torch.zeros_like(logits)
        for rows in _chunks(len(logits), max(shards.sizes), logits.device):
            dz, _ = _logits_grad(source, rows, target, temperature, lse, ent, g_logp, g_ent, shards, tp)
            grad[rows, :dz.shape[1]] = dz.to(grad.dtype)
        return grad, *[None] * 5


def _check_transform(soft_cap, logit_scale) -> _Transform:
    require(soft_cap is None or soft_cap > 0, f"soft_cap: {soft_cap} is not positive")
    require(logit_scale == logit_scale and abs(logit_scale) != float("inf"),
            f"logit_scale: {logit_scale} is not finite")
    return _Transform(soft_cap, float(logit_scale))


def _check_temperature(temperature, shape: torch.Size, device) -> torch.Tensor:
    """As fp32 [N]."""
    if isinstance(temperature, torch.Tensor) and temperature.ndim:
        check_tensor("temperature", temperature, dtypes=(torch.float32,))
        require(temperature.shape == shape,
                f"temperature: shape {tuple(temperature.shape)} differs from the rows' {tuple(shape)}")
        t = temperature.detach().reshape(-1)
    else:
        t = torch.full((shape.numel(),), float(temperature), dtype=torch.float32, device=device)
    bad = t[~(t > 0) | t.isinf()].tolist()
    require(not bad, f"temperature: {bad[:1]} is not positive and finite")
    return t


def _check_targets(target, shape, device, ignore_index: int, vocab: int) -> None:
    check_tensor("target", target, dtypes=(torch.int64,)) if target.ndim else None
    require(target.shape == shape, f"target: shape {tuple(target.shape)} differs from the rows' {tuple(shape)}")
    require(target.device == device, f"target: device {target.device} differs from {device}")
    bad = ((target < 0) | (target >= vocab)) & (target != ignore_index)
    if bool(bad.any()):
        at = tuple(bad.nonzero()[0].tolist())
        require(False, f"target: id {int(target[at])} at {at} is not in [0, {vocab}) and not ignore_index "
                       f"({ignore_index})")


def _run(function, tensors, target, temperature, ignore_index, args, return_entropy):
    """Take the rows that count, run `function` on them, put zeros for the rest. tensors[0] is [..., K]."""
    rows = tensors[0].reshape(-1, tensors[0].shape[-1])
    flat, shape = target.reshape(-1), target.shape
    keep = (flat != ignore_index).nonzero()[:, 0]
    every = keep.numel() == flat.numel()
    if not every:
        rows, flat, temperature = rows[keep], flat[keep], temperature[keep]
    results = function.apply(rows, *tensors[1:], flat, temperature, *args, return_entropy)

    def spread(v):
        if every:
            return v.reshape(shape)
        return v.new_zeros(shape.numel()).index_copy(0, keep, v).reshape(shape)
    return (spread(results[0]), spread(results[1])) if return_entropy else spread(results[0])


def linear_logp(hidden: torch.Tensor, weight: torch.Tensor, target: torch.Tensor, *, bias: torch.Tensor | None = None,
                temperature: float | torch.Tensor = 1.0, soft_cap: float | None = None, logit_scale: float = 1.0,
                ignore_index: int = -100, vocab_size: int | None = None, vocab_start: int = 0, tp: TP | None = None,
                return_entropy: bool = False):
    """``log_softmax(logits / temperature)[target]`` with ``logits = logit_scale * cap(hidden @ weight.T + bias)``,
    ``cap(x) = soft_cap * tanh(x / soft_cap)``; the logits are fp32, not rounded, not stored.

    Args:
        hidden: [..., D], fp32 or bf16; finite. The same on every rank of `tp`.
        weight: [V_local, D], hidden's type; this rank's rows of the vocabulary.
        target: int64 [...], global ids in [0, vocab_size), or `ignore_index`.
        bias: [V_local] or None, weight's type.
        temperature: positive, a number or fp32 [...]; divides the logits.
        soft_cap: positive, or None for no cap.
        logit_scale: factor of the logits.
        ignore_index: rows with this target give logp 0 and entropy 0 and have no gradient.
        vocab_size: the true global size; padded rows at or beyond it never count. Default: all rows.
        vocab_start: global id of this rank's first row. Shards follow each other in rank order; they may differ in
            size, but may not overlap, leave a hole, or be empty.
        tp: the ranks that hold the other rows.
        return_entropy: also return the entropy of the distribution, in nats.

    Returns:
        logp, fp32 [...], in nats; or (logp, entropy). Differentiable in hidden (summed over ranks), weight and bias
        (this rank's rows).

    Raises:
        InputError: an argument is outside the above; on all ranks of `tp` together, before anything is computed.
    """
    tp = tp or SINGLE
    state = {}

    def checks():
        check_weight(hidden, weight, bias, "hidden")
        state["transform"] = _check_transform(soft_cap, logit_scale)
        state["temperature"] = _check_temperature(temperature, hidden.shape[:-1], hidden.device)
        require(bool(hidden.isfinite().all()), "hidden: has NaN or infinite values")
        return Shards.describe(vocab_start, weight.shape[0], vocab_size), (
            tuple(hidden.shape), str(hidden.dtype), bias is not None, soft_cap, logit_scale, ignore_index,
            return_entropy)
    shards = Shards.agree(tp, "linear_logp", checks,
                          lambda size: _check_targets(target, hidden.shape[:-1], hidden.device, ignore_index, size))
    return _run(_LinearLogp, (hidden, weight, bias), target, state["temperature"], ignore_index,
                (state["transform"], shards, tp), return_entropy)


def logp_from_logits(logits: torch.Tensor, target: torch.Tensor, *, temperature: float | torch.Tensor = 1.0,
                     ignore_index: int = -100, vocab_size: int | None = None, vocab_start: int = 0,
                     tp: TP | None = None, return_entropy: bool = False):
    """`linear_logp` from logits that exist already: given `head_logits`, the same bits.

    Args:
        logits: [..., V_local], fp32 or bf16; -inf masks an id, NaN or +inf make their row NaN.
        target, temperature, ignore_index, vocab_size, vocab_start, tp, return_entropy: as for `linear_logp`.

    Returns:
        logp, fp32 [...], in nats; or (logp, entropy). Differentiable in logits.

    Raises:
        InputError: an argument is outside the above; on all ranks of `tp` together, before anything is computed.
    """
    tp = tp or SINGLE
    state = {}

    def checks():
        check_tensor("logits", logits)
        state["temperature"] = _check_temperature(temperature, logits.shape[:-1], logits.device)
        return Shards.describe(vocab_start, logits.shape[-1], vocab_size), (
            tuple(logits.shape[:-1]), str(logits.dtype), ignore_index, return_entropy)
    shards = Shards.agree(tp, "logp_from_logits", checks,
                          lambda size: _check_targets(target, logits.shape[:-1], logits.device, ignore_index, size))
    return _run(_LogitsLogp, (logits,), target, state["temperature"], ignore_index, (shards, tp), return_entropy)


def head_logits(hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None, *,
                soft_cap: float | None = None, logit_scale: float = 1.0) -> torch.Tensor:
    """The logits of `linear_logp` before temperature: what rollout samples from. Not differentiable.

    Args:
        hidden: [..., D], fp32 or bf16.
        weight: [V_local, D], hidden's type.
        bias: [V_local] or None.
        soft_cap, logit_scale: as for `linear_logp`.

    Returns:
        fp32 [..., V_local].

    Raises:
        InputError: shapes, types or devices do not fit.
    """
    check_weight(hidden, weight, bias, "hidden")
    transform = _check_transform(soft_cap, logit_scale)
    with torch.no_grad():
        head = _Head(hidden.reshape(-1, hidden.shape[-1]), weight, bias, weight.shape[0], transform)
        return head.logits(slice(None))[0].reshape(*hidden.shape[:-1], weight.shape[0])


def log_softmax(logits: torch.Tensor, *, temperature: float | torch.Tensor = 1.0,
                vocab_size: int | None = None) -> torch.Tensor:
    """Log-probabilities of every id, each with the bits that `linear_logp` gives it. Not differentiable.

    Args:
        logits: [..., V], fp32 or bf16, the whole vocabulary; -inf masks an id.
        temperature: positive, a number or fp32 [...].
        vocab_size: true size; columns at or beyond it get -inf. Default: V.

    Returns:
        fp32 [..., V].

    Raises:
        InputError: an argument is outside the above.
    """
    check_tensor("logits", logits)
    t = _check_temperature(temperature, logits.shape[:-1], logits.device)
    shards = Shards.agree(SINGLE, "log_softmax", lambda: (Shards.describe(0, logits.shape[-1], vocab_size), ()),
                          lambda size: None)
    flat = logits.detach().reshape(-1, logits.shape[-1])
    source = _Given(flat, shards.columns(0))
    out = torch.full(flat.shape, float("-inf"), dtype=torch.float32, device=flat.device)
    backend = backends.select("linear_logp", logits.device)
    for rows in _chunks(*flat.shape, flat.device):
        z = source.logits(rows)[0] / t[rows, None]
        m, s, _ = merge(shards.whole_tiles(z, SINGLE), SINGLE, False)
        out[rows, :z.shape[1]] = (z.double() - backend.lse(m, s)[:, None]).float()
    return out.reshape(logits.shape)
