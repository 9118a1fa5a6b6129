"""Ops of the contract. Each folder holds the public functions, a reference implementation and the backends.

Public: names and signatures are documented in docs/api/ops.md. `gated_delta_rule.chunk_gated_delta_rule_bwd_dhu` is
public too, but is not exported by this file. It is one step of a layer's backward pass, which flash-linear-attention
calls; the ops in `__all__` are whole steps of a model.
"""

from ..runtime import dispatch
from .attention import attention, paged_attention
from .bit_sums import bit_sums
from .linear import linear, row_parallel_linear
from .linear_logp import head_logits, linear_logp, log_softmax, logp_from_logits, token_logp
from .moe_experts import moe_experts
from .moe_router import moe_router
from .qk_norm_rope import qk_norm_rope
from .rms_norm import rms_norm
from .rope import rope, rope_table
from .sigmoid_mul import sigmoid_mul
from .silu_mul import silu_mul

from . import registry  # isort: skip - after the functions, which the records use

__all__ = [
    "attention",
    "bit_sums",
    "head_logits",
    "linear",
    "linear_logp",
    "log_softmax",
    "logp_from_logits",
    "moe_experts",
    "moe_router",
    "paged_attention",
    "qk_norm_rope",
    "rms_norm",
    "rope",
    "rope_table",
    "row_parallel_linear",
    "sigmoid_mul",
    "silu_mul",
    "token_logp",
]


for _record in registry.RECORDS:
    dispatch.register(_record.folder, _record.kernels)
