"""Policy for Megatron-core's TransformerConfig: the table of its fields, and the check.

A field that is not in the table must have its default. A freed field that affects numerics or collectives also belongs
in `facts.FIELDS`. Recipe checks (alignkit/integrations/recipe) read the table too.
"""

from __future__ import annotations

import dataclasses
import functools

import torch
import torch.nn.functional as F

from alignkit.dist import CP
from alignkit.engines.policy import Policy, Row, only, refusals
from alignkit.engines.versions import training_check
from alignkit.errors import UnsupportedError
from alignkit.megatron.versions import installed

_RECOMPUTED = {"core_attn", "mlp", "moe", "moe_act", "shared_experts"}
"""Supported `recompute_modules`: recomputed from their inputs alone, or by alignkit's ops, to the same bits."""

UNUSED = {
    "alignkit computes the loss, whichever of Megatron's functions is called": """
        cross_entropy_loss_fusion cross_entropy_fusion_impl
    """,
    "only multi-token prediction layers read it, and `mtp_num_layers` must be None or 0": """
        mtp_loss_scaling_factor mtp_use_repeated_layer mtp_detach_heads
    """,
    "only FP8 reads it, and `fp8` must be None": """
        fp8_recipe fp8_margin fp8_interval fp8_amax_history_len fp8_amax_compute_algo fp8_wgrad
    """,
    "only CUDA graphs read it, and `cuda_graph_impl` must be 'none'": "cuda_graph_warmup_steps",
    "only activations other than SwiGLU read it": "use_fused_weighted_squared_relu",
    "alignkit computes attention, whichever library Megatron would use": "flash_attention_version",
    "it seeds Megatron's inference sampling, which is not supported": "inference_sampling_seed",
    "alignkit computes the router's logits in fp32 and selects the experts": "moe_router_dtype moe_router_fusion",
    "one alignkit op computes all experts of a layer": """
        moe_grouped_gemm moe_permute_fusion moe_token_drop_policy moe_shared_expert_overlap moe_layer_recompute
    """,
    "alignkit exchanges tokens between ranks itself, whichever dispatcher is configured": """
        moe_token_dispatcher_type moe_enable_deepep moe_flex_dispatcher_backend moe_flex_dispatcher_num_sms
        moe_deepep_num_sms moe_hybridep_num_sms moe_hybridep_num_blocks_permute moe_hybridep_num_blocks_unpermute
        moe_hybridep_num_sms_preprocessing moe_hybridep_pad_uneven_dispatch_inputs moe_permute_fusion_into_hybridep
        moe_ncclep_static_shape moe_ncclep_zero_copy
    """,
    "only unsupported features read it": """
        moe_router_quantile_balancing_ema moe_paged_stash_page_size moe_paged_stash_buffer_size_factor_cuda
        moe_paged_stash_buffer_size_factor_cpu
    """,
}
"""Reason why a field does not affect numerics -> such fields, which frameworks set and aligned models never read."""
_TRANSPORTS = {None, "p2p", "all_gather", "a2a"}
"""Supported values of `cp_comm_type`, which aligned attention ignores."""
_BALANCED = {"none", "aux_loss", "seq_aux_loss", "global_aux_loss"}
"""Load balancing that only affects gradients and the expert bias."""
_SCORES = {"softmax", "sigmoid"}
"""Score functions of `ops.moe_router`."""


