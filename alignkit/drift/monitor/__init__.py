"""Drift of a training loop: metrics under the names of its framework, one file a rank, and an alarm."""

from .monitor import Monitor
from .replay import Replay, load_replay, weights_digest

__all__ = ["Monitor", "Replay", "load_replay", "weights_digest"]
