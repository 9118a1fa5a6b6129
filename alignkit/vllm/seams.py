"""The names in vLLM that the adapter subclasses, replaces or calls; `versions` says which version has which."""

from __future__ import annotations

from alignkit.engines.seams import Seam
from alignkit.models import FAMILIES

_LAYERS = "model_executor/layers/"
_SAMPLE_V2 = "v1/worker/gpu/sample/"

COMMON = (
    # Getting in: the engine's configuration names the worker, the front end admits requests.
    Seam("engine/arg_utils.py", "EngineArgs.create_engine_config"),
    Seam("config/parallel.py", "ParallelConfig.worker_cls"),
    Seam("v1/engine/llm_engine.py", "InputProcessor"),
    Seam("v1/engine/async_llm.py", "InputProcessor"),
    Seam("v1/engine/input_processor.py", "InputProcessor.__init__", ("vllm_config", "renderer")),
    Seam("v1/engine/input_processor.py", "InputProcessor._validate_params", ("params", "supported_tasks")),
    Seam("v1/worker/cpu_worker.py", "CPUWorker.init_device"),
    Seam("v1/worker/gpu_worker.py", "Worker.load_model"),
    Seam("plugins/__init__.py", "load_general_plugins"),
    # `alignkit serve`: vLLM's command, without what comes before it.
    Seam("entrypoints/cli/serve.py", "cmd_init"),
    *(Seam("entrypoints/cli/serve.py", f"ServeSubcommand.{name}") for name in ("cmd", "validate", "subparser_init")),
    Seam("utils/argparse_utils.py", "FlexibleArgumentParser"),
    # Where a running worker looks at itself, and at what.
    *(
        Seam("v1/worker/gpu_worker.py", f"Worker.{name}")
        for name in ("execute_model", "compile_or_warm_up_model", "reload_weights", "finish_weight_update", "wake_up")
    ),
    Seam("v1/worker/worker_base.py", "WorkerBase.apply_model", ("fn",)),
    Seam("config/compilation.py", "CompilationConfig.static_forward_context"),
    Seam("config/model.py", "ModelConfig.hf_config_path"),
    # Layers, replaced by class when the model is built.
    Seam("model_executor/custom_op.py", "op_registry_oot"),
    Seam("model_executor/custom_op.py", "PluggableLayer.__new__"),
    Seam("model_executor/custom_op.py", "CustomOp.__new__"),
    Seam(_LAYERS + "linear.py", "UnquantizedLinearMethod.process_weights_after_loading", ("layer",)),
    Seam(_LAYERS + "linear.py", "UnquantizedLinearMethod.apply", ("layer", "x", "bias")),
    Seam(_LAYERS + "linear.py", "ReplicatedLinear"),
    Seam(_LAYERS + "linear.py", "ColumnParallelLinear"),
    Seam(_LAYERS + "linear.py", "MergedColumnParallelLinear"),
    Seam(_LAYERS + "linear.py", "QKVParallelLinear"),
    Seam(_LAYERS + "linear.py", "RowParallelLinear", ("input_is_parallel", "reduce_results", "disable_tp")),
    Seam(_LAYERS + "linear.py", "RowParallelLinear.forward", ("input_",)),
    Seam(_LAYERS + "vocab_parallel_embedding.py", "UnquantizedEmbeddingMethod.tie_weights"),
    Seam(_LAYERS + "vocab_parallel_embedding.py", "VocabParallelEmbedding"),
    Seam(_LAYERS + "vocab_parallel_embedding.py", "ParallelLMHead.tie_weights"),
    Seam(_LAYERS + "layernorm.py", "RMSNorm", ("eps", "var_hidden_size", "has_weight")),
    Seam(_LAYERS + "activation.py", "SiluAndMul"),
    # Mixtures of experts: of a router, what makes the weights, and the whole of one.
    Seam(_LAYERS + "fused_moe/router/gate_linear.py", "GateLinear"),
    Seam(
        _LAYERS + "fused_moe/unquantized_fused_moe_method.py",
        "UnquantizedFusedMoEMethod.create_weights",
        ("layer", "num_experts", "hidden_size", "intermediate_size_per_partition", "params_dtype"),
    ),
    Seam(
        _LAYERS + "fused_moe/unquantized_fused_moe_method.py",
        "UnquantizedFusedMoEMethod.process_weights_after_loading",
        ("layer",),
    ),
    Seam(
        _LAYERS + "fused_moe/fused_moe_method_base.py",
        "FusedMoEMethodBase.maybe_roundup_sizes",
        ("hidden_size", "intermediate_size_per_partition", "act_dtype", "moe_parallel_config"),
    ),
    Seam(
        _LAYERS + "fused_moe/routed_experts.py",
        "RoutedExperts.__init__",
        mentions=(
            *("global_num_experts", "local_num_experts", "top_k", "renormalize", "scoring_func", "use_grouped_topk"),
            *("custom_routing_function", "routed_scaling_factor", "e_score_correction_bias"),
            *("apply_router_weight_on_input", "swiglu_limit", "expert_map_manager", "quant_method"),
        ),
    ),
    Seam(
        _LAYERS + "fused_moe/runner/moe_runner.py",
        "MoERunner.__init__",
        ("moe_config", "router", "routed_experts", "gate", "shared_experts", "routed_input_transform"),
        ("shared_expert_gate", "routed_output_transform", "routed_scaling_factor", "layer_name"),
    ),
    Seam(
        _LAYERS + "fused_moe/runner/moe_runner.py", "MoERunner.forward", ("hidden_states", "router_logits", "input_ids")
    ),
    *(
        Seam(_LAYERS + "fused_moe/config.py", f"FusedMoEParallelConfig.{field}")
        for field in "tp_size ep_size ep_rank dp_size sp_size pcp_size is_sequence_parallel enable_eplb".split()
    ),
    # Of replicas that share experts: who they are, how many rows each has, and what one without requests does.
    *(Seam("distributed/parallel_state.py", name) for name in ("get_dp_group", "get_ep_group")),
    Seam("forward_context.py", "DPMetadata.num_tokens_across_dp_cpu"),
    Seam("forward_context.py", "ForwardContext.dp_metadata"),
    Seam("v1/worker/gpu_worker.py", "Worker.execute_dummy_batch"),
    *(
        Seam(_LAYERS + "fused_moe/config.py", f"FusedMoEConfig.{field}")
        for field in ("num_experts", "num_logical_experts", "activation", "has_bias", "is_lora_enabled")
    ),
    *(
        Seam(_LAYERS + "fused_moe/expert_map_manager.py", f"ExpertMapManager.{name}")
        for name in ("placement_strategy", "local_num_experts")
    ),
    Seam(_LAYERS + "rotary_embedding/__init__.py", "_ROPE_DICT"),
    Seam(
        _LAYERS + "rotary_embedding/base.py",
        "RotaryEmbedding",
        ("head_size", "rotary_dim", "max_position_embeddings", "base", "is_neox_style", "init_cache"),
    ),
    Seam(_LAYERS + "rotary_embedding/llama3_rope.py", "Llama3RotaryEmbedding", ("orig_max_position",)),
    Seam(
        _LAYERS + "rotary_embedding/yarn_scaling_rope.py", "YaRNScalingRotaryEmbedding", ("scaling_factor", "truncate")
    ),
    *(
        Seam(_LAYERS + f"rotary_embedding/{file}.py", f"{cls}.__init__", mentions=names)
        for file, cls, names in (
            ("llama3_rope", "Llama3RotaryEmbedding", ("scaling_factor", "low_freq_factor", "high_freq_factor")),
            ("yarn_scaling_rope", "YaRNScalingRotaryEmbedding", ("beta_fast", "beta_slow", "mscale", "truncate")),
        )
    ),
    # Attention whose norms of queries and keys go with the rotation: what its forward calls, in this order.
    *(
        Seam(
            f"model_executor/models/{file}.py",
            f"{cls}.forward",
            ("positions", "hidden_states"),
            ("qkv_proj", "q_size", "kv_size", "q_norm", "k_norm", "rotary_emb", "attn", "o_proj"),
        )
        for file, cls in (("qwen3", "Qwen3Attention"), ("qwen3_moe", "Qwen3MoeAttention"))
    ),
    Seam(_LAYERS + "logits_processor.py", "LogitsProcessor", ("scale", "logits_as_input", "soft_cap")),
    Seam(_LAYERS + "logits_processor.py", "LogitsProcessor._gather_logits", ("logits",)),
    Seam(_LAYERS + "logits_processor.py", "LogitsProcessor.get_top_tokens"),
    Seam(_LAYERS + "attention/attention.py", "Attention"),
    # Attention, by the registry of backends.
    Seam("v1/attention/backends/registry.py", "AttentionBackendEnum.is_overridden"),
    Seam("v1/attention/backends/registry.py", "AttentionBackendEnum.clear_override"),
    Seam("v1/attention/backends/registry.py", "register_backend", ("backend", "class_path")),
    Seam("v1/attention/selector.py", "_cached_get_attn_backend"),
    Seam("v1/attention/backend.py", "AttentionBackend.get_builder_cls"),
    Seam("v1/attention/backend.py", "AttentionImpl.forward", ("kv_cache", "attn_metadata", "output")),
    Seam(
        "v1/attention/backend.py", "AttentionMetadataBuilder", ("kv_cache_spec", "layer_names", "vllm_config", "device")
    ),
    Seam(
        "v1/attention/backend.py",
        "AttentionMetadataBuilder.build",
        ("common_prefix_len", "common_attn_metadata", "fast_build"),
    ),
    *(
        Seam("v1/attention/backend.py", f"CommonAttentionMetadata.{field}")
        for field in ("num_actual_tokens", "query_start_loc", "seq_lens", "block_table_tensor", "causal")
    ),
    Seam("v1/attention/backends/utils.py", "NULL_BLOCK_ID"),
    Seam(_LAYERS + "attention/attention.py", "unified_kv_cache_update", ("key", "value", "layer_name")),
    # The configuration: what is refused is read from it.
    *(
        Seam("config/vllm.py", f"VllmConfig.{field}")
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
        Seam("config/parallel.py", f"ParallelConfig.{field}")
        for field in (
            "pipeline_parallel_size",
            "data_parallel_size",
            "decode_context_parallel_size",
            "prefill_context_parallel_size",
            "use_ubatching",
            "enable_expert_parallel",
        )
    ),
    Seam("config/attention.py", "AttentionConfig.backend"),
    *(
        Seam("config/compilation.py", f"CompilationConfig.{field}")
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
        Seam("config/compilation.py", f"PassConfig.{field}")
        for field in ("fuse_allreduce_rms", "fuse_norm_quant", "fuse_act_quant")
    ),
    Seam("config/compilation.py", "CompilationMode.VLLM_COMPILE"),
    Seam("config/vllm.py", "VllmConfig.additional_config"),
    Seam("v1/attention/backend.py", "AttentionMetadataBuilder._cudagraph_support"),
    Seam("v1/attention/backend.py", "AttentionCGSupport.ALWAYS"),
    Seam(
        "distributed/device_communicators/base_device_communicator.py",
        "DeviceCommunicatorBase.all_gather",
        ("input_", "dim"),
    ),
    # Logprobs, V1 runner.
    Seam("v1/sample/sampler.py", "Sampler.compute_logprobs", ("logits",)),
    Seam("v1/sample/ops/topk_topp_sampler.py", "TopKTopPSampler.forward_cpu", ("logits", "generators", "k", "p")),
    # Logprobs, V2 runner: one function for sampled, prompt and chosen tokens, and the ways to it.
    Seam(_SAMPLE_V2 + "logprob.py", "compute_token_logprobs", ("logits", "token_ids")),
    Seam(_SAMPLE_V2 + "logprob.py", "_ranks_kernel", ("logits_ptr", "vocab_size", "BLOCK_SIZE")),
    Seam(_SAMPLE_V2 + "sampler.py", "Sampler.sample"),
    Seam(_SAMPLE_V2 + "sampler.py", "Sampler.__call__", ("logits", "input_batch")),
    Seam(
        _SAMPLE_V2 + "prompt_logprob.py",
        "PromptLogprobsWorker.compute_prompt_logprobs",
        ("logits_fn", "hidden_states", "input_batch"),
    ),
    Seam(_SAMPLE_V2 + "prompt_logprob.py", "compute_prompt_logprobs_with_chunking", ("prompt_token_ids", "logits_fn")),
    Seam(
        _SAMPLE_V2 + "states.py",
        "SamplingStates.apply_temperature",
        ("logits", "expanded_idx_mapping", "idx_mapping_np"),
    ),
    Seam("v1/worker/gpu/model_runner.py", "Sampler"),
    Seam("v1/worker/gpu/model_runner.py", "PromptLogprobsWorker"),
    # The model classes whose parts are all named above.
    *(Seam(f"model_executor/models/{family.file}", family.architecture) for family in FAMILIES.values()),
)

