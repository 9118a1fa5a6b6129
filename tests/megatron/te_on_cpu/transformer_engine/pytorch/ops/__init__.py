"""TransformerEngine's ``ops``: RMSNorm, and classes that Megatron-core names."""

import torch

from .basic.rmsnorm import RMSNorm

FusibleOperation = Sequential = torch.nn.Module
"""Names used in Megatron-core's annotations."""

__all__ = ["FusibleOperation", "RMSNorm", "Sequential"]
