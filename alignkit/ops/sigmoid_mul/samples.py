"""Random valid calls of sigmoid_mul (../samples.py)."""

from __future__ import annotations

import torch

from ..samples import Sample, Source, Tensor
from . import sigmoid_mul


def _sigmoid_mul(s: Source) -> Sample:
    lead = s.lead()
    given = {
        "gate": Tensor(s.floats(*lead, 1), tuple(range(len(lead) + 1)), (torch.float32,), "gate", rows=True, leaf=True),
        "x": Tensor(s.floats(*lead, s.size(40, 0), dtype=s.dtype()), tuple(range(len(lead))), rows=True, leaf=True),
    }
    terms = given["x"].value.shape[-1] + 8
    return Sample("sigmoid_mul", sigmoid_mul, given, exact=lambda gate, x: torch.sigmoid(gate) * x, terms=terms)


def _sigmoid_mul_each(s: Source) -> Sample:
    dtype, shape = s.dtype(), [*s.lead(), s.size(40, 0)]
    given = {
        name: Tensor(s.floats(*shape, dtype=dtype), tuple(range(len(shape))), rows=True, leaf=True)
        for name in ("gate", "x")
    }
    return Sample("sigmoid_mul", sigmoid_mul, given, exact=lambda gate, x: torch.sigmoid(gate) * x)


SAMPLES = {_sigmoid_mul: 5, _sigmoid_mul_each: 3}
"""Weight of each generator."""
