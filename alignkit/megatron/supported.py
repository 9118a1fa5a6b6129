"""What alignkit keeps aligned in Megatron-core, and the refusal, by name, of everything else.

Configurations and modules are checked against what is known to be right, not against what is known to be
wrong: a field or a class that this file does not know is refused.
"""
from __future__ import annotations

import dataclasses
import functools

import torch
import torch.nn.functional as F

from alignkit import backends
from alignkit.errors import BackendError, InputError, UnsupportedError

_REQUIRED = {"normalization": "RMSNorm", "gated_linear_unit": True, "activation_func": F.silu,
             "add_bias_linear": False}

_FREE = frozenset("""
    num_layers hidden_size num_attention_heads num_query_groups kv_channels ffn_hidden_size layernorm_epsilon
    qk_layernorm add_qkv_bias hidden_dropout attention_dropout
    params_dtype pipeline_dtype autocast_dtype bf16 deterministic_mode attention_softmax_in_fp32
    tensor_model_parallel_size sequence_parallel expert_tensor_parallel_size
    microbatch_group_size_per_vp_stage
    async_tensor_model_parallel_allreduce clone_scatter_output_in_embedding variable_seq_lengths
    init_method output_layer_init_method init_method_std embedding_init_method embedding_init_method_std
    perform_initialization use_cpu_initialization init_model_with_meta_device
    attention_backend transformer_impl disable_bf16_reduced_precision_matmul
    bias_activation_fusion bias_dropout_fusion masked_softmax_fusion apply_rope_fusion persist_layer_norm
    memory_efficient_layer_norm use_te_rng_tracker disable_parameter_transpose_cache
    timers finalize_model_grads_func grad_scale_func no_sync_func grad_sync_func param_sync_func
    calculate_per_token_loss deallocate_pipeline_outputs overlap_p2p_comm batch_p2p_comm batch_p2p_sync
    barrier_with_L1_time hetereogenous_dist_checkpoint
""".split())
"""Fields of TransformerConfig that may have any value: sizes, what the aligned modules do themselves, and
what has no part in the numbers. Every other field must be at its default."""

_INERT = ("moe_", "mamba_", "dsa_")
"""Fields that only speak to modules which are refused anyway."""

_CALLED = {
    "num_moe_experts": "mixture of experts (MoE)",
    "multi_latent_attention": "multi-latent attention (MLA)",
    "mtp_num_layers": "multi-token prediction (MTP)",
    "pipeline_model_parallel_size": "pipeline parallelism",
    "context_parallel_size": "context parallelism",
    "window_size": "sliding window attention",
    "cross_entropy_loss_fusion": "fused cross-entropy",
    "recompute_granularity": "activation recomputation",
    "defer_embedding_wgrad_compute": "weight gradient deferral",
    "delay_wgrad_compute": "weight gradient deferral",
    "normalization": "LayerNorm",
    "gated_linear_unit": "an activation other than SwiGLU",
    "activation_func": "an activation other than SwiGLU",
}
"""What people call the thing that a field switches on."""


def check_config(config) -> None:
    """UnsupportedError naming the first field of a TransformerConfig that alignkit does not keep aligned."""
    for name, default in _defaults().items():
        if name in _FREE or name.startswith(_INERT):
            continue
        wanted, value = _REQUIRED.get(name, default), getattr(config, name)
        if value != wanted:
            called = f" ({_CALLED[name]})" if name in _CALLED else ""
            raise UnsupportedError(f"{name}{called}: {value!r} is not supported, only {wanted!r}")
    if config.params_dtype not in (torch.float32, torch.bfloat16):
        raise UnsupportedError(f"params_dtype: {config.params_dtype} is not supported")
    if config.num_query_groups % config.tensor_model_parallel_size:
        raise UnsupportedError(f"num_query_groups: {config.num_query_groups} KV heads do not divide over "
                               f"{config.tensor_model_parallel_size} tensor-parallel ranks")


@functools.cache
def _defaults() -> dict[str, object]:
    """Every field of a TransformerConfig that asks for nothing but its sizes."""
    from megatron.core.transformer.transformer_config import TransformerConfig

    plain = TransformerConfig(num_layers=1, hidden_size=64, num_attention_heads=1)
    return {f.name: getattr(plain, f.name) for f in dataclasses.fields(TransformerConfig)}


def check_model(model, vocab_size: int) -> None:
    """UnsupportedError for a GPTModel whose own settings alignkit does not keep aligned; InputError for a
    `vocab_size` that is not its own."""
    if not (model.pre_process and model.post_process):
        raise UnsupportedError("pre_process / post_process: pipeline parallelism is not supported")
    if model.mtp_process:
        raise UnsupportedError("mtp_block_spec: multi-token prediction (MTP) is not supported")
    if model.position_embedding_type != "rope":
        raise UnsupportedError(f"position_embedding_type: {model.position_embedding_type!r} is not supported")
    if model.rotary_percent != 1.0:
        raise UnsupportedError(f"rotary_percent: {model.rotary_percent} is not supported, only 1.0")
    if model.rotary_scaling:
        raise UnsupportedError("rope_scaling: scaled rotary embeddings are not supported")
    if model.config.sequence_parallel and not model.embedding.scatter_to_sequence_parallel:
        raise UnsupportedError("scatter_embedding_sequence_parallel: False is not supported")
    if not 0 < vocab_size <= model.vocab_size:
        raise InputError(f"vocab_size: {vocab_size} is not in [1, {model.vocab_size}], the padded size")


