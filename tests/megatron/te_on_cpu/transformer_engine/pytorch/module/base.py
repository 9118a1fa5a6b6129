"""TransformerEngine 2.16's `TransformerEngineBaseModule`: attributes, parameter registration and extra state.

The attributes are TransformerEngine's; te_workers.py checks that patch and undo keep them. Megatron-core imports the
class and `get_dummy_wgrad`.
"""

from abc import ABC, abstractmethod

import torch

from ..quantization import FP8GlobalStateManager


def no_torch_dynamo(function):
    """Exclude a forward from torch.compile, like TransformerEngine's decorator."""
    return torch._dynamo.disable(function, recursive=True)


def get_dummy_wgrad(shape, dtype, zero=False):
    return torch.zeros(shape, dtype=dtype)


class TransformerEngineBaseModule(torch.nn.Module, ABC):
    def __init__(self, name=None):
        super().__init__()
        self.name = name
        self.fp8_initialized = False
        self.fp8 = False
        self.fp8_calibration = False
        self.fp8_meta = {"fp8_checkpoint": False, "fp8_group": None}
        self.fp8_meta_tensors_initialized = False
        self.quantizers = {"scaling_fwd": [], "scaling_bwd": []}
        self.tp_group = None
        self.tp_size = 1
        self.sequence_parallel = False
        self.param_init_meta = {}
        self.primary_weights_in_fp8 = FP8GlobalStateManager.with_fp8_parameters()
        self.fsdp_wrapped = False
        self.fsdp_group = None
        self._fp8_workspaces = {}
        self.activation_dtype = None
        self.wgrad_accumulation_and_reduce_hooks = []
        self.wgrad_store = None

    def fast_setattr(self, name, value):
        self.__dict__[name] = value

    def register_parameter(self, name, param, init_fn=None, get_rng_state_tracker=None, fp8_meta_index=None):
        super().register_parameter(name, param)
        if name not in self.param_init_meta:
            self.param_init_meta[name] = init_fn

    def set_tensor_parallel_group(self, tp_group):
        self.fast_setattr("tp_group", tp_group)
        self.fast_setattr("tp_group_initialized", True)

    def _set_tensor_parallel(self, tp_group, tp_size):
        self.tp_size = tp_size if tp_group is None else tp_group.size()
        if tp_group is not None or tp_size == 1:
            self.set_tensor_parallel_group(tp_group)

    def reset_parameters(self, defer_init=False):
        for name, param in list(self.named_parameters(recurse=False)):
            with torch.no_grad():
                self.param_init_meta[name](param)

    def get_extra_state(self):
        return torch.empty(0, dtype=torch.uint8)

    def set_extra_state(self, state):
        if state is not None and state.numel():
            raise RuntimeError("Refusing to load pickled Transformer Engine extra state")

    def prepare_forward(self, inp):
        """Set the attributes that TransformerEngine derives from the input."""
        self.fast_setattr("activation_dtype", inp.dtype)
        self.fast_setattr("fp8_initialized", True)

    @abstractmethod
    def forward(self): ...
