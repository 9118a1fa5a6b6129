"""Random valid calls of silu_mul (../samples.py)."""

from __future__ import annotations

import torch

from ..samples import Sample, Source, Tensor, replaced
from . import silu_mul


def _silu_mul(s: Source) -> Sample:
    dtype, shape = s.dtype(), [*s.lead(), s.size(40, 0)]
    given = {
        name: Tensor(
            s.floats(*shape, dtype=dtype), tuple(range(len(shape))), rows=True, optional=name == "up", leaf=True
        )
        for name in ("gate", "up")
    }
    return Sample("silu_mul", silu_mul, given, exact=lambda gate, up: torch.nn.functional.silu(gate) * up)


def _joint_silu_mul(s: Source) -> Sample:
    """Pass gate and up as one tensor."""
    shape = [*s.lead(1), 2 * s.size(20, 0)]
    given = {"gate": Tensor(s.floats(*shape, dtype=s.dtype()), rows=True, leaf=True)}
    faults = [("no two halves", replaced("gate", lambda t: t[..., 1:]), ("gate",))] if shape[-1] else []
    return Sample("silu_mul", silu_mul, given, faults, lambda gate: silu_mul(*gate.chunk(2, -1)))


SAMPLES = {_silu_mul: 7, _joint_silu_mul: 3}
"""Weight of each generator."""
