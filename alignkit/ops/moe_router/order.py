"""The ways to choose experts, fastest first."""

from __future__ import annotations

from ...runtime.dispatch import PLAIN

ORDER = {"moe_router": PLAIN}
