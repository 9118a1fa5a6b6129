"""Allow-list policy for `VllmConfig`: one table for it, and one for each part that can affect numerics.

Fields outside the tables, including the new fields of later versions, must have vLLM's defaults. A field in `free` must
not affect the bits of logprobs. tests/vllm/test_policy.py reports fields of a version that are in no table. The same
tables check recipes (`alignkit.integrations.recipe.engines`), where `asked` has no version and only the model's dtype.
"""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Callable
from typing import Any

import torch

from alignkit import dist
from alignkit.engines.hook_points import relies_on
from alignkit.engines.policy import Policy, Row
from alignkit.vllm.versions import Version

VOCAB_SIZE = "alignkit_vocab_size"
"""Key in vLLM's ``additional_config``: the vocabulary size in ids, if smaller than config.json's."""
ALL2ALL = "allgather_reducescatter"
"""vLLM's default collectives for expert parallelism. Others allocate memory and start processes of their own."""
LOGPROBS_MODES = ("raw_logprobs", "processed_logprobs")
"""Supported values of vLLM's `logprobs_mode`; the others return logits."""
EXECUTORS = (None, "uni", "mp", "external_launcher", "ray")
"""Supported executors. A custom executor could bypass the worker's checks."""


@dataclasses.dataclass(frozen=True)
class Asked:
    """The context of the rows: the installed version and the whole configuration."""

    version: Version
    config: Any

    @property
    def compiles(self) -> bool:
        return self.config.compilation_config.mode.name != "NONE"

    @property
    def captures(self) -> bool:
        graphs = self.config.compilation_config.cudagraph_mode
        return graphs is not None and graphs.name != "NONE"

    @property
    def exchanges(self) -> bool:
        """True if vLLM sets up communication between ranks that share experts."""
        parallel = self.config.parallel_config
        return parallel.enable_expert_parallel or parallel.data_parallel_size > 1


def fusions(pass_config) -> list[str]:
    """Return the enabled compiler passes in a `PassConfig` that replace arithmetic or communication."""
    return [
        f.name
        for f in dataclasses.fields(pass_config)
        if f.name.startswith(("fuse_", "enable_")) and getattr(pass_config, f.name)
    ]


def _off(field: str, feature: str) -> Row:
    def message(value: Any, _: Any) -> str:
        given = repr(value) if isinstance(value, (bool, int, str)) else f"a {type(value).__name__}"
        return f"{field} ({feature}): must be {False if value is True else None}, got {given}"

    return Row(field, lambda value, _: value is None or value is False, message)


def _is_vocab_size(additional, model_config) -> bool:
    if not isinstance(additional, dict) or VOCAB_SIZE not in additional:
        return True
    size = additional[VOCAB_SIZE]
    return type(size) is int and 0 < size <= model_config.get_vocab_size()


relies_on(
    "config/vllm.py:VllmConfig",
    members="lora_config speculative_config kv_transfer_config offload_config diffusion_config",
)
relies_on("config/vllm.py:VllmConfig", members="watermark_config", when="watermarks")
relies_on(
    "config/parallel.py:ParallelConfig",
    members="""
        pipeline_parallel_size data_parallel_size decode_context_parallel_size prefill_context_parallel_size
        enable_expert_parallel
    """,
)
relies_on("config/parallel.py:ParallelConfig", members="enable_batch_sharded_sampling", when="sharded_logits")
relies_on(
    "config/compilation.py:CompilationConfig",
    members="mode backend cudagraph_mode use_inductor_graph_partition inductor_passes cache_dir",
)
relies_on("config/compilation.py:CompilationMode", members="VLLM_COMPILE")
relies_on("config/attention.py:AttentionConfig", members="backend_per_kind", when="backend_per_kind")

