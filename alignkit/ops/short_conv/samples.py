"""Random valid calls of short_conv and paged_short_conv (../samples.py)."""

from __future__ import annotations

import torch

from ..samples import INTS, Sample, Source, Tensor, cached, replaced, wrong_starts
from . import MOST_TAPS, paged_short_conv, short_conv


def _filter(s: Source, channels: int, dtype: torch.dtype) -> Tensor:
    taps = s.rng.choice((4, 4, s.rng.randint(1, MOST_TAPS)))
    return Tensor(s.floats(channels, taps, dtype=dtype), (0,), ndim=True, leaf=True)


def _short_conv(s: Source) -> Sample:
    dtype, t, channels = s.dtype(), s.rng.choice((s.size(12, 0), s.size(90))), s.size(20)
    starts = torch.tensor(s.starts(t, s.size(4)), dtype=s.dtype(INTS), device="cpu")
    weight = _filter(s, channels, dtype)
    given = {
        "x": Tensor(s.floats(t, channels, dtype=dtype), (0, 1), ndim=True, leaf=True),
        "weight": weight,
        "cu_seqlens": Tensor(starts, (), INTS, "starts", ndim=True),
    }
    faults = [
        *wrong_starts(s, "cu_seqlens", t),
        ("cu_seqlens ends early", replaced("cu_seqlens", lambda c: torch.tensor([0, t - 1])), ("cu_seqlens",)),
        ("no taps", replaced("weight", lambda w: w[:, :0]), ("weight",)),
        ("many taps", replaced("weight", lambda w: w.new_zeros(len(w), MOST_TAPS + 1)), ("weight",)),
    ]
    return Sample("short_conv", short_conv, given, faults)


def _paged_short_conv(s: Source) -> Sample:
    dtype, channels, new = s.dtype(), s.size(20), cached(s, 9)
    weight = _filter(s, channels, dtype)
    weight.leaf = False
    state = s.floats(new.slot_count, weight.value.shape[1] - 1, channels, dtype=dtype)
    given = {
        "x": Tensor(s.floats(new.rows, channels, dtype=dtype), (1,), ndim=True),
        "weight": weight,
        "state": Tensor(state, (1, 2), ndim=True, written=True),
        **new.given,
    }
    return Sample("paged_short_conv", paged_short_conv, given, new.faults, forward_only=True)


SAMPLES = {_short_conv: 5, _paged_short_conv: 4}
"""Weight of each generator."""
