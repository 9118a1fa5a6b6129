"""Modules of Megatron-core's TransformerEngine layer specs, with their arithmetic replaced by alignkit's ops.

TransformerEngine is not imported; its classes come from existing modules. `ROWS` maps the path of a class to its
replacement. `aligned_class` derives a class from both and registers it in `modules.STOCK`. The derived class overrides
only `forward`, so parameters, hooks, ``_extra_state`` and ``sharded_state_dict`` are unaffected.
"""

from __future__ import annotations

import types
from typing import Any, ClassVar

import torch

from alignkit import ops
from alignkit.dist import TP
from alignkit.engines.hook_points import relies_on, replaces

from . import modules


class Replacement(torch.nn.Module):
    """Base class of the replacements.

    op: op that the module runs through. required: attributes of TransformerEngine's module with the only supported
    values. ignores_children: the module's children do not run.
    """

    op: ClassVar[str]
    required: ClassVar[dict[str, Any]] = {}
    ignores_children: ClassVar[bool] = False
    tp_group: torch.distributed.ProcessGroup | None

    def __reduce_ex__(self, protocol):
        """Pickle and copy the module with its stock class; the next forward of its model patches it again."""
        # Later protocols require the object's own class.
        make, (_, *arguments), *state = super().__reduce_ex__(1)
        return make, (modules.stock_class(type(self)), *arguments), *state


_QUANTIZED = {"primary_weights_in_fp8": False, "te_quant_params": None}
_LINEAR = _QUANTIZED | {"te_return_bias": False, "weight_names": ["weight"]}
_NORM = {"zero_centered_gamma": False}
_ATTENTION = {"attention_type": "self", "qkv_format": "sbhd", "softmax_type": "vanilla", "return_max_logit": False}


class ColumnParallelLinear(Replacement):
    op = "linear"
    required = _LINEAR | {"parallel_mode": "column"}

    @replaces("extensions/transformer_engine.py:TELinear.forward")
    def forward(self, x):
        bias = self._parameters.get("bias")  # without one, the attribute is an empty tensor
        tp = TP(self.tp_group, agreed=True)
        return ops.linear(x, self.weight, bias, tp=tp, sequence_parallel=self.sequence_parallel), None


class LayerNormColumnParallelLinear(ColumnParallelLinear):
    """Norm and linear; the norm's output is rounded to the model type, as between separate modules."""

    op = "rms_norm, linear"
    required = ColumnParallelLinear.required | _NORM | {"normalization": "RMSNorm", "return_layernorm_output": False}

    @replaces("extensions/transformer_engine.py:TELayerNormColumnParallelLinear.forward")
    def forward(self, x):
        return ColumnParallelLinear.forward(self, ops.rms_norm(x, self.layer_norm_weight, self.eps))


class RowParallelLinear(Replacement):
    op = "row_parallel_linear"
    required = _LINEAR | {"parallel_mode": "row"}

    def forward(self, x):
        tp = TP(self.tp_group, agreed=True)
        return ops.row_parallel_linear(x, self.weight, tp=tp, sequence_parallel=self.sequence_parallel), None


class RMSNorm(Replacement):
    op = "rms_norm"
    required = _NORM

    @relies_on("extensions/transformer_engine.py:TENorm.__new__", "config hidden_size eps")
    def forward(self, x, weight_only: bool = False):
        return modules.RMSNorm.forward(self, x, weight_only)  # pyright: ignore[reportArgumentType]


class DotProductAttention(Replacement):
    op = "attention"
    required = _ATTENTION
    ignores_children = True

    @property
    def pg_collection(self) -> types.SimpleNamespace:
        """Process groups, like Megatron's own attention; only the context-parallel one is used."""
        return types.SimpleNamespace(cp=self.cp_group)

    @replaces(
        "extensions/transformer_engine.py:TEDotProductAttention.forward",
        "query key value attention_mask attn_mask_type attention_bias packed_seq_params",
    )
    def forward(self, *args, **kwargs):
        return modules.DotProductAttention.forward(self, *args, **kwargs)  # pyright: ignore[reportArgumentType]


class ExpertLinear(Replacement):
    """Linear of one expert: returns its weight, like `moe.ColumnParallelLinear`."""

    op = "moe_experts"
    required = _LINEAR
    returns_weights = True

    def forward(self):
        return self.weight


class GroupedExpertLinear(Replacement):
    """Grouped linear of a rank's experts: returns the weight of each expert."""

    op = "moe_experts"
    required = _QUANTIZED | {"te_return_bias": False, "use_bias": False}
    returns_weights = True
    num_gemms: int

    def forward(self):
        return [getattr(self, f"weight{i}") for i in range(self.num_gemms)]


_MEGATRON = "megatron.core.extensions.transformer_engine"
relies_on("extensions/transformer_engine.py:TEColumnParallelLinear")
relies_on("extensions/transformer_engine.py:TERowParallelLinear")
relies_on("extensions/transformer_engine.py:TEColumnParallelGroupedLinear")
relies_on("extensions/transformer_engine.py:TERowParallelGroupedLinear")
ROWS: dict[str, type[Replacement]] = {
    f"{_MEGATRON}.TELayerNormColumnParallelLinear": LayerNormColumnParallelLinear,
    f"{_MEGATRON}.TEColumnParallelLinear": ColumnParallelLinear,
    f"{_MEGATRON}.TERowParallelLinear": RowParallelLinear,
    f"{_MEGATRON}.TEDotProductAttention": DotProductAttention,
    "transformer_engine.pytorch.module.rmsnorm.RMSNorm": RMSNorm,
}
"""Exact path of a stock class -> replacement."""

EXPERT_MODULES: dict[str, type[Replacement]] = {
    f"{_MEGATRON}.TEColumnParallelLinear": ExpertLinear,
    f"{_MEGATRON}.TERowParallelLinear": ExpertLinear,
    f"{_MEGATRON}.TEColumnParallelGroupedLinear": GroupedExpertLinear,
    f"{_MEGATRON}.TERowParallelGroupedLinear": GroupedExpertLinear,
}
"""Same map for modules below the experts of a MoELayer."""

_classes: dict[tuple[type, type], type] = {}


def aligned_class(cls: type, rows: dict[str, type[Replacement]]) -> type | None:
    """Return the aligned class of `cls`, derived on first use; None if `rows` has no replacement."""
    row = rows.get(f"{cls.__module__}.{cls.__qualname__}")
    if row is None:
        return None
    if (cls, row) not in _classes:
        derived = type(cls.__name__, (row, cls), {"__module__": __name__, "__doc__": row.__doc__})
        modules.STOCK[derived] = cls
        _classes[cls, row] = derived
    return _classes[cls, row]
