"""How far two sets of logprobs of the same tokens are apart.

Metric names follow the RL frameworks that log them; `docs/drift.md` has the table. Everything is computed in
float64 from the values as they are, so a difference of one fp32 bit is never lost.
"""

from __future__ import annotations

import math
import struct
from dataclasses import asdict, dataclass
from typing import Any

import torch

from ..errors import InputError
from .files import Logprobs


@dataclass(frozen=True)
class TokenDifference:
    """One token at which two sides were compared.

    sequence, position: which sequence, and which of its sampled tokens, from 0 (for tensors: row and column).
    token_id: None where the ids are not known (`compare_tensors`).
    """

    sequence: int
    position: int
    token_id: int | None
    rollout: float
    training: float

    def __str__(self) -> str:
        token = "" if self.token_id is None else f", token {self.token_id}"
        return (
            f"sequence {self.sequence}, position {self.position}{token}: "
            f"rollout {_with_bits(self.rollout)}, training {_with_bits(self.training)}"
        )


@dataclass(frozen=True)
class DriftReport:
    """The drift between rollout and training over `tokens` tokens.

    Write d = training - rollout, and ratio = exp(d), the importance ratio. A token whose logprob is NaN or
    infinite on either side is in `nonfinite`: it is never bit-equal and enters no other statistic, and a
    sequence that holds one enters no sequence-level statistic. A statistic over nothing is NaN.

    tokens, sequences: how many were compared.
    bit_equal: tokens whose two logprobs are the same bits and finite.
    nonfinite: tokens with a NaN or an infinity on either side.
    max_abs, mean_abs: of abs(d).
    kl: k1, the mean of -d; an estimate of KL(rollout || training), may be negative.
    k3_kl: k3, the mean of ratio - 1 - d; the same KL, never negative.
    ratio_is_one: tokens whose ratio is exactly 1.0.
    rollout_is_mean, rollout_is_min, rollout_is_max: of the ratio.
    rollout_is_eff_sample_size: 1 / mean((ratio / mean ratio)^2) over tokens, a fraction in (0, 1].
    rollout_is_seq_eff_sample_size: the same over sequences, whose ratio is the product over their tokens.
    token_mult_prob_error: the mean of exp(abs(d)).
    first_difference: the first token that is not bit-equal, in order; None if there is none.
    worst: tokens that are not bit-equal, nonfinite ones first, then by abs(d), largest first.
    """

    tokens: int
    sequences: int
    bit_equal: int
    nonfinite: int
    max_abs: float
    mean_abs: float
    kl: float
    k3_kl: float
    ratio_is_one: int
    rollout_is_mean: float
    rollout_is_min: float
    rollout_is_max: float
    rollout_is_eff_sample_size: float
    rollout_is_seq_eff_sample_size: float
    token_mult_prob_error: float
    first_difference: TokenDifference | None
    worst: tuple[TokenDifference, ...]

    @property
    def all_equal(self) -> bool:
        """Whether every token is finite and has the same bits on both sides."""
        return self.bit_equal == self.tokens

    def metrics(self, prefix: str = "drift/") -> dict[str, float]:
        """The numbers, for a logger: ``{prefix + name: value}``."""
        return {prefix + k: v for k, v in asdict(self).items() if k not in ("first_difference", "worst")}

    def to_json(self) -> dict:
        """Everything, as values that JSON can hold: a number that is not finite becomes None."""
        return {k: finite_or_none(v) for k, v in asdict(self).items()}


def compare(
    rollout: Logprobs, training: Logprobs, *, allow_contract_mismatch: bool = False, worst: int = 10
) -> DriftReport:
    """Compares two sets of logprobs of the same prompts and tokens.

    allow_contract_mismatch: compare although the contract ids differ, where drift is what one wants to see.
    worst: how many tokens to keep in `DriftReport.worst`.

    Raises InputError if there is no token, if prompts or tokens differ, or if the contract ids do.
    """
    if rollout.contract != training.contract and not allow_contract_mismatch:
        raise InputError(
            f"contract: rollout has {rollout.contract!r}, training {training.contract!r}; "
            "bits of different contracts are not comparable"
        )
    for name in ("prompts", "tokens"):
        _same_ids(name, getattr(rollout, name), getattr(training, name))
    counts = torch.tensor([len(row) for row in rollout.tokens], dtype=torch.int64)
    sequence = torch.repeat_interleave(torch.arange(len(counts)), counts)
    position = torch.cat([torch.arange(n) for n in counts.tolist()]) if len(counts) else counts
    ids = [t for row in rollout.tokens for t in row]
    if not ids:
        raise InputError("tokens: there is nothing to compare")
    return _report(torch.cat(rollout.logprobs), torch.cat(training.logprobs), sequence, position, ids, worst)


