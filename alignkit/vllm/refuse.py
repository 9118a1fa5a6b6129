"""What alignkit refuses in vLLM, by name: of an engine's configuration, of a request, of a built model."""

from __future__ import annotations

import dataclasses
import os

import torch

from alignkit.dist import strict
from alignkit.errors import AlignkitError, UnsupportedError
from alignkit.vllm.built import architecture
from alignkit.vllm.seams import STRUCTURE, installed

ARCHITECTURES = ("LlamaForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")
LOGPROBS_MODES = ("raw_logprobs", "processed_logprobs")


def refuse_config(config) -> None:
    """Raises UnsupportedError naming all that a `VllmConfig` asks for and alignkit cannot keep aligned."""
    model, parallel, cache = config.model_config, config.parallel_config, config.cache_config
    hf = model.hf_config
    version, device, attention = installed(), config.device_config.device_type, config.attention_config
    reasons = [
        name
        for name, present in {
            f"device {device} (no {device.upper()} backend yet for this version of vLLM)": device != version.device,
            "the V2 model runner (set VLLM_USE_V2_MODEL_RUNNER=0)": config.use_v2_model_runner and not version.graphs,
            "micro-batches that overlap": parallel.use_ubatching,
            f"attention_backend {getattr(attention.backend, 'name', '')}": attention.backend is not None
            and attention.backend.name != version.attention,
            "attention backends by kind of layer": bool(attention.backend_per_kind),
            "LoRA": config.lora_config is not None,
            "speculative decoding": config.speculative_config is not None,
            f"quantization ({model.quantization})": model.quantization is not None,
            f"dtype {model.dtype}": model.dtype not in (torch.bfloat16, torch.float32),
            f"{cache.cache_dtype} KV cache": cache.cache_dtype not in ("auto", str(model.dtype).removeprefix("torch.")),
            "pipeline parallelism": parallel.pipeline_parallel_size > 1,
            "data parallelism inside vLLM (start one engine per replica)": parallel.data_parallel_size > 1,
            "context parallelism": max(parallel.decode_context_parallel_size, parallel.prefill_context_parallel_size)
            > 1,
            # Not in 0.26; that they are there otherwise is among the seams.
            "batch-sharded sampling": bool(getattr(parallel, "enable_batch_sharded_sampling", False)),
            "watermarking": getattr(config, "watermark_config", None) is not None,
            "KV cache transfer": config.kv_transfer_config is not None,
            "weight offloading": config.offload_config.uva.cpu_offload_gb > 0
            or config.offload_config.prefetch.offload_group_size > 0,
            "diffusion decoding": config.diffusion_config is not None,
            f"model_impl {model.model_impl}": model.model_impl not in ("auto", "vllm"),
            f"runner {model.runner_type}": model.runner_type != "generate",
            f"logprobs_mode {model.logprobs_mode}": model.logprobs_mode not in LOGPROBS_MODES,
            "custom logits processors with processed_logprobs": bool(model.logits_processors)
            and model.logprobs_mode == "processed_logprobs",
            "prompt embeddings": model.enable_prompt_embeds,
            "VLLM_BATCH_INVARIANT=1 (other kernels for the same purpose: unset it)": _is_set("VLLM_BATCH_INVARIANT"),
            "the front end in Rust (VLLM_USE_RUST_FRONTEND: it would admit requests that must be refused)": _is_set(
                "VLLM_USE_RUST_FRONTEND"
            ),
            "an additional_config that is not a dict": not isinstance(config.additional_config, dict),
        }.items()
        if present
    ]
    reasons += _compilation_reasons(config.compilation_config, version.graphs)
    reasons += _model_reasons(hf, cache.sliding_window) or _reading_reasons(model)
    if reasons:
        raise UnsupportedError(f"alignkit cannot keep this vLLM engine aligned: {'; '.join(reasons)}")


def _compilation_reasons(compilation, allowed: bool) -> list[str]:
    mode, graphs = compilation.mode.name, compilation.cudagraph_mode
    compiles, captures = mode != "NONE", graphs is not None and graphs.name != "NONE"
    return [
        name
        for name, present in {
            "torch.compile (set enforce_eager=True)": compiles and not allowed,
            "CUDA graphs (set enforce_eager=True)": captures and not allowed,
            "CUDA graphs without torch.compile between them (VLLM_USE_BREAKABLE_CUDAGRAPH)": _is_set(
                "VLLM_USE_BREAKABLE_CUDAGRAPH"
            ),
            "ALIGNKIT_STRICT=1 in CUDA graphs (it waits for the device: set enforce_eager=True)": captures and strict(),
            f"compilation mode {mode}": mode not in ("NONE", "VLLM_COMPILE"),
            f"compilation backend {compilation.backend}": compiles and compilation.backend not in ("inductor", "eager"),
            "graphs partitioned by inductor": compiles and bool(compilation.use_inductor_graph_partition),
            "compiler passes of your own": bool(compilation.inductor_passes),
            "a cache_dir of your own for compiled models (a stock engine's could be in it)": compiles
            and bool(compilation.cache_dir),
            f"fusion by the compiler ({', '.join(fusions(compilation.pass_config))})": bool(
                fusions(compilation.pass_config)
            ),
        }.items()
        if present
    ]


