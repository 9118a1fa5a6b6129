"""The ways to compute attention, fastest first."""

from __future__ import annotations

from ...runtime.dispatch import PLAIN

ORDER = {"attention": PLAIN}
