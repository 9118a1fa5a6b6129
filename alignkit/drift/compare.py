"""Comparison of two sets of logprobs of the same tokens.

Metric names follow the RL frameworks that log them; docs/drift.md has the table. All statistics are computed in float64
from the unmodified values, so a difference of one fp32 bit is never lost. Fields of `DriftReport` are also the keys of
check.json, of monitor records and of loggers. A new name or formula must change docs/drift.md too.
"""

from __future__ import annotations

import math
import struct
from dataclasses import asdict, dataclass
from typing import Any

import torch

from ..errors import InputError
from ..identity import Identity
from .causes import MIXED, Sides
from .files import Logprobs, check_epochs, check_temperature

Identities = tuple[Identity | None, Identity | None]
Temperatures = tuple[float | None, float | None]
_TEXTS = ("first_difference", "worst", "identity", "causes")
"""Fields of `DriftReport` that are not numbers."""


@dataclass(frozen=True)
class TokenDifference:
    """One token and its logprobs in rollout and training.

    Attributes:
        sequence: Index of the sequence, from 0 (the row in `compare_tensors`).
        position: Index among the sequence's sampled tokens, from 0 (the column in `compare_tensors`).
        token_id: Token id, or None if the ids are unknown (`compare_tensors`).
        rollout: Logprob of the rollout engine (natural logarithm).
        training: Logprob of the training engine (natural logarithm).
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
    """Drift between rollout and training over `tokens` tokens.

    Notation: d = training - rollout; ratio = exp(d), the importance ratio. A token with a NaN or infinite logprob on
    either side is nonfinite: it is never bit-equal and is excluded from every statistic below `nonfinite`. Its
    sequence is excluded from the sequence-level statistics. A statistic over an empty set is NaN.

    Attributes:
        tokens: Number of compared tokens.
        sequences: Number of compared sequences.
        bit_equal: Number of tokens whose two logprobs are finite and have the same bits.
        nonfinite: Number of tokens with a NaN or an infinity on either side.
        max_abs: Maximum of abs(d).
        mean_abs: Mean of abs(d).
        kl: Mean of -d (k1), an estimate of KL(rollout || training); may be negative.
        k3_kl: Mean of ratio - 1 - d (k3), an estimate of the same KL; never negative.
        ratio_is_one: Number of tokens whose ratio is exactly 1.0.
        rollout_is_mean: Mean of the ratio.
        rollout_is_min: Minimum of the ratio.
        rollout_is_max: Maximum of the ratio.
        rollout_is_eff_sample_size: 1 / mean((ratio / mean ratio)^2) over tokens, a fraction in (0, 1].
        rollout_is_seq_eff_sample_size: The same over sequences; a sequence's ratio is the product over its tokens.
        token_mult_prob_error: Mean of exp(abs(d)).
        first_difference: First token, in order, that is not bit-equal; None if every token is.
        worst: Tokens that are not bit-equal: nonfinite tokens first, then by descending abs(d).
        identity: One line each for epochs, weights, temperature and contract, such as ``"weights: equal (3f1c...)"``.
            They say equal, different or unknown, even if all tokens are bit-equal.
        causes: Causes of drift that follow from `identity`, the first cause first; empty if all tokens are bit-equal.
            Known differences come first, then what is unknown, or numerics if nothing is (docs/drift.md).
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
    identity: tuple[str, ...] = ()
    causes: tuple[str, ...] = ()

    @property
    def all_equal(self) -> bool:
        """True if every token is finite and has the same bits on both sides."""
        return self.bit_equal == self.tokens

    def metrics(self, prefix: str = "drift/") -> dict[str, float]:
        """Return the numeric fields for a logger.

        Args:
            prefix: Text prepended to each field name.

        Returns:
            ``{prefix + name: value}`` for every field except `first_difference`, `worst`, `identity` and `causes`.
        """
        return {prefix + k: v for k, v in asdict(self).items() if k not in _TEXTS}

    def to_json(self) -> dict:
        """Return all fields as JSON values; a nonfinite number becomes None."""
        return {k: finite_or_none(v) for k, v in asdict(self).items()}