CPU = (
    Seam("v1/attention/backends/registry.py", "AttentionBackendEnum.CPU_ATTN"),
    Seam(
        "v1/attention/backends/cpu_attn.py",
        "CPUAttentionBackendImpl.do_kv_cache_update",
        ("key", "value", "kv_cache", "slot_mapping"),
    ),
)

CUDA = (
    Seam("v1/attention/backends/registry.py", "AttentionBackendEnum.CUSTOM"),
    Seam(
        "v1/attention/backends/triton_attn.py",
        "TritonAttentionImpl.do_kv_cache_update",
        ("key", "value", "kv_cache", "slot_mapping"),
    ),
    Seam("v1/worker/gpu_worker.py", "Worker.init_device"),
    Seam("v1/worker/gpu_model_runner.py", "Sampler"),
    Seam("v1/worker/gpu_model_runner.py", "GPUModelRunner.get_model"),
    Seam("v1/worker/gpu/model_runner.py", "GPUModelRunner.get_model"),
    Seam(
        "v1/worker/gpu/model_runner.py",
        "GPUModelRunner.load_model",
        mentions=("sampler", "rejection_sampler", "prompt_logprobs_worker"),
    ),
    Seam(
        "_custom_ops.py",
        "reshape_and_cache_flash",
        ("key", "value", "key_cache", "value_cache", "slot_mapping", "kv_cache_dtype"),
    ),
    Seam("v1/sample/ops/topk_topp_sampler.py", "TopKTopPSampler.forward_native", ("logits", "generators", "k", "p")),
)


