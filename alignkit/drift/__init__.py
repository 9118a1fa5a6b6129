"""Train-inference drift: two aligned sets of logprobs in, a report out."""

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
