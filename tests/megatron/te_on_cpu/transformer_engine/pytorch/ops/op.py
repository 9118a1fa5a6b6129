"""TransformerEngine 2.16's `BasicOperation`, the base class of RMSNorm: it has an extra state but no parameters."""

import abc

import torch


class BasicOperation(torch.nn.Module, metaclass=abc.ABCMeta):
    def __init__(self):
        super().__init__()
        self._fp8_metas = None
        self._quantizers = None

    def get_extra_state(self):
        return torch.empty(0, dtype=torch.uint8)

    def set_extra_state(self, state):
        if state is not None and state.numel():
            raise RuntimeError("Refusing to load pickled Transformer Engine extra state")

    def forward(self, input, *extra_inputs, **kwargs):
        return self.op_forward(input)

    @abc.abstractmethod
    def op_forward(self, input_): ...
