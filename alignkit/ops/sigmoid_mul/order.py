"""The ways to compute sigmoid_mul, fastest first."""

from __future__ import annotations

from ...runtime.dispatch import PLAIN

ORDER = {"sigmoid_mul": PLAIN}