def _heads_refusal(config) -> str | None:
    tp = config.tensor_model_parallel_size
    if config.context_parallel_size == 1 or config.num_query_groups % tp:  # num_query_groups has its own row
        return None
    return CP.refusal(config.context_parallel_size, config.num_attention_heads // tp, config.num_query_groups // tp)


POLICY = Policy(
    # Sizes, settings that the aligned modules implement, and settings that do not affect numerics.
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
        num_moe_experts moe_layer_freq moe_ffn_hidden_size moe_shared_expert_intermediate_size moe_shared_expert_gate
        moe_router_topk moe_router_pre_softmax moe_router_num_groups moe_router_topk_scaling_factor
        moe_router_enable_expert_bias moe_router_bias_update_rate moe_aux_loss_coeff moe_z_loss_coeff
        moe_per_layer_logging moe_grad_scale_func
    """
    + " ".join(UNUSED.values()),
    # Only unsupported modules read these.
    ignored_prefixes=("mamba_", "dsa_"),
    rows=(
        only("normalization", "RMSNorm"),
        only("gated_linear_unit", True, "SwiGLU"),
        Row(
            "activation_func",
            lambda function, _: function == F.silu,
            "{field} (SwiGLU): must be torch.nn.functional.silu, got {value!r}",
        ),
        only("add_bias_linear", False),
        Row(
            "recompute_modules",
            lambda modules, config: config.recompute_granularity != "selective" or _RECOMPUTED.issuperset(modules),
            "{field} (selective activation recomputation): must contain only "
            + ", ".join(sorted(_RECOMPUTED))
            + ", got {value!r}",
        ),
        Row(
            "mtp_num_layers",
            lambda layers, _: not layers,
            "{field} (multi-token prediction, MTP): must be None or 0, got {value!r}",
        ),
        Row(
            "params_dtype",
            lambda dtype, _: dtype in (torch.float32, torch.bfloat16),
            "{field}: must be torch.float32 or torch.bfloat16, got {value}",
        ),
        Row(
            "pipeline_dtype",
            lambda dtype, config: config.pipeline_model_parallel_size == 1 or dtype == config.params_dtype,
            "{field}: must equal params_dtype = {context.params_dtype}, got {value}",
        ),
        Row(
            "context_parallel_size",
            lambda _, config: _heads_refusal(config) is None,
            lambda _, config: f"context_parallel_size: {_heads_refusal(config)} (heads of each tensor-parallel rank)",
        ),
        Row(
            "cp_comm_type",
            # Megatron's exchange methods of attention; alignkit always uses its own.
            lambda kind, _: _TRANSPORTS.issuperset(kind if isinstance(kind, list) else [kind]),
            "{field}: must be None, 'p2p', 'all_gather' or 'a2a' (no hierarchical context parallelism), got {value!r}",
        ),
        Row(
            "expert_model_parallel_size",
            lambda ranks, config: (
                not config.num_moe_experts or (config.num_moe_experts & -config.num_moe_experts) % ranks == 0
            ),
            "{field}: must be a power of two that divides num_moe_experts = {context.num_moe_experts}, got {value}",
        ),
        Row(
            "moe_router_load_balancing_type",
            lambda kinds, _: _BALANCED.issuperset(kinds if isinstance(kinds, list) else [kinds]),
            f"{{field}}: must be one of {', '.join(sorted(_BALANCED))}, got {{value!r}}",
        ),
        Row(
            "moe_router_score_function",
            lambda score, _: score in _SCORES,
            f"{{field}}: must be one of {', '.join(sorted(_SCORES))}, got {{value!r}}",
        ),
        Row(
            "moe_router_group_topk",
            # Megatron scores a group by the sum of its topk // group_topk best experts, alignkit by its two best.
            lambda groups, config: (
                not groups or (config.moe_router_score_function == "sigmoid" and config.moe_router_topk // groups == 2)
            ),
            lambda groups, config: (
                f"moe_router_group_topk: moe_router_topk // moe_router_group_topk must be 2, got "
                f"{config.moe_router_topk} // {groups}"
                if config.moe_router_score_function == "sigmoid"
                else "moe_router_group_topk: must be None with moe_router_score_function = "
                f"{config.moe_router_score_function!r}, got {groups}"
            ),
        ),
        Row(
            "num_query_groups",
            lambda groups, config: groups % config.tensor_model_parallel_size == 0,
            "{field}: must be a multiple of tensor_model_parallel_size = {context.tensor_model_parallel_size}, got "
            "{value}",
        ),
    ),
    labels={
        "multi_latent_attention": "multi-latent attention (MLA)",
        "hierarchical_context_parallel_sizes": "hierarchical context parallelism",
        "hybrid_context_parallel": "context parallelism with several group sizes",
        "window_size": "sliding window attention",
        "defer_embedding_wgrad_compute": "weight gradient deferral",
        "delay_wgrad_compute": "weight gradient deferral",
        "overlap_dispatch_backward_with_experts_wgrad": "weight gradient deferral",
        "overlap_moe_expert_parallel_comm": "overlap of expert communication between micro-batches",
        "expert_tensor_parallel_num_weight_shards": "sharding of expert weights",
        "expert_gtp_weight_remat_size": "sharding of expert weights",
        "use_grouped_gemm_for_shared_expert": "grouped GEMM of shared experts",
        "moe_extended_tp": "experts over all tensor-parallel ranks",
        "moe_use_legacy_grouped_gemm": "the legacy GroupedMLP",
        "moe_single_grouped_weight": "a single parameter for all experts",
        "moe_single_grouped_bias": "a single parameter for all experts",
        "moe_mlp_glu_interleave_size": "interleaved gate and up projections",
        "moe_shared_expert_glu_interleave_size": "interleaved gate and up projections",
        "moe_latent_size": "latent MoE",
        "moe_apply_probs_on_input": "routing weights applied to the experts' input",
        "moe_input_jitter_eps": "noise on the router's input",
        "moe_enable_routing_replay": "routing replay",
        "moe_router_force_load_balancing": "random routing",
        "moe_router_force_biased": "random routing",
        "moe_router_topk_limited_devices": "device-limited routing",
        "moe_router_padding_for_quantization": "padding for FP8",
        "moe_router_padding_for_fp8": "padding for FP8",
        "moe_token_dropping": "token dropping",
        "moe_expert_capacity_factor": "token dropping",
        "moe_expert_rank_capacity_factor": "token dropping",
        "moe_pad_expert_input_to_capacity": "token dropping",
        "moe_pad_experts_for_cuda_graph_inference": "Megatron's inference",
        "moe_paged_stash": "paged stash of activations",
    },
)


@functools.cache
def restricted() -> tuple[str, ...]:
    """Return the names of the fields that `check_config` reads."""
    return tuple(dict.fromkeys(row.field for row in _rows()))


def check_config(config) -> None:
    """Raise UnsupportedError naming the first field of a TransformerConfig that alignkit does not support."""
    for refusal in refusals(config, _rows(), context=config):
        raise UnsupportedError(refusal)
    sizes = {
        name: getattr(config, f"{field}_model_parallel_size" if field != "context" else "context_parallel_size")
        for name, field in (("tp", "tensor"), ("ep", "expert"), ("pp", "pipeline"), ("cp", "context"))
    }
    installed(training_check(config.num_moe_experts is not None, sp=config.sequence_parallel, **sizes))


@functools.cache
def _rows() -> tuple[Row, ...]:
    """Return the rows for all fields, with the defaults of a TransformerConfig that has only sizes."""
    from megatron.core.transformer.transformer_config import TransformerConfig

    plain = TransformerConfig(num_layers=1, hidden_size=64, num_attention_heads=1)
    rows = POLICY.rows_for([f.name for f in dataclasses.fields(plain)], functools.partial(getattr, plain))
    return tuple(_moe_only(row) if row.field.startswith("moe_") else row for row in rows)


def _moe_only(row: Row) -> Row:
    """Return the row for MoE models only; a dense model does not read the field."""
    return dataclasses.replace(
        row, allows=lambda value, config: config.num_moe_experts is None or row.allows(value, config)
    )
