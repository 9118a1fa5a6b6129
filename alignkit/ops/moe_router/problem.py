"""What is asked of a router."""

from __future__ import annotations

from typing import NamedTuple


class Routing(NamedTuple):
    top_k: int
    sigmoid: bool
    """The score of an expert is the sigmoid of its logit; else the softmax over all experts."""
    normalize: bool
    groups: int
    top_groups: int
    scale: float
