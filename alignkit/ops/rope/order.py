"""The ways to rotate, fastest first."""

from __future__ import annotations

from ...runtime.dispatch import PLAIN

ORDER = {"rope": PLAIN}