def fusions(pass_config) -> list[str]:
    """The compiler passes in a `PassConfig` that are on and replace arithmetic or communication."""
    return [
        f.name
        for f in dataclasses.fields(pass_config)
        if f.name.startswith(("fuse_", "enable_")) and getattr(pass_config, f.name)
    ]


def _is_set(variable: str) -> bool:
    return os.environ.get(variable, "0") not in ("", "0")


def _model_reasons(hf, sliding_window: int | None) -> list[str]:
    architectures = tuple(hf.architectures or ())
    if len(architectures) != 1 or architectures[0] not in ARCHITECTURES:
        moe = "mixture of experts, " if {"num_experts", "num_local_experts"} & vars(hf).keys() else ""
        return [f"model architecture {', '.join(architectures)} ({moe}supported: {', '.join(ARCHITECTURES)})"]
    rope = dict(getattr(hf, "rope_parameters", None) or {})
    reasons = []
    if rope.pop("rope_type", "default") != "default" or rope.keys() - {"rope_theta", "partial_rotary_factor"}:
        reasons.append(f"rope scaling ({hf.rope_parameters})")
    if rope.get("partial_rotary_factor", 1.0) != 1.0:
        reasons.append("rotary embedding of a part of the head")
    layer_types = set(getattr(hf, "layer_types", None) or ())
    if sliding_window is not None or layer_types - {"full_attention"}:
        reasons.append("sliding window")
    if not getattr(hf, "is_causal", True):
        reasons.append("attention that is not causal")
    if getattr(hf, "dual_chunk_attention_config", None) is not None:
        reasons.append("dual chunk attention")
    return reasons


def _reading_reasons(model_config) -> list[str]:
    """The training side is made from config.json: what alignkit cannot read there is refused here too."""
    try:
        architecture(model_config)
    except AlignkitError as e:
        return [f"config.json: {e}"]
    return []


def request_reasons(params, logprobs_mode: str) -> list[str]:
    """What in a request's `SamplingParams` changes the logprobs it will get, so that no recomputation from
    the tokens alone could give them again."""
    reasons = []
    if params.logprobs is None and not params.logprob_token_ids and params.prompt_logprobs is None:
        return reasons
    if params.structured_outputs is not None:  # its mask comes before even the raw logprobs
        reasons.append("structured outputs")
    if logprobs_mode == "processed_logprobs":
        reasons += [
            name
            for name, present in {
                "top_k": params.top_k > 0,
                "top_p": params.top_p != 1.0,
                "min_p": params.min_p != 0.0,
                "presence_penalty": params.presence_penalty != 0.0,
                "frequency_penalty": params.frequency_penalty != 0.0,
                "repetition_penalty": params.repetition_penalty != 1.0,
                "logit_bias": bool(params.logit_bias),
                "allowed_token_ids": bool(params.allowed_token_ids),
                "bad_words": bool(params.bad_words),
                "min_tokens": params.min_tokens > 0,
                "thinking_token_budget": params.thinking_token_budget is not None,
            }.items()
            if present
        ]
    return reasons


def refuse_model(model: torch.nn.Module, aligned: tuple[type, ...]) -> dict[str, int]:
    """How many modules of each class in `aligned` the built model has. Raises UnsupportedError naming the
    modules that are neither of those nor plain structure: they would compute something of their own."""
    counts: dict[str, int] = {}
    strangers = []
    for path, module in model.named_modules():
        name = type(module).__name__
        if type(module) in aligned:
            counts[name] = counts.get(name, 0) + 1
        elif name not in STRUCTURE or not type(module).__module__.startswith(("vllm.", "torch.")):
            strangers.append(f"{path or 'the model'} ({name})")
    if strangers:
        raise UnsupportedError(
            f"modules that alignkit does not know: {', '.join(strangers[:8])}"
            + (f" and {len(strangers) - 8} more" if len(strangers) > 8 else "")
        )
    return counts
