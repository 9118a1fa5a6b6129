"""Random valid calls of rms_norm (../samples.py)."""

from __future__ import annotations

from ..samples import Sample, Scalar, Source, Tensor, custom
from . import rms_norm


def _rms_norm(s: Source) -> Sample:
    dtype, lead, h = s.dtype(), s.lead(), s.size(48)
    last = len(lead)
    given = {
        "x": Tensor(s.floats(*lead, h, dtype=dtype), (last,), rows=True, leaf=True),
        "weight": Tensor(s.floats(h, dtype=dtype), (0,), ndim=True, leaf=True),
        "eps": Scalar(10 ** s.rng.uniform(-12, 0), "positive"),
        "residual": Tensor(
            s.floats(*lead, h, dtype=dtype) if s.chance(0.4) else None,
            tuple(range(last + 1)),
            rows=True,
            optional=True,
            leaf=True,
        ),
        "zero_centered": Scalar(s.chance(0.3), "flag"),
    }

    def empty(args):
        for name in ("x", "weight", "residual"):
            if args.get(name) is not None:
                args[name] = args[name][..., :0]

    return Sample("rms_norm", rms_norm, given, [("no columns", empty, ("x", "weight"))])


def _custom_add_rms_norm(s: Source) -> Sample:
    given = _rms_norm(s).given
    del given["zero_centered"]
    x = given["x"].value
    given["residual"].value, given["residual"].optional = s.floats(*x.shape, dtype=x.dtype), False
    return custom("add_rms_norm", given, rms_norm)


SAMPLES = {_rms_norm: 9, _custom_add_rms_norm: 2}
"""Weight of each generator."""