def compare_tensors(
    rollout_logp: torch.Tensor, train_logp: torch.Tensor, mask: torch.Tensor | None = None, *, worst: int = 10
) -> DriftReport:
    """Compares padded logprobs inside a training loop.

    rollout_logp, train_logp: ``[B, S]``, fp32 or bf16, the same type; on any device.
    mask: ``[B, S]``, bool or 0/1: which positions are sampled tokens; None takes all.

    A rank compares what it holds. Raises InputError naming the argument.
    """
    for name, x in (("rollout_logp", rollout_logp), ("train_logp", train_logp)):
        if not isinstance(x, torch.Tensor):
            raise InputError(f"{name}: {type(x).__name__}, expected a torch.Tensor [B, S]")
        if x.dim() != 2:
            raise InputError(f"{name}: shape {list(x.shape)}, expected [B, S]")
        if x.dtype not in (torch.float32, torch.bfloat16):
            raise InputError(f"{name}: {x.dtype}, expected torch.float32 or torch.bfloat16")
    if rollout_logp.dtype != train_logp.dtype:
        raise InputError(
            f"train_logp: {train_logp.dtype}, but rollout_logp is {rollout_logp.dtype}; "
            "the bits of two types are not comparable"
        )
    if rollout_logp.shape != train_logp.shape:
        raise InputError(f"train_logp: shape {list(train_logp.shape)}, but rollout_logp has {list(rollout_logp.shape)}")
    if mask is None:
        mask = torch.ones(rollout_logp.shape, dtype=torch.bool)
    if not isinstance(mask, torch.Tensor):
        raise InputError(f"mask: {type(mask).__name__}, expected a torch.Tensor [B, S]")
    if mask.shape != rollout_logp.shape:
        raise InputError(f"mask: shape {list(mask.shape)}, expected {list(rollout_logp.shape)}")
    mask = mask.detach().cpu()
    if mask.dtype != torch.bool and bool(((mask != 0) & (mask != 1)).any()):
        raise InputError("mask: values other than 0 and 1")
    sequence, position = mask.bool().nonzero(as_tuple=True)
    if not len(sequence):
        raise InputError("mask: it keeps no token" if mask.numel() else "rollout_logp: it is empty")
    rollout, training = (x.detach().cpu()[sequence, position] for x in (rollout_logp, train_logp))
    return _report(rollout, training, sequence, position, None, worst)


def finite_or_none(value: Any) -> Any:
    """`value` with each float that JSON cannot hold replaced by None, in lists and dicts too."""
    if isinstance(value, dict):
        return {k: finite_or_none(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [finite_or_none(v) for v in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _report(
    rollout: torch.Tensor,
    training: torch.Tensor,
    sequence: torch.Tensor,
    position: torch.Tensor,
    ids: list[int] | None,
    worst: int,
) -> DriftReport:
    """All arguments are flat, one element a token; `sequence` ascends."""
    bits = torch.int32 if rollout.dtype == torch.float32 else torch.int16
    finite = rollout.isfinite() & training.isfinite()
    equal = finite & (rollout.view(bits) == training.view(bits))
    difference = training.double() - rollout.double()
    d = difference[finite]
    ratio = d.exp()

    distinct, of_sequence = sequence.unique_consecutive(return_inverse=True)
    sums = torch.zeros(len(distinct), dtype=torch.float64).index_add_(0, of_sequence, difference)
    sequence_d = sums[sums.isfinite()]

    def token(i: int) -> TokenDifference:
        return TokenDifference(
            int(sequence[i]), int(position[i]), None if ids is None else ids[i], rollout[i].item(), training[i].item()
        )

    unequal = (~equal).nonzero().flatten()
    # Nonfinite tokens sort as infinitely far apart; among equals the earlier one comes first.
    distance = torch.where(finite, difference.abs(), torch.inf)[unequal]
    order = unequal[distance.sort(descending=True, stable=True).indices][:worst]
    return DriftReport(
        tokens=rollout.numel(),
        sequences=len(distinct),
        bit_equal=int(equal.sum()),
        nonfinite=int((~finite).sum()),
        max_abs=d.abs().max().item() if d.numel() else math.nan,
        mean_abs=d.abs().mean().item(),
        kl=-d.mean().item() + 0.0,  # + 0.0: no negative zero
        k3_kl=(torch.expm1(d) - d).mean().item(),
        ratio_is_one=int((ratio == 1.0).sum()),
        rollout_is_mean=ratio.mean().item(),
        rollout_is_min=ratio.min().item() if d.numel() else math.nan,
        rollout_is_max=ratio.max().item() if d.numel() else math.nan,
        rollout_is_eff_sample_size=_effective_fraction(d),
        rollout_is_seq_eff_sample_size=_effective_fraction(sequence_d),
        token_mult_prob_error=d.abs().exp().mean().item(),
        first_difference=token(int(unequal[0])) if len(unequal) else None,
        worst=tuple(token(i) for i in order.tolist()),
    )


def _effective_fraction(log_weights: torch.Tensor) -> float:
    """(sum w)^2 / (n sum w^2), scaled by the largest weight so that no weight overflows."""
    if not log_weights.numel():
        return math.nan
    w = (log_weights - log_weights.max()).exp()
    return (w.mean().square() / w.square().mean()).item()


def _same_ids(name: str, rollout: list[list[int]], training: list[list[int]]) -> None:
    if len(rollout) != len(training):
        raise InputError(f"{name}: rollout has {len(rollout)} sequences, training {len(training)}")
    for i, (a, b) in enumerate(zip(rollout, training, strict=True)):
        if len(a) != len(b):
            raise InputError(f"{name}: sequence {i} has {len(a)} token ids in rollout, {len(b)} in training")
        for j, (x, y) in enumerate(zip(a, b, strict=True)):
            if x != y:
                raise InputError(f"{name}: sequence {i}, position {j}: token id {x} in rollout, {y} in training")


def _with_bits(x: float) -> str:
    """The shortest decimal that gives the fp32 value back, and its bits."""
    return f"{x:.9g} (0x{struct.pack('>f', x).hex()})"
