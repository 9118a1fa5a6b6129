"""TransformerEngine's ``pytorch``: the modules that Megatron-core's wrappers subclass, at the same paths."""

from . import distributed, fp8, ops
from .attention.dot_product_attention.dot_product_attention import DotProductAttention
from .module.grouped_linear import GroupedLinear
from .module.layernorm_linear import LayerNormLinear
from .module.linear import Linear
from .module.rmsnorm import RMSNorm
from .quantization import fp8_autocast, fp8_model_init

__all__ = [
    "DotProductAttention",
    "GroupedLinear",
    "LayerNormLinear",
    "Linear",
    "RMSNorm",
    "distributed",
    "fp8",
    "fp8_autocast",
    "fp8_model_init",
    "ops",
]
