"""Random valid calls of delta_gates (../samples.py)."""

from __future__ import annotations

from ..samples import FLOATS, Sample, Source, Tensor
from . import delta_gates


def _delta_gates(s: Source) -> Sample:
    """A_log is at most 30: the decay exp(A_log) must be finite, or decays of 0 are NaN."""
    dtype, shape = s.dtype(), [*s.lead(), s.size(40, 0)]
    given = {
        name: Tensor(s.floats(*shape, dtype=dtype), tuple(range(len(shape))), rows=True, leaf=True) for name in "ab"
    } | {
        name: Tensor(s.floats(shape[-1], dtype=s.dtype()).clamp(-30, 30), (0,), FLOATS, name, ndim=True, leaf=True)
        for name in ("A_log", "dt_bias")
    }
    return Sample("delta_gates", delta_gates, given)


SAMPLES = {_delta_gates: 4}
"""Weight of each generator."""