def _scores_of_v2(function: str) -> tuple[Seam, ...]:
    """The V2 runner's `function` between its classes and `compute_token_logprobs`."""
    return (
        Seam(
            _SAMPLE_V2 + "logprob.py",
            function,
            ("logits", "num_logprobs", "sampled_token_ids"),
            ("compute_token_logprobs", "_ranks_kernel"),
        ),
        *(Seam(_SAMPLE_V2 + file, function) for file in ("sampler.py", "prompt_logprob.py")),
        Seam(_SAMPLE_V2 + "sampler.py", "Sampler.__call__", mentions=(function,)),
        Seam(_SAMPLE_V2 + "prompt_logprob.py", "compute_prompt_logprobs_with_chunking", mentions=(function,)),
    )


# Until 0.25 the V2 runner's logprobs cannot be logits.
UNTIL_0_25 = _scores_of_v2("compute_topk_logprobs")

# From 0.25: vLLM's communicator gathers by NCCL of its own, and a mixture may leave its sum over ranks to later.
SINCE_0_25 = (
    Seam("distributed/device_communicators/cuda_communicator.py", "CudaCommunicator.all_gather", ("input_", "dim")),
    Seam(_LAYERS + "fused_moe/config.py", "FusedMoEConfig.skip_final_all_reduce"),
)

