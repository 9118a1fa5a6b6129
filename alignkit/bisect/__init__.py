"""Localization of drift (`alignkit bisect`): two engines' activations compared point by point on the same tokens.

Public: docs/api/bisect.md documents `__all__`.
"""

from .comparison import Comparison, PointDifference, compare
from .recording import Recording, load
from .run import Options, Result, bisect

__all__ = ["Comparison", "Options", "PointDifference", "Recording", "Result", "bisect", "compare", "load"]