def compare(
    rollout: Logprobs,
    training: Logprobs,
    *,
    allow_contract_mismatch: bool = False,
    allow_weights_mismatch: bool = False,
    worst: int = 10,
) -> DriftReport:
    """Compare two sets of logprobs of the same prompts and tokens.

    `training.epochs` is not used: epochs count the changes of a rollout engine.

    Args:
        rollout: Logprobs of the rollout engine.
        training: Logprobs of the training engine, for the same prompts and tokens.
        allow_contract_mismatch: Compare even if the contract ids differ, e.g. to measure drift against a stock engine.
        allow_weights_mismatch: Compare even if both digests of the weights are known and differ.
        worst: Maximum number of tokens in `DriftReport.worst`.

    Returns:
        The drift over all sampled tokens.

    Raises:
        InputError: No token was sampled, the prompts, tokens, contract ids or known digests of the weights differ, or
            a field is invalid.
    """
    identity = Identity(rollout.contract, rollout.weights), Identity(training.contract, training.weights)
    if rollout.contract != training.contract and not allow_contract_mismatch:
        raise InputError(
            f"contract: rollout and training must have the same contract id, got {rollout.contract!r} and "
            f"{training.contract!r}. Pass allow_contract_mismatch=True (alignkit compare: --allow-contract-mismatch) "
            "to compare them nevertheless."
        )
    known = rollout.weights is not None and training.weights is not None
    if known and rollout.weights != training.weights and not allow_weights_mismatch:
        raise InputError(
            f"weights: rollout and training must have the same weights, got the digests {rollout.weights!r} and "
            f"{training.weights!r}. Pass allow_weights_mismatch=True (alignkit compare: --allow-weights-mismatch) to "
            "compare them nevertheless."
        )
    check_epochs(rollout)
    temperature = rollout.temperature, training.temperature
    _check_temperatures(temperature)
    for name in ("prompts", "tokens"):
        _same_ids(name, getattr(rollout, name), getattr(training, name))
    counts = torch.tensor([len(row) for row in rollout.tokens], dtype=torch.int64, device="cpu")
    sequence = torch.repeat_interleave(torch.arange(len(counts), device="cpu"), counts)
    position = torch.cat([torch.arange(n, device="cpu") for n in counts.tolist()]) if len(counts) else counts
    ids = [t for row in rollout.tokens for t in row]
    if not ids:
        raise InputError("tokens: rollout and training must have at least one sampled token, got none")
    epochs = None if rollout.epochs is None else torch.cat([x.detach().cpu() for x in rollout.epochs])
    sides = Sides(identity, epochs, temperature)
    return _report(torch.cat(rollout.logprobs), torch.cat(training.logprobs), sequence, position, ids, worst, sides)