ENGINE = Policy(
    # Parts with tables below, parts that affect only unsupported modules, and settings for loading, serving, logging
    # and profiling. The model uses alignkit's kernels for any `kernel_config`.
    free="""
        model_config parallel_config cache_config compilation_config scheduler_config attention_config
        mamba_config kernel_config ec_transfer_config ec_manager_config reasoning_config
        load_config weight_transfer_config structured_outputs_config kv_events_config
        observability_config logging_config profiler_config
        instance_id optimization_level performance_mode shutdown_timeout
    """,
    rows=(
        Row(
            "device_config",
            lambda device, asked: device.device_type == asked.version.family.device_type,
            lambda device, asked: (
                f"device: must be {asked.version.family.device_type} with this version of vLLM, got "
                f"{device.device_type}"
            ),
        ),
        Row(
            "quant_config",
            lambda quantization, _: quantization is None,
            lambda quantization, _: f"quantization: must be None, got {type(quantization).__name__}",
        ),
        _off("lora_config", "LoRA"),
        _off("speculative_config", "speculative decoding"),
        _off("watermark_config", "watermarking"),
        _off("kv_transfer_config", "KV cache transfer"),
        _off("diffusion_config", "diffusion decoding"),
        Row(
            "offload_config",
            lambda offload, _: offload.uva.cpu_offload_gb <= 0 and offload.prefetch.offload_group_size <= 0,
            lambda offload, _: (
                "cpu_offload_gb, offload_group_size (weight offloading): must be 0, got "
                f"{offload.uva.cpu_offload_gb} and {offload.prefetch.offload_group_size}"
            ),
        ),
        Row(
            "aux_output_config",
            lambda aux, _: not aux.enable_return_routed_experts,
            "enable_return_routed_experts (return of routed experts): must be False, got True",
        ),
        Row(
            "additional_config",
            lambda value, _: isinstance(value, dict),
            "additional_config: must be a dict, got {value!r:.200}",
        ),
        Row(
            "additional_config",
            lambda value, asked: _is_vocab_size(value, asked.config.model_config),
            lambda value, asked: (
                f"{VOCAB_SIZE}: must be an int of at least 1 and at most the model's vocabulary size "
                f"{asked.config.model_config.get_vocab_size()}, got {value[VOCAB_SIZE]!r:.200}"
            ),
        ),
    ),
)

MODEL = Policy(
    # `hf_config` is validated per model family. Overrides are detected in the built model.
    free="""
        model model_weights tokenizer tokenizer_mode trust_remote_code seed
        hf_config hf_text_config hf_config_path hf_overrides hf_token revision code_revision
        tokenizer_revision runner convert model_class_overrides is_submodel_config word_embeddings_untied_by_checkpoint
        allowed_local_media_path allowed_media_domains max_model_len spec_target_max_model_len
        quantization_config allow_deprecated_quantization enforce_eager
        max_logprobs use_fp64_gumbel return_sampling_mask enable_trace_replay
        disable_sliding_window disable_cascade_attn skip_tokenizer_init served_model_name
        generation_config override_generation_config
        enable_sleep_mode sleep_mode_backend sleep_preserve_parameter_names sleep_mode_offload_cudagraph
        enable_nccl_comm_suspend enable_cumem_allocator io_processor_plugin renderer_num_workers
        pooler_config multimodal_config
    """,
    rows=(
        Row("quantization", lambda method, _: method is None or method is False, "{field}: must be None, got {value}"),
        Row(
            "dtype",
            lambda dtype, _: dtype in (torch.bfloat16, torch.float32),
            "{field}: must be bfloat16 or float32, got {value}",
        ),
        # Other formats read other files, but the training side is built from config.json.
        Row("config_format", lambda name, _: name in ("auto", "hf"), "{field}: must be auto or hf, got {value}"),
        Row("model_impl", lambda impl, _: impl in ("auto", "vllm"), "{field}: must be auto or vllm, got {value}"),
        Row(
            "logprobs_mode",
            lambda mode, _: mode in LOGPROBS_MODES,
            f"{{field}}: must be {' or '.join(LOGPROBS_MODES)}, got {{value}}",
        ),
        Row(
            "logits_processors",
            lambda given, asked: not given or asked.config.model_config.logprobs_mode != "processed_logprobs",
            "{field} (custom logits processors): must be None with logprobs_mode = processed_logprobs, got "
            "{value!r:.200}",
        ),
        _off("enable_prompt_embeds", "prompt embeddings"),
        _off("enable_return_routed_experts", "return of routed experts"),
    ),
)

