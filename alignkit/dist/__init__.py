"""Ranks that share a layer: `TP`, what they tell each other (agreement.py) and how they add (symmetric.py)."""

from .tp import SINGLE, TP, check_same_across, strict

__all__ = ["SINGLE", "TP", "check_same_across", "strict"]
