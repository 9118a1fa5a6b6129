"""TransformerEngine 2.16's `DotProductAttention`: causal attention of padded and packed sequences.

The parameters are those that Megatron-core's wrapper passes. alignkit reads ``cp_group``, ``attn_mask_type``,
``attention_dropout``, and the attributes in ``required`` of its replacement in alignkit/megatron/te.py.
"""

import math

import torch

from ...module.base import TransformerEngineBaseModule, no_torch_dynamo
from .backends import FlashAttention, UnfusedDotProductAttention


def _remove_extra_states_check(module, incompatible_keys):
    """Ignore a missing _extra_state, which distributed checkpoints lack."""
    for key in incompatible_keys.missing_keys:
        if "core_attention._extra_state" in key:
            incompatible_keys.missing_keys.remove(key)


class DotProductAttention(TransformerEngineBaseModule):
    def __init__(
        self,
        num_attention_heads,
        kv_channels,
        num_gqa_groups=None,
        attention_dropout=0.0,
        qkv_format="sbhd",
        attn_mask_type="causal",
        window_size=None,
        sequence_parallel=False,
        tp_size=1,
        get_rng_state_tracker=None,
        tp_group=None,
        layer_number=None,
        attention_type="self",
        cp_group=None,
        cp_global_ranks=None,
        cp_stream=None,
        cp_comm_type="p2p",
        softmax_scale=None,
        softmax_type="vanilla",
        return_max_logit=False,
        name=None,
    ):
        super().__init__(name)
        self.qkv_format = qkv_format
        self.attn_mask_type = attn_mask_type
        self.window_size = window_size or (-1, 0)
        self._set_tensor_parallel(tp_group, tp_size)
        self.num_attention_heads = num_attention_heads
        self.layer_number = layer_number or 1
        self.cp_group = cp_group
        self.cp_global_ranks = cp_global_ranks
        self.cp_stream = cp_stream
        self.cp_comm_type = cp_comm_type
        self.num_gqa_groups = num_gqa_groups or num_attention_heads
        self.attention_type = attention_type
        self.attention_dropout = attention_dropout
        self.return_max_logit = return_max_logit
        self.softmax_type = softmax_type
        self.softmax_offset = None
        scale = softmax_scale or 1.0 / math.sqrt(kv_channels if isinstance(kv_channels, int) else kv_channels[0])
        self.flash_attention = FlashAttention(scale, attention_dropout)
        self.unfused_attention = UnfusedDotProductAttention(scale, attention_dropout)
        self.register_load_state_dict_post_hook(_remove_extra_states_check)

    @no_torch_dynamo
    def forward(self, query, key, value, attention_mask=None, qkv_format=None, cu_seqlens_q=None, **_):
        self.prepare_forward(query)
        if (qkv_format or self.qkv_format) == "thd":
            return self.unfused_attention(query, key, value, cu_seqlens_q)
        s, b = query.shape[:2]
        cu_seqlens = torch.arange(b + 1) * s
        q, k, v = (x.transpose(0, 1).flatten(0, 1) for x in (query, key, value))
        return self.unfused_attention(q, k, v, cu_seqlens).view(b, s, -1).transpose(0, 1).contiguous()