PARALLEL = Policy(
    # Ranks, replicas, hosts and processes.
    free="""
        tensor_parallel_size world_size rank node_rank nnodes master_addr master_port
        data_parallel_size_local data_parallel_rank data_parallel_rank_local data_parallel_index
        data_parallel_master_ip data_parallel_rpc_port data_parallel_master_port data_parallel_backend
        data_parallel_external_lb data_parallel_hybrid_lb _data_parallel_master_port_list dp_sync_interval
        is_moe_model enable_expert_parallel enable_ep_weight_filter elastic_ep_max_dp_size enable_dbo ubatch_size
        dbo_decode_token_threshold dbo_prefill_token_threshold disable_nccl_for_dp_synchronization
        disable_custom_all_reduce
        dcp_kv_cache_interleave_size dcp_comm_backend dcp_q_replicate cp_kv_cache_interleave_size
        _allow_auto_resolve_cp_interleave_size
        max_parallel_loading_workers enable_shm_tensor_arena fault_tolerance_config
        ray_workers_use_nsight ray_runtime_env placement_group
        worker_cls sd_worker_cls worker_extension_cls numa_bind numa_bind_nodes numa_bind_cpus
        assigned_physical_gpu_ids distributed_timeout_seconds cpu_distributed_timeout_seconds
        _coord_store_port _api_process_rank
    """,
    rows=(
        Row(
            "distributed_executor_backend",
            lambda name, _: name in EXECUTORS,
            f"{{field}}: must be one of {', '.join(filter(None, EXECUTORS))}, got {{value}}",
        ),
        Row("pipeline_parallel_size", lambda size, _: size <= 1, "{field}: must be 1, got {value}"),
        Row(
            "data_parallel_size",
            lambda size, asked: size <= 1 or asked.version.replicas,
            "{field}: must be 1 with this version of vLLM (larger values are untested on GPUs), got {value}. "
            "Start one engine per replica",
        ),
        Row(
            "_api_process_count",
            lambda count, _: count == 1,
            "--api-server-count: must be 1, because each API server would count the epochs of the weights on its own, "
            "got {value}",
        ),
        Row("decode_context_parallel_size", lambda size, _: size <= 1, "{field}: must be 1, got {value}"),
        Row("prefill_context_parallel_size", lambda size, _: size <= 1, "{field}: must be 1, got {value}"),
        _off("enable_batch_sharded_sampling", "batch-sharded sampling"),
        _off("enable_eplb", "expert load balancing, EPLB"),
        Row(
            "eplb_config",
            lambda eplb, _: eplb.num_redundant_experts == 0,
            "num_redundant_experts: must be 0, got {value.num_redundant_experts}",
        ),
        Row("expert_placement_strategy", lambda name, _: name == "linear", "{field}: must be linear, got {value}"),
        Row(
            "all2all_backend",
            lambda name, asked: name == ALL2ALL or not asked.exchanges,
            f"{{field}}: must be {ALL2ALL}, got {{value}}",
        ),
        _off("enable_elastic_ep", "elastic expert parallelism"),
        Row(
            "enable_fault_tolerance",
            lambda on, asked: not (on and asked.config.parallel_config.data_parallel_size > 1),
            "{field} (fault-tolerant data parallelism): must be False with data_parallel_size > 1, got {value}",
        ),
    ),
)

CACHE = Policy(
    # Blocks, prefix caching, and settings of Mamba layers. `sliding_window` is validated per model.
    free="""
        block_size user_specified_block_size _block_size_resolved effective_attention_block_size prefix_match_unit
        gpu_memory_utilization num_gpu_blocks_override num_gpu_blocks num_cpu_blocks kv_cache_memory_bytes
        kv_cache_size_tokens kv_cache_max_concurrency kv_cache_layout kv_offloading_size kv_offloading_backend
        sliding_window swa_bounded_replay is_attention_free
        enable_prefix_caching prefix_caching_hash_algo prefix_cache_retention_interval hash_block_size
        cache_hit_alignment_tokens
        mamba_page_size_padded skip_page_size_padded mamba_block_size user_specified_mamba_block_size mamba_cache_dtype
        mamba_ssm_cache_dtype mamba_cache_mode enable_mamba_shared_prefix_checkpoint replayssm_buffer_len use_replayssm
        use_kda_recoverssm
    """,
    rows=(
        Row(
            "cache_dtype",
            lambda dtype, asked: dtype in ("auto", str(asked.config.model_config.dtype).removeprefix("torch.")),
            lambda dtype, asked: (
                f"kv_cache_dtype: must be auto or the model's dtype "
                f"{str(asked.config.model_config.dtype).removeprefix('torch.')}, got {dtype}"
            ),
        ),
    ),
)

