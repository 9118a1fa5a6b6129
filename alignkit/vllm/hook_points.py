"""Hook points in vLLM: the names that the adapter subclasses, replaces or calls. `versions` lists them per version.

A row gives the file below vllm/, the dotted name, the parameters that it must accept, and the identifiers that its
source must contain. `patch_vllm` rejects a vLLM that lacks a row of its version. tests/vllm/test_hook_points.py
resolves the rows in every version. Add a row for a name that the adapter starts to use; remove unused rows.

The names of the last tables give the versions that they belong to; both ends of a range are included.
"""

from __future__ import annotations

from alignkit.engines.hook_points import HookPoint
from alignkit.models import FAMILIES

_LAYERS = "model_executor/layers/"
_SAMPLE_V2 = "v1/worker/gpu/sample/"

COMMON = (
    # Entry: the engine's configuration names the worker class, and the front end validates requests.
    HookPoint("engine/arg_utils.py", "EngineArgs.create_engine_config"),
    HookPoint("config/parallel.py", "ParallelConfig.worker_cls"),
    HookPoint("v1/engine/llm_engine.py", "InputProcessor"),
    HookPoint("v1/engine/async_llm.py", "InputProcessor"),
    HookPoint("v1/engine/input_processor.py", "InputProcessor.__init__", ("vllm_config", "renderer")),
    HookPoint("v1/engine/input_processor.py", "InputProcessor._validate_params", ("params", "supported_tasks")),
    HookPoint("v1/worker/cpu_worker.py", "CPUWorker.init_device"),
    HookPoint("v1/worker/gpu_worker.py", "Worker.load_model"),
    HookPoint("plugins/__init__.py", "load_general_plugins"),
    # `alignkit serve`: vLLM's subcommand, called directly.
    HookPoint("entrypoints/cli/serve.py", "cmd_init"),
    *(
        HookPoint("entrypoints/cli/serve.py", f"ServeSubcommand.{name}")
        for name in ("cmd", "validate", "subparser_init")
    ),
    HookPoint("utils/argparse_utils.py", "FlexibleArgumentParser"),
    # Checks of a running worker: the methods that run them, and the attributes that they read.
    *(
        HookPoint("v1/worker/gpu_worker.py", f"Worker.{name}")
        for name in ("execute_model", "compile_or_warm_up_model", "reload_weights", "finish_weight_update", "wake_up")
    ),
    HookPoint("v1/worker/worker_base.py", "WorkerBase.apply_model", ("fn",)),
    HookPoint("config/compilation.py", "CompilationConfig.static_forward_context"),
    HookPoint("config/model.py", "ModelConfig.hf_config_path"),
    # Layer classes, replaced when the model is built.
    HookPoint("model_executor/custom_op.py", "op_registry_oot"),
    HookPoint("model_executor/custom_op.py", "PluggableLayer.__new__"),
    HookPoint("model_executor/custom_op.py", "CustomOp.__new__"),
    HookPoint(_LAYERS + "linear.py", "UnquantizedLinearMethod.process_weights_after_loading", ("layer",)),
    HookPoint(_LAYERS + "linear.py", "UnquantizedLinearMethod.apply", ("layer", "x", "bias")),
    HookPoint(_LAYERS + "linear.py", "ReplicatedLinear"),
    HookPoint(_LAYERS + "linear.py", "ColumnParallelLinear"),
    HookPoint(_LAYERS + "linear.py", "MergedColumnParallelLinear"),
    HookPoint(_LAYERS + "linear.py", "QKVParallelLinear"),
    HookPoint(_LAYERS + "linear.py", "RowParallelLinear", ("input_is_parallel", "reduce_results", "disable_tp")),
    HookPoint(_LAYERS + "linear.py", "RowParallelLinear.forward", ("input_",)),
    HookPoint(_LAYERS + "vocab_parallel_embedding.py", "UnquantizedEmbeddingMethod.tie_weights"),
    HookPoint(_LAYERS + "vocab_parallel_embedding.py", "VocabParallelEmbedding"),
    HookPoint(_LAYERS + "vocab_parallel_embedding.py", "ParallelLMHead.tie_weights"),
    HookPoint(_LAYERS + "layernorm.py", "RMSNorm", ("eps", "var_hidden_size", "has_weight")),
    HookPoint(_LAYERS + "activation.py", "SiluAndMul"),
    # MoE layers: the router, the creation of weights, and the runner.
    HookPoint(_LAYERS + "fused_moe/router/gate_linear.py", "GateLinear"),
    HookPoint(
        _LAYERS + "fused_moe/unquantized_fused_moe_method.py",
        "UnquantizedFusedMoEMethod.create_weights",
        ("layer", "num_experts", "hidden_size", "intermediate_size_per_partition", "params_dtype"),
    ),
    HookPoint(
        _LAYERS + "fused_moe/unquantized_fused_moe_method.py",
        "UnquantizedFusedMoEMethod.process_weights_after_loading",
        ("layer",),
    ),
    HookPoint(
        _LAYERS + "fused_moe/fused_moe_method_base.py",
        "FusedMoEMethodBase.maybe_roundup_sizes",
        ("hidden_size", "intermediate_size_per_partition", "act_dtype", "moe_parallel_config"),
    ),
    HookPoint(
        _LAYERS + "fused_moe/routed_experts.py",
        "RoutedExperts.__init__",
        mentions=(
            *("global_num_experts", "local_num_experts", "top_k", "renormalize", "scoring_func", "use_grouped_topk"),
            *("custom_routing_function", "routed_scaling_factor", "e_score_correction_bias"),
            *("apply_router_weight_on_input", "swiglu_limit", "expert_map_manager", "quant_method"),
        ),
    ),
    HookPoint(
        _LAYERS + "fused_moe/runner/moe_runner.py",
        "MoERunner.__init__",
        ("moe_config", "router", "routed_experts", "gate", "shared_experts", "routed_input_transform"),
        ("shared_expert_gate", "routed_output_transform", "routed_scaling_factor", "layer_name"),
    ),
    HookPoint(
        _LAYERS + "fused_moe/runner/moe_runner.py", "MoERunner.forward", ("hidden_states", "router_logits", "input_ids")
    ),
    *(
        HookPoint(_LAYERS + "fused_moe/config.py", f"FusedMoEParallelConfig.{field}")
        for field in "tp_size ep_size ep_rank dp_size sp_size pcp_size is_sequence_parallel enable_eplb".split()
    ),
    # Data-parallel replicas that share experts: groups, number of rows, and dummy batches.
    *(HookPoint("distributed/parallel_state.py", name) for name in ("get_dp_group", "get_ep_group")),
    HookPoint("forward_context.py", "DPMetadata.num_tokens_across_dp_cpu"),
    HookPoint("forward_context.py", "ForwardContext.dp_metadata"),
    HookPoint("v1/worker/gpu_worker.py", "Worker.execute_dummy_batch"),
    *(
        HookPoint(_LAYERS + "fused_moe/config.py", f"FusedMoEConfig.{field}")
        for field in ("num_experts", "num_logical_experts", "activation", "has_bias", "is_lora_enabled")
    ),
    *(
        HookPoint(_LAYERS + "fused_moe/expert_map_manager.py", f"ExpertMapManager.{name}")
        for name in ("placement_strategy", "local_num_experts")
    ),
    HookPoint(_LAYERS + "rotary_embedding/__init__.py", "_ROPE_DICT"),
    HookPoint(
        _LAYERS + "rotary_embedding/base.py",
        "RotaryEmbedding",
        ("head_size", "rotary_dim", "max_position_embeddings", "base", "is_neox_style", "init_cache"),
    ),
    HookPoint(_LAYERS + "rotary_embedding/llama3_rope.py", "Llama3RotaryEmbedding", ("orig_max_position",)),
    HookPoint(
        _LAYERS + "rotary_embedding/yarn_scaling_rope.py", "YaRNScalingRotaryEmbedding", ("scaling_factor", "truncate")
    ),
    *(
        HookPoint(_LAYERS + f"rotary_embedding/{file}.py", f"{cls}.__init__", mentions=names)
        for file, cls, names in (
            ("llama3_rope", "Llama3RotaryEmbedding", ("scaling_factor", "low_freq_factor", "high_freq_factor")),
            ("yarn_scaling_rope", "YaRNScalingRotaryEmbedding", ("beta_fast", "beta_slow", "mscale", "truncate")),
        )
    ),
    # Attention with QK norm fused into the rotary embedding: the attributes that its forward uses.
    *(
        HookPoint(
            f"model_executor/models/{file}.py",
            f"{cls}.forward",
            ("positions", "hidden_states"),
            ("qkv_proj", "q_size", "kv_size", "q_norm", "k_norm", "rotary_emb", "attn", "o_proj"),
        )
        for file, cls in (("qwen3", "Qwen3Attention"), ("qwen3_moe", "Qwen3MoeAttention"))
    ),
    HookPoint(_LAYERS + "logits_processor.py", "LogitsProcessor", ("scale", "logits_as_input", "soft_cap")),
    HookPoint(_LAYERS + "logits_processor.py", "LogitsProcessor._gather_logits", ("logits",)),
    HookPoint(_LAYERS + "logits_processor.py", "LogitsProcessor.get_top_tokens"),
    HookPoint(_LAYERS + "attention/attention.py", "Attention"),
    # Attention backends and their registry.
    HookPoint("v1/attention/backends/registry.py", "AttentionBackendEnum.is_overridden"),
    HookPoint("v1/attention/backends/registry.py", "AttentionBackendEnum.clear_override"),
    HookPoint("v1/attention/backends/registry.py", "register_backend", ("backend", "class_path")),
    HookPoint("v1/attention/selector.py", "_cached_get_attn_backend"),
    HookPoint("v1/attention/backend.py", "AttentionBackend.get_builder_cls"),
    HookPoint("v1/attention/backend.py", "AttentionImpl.forward", ("kv_cache", "attn_metadata", "output")),
    HookPoint(
        "v1/attention/backend.py", "AttentionMetadataBuilder", ("kv_cache_spec", "layer_names", "vllm_config", "device")
    ),
    HookPoint(
        "v1/attention/backend.py",
        "AttentionMetadataBuilder.build",
        ("common_prefix_len", "common_attn_metadata", "fast_build"),
    ),
    *(
        HookPoint("v1/attention/backend.py", f"CommonAttentionMetadata.{field}")
        for field in ("num_actual_tokens", "query_start_loc", "seq_lens", "block_table_tensor", "causal")
    ),
    HookPoint("v1/attention/backends/utils.py", "NULL_BLOCK_ID"),
    HookPoint(_LAYERS + "attention/attention.py", "unified_kv_cache_update", ("key", "value", "layer_name")),
    # Configuration fields that the policy and `refuse` read.
    *(
        HookPoint("config/vllm.py", f"VllmConfig.{field}")
        for field in (
            "use_v2_model_runner",
            "lora_config",
            "speculative_config",
            "kv_transfer_config",
            "offload_config",
            "diffusion_config",
            "attention_config",
        )
    ),
    *(
        HookPoint("config/parallel.py", f"ParallelConfig.{field}")
        for field in (
            "pipeline_parallel_size",
            "data_parallel_size",
            "decode_context_parallel_size",
            "prefill_context_parallel_size",
            "use_ubatching",
            "enable_expert_parallel",
        )
    ),
    HookPoint("config/attention.py", "AttentionConfig.backend"),
    *(
        HookPoint("config/compilation.py", f"CompilationConfig.{field}")
        for field in (
            "mode",
            "backend",
            "cudagraph_mode",
            "pass_config",
            "use_inductor_graph_partition",
            "inductor_passes",
            "cache_dir",
        )
    ),
    *(
        HookPoint("config/compilation.py", f"PassConfig.{field}")
        for field in ("fuse_allreduce_rms", "fuse_norm_quant", "fuse_act_quant")
    ),
    HookPoint("config/compilation.py", "CompilationMode.VLLM_COMPILE"),
    HookPoint("config/vllm.py", "VllmConfig.additional_config"),
    HookPoint("v1/attention/backend.py", "AttentionMetadataBuilder._cudagraph_support"),
    HookPoint("v1/attention/backend.py", "AttentionCGSupport.ALWAYS"),
    HookPoint(
        "distributed/device_communicators/base_device_communicator.py",
        "DeviceCommunicatorBase.all_gather",
        ("input_", "dim"),
    ),
    # Logprobs, V1 runner.
    HookPoint("v1/sample/sampler.py", "Sampler.compute_logprobs", ("logits",)),
    HookPoint("v1/sample/ops/topk_topp_sampler.py", "TopKTopPSampler.forward_cpu", ("logits", "generators", "k", "p")),
    # Logprobs, V2 runner: one function for all logprobs, and its callers.
    HookPoint(_SAMPLE_V2 + "logprob.py", "compute_token_logprobs", ("logits", "token_ids")),
    HookPoint(_SAMPLE_V2 + "logprob.py", "_ranks_kernel", ("logits_ptr", "vocab_size", "BLOCK_SIZE")),
    HookPoint(_SAMPLE_V2 + "sampler.py", "Sampler.sample"),
    HookPoint(_SAMPLE_V2 + "sampler.py", "Sampler.__call__", ("logits", "input_batch")),
    HookPoint(
        _SAMPLE_V2 + "prompt_logprob.py",
        "PromptLogprobsWorker.compute_prompt_logprobs",
        ("logits_fn", "hidden_states", "input_batch"),
    ),
    HookPoint(
        _SAMPLE_V2 + "prompt_logprob.py", "compute_prompt_logprobs_with_chunking", ("prompt_token_ids", "logits_fn")
    ),
    HookPoint(
        _SAMPLE_V2 + "states.py",
        "SamplingStates.apply_temperature",
        ("logits", "expanded_idx_mapping", "idx_mapping_np"),
    ),
    HookPoint("v1/worker/gpu/model_runner.py", "Sampler"),
    HookPoint("v1/worker/gpu/model_runner.py", "PromptLogprobsWorker"),
    # Supported model classes, which consist of the parts above.
    *(HookPoint(f"model_executor/models/{family.file}", family.architecture) for family in FAMILIES.values()),
)