def compare_tensors(
    rollout_logp: torch.Tensor,
    train_logp: torch.Tensor,
    mask: torch.Tensor | None = None,
    *,
    worst: int = 10,
    identity: Identities | None = None,
    epochs: torch.Tensor | None = None,
    temperature: Temperatures | None = None,
) -> DriftReport:
    """Compare padded logprobs inside a training loop; each rank compares its own tensors.

    `identity`, `epochs` and `temperature` explain a difference; they never change a number. Different weights or
    contracts are causes in the report, not errors.

    Args:
        rollout_logp: Logprobs of the rollout engine (natural logarithm), ``[B, S]``, fp32 or bf16, on any device.
        train_logp: Logprobs of the training engine, same shape and dtype as `rollout_logp`, on any device.
        mask: ``[B, S]``, bool or 0/1; true where the position is a sampled token. None selects every position.
        worst: Maximum number of tokens in `DriftReport.worst`.
        identity: Identities of rollout and training; None for an unknown one.
        epochs: ``[B, S]``, int64 or int32, on any device: the epoch of the weights that computed each rollout token,
            or -1 if its KV cache has entries of several epochs. Values that the mask does not select are ignored.
        temperature: Temperatures of rollout and training, positive and finite in fp32; None for an unknown one.

    Returns:
        The drift over the selected tokens; `TokenDifference.token_id` is None.

    Raises:
        InputError: An argument has a wrong type, shape, dtype or value, or no token is selected. Names the argument.
    """
    for name, x in (("rollout_logp", rollout_logp), ("train_logp", train_logp)):
        if not isinstance(x, torch.Tensor):
            raise InputError(f"{name}: expected a torch.Tensor [B, S], got {type(x).__name__}")
        if x.dim() != 2:
            raise InputError(f"{name}: expected shape [B, S], got {list(x.shape)}")
        if x.dtype not in (torch.float32, torch.bfloat16):
            raise InputError(f"{name}: expected torch.float32 or torch.bfloat16, got {x.dtype}")
    if rollout_logp.dtype != train_logp.dtype:
        raise InputError(
            f"train_logp: expected rollout_logp's dtype {rollout_logp.dtype}, got {train_logp.dtype}; "
            "the bits of different dtypes are not comparable"
        )
    if rollout_logp.shape != train_logp.shape:
        raise InputError(
            f"train_logp: expected rollout_logp's shape {list(rollout_logp.shape)}, got {list(train_logp.shape)}"
        )
    if mask is None:
        mask = torch.ones_like(rollout_logp, dtype=torch.bool)
    if not isinstance(mask, torch.Tensor):
        raise InputError(f"mask: expected a torch.Tensor [B, S] or None, got {type(mask).__name__}")
    if mask.shape != rollout_logp.shape:
        raise InputError(f"mask: expected shape {list(rollout_logp.shape)}, got {list(mask.shape)}")
    mask = mask.detach().cpu()
    if mask.dtype != torch.bool and len(others := ((mask != 0) & (mask != 1)).nonzero()):
        i, j = others[0].tolist()
        raise InputError(f"mask: expected only the values 0 and 1, got {mask[i, j].item()} at [{i}, {j}]")
    sequence, position = mask.bool().nonzero(as_tuple=True)
    if not len(sequence):
        raise InputError(
            "mask: must select at least one token, got none"
            if mask.numel()
            else f"rollout_logp: must have at least one value, got shape {list(rollout_logp.shape)}"
        )
    sides = sides_of(identity, epochs, temperature, mask.bool())
    rollout, training = (x.detach().cpu()[sequence, position] for x in (rollout_logp, train_logp))
    return _report(rollout, training, sequence, position, None, worst, sides)


def sides_of(
    identity: Identities | None, epochs: torch.Tensor | None, temperature: Temperatures | None, mask: torch.Tensor
) -> Sides:
    """Return the facts about both sides over the tokens that `mask` selects: bool [B, S] on the CPU.

    Raises InputError that names the argument.
    """
    identity = (None, None) if identity is None else checked_pair("identity", identity)
    for one in identity:
        if one is not None and not isinstance(one, Identity):
            raise InputError(f"identity: expected an alignkit.identity.Identity or None, got {one!r:.80}")
    temperature = (None, None) if temperature is None else checked_pair("temperature", temperature)
    _check_temperatures(temperature)
    if epochs is None:
        return Sides(identity, None, temperature)
    if not isinstance(epochs, torch.Tensor):
        raise InputError(f"epochs: expected a torch.Tensor [B, S] or None, got {type(epochs).__name__}")
    if epochs.dtype not in (torch.int64, torch.int32):
        raise InputError(f"epochs: expected torch.int64 or torch.int32, got {epochs.dtype}")
    if epochs.shape != mask.shape:
        raise InputError(f"epochs: expected shape {list(mask.shape)}, got {list(epochs.shape)}")
    selected = epochs.detach().cpu()[mask].long()
    if bool((selected < MIXED).any()):
        raise InputError(
            f"epochs: must be at least {MIXED} (mixed) where the mask selects a token, got {int(selected.min())}"
        )
    return Sides(identity, selected, temperature)


