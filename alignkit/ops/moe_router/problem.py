"""Checked options of the router, as its kernels read them.

`moe_router.check` fills them. The router's kernel depends on the device alone, so there are no rules.
"""

from __future__ import annotations

from typing import NamedTuple


class Routing(NamedTuple):
    """Checked options of `moe_router`."""

    top_k: int
    sigmoid: bool
    """True for sigmoid scores, False for softmax scores."""
    normalize: bool
    groups: int
    top_groups: int
    scale: float
