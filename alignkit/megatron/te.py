"""The modules of Megatron-core's TransformerEngine layer specs, with their arithmetic replaced by alignkit's ops.

TransformerEngine is not imported here: a module that exists has brought its class. `ROWS` says, by the path of a class,
what takes its place; a class that is made of the two is kept in `modules.STOCK`, like alignkit's own. It overrides the
forward and calls nothing else of TransformerEngine's, so parameters, hooks, ``_extra_state`` and
``sharded_state_dict`` are what they were.
"""

from __future__ import annotations

import types
from typing import Any, ClassVar

import torch

from alignkit import ops
from alignkit.dist import TP

from . import modules


class Replacement(torch.nn.Module):
    """What the classes of `ROWS` have in common.

    op: the op that the module runs through. must: attributes of TransformerEngine's module that it does not look at,
    each with the value that it stands for. leaf: whether the module's own children do not run.
    """

    op: ClassVar[str]
    must: ClassVar[dict[str, Any]] = {}
    leaf: ClassVar[bool] = False
    tp_group: torch.distributed.ProcessGroup | None

    def __reduce_ex__(self, protocol):
        """A copy, or what is pickled, has TransformerEngine's class, until the model that it is in is taken over."""
        # In later protocols pickle asks for the object's own class.
        make, (_, *arguments), *state = super().__reduce_ex__(1)
        return make, (modules.stock_class(type(self)), *arguments), *state


_QUANTIZED = {"primary_weights_in_fp8": False, "te_quant_params": None}
_LINEAR = _QUANTIZED | {"te_return_bias": False, "weight_names": ["weight"]}
_NORM = {"zero_centered_gamma": False}
_ATTENTION = {"attention_type": "self", "qkv_format": "sbhd", "softmax_type": "vanilla", "return_max_logit": False}


class ColumnParallelLinear(Replacement):
    op = "linear"
    must = _LINEAR | {"parallel_mode": "column"}

    def forward(self, x):
        bias = self._parameters.get("bias")  # without one, the attribute is an empty tensor
        tp = TP(self.tp_group, agreed=True)
        return ops.linear(x, self.weight, bias, tp=tp, sequence_parallel=self.sequence_parallel), None


class LayerNormColumnParallelLinear(ColumnParallelLinear):
    """A norm and the linear after it; the norm's output is rounded to the model type, as between two modules."""

    op = "rms_norm, linear"
    must = ColumnParallelLinear.must | _NORM | {"normalization": "RMSNorm", "return_layernorm_output": False}

    def forward(self, x):
        return ColumnParallelLinear.forward(self, ops.rms_norm(x, self.layer_norm_weight, self.eps))


class RowParallelLinear(Replacement):
    op = "row_parallel_linear"
    must = _LINEAR | {"parallel_mode": "row"}

    def forward(self, x):
        tp = TP(self.tp_group, agreed=True)
        return ops.row_parallel_linear(x, self.weight, tp=tp, sequence_parallel=self.sequence_parallel), None


class RMSNorm(Replacement):
    op = "rms_norm"
    must = _NORM

    def forward(self, x):
        return modules.RMSNorm.forward(self, x)  # pyright: ignore[reportArgumentType]


class DotProductAttention(Replacement):
    op = "attention"
    must = _ATTENTION
    leaf = True

    @property
    def pg_collection(self) -> types.SimpleNamespace:
        """As Megatron's own has it; of the groups TransformerEngine's keeps the context-parallel one."""
        return types.SimpleNamespace(cp=self.cp_group)

    def forward(self, *args, **kwargs):
        return modules.DotProductAttention.forward(self, *args, **kwargs)  # pyright: ignore[reportArgumentType]


class OfExperts(Replacement):
    """Of one expert: as `moe.ColumnParallelLinear`, it hands its weight down."""

    op = "moe_experts"
    must = _LINEAR
    hands_down = True

    def forward(self):
        return self.weight


class GroupedOfExperts(Replacement):
    """Of all experts of a rank: the weight of each."""

    op = "moe_experts"
    must = _QUANTIZED | {"te_return_bias": False, "use_bias": False}
    hands_down = True
    num_gemms: int

    def forward(self):
        return [getattr(self, f"weight{i}") for i in range(self.num_gemms)]


_MEGATRON = "megatron.core.extensions.transformer_engine"
ROWS: dict[str, type[Replacement]] = {
    f"{_MEGATRON}.TELayerNormColumnParallelLinear": LayerNormColumnParallelLinear,
    f"{_MEGATRON}.TEColumnParallelLinear": ColumnParallelLinear,
    f"{_MEGATRON}.TERowParallelLinear": RowParallelLinear,
    f"{_MEGATRON}.TEDotProductAttention": DotProductAttention,
    "transformer_engine.pytorch.module.rmsnorm.RMSNorm": RMSNorm,
}
"""The path of a class, exactly -> what takes its place."""

OF_EXPERTS: dict[str, type[Replacement]] = {
    f"{_MEGATRON}.TEColumnParallelLinear": OfExperts,
    f"{_MEGATRON}.TERowParallelLinear": OfExperts,
    f"{_MEGATRON}.TEColumnParallelGroupedLinear": GroupedOfExperts,
    f"{_MEGATRON}.TERowParallelGroupedLinear": GroupedOfExperts,
}
"""The same below the experts of a MoELayer."""

_made: dict[tuple[type, type], type] = {}


def aligned_class(cls: type, rows: dict[str, type[Replacement]]) -> type | None:
    """The class that takes the place of `cls`, if `rows` have one for it."""
    row = rows.get(f"{cls.__module__}.{cls.__qualname__}")
    if row is None:
        return None
    if (cls, row) not in _made:
        made = type(cls.__name__, (row, cls), {"__module__": __name__, "__doc__": row.__doc__})
        modules.STOCK[made] = cls
        _made[cls, row] = made
    return _made[cls, row]