SCHEDULER = Policy(
    # Batch composition, which the contract's bits do not depend on.
    free="""
        max_num_batched_tokens max_num_scheduled_tokens max_num_seqs max_num_active_seqs
        max_num_partial_prefills max_long_partial_prefills long_prefill_token_threshold
        long_prefill_token_threshold_adaptive max_num_queued_reqs max_num_queued_tokens enable_chunked_prefill
        is_multimodal_model max_num_encoder_input_tokens encoder_cache_size policy disable_chunked_mm_input
        scheduler_cls disable_hybrid_kv_cache_manager scheduler_reserve_full_isl watermark prefill_schedule_interval
        async_scheduling stream_interval runner_type
    """
)

ATTENTION = Policy(
    # Settings of backends other than alignkit's.
    free="""
        flash_attn_version use_prefill_decode_attention flash_attn_max_num_splits_for_cuda_graph
        tq_max_kv_splits_for_cuda_graph use_trtllm_attention disable_flashinfer_q_quantization mla_prefill_backend
        use_prefill_query_quantization use_fp4_indexer_cache indexer_kv_dtype indexer_sparse_logits hisparse_config
        sparse_mla_force_mqa sparse_mla_prefill_workspace_factor tokenspeed_mla_min_split_kv
        minimax_m3_msa_decode_backend
        flex_attn_block_m flex_attn_block_n flex_attn_q_block_size flex_attn_kv_block_size
    """,
    rows=(
        Row(
            "backend",
            lambda backend, asked: backend is None or backend.name == asked.version.attention,
            lambda backend, asked: f"attention_backend: must be None or {asked.version.attention}, got {backend.name}",
        ),
        Row(
            "backend_per_kind",
            lambda backends, _: not backends,
            "{field} (attention backends per layer kind): must be empty, got {value!r:.200}",
        ),
    ),
)

COMPILATION = Policy(
    # Each op is a custom op in the compiled model, so the code compiled around it and the sizes do not matter.
    free="""
        debug_dump_path local_cache_dir compile_cache_save_format custom_ops enabled_custom_ops disabled_custom_ops
        ir_enable_torch_wrap splitting_ops compile_sizes compile_ranges_endpoints dynamic_shapes_config
        inductor_compile_config traced_files compilation_time encoder_compilation_time
        static_forward_context static_all_moe_layers fast_moe_cold_start
        compile_mm_encoder cudagraph_mm_encoder encoder_cudagraph_token_budgets
        encoder_cudagraph_max_vision_items_per_batch encoder_cudagraph_max_frames_per_batch
        cudagraph_num_of_warmups cudagraph_capture_sizes max_cudagraph_capture_size cudagraph_copy_inputs
        cudagraph_specialize_lora
        cudagraph_decoder_replay decoder_replay_cudagraph_capture_sizes decoder_replay_trim_threshold
    """,
    rows=(
        Row(
            "mode",
            lambda _, asked: asked.version.graphs or not asked.compiles,
            "enforce_eager: must be True with this version of vLLM, because torch.compile is not supported with it",
        ),
        Row(
            "mode",
            lambda mode, _: mode.name in ("NONE", "VLLM_COMPILE"),
            "mode (compilation mode): must be NONE or VLLM_COMPILE, got {value.name}",
        ),
        Row(
            "cudagraph_mode",
            lambda _, asked: asked.version.graphs or not asked.captures,
            "enforce_eager: must be True with this version of vLLM, because CUDA graphs are not supported with it",
        ),
        Row(
            "cudagraph_mode",
            lambda _, asked: not (asked.captures and dist.strict()),
            "ALIGNKIT_STRICT: must be 0 or unset with CUDA graphs, because strict checks synchronize with the device. "
            "Unset it, or set enforce_eager=True",
        ),
        Row(
            "backend",
            lambda backend, asked: not asked.compiles or backend in ("inductor", "eager"),
            "backend (compilation backend): must be inductor or eager, got {value}",
        ),
        Row(
            "use_inductor_graph_partition",
            lambda value, asked: not (asked.compiles and value),
            "{field} (graph partitioning by inductor): must be False, got {value}",
        ),
        Row(
            "inductor_passes",
            lambda passes, _: not passes,
            "{field} (custom compiler passes): must be empty, got {value!r:.200}",
        ),
        Row(
            "cache_dir",
            lambda folder, asked: not (asked.compiles and folder),
            "{field}: must not be set, because the folder may contain models compiled by stock engines, got {value}",
        ),
        Row(
            "pass_config",
            lambda passes, _: not fusions(passes),
            lambda passes, _: f"pass_config (compiler fusion passes): must be off, got {', '.join(fusions(passes))}",
        ),
    ),
)

