import torch

from .basic.rmsnorm import RMSNorm

FusibleOperation = Sequential = torch.nn.Module
"""Megatron-core's annotations mention them."""

__all__ = ["FusibleOperation", "RMSNorm", "Sequential"]
