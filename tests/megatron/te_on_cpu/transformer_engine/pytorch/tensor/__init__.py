import torch


class QuantizedTensor(torch.Tensor):
    """Megatron-core asks parameters whether they are of this class."""
