"""Facts about the two sides of a comparison, and the causes of drift that follow from them.

`compare` and `compare_tensors` add both to `DriftReport`, and `Monitor` to its records. An unknown fact never counts as
equal. docs/drift.md lists the causes and their order.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch

from ..identity.identity import MIXED, Identity

VLLM_TEMPERATURE = 0.01
"""`_MAX_TEMP` of vLLM's sampling_params.py: vLLM replaces a request's temperature in (0, 0.01) by this one."""
NUMERICS = "numerics: the bits differ although epochs, weights, temperature and contract are equal"


class Epochs(NamedTuple):
    """Epochs of the rollout's compared tokens.

    first, last: smallest and largest epoch; None if all tokens are mixed. current: epoch of the weights that the
    rollout's identity names; without one, the last. mixed: number of mixed tokens. other: bool [tokens], true for
    tokens of an epoch other than the current one, mixed ones included.
    """

    first: int | None
    last: int | None
    current: int | None
    mixed: int
    other: torch.Tensor

    @property
    def range(self) -> str:
        if self.last is None:
            return "mixed"
        text = f"{self.first}" if self.first == self.last else f"{self.first} to {self.last}"
        return f"{text} and mixed" if self.mixed else text

    def share(self, tokens: torch.Tensor, name: str) -> str:
        """Say how many of the selected tokens are of another epoch. tokens: bool [tokens]."""
        other = "mixed" if self.current is None else f"of an epoch other than {self.current}"
        return f"{int((self.other & tokens).sum())} of {int(tokens.sum())} {name} are {other}"

    def to_json(self) -> dict[str, int | None]:
        return {"first": self.first, "last": self.last, "mixed": self.mixed, "other": int(self.other.sum())}


class Finding(NamedTuple):
    """Statements about one fact: a line for people, the cause of drift and the unknown part; "" for neither."""

    line: str
    cause: str = ""
    unknown: str = ""


class Sides(NamedTuple):
    """Facts about a comparison. Pairs are (rollout, training); None means unknown.

    epochs: int64 [tokens] on the CPU: the epoch of each compared token of the rollout, or `MIXED`.
    """

    identity: tuple[Identity | None, Identity | None] = (None, None)
    epochs: torch.Tensor | None = None
    temperature: tuple[float | None, float | None] = (None, None)

    def counted_epochs(self) -> Epochs | None:
        """Return the range of the tokens' epochs, or None if they are unknown."""
        if self.epochs is None:
            return None
        counted = self.epochs[self.epochs != MIXED]
        first, last = (int(x) for x in counted.aminmax()) if len(counted) else (None, None)
        rollout = self.identity[0]
        current = last if rollout is None or rollout.epoch is None else rollout.epoch
        other = self.epochs != (MIXED - 1 if current is None else current)
        return Epochs(first, last, current, len(self.epochs) - len(counted), other)

    def explain(self, unequal: torch.Tensor) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """Return the lines of `DriftReport.identity` and of `DriftReport.causes`.

        unequal: bool [tokens], true for tokens that are not bit-equal.
        """
        findings = (
            _epochs(self.counted_epochs(), unequal),
            _pair("weights", *(one and one.weights for one in self.identity)),
            _temperature(*self.temperature),
            _pair("contract", *(one and one.contract for one in self.identity)),
        )
        lines = tuple(finding.line for finding in findings)
        if not unequal.any():
            return lines, ()
        causes = [finding.cause for finding in findings if finding.cause]
        if unknown := [finding.unknown for finding in findings if finding.unknown]:
            causes.append(f"unknown: {', '.join(unknown)}")
        return lines, tuple(causes or [NUMERICS])

    def to_json(self) -> dict[str, dict]:
        """Return both sides as JSON values."""
        return {
            side: {
                "contract": one and one.contract,
                "weights": one and one.weights,
                "epoch": one and one.epoch,
                "temperature": temperature,
            }
            for side, one, temperature in zip(("rollout", "training"), self.identity, self.temperature, strict=True)
        }


def _epochs(epochs: Epochs | None, unequal: torch.Tensor) -> Finding:
    if epochs is None:
        return Finding("epochs: unknown in rollout", unknown="epochs of rollout")
    if not epochs.other.any():
        return Finding(f"epochs: {epochs.range}")
    return Finding(
        f"epochs: {epochs.range}; {epochs.share(torch.ones_like(unequal), 'tokens')}",
        f"the rollout's tokens have epochs {epochs.range}: {epochs.share(unequal, 'differing tokens')}",
    )


def _temperature(rollout: float | None, training: float | None) -> Finding:
    """Compare the fp32 values, by which both engines divide; `str` of an fp32 value is exact."""
    values = [None if x is None else np.float32(x) for x in (rollout, training)]
    finding = _pair("temperature", *(None if x is None else str(x) for x in values))
    if not any(x is not None and x < np.float32(VLLM_TEMPERATURE) for x in values):
        return finding
    return finding._replace(
        cause=f"{finding.cause or finding.line}; vLLM replaces a temperature in (0, {VLLM_TEMPERATURE}) by "
        f"{VLLM_TEMPERATURE}"
    )


def _pair(name: str, rollout: str | None, training: str | None) -> Finding:
    """Compare one fact of both sides."""
    if rollout is None or training is None:
        sides = {"rollout": rollout, "training": training}
        missing = " and ".join(side for side, value in sides.items() if value is None)
        known = "".join(f" ({side} {value})" for side, value in sides.items() if value is not None)
        return Finding(f"{name}: unknown in {missing}{known}", unknown=f"{name} of {missing}")
    if rollout != training:
        values = f"rollout {rollout}, training {training}"
        return Finding(f"{name}: different ({values})", f"different {name}: {values}")
    return Finding(f"{name}: equal ({rollout})")
