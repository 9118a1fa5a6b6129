"""Random valid calls of linear (../samples.py)."""

from __future__ import annotations

from functools import partial

import torch

from ..samples import HALVES, Sample, Scalar, Source, Tensor, custom, replaced
from . import linear, row_parallel_linear


def _layer(s: Source, row: bool) -> dict[str, Tensor]:
    dtype, lead = s.dtype(HALVES), s.lead()
    k = s.rng.choice((s.size(40), 16 * s.size(6))) if row else s.size(40)
    n = s.size(24)
    return {
        "x": Tensor(s.floats(*lead, k, dtype=dtype), (len(lead),), HALVES, rows=True, leaf=True),
        "weight": Tensor(s.floats(n, k, dtype=dtype), (1,), HALVES, ndim=True, leaf=True),
        "bias": Tensor(
            s.floats(n, dtype=dtype) if s.chance(0.5) else None, (0,), HALVES, ndim=True, optional=True, leaf=True
        ),
    }


def _formula(x, weight, bias=None):
    y = x @ weight.t()
    return y if bias is None else y + bias


def _empty_weight(args):
    args["weight"] = args["weight"][:, :0]
    args["x"] = args["x"][..., :0]


def _linear(s: Source) -> Sample:
    row = s.chance(0.4)
    given: dict = _layer(s, row)
    x = given["x"].value
    given |= {"tp": s.group(), "sequence_parallel": Scalar(x.ndim >= 2 and s.chance(0.3), "flag")}
    given["out_dtype"] = Scalar(
        s.rng.choice((None, x.dtype, torch.float32)),
        "dtype",
        bad=tuple({torch.float16, torch.bfloat16, torch.float64} - {x.dtype}),
    )
    faults = [
        ("empty weight", _empty_weight, ("weight", "x")),
        ("no rows of weight", replaced("weight", lambda w: w[:0]), ("weight", "bias")),
    ]
    op = row_parallel_linear if row else linear
    return Sample(
        op.__name__, op, given, faults, exact=_formula, terms=max(x.numel(), *given["weight"].value.shape) + 4
    )


def _custom_linear_fp32(s: Source) -> Sample:
    return custom("linear_fp32", _layer(s, False), partial(linear, out_dtype=torch.float32))


def _custom_add(s: Source) -> Sample:
    dtype, shape = s.dtype(), [*s.lead(), s.size(40, 0)]
    given = {n: Tensor(s.floats(*shape, dtype=dtype), tuple(range(len(shape))), rows=True, leaf=True) for n in "xy"}
    return custom("add", given, lambda x, y: x + y)


SAMPLES = {_linear: 12, _custom_linear_fp32: 2, _custom_add: 2}
"""Weight of each generator."""
