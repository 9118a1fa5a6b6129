"""Drift monitor for training loops: framework-named metrics, one record file per rank and an alarm."""

from .monitor import Monitor
from .replay import Replay, load_replay, weights_digest

__all__ = ["Monitor", "Replay", "load_replay", "weights_digest"]
