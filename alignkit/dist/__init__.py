"""Ranks that share a layer: `TP`, what they tell each other (agreement.py) and how they add (symmetric.py)."""

from .tp import SINGLE, TP, strict

__all__ = ["SINGLE", "TP", "strict"]