def finite_or_none(value: Any) -> Any:
    """Return `value` with nonfinite floats replaced by None, recursively in lists and dicts."""
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
    sides: Sides,
) -> DriftReport:
    """Build the report from flat arguments with one element per token; `sequence` is ascending."""
    bits = torch.int32 if rollout.dtype == torch.float32 else torch.int16
    finite = rollout.isfinite() & training.isfinite()
    equal = finite & (rollout.view(bits) == training.view(bits))
    difference = training.double() - rollout.double()
    d = difference[finite]
    ratio = d.exp()

    distinct, sequence_index = sequence.unique_consecutive(return_inverse=True)
    sums = difference.new_zeros(len(distinct)).index_add_(0, sequence_index, difference)
    sequence_d = sums[sums.isfinite()]

    def token(i: int) -> TokenDifference:
        return TokenDifference(
            int(sequence[i]), int(position[i]), None if ids is None else ids[i], rollout[i].item(), training[i].item()
        )

    unequal = (~equal).nonzero().flatten()
    # Nonfinite tokens sort as an infinite difference; ties keep the token order.
    distance = torch.where(finite, difference.abs(), torch.inf)[unequal]
    order = unequal[distance.sort(descending=True, stable=True).indices][:worst]
    identity, causes = sides.explain(~equal)
    return DriftReport(
        tokens=rollout.numel(),
        sequences=len(distinct),
        bit_equal=int(equal.sum()),
        nonfinite=int((~finite).sum()),
        max_abs=d.abs().max().item() if d.numel() else math.nan,
        mean_abs=d.abs().mean().item(),
        kl=-d.mean().item() + 0.0,  # + 0.0 turns -0.0 into 0.0
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
        identity=identity,
        causes=causes,
    )


def checked_pair(name: str, values) -> tuple:
    """Return the pair (rollout, training) as a tuple. Raises InputError that names the argument."""
    if not isinstance(values, (tuple, list)) or len(values) != 2:
        raise InputError(f"{name}: expected a pair (rollout, training) or None, got {values!r:.80}")
    return tuple(values)


def _check_temperatures(pair: Temperatures) -> None:
    for one in pair:
        if one is not None:
            check_temperature(one)


def _effective_fraction(log_weights: torch.Tensor) -> float:
    """Return (sum w)^2 / (n sum w^2), computed on weights divided by the largest one to avoid overflow."""
    if not log_weights.numel():
        return math.nan
    w = (log_weights - log_weights.max()).exp()
    return (w.mean().square() / w.square().mean()).item()


def _same_ids(name: str, rollout: list[list[int]], training: list[list[int]]) -> None:
    if len(rollout) != len(training):
        raise InputError(
            f"{name}: rollout and training must have the same number of sequences, "
            f"got {len(rollout)} and {len(training)}"
        )
    for i, (a, b) in enumerate(zip(rollout, training, strict=True)):
        if len(a) != len(b):
            raise InputError(
                f"{name}: sequence {i}: rollout and training must have the same length, got {len(a)} and {len(b)}"
            )
        for j, (x, y) in enumerate(zip(a, b, strict=True)):
            if x != y:
                raise InputError(
                    f"{name}: sequence {i}, position {j}: token ids must be equal, "
                    f"got {x} in rollout and {y} in training"
                )


def _with_bits(x: float) -> str:
    """Return x with 9 significant digits, which identify an fp32 value, and its bits in hexadecimal."""
    return f"{x:.9g} (0x{struct.pack('>f', x).hex()})"
