"""Random valid calls of qk_norm_rope (../samples.py)."""

from __future__ import annotations

import torch

from ..rms_norm import rms_norm
from ..rope import rope
from ..rope.samples import rotation_faults
from ..samples import Sample, Scalar, Source, Tensor, custom
from . import qk_norm_rope


def _norm_then_rope(q, k, q_weight, k_weight, eps, positions, table, rotary_dim=None, zero_centered=False):
    normed = (rms_norm(x, w, eps, zero_centered=zero_centered) for x, w in ((q, q_weight), (k, k_weight)))
    return tuple(rope(x, positions, table, rotary_dim=rotary_dim) for x in normed)


def _qk_norm_rope(s: Source) -> Sample:
    dtype, t, d, positions = s.dtype(), s.tokens(), 2 * s.size(12), s.size(20)
    rotary = s.rng.choice((None, 2 * s.rng.randint(1, d // 2)))
    given = {
        name: Tensor(s.floats(t, s.size(4), d, dtype=dtype), (0, 2), ndim=True, rows=True, leaf=True)
        for name in ("q", "k")
    }
    given |= {name: Tensor(s.floats(d, dtype=dtype), (0,), ndim=True, leaf=True) for name in ("q_weight", "k_weight")}
    given |= {
        "eps": Scalar(10 ** s.rng.uniform(-12, 0), "positive"),
        "positions": Tensor(s.ints([t], 0, positions), (0,), (torch.int64,), "positions", ndim=True, rows=True),
        "table": Tensor(s.floats(positions, rotary or d), (1,), (torch.float32,), "table", ndim=True),
        "rotary_dim": Scalar(rotary, "positive int", optional=True, bad=(d + 2, 3)),
        "zero_centered": Scalar(s.chance(0.3), "flag"),
    }
    faults = rotation_faults(s, given, ("q", "k"))
    return Sample("qk_norm_rope", qk_norm_rope, given, faults)


def _custom_qk_norm_rope(s: Source) -> Sample:
    sample = _qk_norm_rope(s)
    del sample.given["zero_centered"]
    return custom("qk_norm_rope", sample.given, _norm_then_rope, sample.faults)


SAMPLES = {_qk_norm_rope: 5, _custom_qk_norm_rope: 3}
"""Weight of each generator."""
