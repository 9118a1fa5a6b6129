"""The ways to compute silu_mul, fastest first."""

from __future__ import annotations

from ...runtime.dispatch import PLAIN

ORDER = {"silu_mul": PLAIN}
