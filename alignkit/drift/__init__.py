"""Comparison of rollout and training logprobs: reports, logprob files and a monitor for training loops.

Public: docs/api/drift.md documents `__all__`.
"""

from .compare import DriftReport, TokenDifference, compare, compare_tensors
from .files import Logprobs, load, save
from .monitor import Monitor, Replay, load_replay, weights_digest

__all__ = [
    "DriftReport",
    "Logprobs",
    "Monitor",
    "Replay",
    "TokenDifference",
    "compare",
    "compare_tensors",
    "load",
    "load_replay",
    "save",
    "weights_digest",
]
