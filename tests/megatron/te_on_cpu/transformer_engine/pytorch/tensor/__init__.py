"""TransformerEngine's ``tensor``, from which Megatron-core imports `QuantizedTensor`."""

import torch


class QuantizedTensor(torch.Tensor):
    """Parameter class that Megatron-core checks for."""