CPU = (
    HookPoint("v1/attention/backends/registry.py", "AttentionBackendEnum.CPU_ATTN"),
    HookPoint(
        "v1/attention/backends/cpu_attn.py",
        "CPUAttentionBackendImpl.do_kv_cache_update",
        ("key", "value", "kv_cache", "slot_mapping"),
    ),
)

CUDA = (
    HookPoint("v1/attention/backends/registry.py", "AttentionBackendEnum.CUSTOM"),
    HookPoint(
        "v1/attention/backends/triton_attn.py",
        "TritonAttentionImpl.do_kv_cache_update",
        ("key", "value", "kv_cache", "slot_mapping"),
    ),
    HookPoint("v1/worker/gpu_worker.py", "Worker.init_device"),
    HookPoint("v1/worker/gpu_model_runner.py", "Sampler"),
    HookPoint("v1/worker/gpu_model_runner.py", "GPUModelRunner.get_model"),
    HookPoint("v1/worker/gpu/model_runner.py", "GPUModelRunner.get_model"),
    HookPoint(
        "v1/worker/gpu/model_runner.py",
        "GPUModelRunner.load_model",
        mentions=("sampler", "rejection_sampler", "prompt_logprobs_worker"),
    ),
    HookPoint(
        "_custom_ops.py",
        "reshape_and_cache_flash",
        ("key", "value", "key_cache", "value_cache", "slot_mapping", "kv_cache_dtype"),
    ),
    HookPoint(
        "v1/sample/ops/topk_topp_sampler.py", "TopKTopPSampler.forward_native", ("logits", "generators", "k", "p")
    ),
)


