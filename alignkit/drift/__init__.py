"""Train-inference drift: two aligned sets of logprobs in, a report out."""
from .compare import DriftReport, TokenDifference, compare, compare_tensors
from .files import Logprobs, load, save

__all__ = ["DriftReport", "Logprobs", "TokenDifference", "compare", "compare_tensors", "load", "save"]