def check_rotary(rotary, base: float, head_dim: int) -> None:
    """UnsupportedError unless the module's frequencies are the default ones, bit for bit."""
    if rotary.rotary_interleaved or rotary.seq_len_interpolation_factor is not None:
        raise UnsupportedError("rotary_interleaved / seq_len_interpolation_factor: neither is supported")
    expected = 1.0 / base ** (torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim)
    if not torch.equal(rotary.inv_freq.cpu(), expected):
        raise UnsupportedError("rotary_pos_emb: scaled rotary embeddings are not supported")


def check_module(path: str, module: torch.nn.Module) -> None:
    """UnsupportedError for what is not supported of one known module, told apart by its attributes."""
    for name in ("forward", "_forward_impl"):
        if name in module.__dict__:
            raise UnsupportedError(f"{path}.{name}: the module's own method has been replaced")
    if getattr(module, "bias", None) is not None and not path.endswith("linear_qkv"):
        raise UnsupportedError(f"{path}.bias: only QKV bias is supported")
    if getattr(module, "disable_grad_reduce", False) or getattr(module, "is_expert", False):
        raise UnsupportedError(f"{path}: disable_grad_reduce (LoRA) and is_expert (MoE) are not supported")
    if not getattr(module, "input_is_parallel", True):
        raise UnsupportedError(f"{path}.input_is_parallel: False is not supported")
    if getattr(module, "gtp_remat_size", 1) > 1:
        raise UnsupportedError(f"{path}.gtp_remat_size: {module.gtp_remat_size} is not supported, only 1")
    if isinstance(module, torch.nn.RMSNorm) and (module.weight is None or module.eps is None):
        raise UnsupportedError(f"{path}: RMSNorm without weight or eps is not supported")
    mask = getattr(module, "attn_mask_type", None)
    if mask is not None and mask.name not in ("causal", "padding_causal"):
        raise UnsupportedError(f"{path}.attn_mask_type: {mask.name} is not supported, only causal")


def check_running(path: str, module: torch.nn.Module) -> None:
    """UnsupportedError for what only matters once the model runs: dropout in training, and the device."""
    if isinstance(module, torch.nn.Dropout) and module.p > 0 and module.training:
        raise UnsupportedError(f"{path}: dropout of {module.p} in training is not supported")
    for name, parameter in module.named_parameters(recurse=False):
        try:
            backends.name(parameter.device)
        except BackendError as e:
            raise UnsupportedError(f"{path}.{name}: {e}") from None


def check_tokens(tokens: torch.Tensor, vocab_size: int) -> None:
    """InputError for a token outside the vocabulary; with tensor parallelism Megatron embeds it as zeros."""
    if tokens.numel() and not 0 <= int(tokens.min()) <= int(tokens.max()) < vocab_size:
        raise InputError(f"input_ids: ids {int(tokens.min())} to {int(tokens.max())} leave [0, {vocab_size})")


def check_call(s: int, b: int, attention_mask, *, packed_seq_params=None, inference_context=None,
               inference_params=None, attention_bias=None, context=None, extract_layer_indices=None,
               **_) -> dict:
    """Checks what a TransformerBlock is called with, and returns what must agree between ranks.

    s, b: length and size of the whole micro-batch.
    """
    if inference_context is not None or inference_params is not None:
        raise UnsupportedError("inference_context: Megatron's inference is not supported")
    if attention_bias is not None or context is not None or extract_layer_indices:
        raise UnsupportedError("attention_bias / context / extract_layer_indices: none is supported")
    packed = None
    if packed_seq_params is not None:
        if b != 1 or attention_mask is not None:
            raise UnsupportedError("packed_seq_params: needs a micro-batch of one row and no attention_mask")
        packed = packed_cu_seqlens(packed_seq_params, s).tolist()
    elif attention_mask is not None and not _is_causal(attention_mask, s, b):
        raise UnsupportedError("attention_mask: only a causal one, with padding on the right, is supported")
    return {"micro-batch": (s, b), "cu_seqlens": packed}


def packed_cu_seqlens(params, total: int) -> torch.Tensor:
    """``cu_seqlens`` ``[B+1]`` of a packed micro-batch of `total` tokens, each sequence with its padding."""
    if params.qkv_format != "thd":
        raise UnsupportedError(f"packed_seq_params.qkv_format: {params.qkv_format!r} is not supported")
    if (getattr(params, "cp_group", None) is not None and params.cp_group.size() > 1):
        raise UnsupportedError("packed_seq_params.cp_group: context parallelism is not supported")
    q, kv = params.cu_seqlens_q, params.cu_seqlens_kv
    if params.cu_seqlens_q_padded is not None:
        q, kv = params.cu_seqlens_q_padded, params.cu_seqlens_kv_padded
    if kv is None or not torch.equal(q, kv):
        raise InputError("packed_seq_params: cu_seqlens of queries and of keys differ")
    if int(q[-1]) != total:
        raise InputError(f"packed_seq_params: cu_seqlens ends at {int(q[-1])}, there are {total} tokens")
    return q


def _is_causal(mask, s: int, b: int) -> bool:
    """Whether a mask (True hides) is causal for the tokens of each sequence, with padding on the right."""
    if (not isinstance(mask, torch.Tensor) or mask.dtype != torch.bool or mask.dim() != 4
            or mask.shape[0] not in (1, b) or mask.shape[1:] != (1, s, s)):
        return False
    mask = mask[:, 0]
    token = ~mask.diagonal(dim1=1, dim2=2)
    if not (token[:, 0].all() and torch.equal(token, token.long().cumprod(1).bool())):
        return False
    causal = torch.ones(s, s, dtype=torch.bool, device=mask.device).triu(1)
    return not ((mask ^ causal) & token[:, :, None]).any()
