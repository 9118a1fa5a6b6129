"""Rules for NeMo-RL's settings that affect numerics. Keys are those of NeMo-RL's YAML files.

A setting that only Megatron-core or vLLM reads is judged by `engines`, and needs no rule here.
docs/nemo-rl.md names the commit of NeMo-RL whose keys these are.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from . import ADD, SUPPORTED, UNKNOWN, UNSUPPORTED, Finding
from .engines import megatron_refusal, model, unmet, vllm_refusal
from .reading import Recipe, Setting

ENABLING_SETTING = ("PYTHONPATH", "$(python -m alignkit.integrations.startup):$PYTHONPATH")
"""The setting that enables alignkit."""

MUST_BE: dict[str, tuple[tuple[Any, ...], str, str]] = {
    "policy.megatron_cfg.enabled": ((True,), "training: only Megatron-core is supported", "enable policy.megatron_cfg"),
    "policy.generation.backend": (("vllm",), "only vLLM is supported", "set it to vllm"),
    "policy.precision": (("bfloat16", "float32"), "fp16", "set it to bfloat16"),
    "policy.generation.top_p": ((1, 1.0), "training recomputes logprobs from the tokens alone", "set it to 1.0"),
    "policy.generation.top_k": ((None, -1), "training recomputes logprobs from the tokens alone", "set it to null"),
    "policy.generation.vllm_cfg.precision": (("bfloat16", "float32"), "quantization", "set it to ${policy.precision}"),
    "policy.generation.quant_cfg": ((None,), "quantization", "remove it"),
    "policy.draft.enabled": ((False,), "speculative decoding", "remove it"),
    "policy.quant_cfg": ((None,), "quantization", "remove it"),
    "policy.router_replay.enabled": ((False,), "routing replay (MoE)", "remove it"),
    "policy.generation.refit_transport": ((None, "ipc", "nccl"), "it uses custom vLLM workers", "remove it"),
    "distillation.topk_logits_k": ((), "distillation from logits", "remove it"),
}  # fmt: skip
"""Key -> (supported values, the reason against others, the remedy)."""

OWN: dict[str, tuple[tuple[Any, ...], str]] = {
    "peft.enabled": ((False,), "LoRA"),
    "fp8_cfg.enabled": ((False,), "fp8"),
    "use_fused_linear_logprobs": ((False,), "fused linear logprobs of NeMo-RL"),
    "fine_grained_activation_offloading": ((False,), "activation offloading"),
}
"""NeMo-RL's own field of `megatron_cfg` -> (supported values, the feature that other values enable)."""
FREE = re.compile(
    r"enabled|(optimizer|scheduler|distributed_data_parallel_config|checkpoint|peft|fp8_cfg|env_vars)\..*|env_vars|"
    r"force_reconvert_from_hf|empty_unused_memory_level|activation_checkpointing|freeze_moe_router|use_gloo_process_groups|"
    r"fused_linear_logprobs_chunk_size|converter_type|train_iters|offload_modules|force_overwrite_initial_ckpt|"
    r"defer_fp32_logits|track_moe_metrics|clear_memory_caches_before_refit|model_overrides|gradient_accumulation_fusion|force_.*|cuda_graph_(modules|scope|warmup_steps)"
)
"""NeMo-RL's own fields of `megatron_cfg` that do not affect numerics, or that are checked when the model is built."""
SERVING = re.compile(
    r"use_tqdm|enable_vllm_metrics_logger|vllm_metrics_logger_interval|expose_http_server|http_server_.*|reasoning_parser_plugin|"
    r"env_vars|skip_mm_profiling|moe_backend|use_deep_gemm|is_mx|quantization_ignored_layer_kws|num_(first|last)_layers_in_bf16|"
    r"async_engine"
)
"""Names under ``vllm_cfg``, NeMo-RL's own arguments, that do not affect the numerics of unquantized models."""
_MEGATRON, _VLLM = "policy.megatron_cfg.", re.compile(r"policy\.generation\.vllm_(cfg|kwargs)\.([^.]+).*")


def judge(recipe: Recipe) -> Iterator[Finding]:
    """Yield the findings of `examine`."""
    experts = None
    if "policy.model_name" in recipe.settings:
        setting = recipe.settings["policy.model_name"]
        found = model(setting.value)
        experts = found.experts
        yield Finding(setting, {True: SUPPORTED, False: UNSUPPORTED, None: UNKNOWN}[found.supported], found.why)
    for key in ("policy.megatron_cfg.enabled", "policy.generation.backend"):
        if key not in recipe.settings:
            yield Finding(Setting(key, None), UNSUPPORTED, MUST_BE[key][1], MUST_BE[key][2])
    others = {"num_moe_experts": experts} | {
        key.removeprefix(_MEGATRON): setting.value
        for key, setting in recipe.settings.items()
        if key.startswith(_MEGATRON)
    }
    for key, setting in recipe.settings.items():
        if isinstance(setting.value, str) and "${" in setting.value:
            continue
        if key in MUST_BE:
            allowed, why, change = MUST_BE[key]
            good = setting.value in allowed
            yield Finding(setting, SUPPORTED, "") if good else Finding(setting, UNSUPPORTED, why, change)
        elif key == "policy.generation.vllm_cfg.expert_parallel_size":
            ranks = recipe.get("policy.generation.vllm_cfg.tensor_parallel_size", 1)
            good = setting.value in (1, ranks)
            why = f"must be 1 or tensor_parallel_size = {ranks}; not supported: data parallelism inside vLLM"
            yield Finding(setting, SUPPORTED, "") if good else Finding(setting, UNSUPPORTED, why)
        elif key == "policy.generation.temperature":
            mode = "policy.generation.vllm_cfg.logprobs_mode"
            raw = setting.value != 1 and recipe.get(mode) != "processed_logprobs"
            good = isinstance(setting.value, (int, float)) and setting.value > 0 and not raw
            why, change = ("raw logprobs require temperature 1", f"set {mode}=processed_logprobs") if raw else ("", "")
            yield (
                Finding(setting, SUPPORTED, "")
                if good
                else Finding(setting, UNSUPPORTED, why or "must be positive", change)
            )
        elif key.startswith(_MEGATRON) and recipe.get("policy.megatron_cfg.enabled"):
            yield _training(setting, key.removeprefix(_MEGATRON), others)
        elif (match := _VLLM.fullmatch(key)) and not (match[1] == "cfg" and SERVING.fullmatch(match[2])):
            why = vllm_refusal(match[2], setting.value)
            yield Finding(setting, UNSUPPORTED, why) if why else Finding(setting, SUPPORTED, "")
    yield Finding(Setting(*ENABLING_SETTING), ADD, "to the environment of the run: enables alignkit in NeMo-RL")


def uses_megatron(recipe: Recipe) -> bool:
    """Return whether the recipe trains with Megatron-core."""
    return recipe.get("policy.megatron_cfg.enabled") is True


def _training(setting: Setting, name: str, others: dict[str, Any]) -> Finding:
    if name in OWN:
        why = unmet(setting.value, *OWN[name])
        return Finding(setting, UNSUPPORTED, why) if why else Finding(setting, SUPPORTED, "")
    if FREE.fullmatch(name):
        return Finding(setting, SUPPORTED, "")
    field, value = name.removeprefix("model_overrides."), setting.value
    if field == "recompute_modules" and not others.get("activation_checkpointing"):
        return Finding(setting, SUPPORTED, "")
    why = megatron_refusal(field, value, others)
    return Finding(setting, UNSUPPORTED, why) if why else Finding(setting, SUPPORTED, "")
