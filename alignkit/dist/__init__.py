"""Ranks that share a layer: `TP`, or sequences: `CP`; what they tell each other (agreement.py) and how they add (symmetric.py)."""

from .cp import CP
from .tp import SINGLE, TP, check_same_across, check_same_values_across, strict

__all__ = ["CP", "SINGLE", "TP", "check_same_across", "check_same_values_across", "strict"]