def _scores_of_v2(function: str) -> tuple[HookPoint, ...]:
    """Return the hook points of `function`, through which the V2 runner's classes call `compute_token_logprobs`."""
    return (
        HookPoint(
            _SAMPLE_V2 + "logprob.py",
            function,
            ("logits", "num_logprobs", "sampled_token_ids"),
            ("compute_token_logprobs", "_ranks_kernel"),
        ),
        *(HookPoint(_SAMPLE_V2 + file, function) for file in ("sampler.py", "prompt_logprob.py")),
        HookPoint(_SAMPLE_V2 + "sampler.py", "Sampler.__call__", mentions=(function,)),
        HookPoint(_SAMPLE_V2 + "prompt_logprob.py", "compute_prompt_logprobs_with_chunking", mentions=(function,)),
    )


# The V2 runner's function for logprobs of token ids, under its first name. It has no mode that returns logits.
FROM_0_24_TO_0_25 = _scores_of_v2("compute_topk_logprobs")

# vLLM's communicator all-gathers with its own NCCL binding, and an MoE layer may defer its all-reduce.
FROM_0_25 = (
    HookPoint(
        "distributed/device_communicators/cuda_communicator.py", "CudaCommunicator.all_gather", ("input_", "dim")
    ),
    HookPoint(_LAYERS + "fused_moe/config.py", "FusedMoEConfig.skip_final_all_reduce"),
)

