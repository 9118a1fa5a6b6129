"""Ops of the contract. Each folder holds the public functions, a reference implementation and the backends.

Public: names and signatures are documented in docs/api/ops.md. `gated_delta_rule.chunk_gated_delta_rule_bwd_dhu` is
public too, but is not exported by this file. It is one step of a layer's backward pass, which flash-linear-attention
calls; the ops in `__all__` are whole steps of a model.
"""

from ..runtime import dispatch
from .attention import attention, paged_attention
from .bit_sums import bit_sums
from .delta_gates import delta_gates
from .delta_rule import delta_page_words, delta_rule, paged_delta_rule
from .gated_rms_norm import gated_rms_norm
from .l2_norm import l2_norm
from .linear import linear, row_parallel_linear
from .linear_logp import head_logits, linear_logp, log_softmax, logp_from_logits, token_logp
from .moe_experts import moe_experts
from .moe_router import moe_router
from .qk_norm_rope import qk_norm_rope
from .rms_norm import rms_norm
from .rope import rope, rope_table
from .short_conv import paged_short_conv, short_conv
from .sigmoid_mul import sigmoid_mul
from .silu_mul import silu_mul

from . import registry  # isort: skip - after the functions, which the records use

__all__ = [
    "attention",
    "bit_sums",
    "delta_gates",
    "delta_page_words",
    "delta_rule",
    "gated_rms_norm",
    "head_logits",
    "l2_norm",
    "linear",
    "linear_logp",
    "log_softmax",
    "logp_from_logits",
    "moe_experts",
    "moe_router",
    "paged_attention",
    "paged_delta_rule",
    "paged_short_conv",
    "qk_norm_rope",
    "rms_norm",
    "rope",
    "rope_table",
    "row_parallel_linear",
    "short_conv",
    "sigmoid_mul",
    "silu_mul",
    "token_logp",
]


for _record in registry.RECORDS:
    dispatch.register(_record.folder, _record.kernels)
