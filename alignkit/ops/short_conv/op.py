"""The record of short_conv and paged_short_conv: kernels, golden cases, self-test (../record.py)."""

from __future__ import annotations

import torch

from ...runtime.dispatch import one_per_backend
from ..inputs import Inputs, Normal
from ..record import WIDTH, Check, Golden, Op, Trial
from ..self_test import sequence_invariance
from . import cpu, paged_short_conv, reference, short_conv

TAPS = 4
"""schedule: length of the filters of the golden cases and the self-test."""


def _triton():
    from . import triton_backend

    return triton_backend


def _cached(given: Inputs, channels: int) -> list[torch.Tensor]:
    """Compute new tokens of sequences of 0 to 9 tokens; one has none."""
    queries, lens = [1, 5, 0, 2, 1], [1, 7, 3, 2, 9]
    x, weight = given.rough(sum(queries) + 2, channels, seed=3), given.rough(channels, TAPS, seed=4)
    state = given.rough(6, TAPS - 1, channels, seed=5)
    starts = given.starts(queries)
    y = paged_short_conv(x, weight, state, given.tensor([4, 0, 2, 5, 1]), starts, given.tensor(lens))
    return [y, state]


def _run(given: Inputs, lengths: list[int], channels: int) -> list[torch.Tensor]:
    starts = given.starts(lengths)
    x, weight = given.rough(sum(lengths), channels, seed=1), given.rough(channels, TAPS, seed=2, high=1)
    return given.run(lambda x, w: short_conv(x, w, starts), x, weight, rough=True) + _cached(given, channels)


def rounding_short_conv(given: Inputs) -> list[torch.Tensor]:
    """Compute packed sequences, one of them empty, and cached ones."""
    return _run(given, [3, 70, 0, 1, 66], 48)


def _sequences(normal: Normal) -> str | None:
    """Return the first difference of a sequence between packed, alone, in chunks and token by token."""
    lengths, weight = (5, 1, 40), normal(3, WIDTH, TAPS)
    x = normal(1, sum(lengths), WIDTH)
    state = x.new_zeros(len(lengths), TAPS - 1, WIDTH)
    return sequence_invariance(
        [x],
        lengths,
        lambda x, starts: short_conv(x, weight, starts),
        lambda x, *integers: paged_short_conv(x, weight, state, *integers),
        chunk=3,
    )


def _self_test(normal):
    yield Check("short_conv", "sequences alone, packed, cached in chunks", lambda: _sequences(normal))


def _samples():
    from .samples import SAMPLES

    return SAMPLES


_EACH = one_per_backend(_triton, cpu, reference)
OP = Op(
    "short_conv",
    kernels={"short_conv": _EACH, "paged_short_conv": _EACH},
    golden=(Golden(rounding_short_conv),),
    self_test=_self_test,
    samples=_samples,
    trials={
        "short_conv": Trial(lambda given, _: _run(given, [3, 0, 20], 24)),
        "paged_short_conv": Trial(lambda given, _: _cached(given, 24)),
    },
)
