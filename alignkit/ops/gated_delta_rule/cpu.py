"""CPU: the reference. Models with this op are trained on GPUs."""

from .reference import bwd_dhu

__all__ = ["bwd_dhu"]
