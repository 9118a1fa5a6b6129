"""Where do two engines diverge? The same tokens and weights through both, point by point; `alignkit bisect`."""

from .comparison import Comparison, PointDifference, compare
from .recording import Recording, load
from .run import Options, Result, bisect

__all__ = ["Comparison", "Options", "PointDifference", "Recording", "Result", "bisect", "compare", "load"]