# An attention backend per layer kind, and `compute_topk_scores` instead of `compute_topk_logprobs`.
FROM_0_26 = (
    HookPoint("config/attention.py", "AttentionConfig.backend_per_kind"),
    *_scores_of_v2("compute_topk_scores"),
)

# vLLM asks an attention backend for the shape and stride order of the KV cache, and has compiler passes that move
# communication.
FROM_0_24_TO_0_26 = (
    HookPoint("config/compilation.py", "PassConfig.enable_sp"),
    HookPoint("config/compilation.py", "PassConfig.fuse_gemm_comms"),
    HookPoint(
        "v1/attention/backend.py",
        "AttentionBackend.get_kv_cache_shape",
        ("num_blocks", "block_size", "num_kv_heads", "head_size", "cache_dtype_str"),
    ),
    HookPoint(
        "v1/attention/backend.py", "AttentionBackend.get_kv_cache_stride_order", ("include_num_layers_dimension",)
    ),
)

# Prompt logprobs import the V2 function by name, logits can stay sharded up to the sampler, KV cache layouts are an
# enum, requests can be watermarked, and errors have classes.
FROM_0_32 = (
    HookPoint("exceptions.py", "VLLMClientError"),
    HookPoint(_SAMPLE_V2 + "prompt_logprob.py", "compute_token_logprobs"),
    HookPoint(_LAYERS + "logits_processor.py", "LogitsProcessor.forward", ("skip_gather",)),
    HookPoint(_LAYERS + "logits_processor.py", "LogitsProcessor.get_top_k_tokens"),
    HookPoint("v1/kv_cache_layout.py", "KVCacheLayout.LBNHC"),
    HookPoint("v1/attention/backend.py", "AttentionBackend.supported_kv_cache_layouts"),
    HookPoint("config/parallel.py", "ParallelConfig.enable_batch_sharded_sampling"),
    HookPoint("config/vllm.py", "VllmConfig.watermark_config"),
)
