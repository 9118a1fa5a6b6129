"""What Megatron-core's TransformerConfig may ask for: the table, and its reader."""

from __future__ import annotations

import dataclasses
import functools

import torch
import torch.nn.functional as F

from alignkit.dist import CP
from alignkit.engines.policy import Policy, Row, only, refusals
from alignkit.errors import UnsupportedError

_RECOMPUTED = {"core_attn", "mlp"}
"""Of `recompute_modules`: what is computed again from its inputs alone. An op gives the same bits each time."""

UNUSED = {
    "the loss is alignkit's, whichever of Megatron's functions is called": """
        cross_entropy_loss_fusion cross_entropy_fusion_impl
    """,
    "only layers for multi-token prediction read it, and `mtp_num_layers` says that there are none": """
        mtp_loss_scaling_factor mtp_use_repeated_layer mtp_detach_heads
    """,
    "only FP8 reads it, and `fp8` is None": """
        fp8_recipe fp8_margin fp8_interval fp8_amax_history_len fp8_amax_compute_algo fp8_wgrad
    """,
    "only CUDA graphs read it, and `cuda_graph_impl` is 'none'": "cuda_graph_warmup_steps",
    "only another activation than SwiGLU reads it": "use_fused_weighted_squared_relu",
    "attention is alignkit's, whichever library Megatron would take": "flash_attention_version",
    "it seeds what Megatron's inference samples; inference contexts are refused": "inference_sampling_seed",
}
"""Why a field that frameworks set changes no bit -> the fields. Whatever it says, nothing that an aligned model runs reads
it."""
_TRANSPORTS = {None, "p2p", "all_gather", "a2a"}


def _heads_refusal(config) -> str | None:
    tp = config.tensor_model_parallel_size
    if config.context_parallel_size == 1 or config.num_query_groups % tp:  # the latter is refused anyway
        return None
    return CP.refusal(config.context_parallel_size, config.num_attention_heads // tp, config.num_query_groups // tp)


POLICY = Policy(
    # Sizes, what the aligned modules do themselves, and what has no part in the numbers.
    free="""
        num_layers is_hybrid_model hidden_size num_attention_heads kv_channels ffn_hidden_size layernorm_epsilon
        qk_layernorm add_qkv_bias hidden_dropout attention_dropout
        autocast_dtype bf16 deterministic_mode attention_softmax_in_fp32
        tensor_model_parallel_size sequence_parallel expert_tensor_parallel_size
        pipeline_model_parallel_size virtual_pipeline_model_parallel_size pipeline_model_parallel_layout
        num_layers_in_first_pipeline_stage num_layers_in_last_pipeline_stage
        account_for_embedding_in_pipeline_split account_for_loss_in_pipeline_split
        pipeline_model_parallel_comm_backend microbatch_group_size_per_vp_stage overlap_p2p_comm_warmup_flush
        async_tensor_model_parallel_allreduce clone_scatter_output_in_embedding variable_seq_lengths
        init_method output_layer_init_method init_method_std embedding_init_method embedding_init_method_std
        perform_initialization use_cpu_initialization init_model_with_meta_device
        attention_backend transformer_impl disable_bf16_reduced_precision_matmul
        bias_activation_fusion bias_dropout_fusion masked_softmax_fusion apply_rope_fusion persist_layer_norm
        memory_efficient_layer_norm use_te_rng_tracker disable_parameter_transpose_cache
        timers finalize_model_grads_func grad_scale_func no_sync_func grad_sync_func param_sync_func
        calculate_per_token_loss deallocate_pipeline_outputs overlap_p2p_comm batch_p2p_comm batch_p2p_sync
        barrier_with_L1_time hetereogenous_dist_checkpoint
        recompute_granularity recompute_method recompute_num_layers distribute_saved_activations
        gradient_accumulation_fusion
    """
    + " ".join(UNUSED.values()),
    # These only speak to modules which are refused anyway.
    inert=("moe_", "mamba_", "dsa_"),
    rows=(
        only("normalization", "RMSNorm", "LayerNorm"),
        only("gated_linear_unit", True, "an activation other than SwiGLU"),
        only("activation_func", F.silu, "an activation other than SwiGLU"),
        only("add_bias_linear", False),
        Row(
            "recompute_modules",
            lambda modules, config: config.recompute_granularity != "selective" or _RECOMPUTED.issuperset(modules),
            "{field} (selective activation recomputation): {value!r} is not supported, only "
            + ", ".join(sorted(_RECOMPUTED)),
        ),
        Row(
            "mtp_num_layers",
            lambda layers, _: not layers,
            "{field} (multi-token prediction, MTP): {value!r} is not supported, only None and 0",
        ),
        Row(
            "params_dtype",
            lambda dtype, _: dtype in (torch.float32, torch.bfloat16),
            "{field}: {value} is not supported",
        ),
        Row(
            "pipeline_dtype",
            lambda dtype, config: config.pipeline_model_parallel_size == 1 or dtype == config.params_dtype,
            "{field}: {value} is not supported, only params_dtype, {context.params_dtype}",
        ),
        Row(
            "context_parallel_size",
            lambda _, config: _heads_refusal(config) is None,
            lambda _, config: f"context_parallel_size: {_heads_refusal(config)}, those of a tensor-parallel rank",
        ),
        Row(
            "cp_comm_type",
            # How Megatron's ranks exchange what they attend to; alignkit's do in one way.
            lambda kind, _: _TRANSPORTS.issuperset(kind if isinstance(kind, list) else [kind]),
            "{field}: {value!r} is not supported, only p2p, all_gather and a2a: no hierarchical context parallelism",
        ),
        Row(
            "num_query_groups",
            lambda groups, config: groups % config.tensor_model_parallel_size == 0,
            "{field}: {value} KV heads do not divide over {context.tensor_model_parallel_size} tensor-parallel ranks",
        ),
    ),
    called={
        "num_moe_experts": "mixture of experts (MoE)",
        "multi_latent_attention": "multi-latent attention (MLA)",
        "hierarchical_context_parallel_sizes": "hierarchical context parallelism",
        "hybrid_context_parallel": "context parallelism of several sizes",
        "window_size": "sliding window attention",
        "defer_embedding_wgrad_compute": "weight gradient deferral",
        "delay_wgrad_compute": "weight gradient deferral",
    },
)


def check_config(config) -> None:
    """UnsupportedError naming the first field of a TransformerConfig that alignkit does not keep aligned."""
    for refusal in refusals(config, _rows(), context=config):
        raise UnsupportedError(refusal)


@functools.cache
def _rows() -> tuple[Row, ...]:
    """Of every field, with the defaults of a TransformerConfig that asks for nothing but its sizes."""
    from megatron.core.transformer.transformer_config import TransformerConfig

    plain = TransformerConfig(num_layers=1, hidden_size=64, num_attention_heads=1)
    return POLICY.over([f.name for f in dataclasses.fields(plain)], functools.partial(getattr, plain))
