"""Scaled rotary frequencies in float64: the formulas of docs/contract.md, "RoPE".

The order of operations as written determines the bits of the rope table, so changing it needs a new contract version
(`runtime.families`). `Llama3` and `Yarn` are public (docs/api/ops.md).
"""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class Llama3:
    """Llama 3.1 scaling: divide low frequencies by `factor`, keep high ones, interpolate between the two."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position: int

    @property
    def attention_factor(self) -> float:
        """The factor of cosines and sines."""
        return 1.0

    def frequencies(self, head_dim: int, base: float) -> list[float]:
        """Return the head_dim / 2 scaled frequencies."""
        return [self._scaled(f) for f in plain(head_dim, base)]

    def _scaled(self, f: float) -> float:
        wave = 2.0 * math.pi / f
        if wave < self.original_max_position / self.high_freq_factor:
            return f
        if wave > self.original_max_position / self.low_freq_factor:
            return f / self.factor
        smooth = (self.original_max_position / wave - self.low_freq_factor) / (
            self.high_freq_factor - self.low_freq_factor
        )
        return (1.0 - smooth) * f / self.factor + smooth * f


@dataclass(frozen=True)
class Yarn:
    """YaRN scaling: a linear ramp over the dimensions, from unscaled frequencies to frequencies over `factor`.

    `attention_factor` multiplies cosines and sines. `truncate` rounds the ends of the ramp to whole dimensions.
    """

    factor: float
    original_max_position: int
    beta_fast: float
    beta_slow: float
    attention_factor: float
    truncate: bool

    @property
    def positions(self) -> int:
        """The number of positions to which the scaling extends the original ones."""
        return math.ceil(self.original_max_position * self.factor)

    def frequencies(self, head_dim: int, base: float) -> list[float]:
        """Return the head_dim / 2 scaled frequencies."""

        def dimension(rotations: float) -> float:
            turns = self.original_max_position / (rotations * 2.0 * math.pi)
            return head_dim * math.log(turns) / (2.0 * math.log(base))

        low, high = dimension(self.beta_fast), dimension(self.beta_slow)
        if self.truncate:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, head_dim - 1)
        if low == high:
            high += 0.001
        ramps = [min(max((j - low) / (high - low), 0.0), 1.0) for j in range(head_dim // 2)]
        return [f / self.factor * r + f * (1.0 - r) for f, r in zip(plain(head_dim, base), ramps, strict=True)]


Scaling = Llama3 | Yarn


def plain(head_dim: int, base: float) -> list[float]:
    """Return the head_dim / 2 unscaled frequencies."""
    return [base ** (-2.0 * j / head_dim) for j in range(head_dim // 2)]


def yarn_attention_factor(factor: float, mscale: float | None = None, mscale_all_dim: float | None = None) -> float:
    """Return YaRN's default attention factor."""

    def scale(m: float) -> float:
        return 0.1 * m * math.log(factor) + 1.0 if factor > 1 else 1.0

    return scale(1.0) if not mscale or not mscale_all_dim else scale(mscale) / scale(mscale_all_dim)
