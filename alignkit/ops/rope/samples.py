"""Random valid calls of rope (../samples.py)."""

from __future__ import annotations

import torch

from ..samples import Fault, Sample, Scalar, Source, Tensor, custom, poked
from . import rope, rope_table


def _rope_table(s: Source) -> Sample:
    """Use a random base, so that calls do not share an entry of the op's cache."""
    given = {
        "head_dim": Scalar(2 * s.size(16), "positive int", bad=(7, 3)),
        "max_position": Scalar(s.size(40), "positive int"),
        "base": Scalar(s.rng.uniform(1.1, 1e6), "positive"),
        "device": Scalar(s.rng.choice(("cpu", torch.device("cpu"))), "device"),
    }
    return Sample("rope_table", rope_table, given)


def _rotation(s: Source, names: tuple[str, ...]) -> dict[str, Tensor]:
    dtype, t, d, positions = s.dtype(), s.tokens(), 2 * s.size(12), s.size(20)
    rotary = s.rng.choice((None, 2 * s.rng.randint(1, d // 2)))
    width = rotary or d
    table = rope_table(width, positions, 10000.0).clone() if s.chance(0.7) else s.floats(positions, width)
    given = {
        name: Tensor(s.floats(t, s.size(4), d, dtype=dtype), (0, 2), group=name, ndim=True, rows=True, leaf=True)
        for name in names
    }
    return given | {
        "positions": Tensor(s.ints([t], 0, positions), (0,), (torch.int64,), "positions", ndim=True, rows=True),
        "table": Tensor(table, (1,), (torch.float32,), "table", ndim=True),
        "rotary_dim": Scalar(rotary, "positive int", optional=True, bad=(d + 2, 3)),
    }


def rotation_faults(s: Source, given, names: tuple[str, ...]) -> list[Fault]:
    """Return faults of positions, and an odd head_dim of the tensors `names`."""
    table, faults = given["table"].value, []
    if given["positions"].value.numel():
        for value in (-1, len(table), 2**40, -(2**62)):
            faults.append((f"position {value}", poked("positions", value, s), ("positions",)))

    def odd(args):
        for name in (*names, "table"):
            args[name] = args[name][..., :-1]

    return [*faults, ("odd head_dim", odd, (*names, "table", "head_dim", "rotary_dim"))]


def _rope(s: Source) -> Sample:
    given = _rotation(s, ("x",))
    return Sample("rope", rope, given, rotation_faults(s, given, ("x",)), linear=True)


def _rope_of_table(s: Source) -> Sample:
    """Use a table that `rope_table` makes and caches under the call's modes."""
    t, d, positions = s.tokens(), 2 * s.size(12), s.size(20)

    def call(x, positions, head_dim, max_position, base):
        return rope(x, positions, rope_table(head_dim, max_position, base, getattr(x, "device", "cpu")))

    given = {
        "x": Tensor(s.floats(t, s.size(4), d, dtype=s.dtype()), (0, 2), ndim=True, rows=True, leaf=True),
        "positions": Tensor(s.ints([t], 0, positions), (0,), (torch.int64,), "positions", ndim=True, rows=True),
        "head_dim": Scalar(d, "positive int", bad=(7, 3)),
        "max_position": Scalar(positions, "positive int"),
        "base": Scalar(s.rng.uniform(1.1, 1e6), "positive"),
    }
    return Sample("rope", call, given, linear=True)


def _separately(q, k, positions, table, rotary_dim):
    return tuple(rope(x, positions, table, rotary_dim=rotary_dim) for x in (q, k))


def _custom_rope_qk(s: Source) -> Sample:
    given = _rotation(s, ("q", "k"))
    return custom("rope_qk", given, _separately, rotation_faults(s, given, ("q", "k")))


SAMPLES = {_rope_table: 4, _rope: 7, _rope_of_table: 4, _custom_rope_qk: 3}
"""Weight of each generator."""
