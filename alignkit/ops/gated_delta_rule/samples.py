"""Random valid calls of gated_delta_rule (../samples.py)."""

from __future__ import annotations

import itertools

import torch

from ..samples import HALVES, INTS, Sample, Scalar, Source, Tensor, wrong_starts
from . import chunk_gated_delta_rule_bwd_dhu, fla


def _gated_delta_rule(s: Source) -> Sample:
    dtype, heads_k = s.dtype(HALVES), s.size(2)
    k, v = s.rng.choice((64, 64, 128)), s.rng.choice((64, 64, 128))
    heads, packed, t = heads_k * s.size(2), s.chance(0.5), s.rng.choice((s.size(20), s.size(140)))
    batch = 1 if packed else s.size(2)
    starts = s.starts(t, s.size(3)) if packed else None
    sequences = len(starts) - 1 if starts else batch
    v_first = s.chance(0.3)
    state = (sequences, heads, *((v, k) if v_first else (k, v)))
    counted = sum(-(-(b - a) // 64) for a, b in itertools.pairwise(starts)) if starts else None

    def rows(width: int, of: int = heads) -> Tensor:
        return Tensor(s.floats(batch, t, of, width, dtype=dtype) * 0.1, (0, 1, 2, 3), HALVES, ndim=True)

    def optional(*shape: int) -> Tensor:
        value = -s.floats(*shape).abs() * 0.05 if s.chance(0.5) else None
        return Tensor(value, tuple(range(len(shape))), (torch.float32,), "gates", ndim=True, optional=True)

    given = {
        "q": rows(k, heads_k),
        "k": rows(k, heads_k),
        "w": rows(k),
        "do": rows(v),
        "dv": rows(v),
        "g": optional(batch, t, heads),
        "gk": optional(batch, t, heads, k),
        "dht": optional(*state),
        "scale": Scalar(s.rng.choice((None, s.rng.uniform(0.01, 2))), "finite", optional=True),
        "cu_seqlens": Tensor(
            torch.tensor(starts, dtype=s.dtype(INTS), device="cpu") if starts else None,
            (),
            INTS,
            "starts",
            ndim=True,
            optional=True,
        ),
        "num_chunks": Scalar(
            s.rng.choice((None, counted)),
            "positive int",
            optional=True,
            bad=((counted or 0) + 1, counted - 1) if starts else (1, 2),
        ),
        "state_v_first": Scalar(v_first, "flag"),
        "base2": Scalar(s.chance(0.3), "flag"),
        "need_dh0": Scalar(s.chance(0.5), "flag"),
    }
    faults = [*(wrong_starts(s, "cu_seqlens", t) if starts else ())]
    op = chunk_gated_delta_rule_bwd_dhu
    return Sample(op.__name__, op, given, faults, forward_only=True)


def _fla(s: Source) -> Sample:
    """Call the op with the arguments of flash-linear-attention."""
    sample = _gated_delta_rule(s)
    given = sample.given
    dropped = ("num_chunks", "need_dh0", "state_v_first", "base2")
    _, _, v_first, base2 = (given.pop(name).value for name in dropped)
    for name in ("g", "gk", "dht"):  # converted, each by itself
        given[name].dtypes, given[name].group = HALVES, name
    given |= {
        "chunk_size": Scalar(64, "positive int", bad=(32, 128)),
        "state_v_first": Scalar(v_first, "flag"),
        "use_exp2": Scalar(base2, "flag"),
        "transpose_state_layout": Scalar(v_first, "flag"),
    }

    def reference(chunk_size, use_exp2, transpose_state_layout, **others):
        return chunk_gated_delta_rule_bwd_dhu(base2=use_exp2, **others)

    return Sample(sample.op, fla.chunk_gated_delta_rule_bwd_dhu, given, sample.faults, reference, forward_only=True)


SAMPLES = {_gated_delta_rule: 6, _fla: 2}
"""Weight of each generator."""
