"""The ops of the contract. Each folder holds the public function, a reference and its backends."""

from .attention import attention, paged_attention
from .linear import linear, row_parallel_linear
from .linear_logp import head_logits, linear_logp, log_softmax, logp_from_logits, token_logp
from .rms_norm import rms_norm
from .rope import rope, rope_table
from .silu_mul import silu_mul

__all__ = [
    "attention",
    "head_logits",
    "linear",
    "linear_logp",
    "log_softmax",
    "logp_from_logits",
    "paged_attention",
    "rms_norm",
    "rope",
    "rope_table",
    "row_parallel_linear",
    "silu_mul",
    "token_logp",
]