# From 0.26: a backend of attention for each kind of layer.
SINCE_0_26 = (Seam("config/attention.py", "AttentionConfig.backend_per_kind"), *_scores_of_v2("compute_topk_scores"))

# Until 0.26 vLLM asks an attention backend for the shape of its cache and for the order of its dimensions in memory, and
# has compiler passes that move communication.
UNTIL_0_26 = (
    Seam("config/compilation.py", "PassConfig.enable_sp"),
    Seam("config/compilation.py", "PassConfig.fuse_gemm_comms"),
    Seam(
        "v1/attention/backend.py",
        "AttentionBackend.get_kv_cache_shape",
        ("num_blocks", "block_size", "num_kv_heads", "head_size", "cache_dtype_str"),
    ),
    Seam("v1/attention/backend.py", "AttentionBackend.get_kv_cache_stride_order", ("include_num_layers_dimension",)),
)

# From 0.32: prompt logprobs import the V2 function by name, the vocabulary can stay sharded up to the
# sampler, a cache layout is a named enum, requests can be watermarked, and errors have classes.
SINCE_0_32 = (
    Seam("exceptions.py", "VLLMClientError"),
    Seam(_SAMPLE_V2 + "prompt_logprob.py", "compute_token_logprobs"),
    Seam(_LAYERS + "logits_processor.py", "LogitsProcessor.forward", ("skip_gather",)),
    Seam(_LAYERS + "logits_processor.py", "LogitsProcessor.get_top_k_tokens"),
    Seam("v1/kv_cache_layout.py", "KVCacheLayout.LBNHC"),
    Seam("v1/attention/backend.py", "AttentionBackend.supported_kv_cache_layouts"),
    Seam("config/parallel.py", "ParallelConfig.enable_batch_sharded_sampling"),
    Seam("config/vllm.py", "VllmConfig.watermark_config"),
)
