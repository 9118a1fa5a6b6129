"""Random valid calls of l2_norm (../samples.py)."""

from __future__ import annotations

from ..samples import Sample, Scalar, Source, Tensor, replaced
from . import l2_norm


def _l2_norm(s: Source) -> Sample:
    shape = [*s.lead(), s.size(48)]
    given = {
        "x": Tensor(s.floats(*shape, dtype=s.dtype()), rows=True, leaf=True),
        "eps": Scalar(10 ** s.rng.uniform(-12, 0), "positive"),
    }
    faults = [("no columns", replaced("x", lambda t: t[..., :0]), ("x",))]
    return Sample("l2_norm", l2_norm, given, faults)


SAMPLES = {_l2_norm: 4}
"""Weight of each generator."""
