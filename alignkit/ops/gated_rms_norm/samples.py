"""Random valid calls of gated_rms_norm (../samples.py)."""

from __future__ import annotations

from ..samples import Sample, Scalar, Source, Tensor
from . import gated_rms_norm


def _gated_rms_norm(s: Source) -> Sample:
    dtype, lead, h = s.dtype(), s.lead(), s.size(48)
    shape, eps = [*lead, h], 10 ** s.rng.uniform(-12, 0)
    given = {
        "x": Tensor(s.floats(*shape, dtype=dtype), tuple(range(len(shape))), rows=True, leaf=True),
        "weight": Tensor(s.floats(h, dtype=dtype), (0,), ndim=True, leaf=True),
        "gate": Tensor(s.floats(*shape, dtype=dtype), tuple(range(len(shape))), rows=True, leaf=True),
        "eps": Scalar(eps, "positive"),
    }

    def empty(args):
        for name in ("x", "weight", "gate"):
            args[name] = args[name][..., :0]

    faults = [("no columns", empty, ("x", "weight"))]
    return Sample("gated_rms_norm", gated_rms_norm, given, faults)


SAMPLES = {_gated_rms_norm: 4}
"""Weight of each generator."""