PASSES = Policy(
    free="eliminate_noops rope_kvcache_fusion_max_token_num fi_allreduce_fusion_max_size_mb sp_min_token_num",
    ignored_prefixes=("fuse_", "enable_"),  # COMPILATION validates these as `pass_config`
)


@dataclasses.dataclass(frozen=True)
class Request:
    """The context of `REQUEST`'s rows: the engine's logprobs mode, and whether the request returns logprobs."""

    mode: str
    logprobs: bool


def _only_raw(field: str, neutral: Callable[[Any], bool]) -> Row:
    """Return the row of a field that changes processed logprobs, unless its value is neutral."""
    return Row(
        field,
        lambda value, asked: not asked.logprobs or asked.mode != "processed_logprobs" or neutral(value),
        lambda _, asked: f"{field} with logprobs_mode = {asked.mode}",
    )


REQUEST = Policy(
    # Sampling, stopping and output: they decide which tokens are returned, not the logprobs of these tokens. The engine
    # decides whether trace replay, watermarking, KV transfer and custom logits processors (extra_args) exist.
    free="""
        n seed temperature stop stop_token_ids ignore_eos max_tokens repetition_detection stream_interval
        logprobs prompt_logprobs logprob_token_ids flat_logprobs
        detokenize skip_special_tokens spaces_between_special_tokens include_stop_str_in_output output_kind
        skip_clone output_text_buffer_length routed_experts_prompt_start skip_reading_prefix_cache extra_args
        watermarking _watermarking_skipped _eos_token_id _all_stop_token_ids _bad_words_token_ids
    """,
    rows=(
        Row(  # vLLM applies the mask before it computes raw logprobs
            "structured_outputs", lambda value, asked: not asked.logprobs or value is None, "structured outputs"
        ),
        *(_only_raw(field, lambda value: value <= 0) for field in ("top_k", "min_tokens")),
        *(_only_raw(field, lambda value: value == 1.0) for field in ("top_p", "repetition_penalty")),
        *(_only_raw(field, lambda value: value == 0.0) for field in ("min_p", "presence_penalty", "frequency_penalty")),
        *(_only_raw(field, operator.not_) for field in ("logit_bias", "allowed_token_ids", "bad_words")),
        _only_raw("thinking_token_budget", lambda value: value is None),
    ),
    labels={
        "prompt_logprob_token_ids": "logprobs of given prompt token ids",
        "prompt_logprob_start": "logprobs of given prompt token ids",
        "trace_decode_token_ids": "trace replay",
    },
)
"""Fields of vLLM's `SamplingParams`. The messages of the rows are parts of a sentence (`refuse.request_reasons`)."""

PARTS = (
    ("", ENGINE),
    ("model_config", MODEL),
    ("parallel_config", PARALLEL),
    ("cache_config", CACHE),
    ("scheduler_config", SCHEDULER),
    ("attention_config", ATTENTION),
    ("compilation_config", COMPILATION),
    ("compilation_config.pass_config", PASSES),
)
"""Parts of a `VllmConfig`: (dotted name, table)."""
