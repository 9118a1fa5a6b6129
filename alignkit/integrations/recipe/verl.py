"""Rules for verl's settings that affect numerics. Keys are those of verl's Hydra configuration.

A setting that only Megatron-core or vLLM reads is judged by `engines`, and needs no rule here.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from . import ADD, SUPPORTED, UNKNOWN, UNSUPPORTED, Finding
from .engines import megatron_refusal, model, unmet, vllm_refusal
from .reading import Recipe, Setting

ENABLING_SETTING = ("actor_rollout_ref.model.external_lib", "alignkit.integrations.verl")
"""The setting that enables alignkit."""
_MODEL, _ROLLOUT = "actor_rollout_ref.model.", "actor_rollout_ref.rollout."

MUST_BE: dict[str, tuple[tuple[Any, ...], str, str]] = {
    _ROLLOUT + "name": (("vllm",), "only vLLM is supported", "set it to vllm"),
    _ROLLOUT + "top_p": ((1, 1.0), "training recomputes logprobs from the tokens alone", "set it to 1"),
    _ROLLOUT + "top_k": ((-1, 0), "training recomputes logprobs from the tokens alone", "set it to -1"),
    _ROLLOUT + "dtype": (("bfloat16", "float32"), "must be bfloat16 or float32", "set it to bfloat16"),
    _ROLLOUT + "quantization": ((None,), "quantization", "remove it"),
    _ROLLOUT + "qat.enable": ((False,), "quantization", "remove it"),
    _ROLLOUT + "full_determinism": ((False,), "it sets VLLM_BATCH_INVARIANT=1 (other kernels)", "remove it"),
    _ROLLOUT + "enable_rollout_routing_replay": ((False,), "routing replay (MoE)", "remove it"),
    _ROLLOUT + "disaggregation.enabled": ((False,), "KV cache transfer", "remove it"),
    _ROLLOUT + "checkpoint_engine.backend": (
        ("naive", "nccl", "nixl", "mooncake", "kimi_ckpt_engine"),
        "the transport is unknown, or sends changed elements, which are not compared with the trainer's weights",
        "remove it",
    ),
    _ROLLOUT + "layered_summon": ((False, True), "", ""),
    _MODEL + "lora_rank": ((0,), "LoRA", "remove it"),
    _MODEL + "lora.rank": ((0,), "LoRA", "remove it"),
    _MODEL + "lora_adapter_path": ((None,), "LoRA", "remove it"),
    _MODEL + "mtp.enable": ((False,), "multi-token prediction", "remove it"),
    _MODEL + "load_tokenizer": ((True,), "the tokenizer determines the vocabulary size", "remove it"),
    _MODEL + "use_fused_kernels": ((True, False), "", ""),
    _MODEL + "use_remove_padding": ((True,), "padded rows use another attention mask", "set it to True"),
    "algorithm.adv_estimator": (
        ("gae", "grpo", "grpo_vectorized", "grpo_passk", "gpg", "reinforce_plus_plus", "reinforce_plus_plus_baseline",
         "remax", "rloo", "rloo_vectorized", "opo", "gdpo"),
        "it computes a sum over the vocabulary that is not aligned, or is unknown",
        "set it to gae, grpo, rloo or another supported estimator (docs/verl.md)",
    ),
    "distillation.enabled": ((False,), "distillation from logits", "remove it"),
}  # fmt: skip
"""Key -> (supported values, the reason against others, the remedy)."""

VLLM = {
    "data_parallel_size": "data_parallel_size",
    "pipeline_model_parallel_size": "pipeline_parallel_size",
    "tensor_model_parallel_size": "tensor_parallel_size",
    "logprobs_mode": "logprobs_mode",
    "enforce_eager": "enforce_eager",
    "enable_chunked_prefill": "enable_chunked_prefill",
    "enable_prefix_caching": "enable_prefix_caching",
    "load_format": "load_format",
}
"""Setting of verl's rollout -> argument of vLLM's engine."""

TRAINING = re.compile(r"(?:actor_rollout_ref\.(?:actor|ref)|critic)\.megatron\.(.+)")
"""Pattern of the settings of a Megatron engine."""
_ENGINE_KWARGS = _ROLLOUT + "engine_kwargs.vllm."
OWN: dict[str, tuple[tuple[Any, ...], str]] = {
    "dtype": (("bfloat16", "float32"), "fp16"),
    "use_mbridge": ((True,), "models built without a bridge"),
    "use_megatron_fsdp": ((False,), "sharded parameters (Megatron-FSDP)"),
    "dynamic_context_parallel": ((False,), "dynamic context parallelism"),
    "qat.enable": ((False,), "quantization"),
    "router_replay.mode": (("disabled",), "routing replay (MoE)"),
}
"""verl's own field of a Megatron engine -> (supported values, the feature that other values enable)."""
FREE = re.compile(
    r"param_offload|optimizer_offload|grad_offload|use_distributed_optimizer|use_dist_checkpointing|dist_ckpt.*|distrib_.*|"
    r"dist_checkpointing.*|entropy_from_logits.*|max_seqlen_per_dp_cp_rank|pad_.*|override_ddp_config.*|seed|load_weight|"
    r"override_mcore_model_config|vanilla_mbridge|use_remove_padding|use_fused_kernels|forward_only|qat\..*|"
    r"router_replay\..*|extra.*|use_checkpoint_opt_param_scheduler|_target_|strategy"
)
"""Fields that do not affect numerics, or whose effects are checked when the model is built."""


def judge(recipe: Recipe) -> Iterator[Finding]:
    """Yield the findings of `examine`."""
    yield _strategy(recipe)
    others = {}
    if _MODEL + "path" in recipe.settings:
        setting = recipe.settings[_MODEL + "path"]
        found = model(setting.value)
        yield Finding(setting, {True: SUPPORTED, False: UNSUPPORTED, None: UNKNOWN}[found.supported], found.why)
        others["num_moe_experts"] = found.experts
    for key, setting in recipe.settings.items():
        if (match := TRAINING.fullmatch(key)) and not key.startswith("critic."):
            others[match[1].removeprefix("override_transformer_config.")] = setting.value
    for setting in recipe.settings.values():
        yield from _setting(setting, recipe, others)
    key, module = ENABLING_SETTING
    given = recipe.get(key)
    if module not in (given if isinstance(given, list) else [given]):
        yield Finding(Setting(key, module), ADD, "enables alignkit in verl")
    if not recipe.get(_ROLLOUT + "calculate_log_probs", False):
        yield Finding(Setting(_ROLLOUT + "calculate_log_probs", True), ADD, "reports training/rollout_probs_diff_max")


def _strategy(recipe: Recipe) -> Finding:
    keys = ("actor_rollout_ref.actor.strategy", "model_engine", "--config-name")
    found = [recipe.settings[key] for key in keys if key in recipe.settings]
    found += [s for key, s in recipe.settings.items() if key.startswith("defaults.")]
    for setting in found:
        if "megatron" in str(setting.value):
            return Finding(setting, SUPPORTED, "trained by Megatron-core")
    if keys[0] in recipe.settings:
        change = f"remove {keys[0]} and set model_engine=megatron"
    else:
        change = "set model_engine=megatron"
    if found:
        return Finding(found[0], UNSUPPORTED, "training: only Megatron-core is supported", change)
    return Finding(
        Setting(keys[0], "fsdp"), UNSUPPORTED, "training: verl's default; only Megatron-core is supported", change
    )


def uses_megatron(recipe: Recipe) -> bool:
    """Return whether the recipe trains with Megatron-core."""
    return _strategy(recipe).verdict == SUPPORTED


def _setting(setting: Setting, recipe: Recipe, others: dict[str, Any]) -> Iterator[Finding]:
    key, value = setting.key, setting.value
    if isinstance(value, str) and "${" in value:
        return  # resolved and checked when the recipe is composed
    if key in MUST_BE:
        allowed, why, change = MUST_BE[key]
        if key.endswith((".top_p", ".top_k")) and recipe.get(_ROLLOUT + "logprobs_mode") == "raw_logprobs":
            return
        yield Finding(setting, SUPPORTED, "") if value in allowed else Finding(setting, UNSUPPORTED, why, change)
    elif key == _ROLLOUT + "temperature":
        raw = recipe.get(_ROLLOUT + "logprobs_mode") == "raw_logprobs" and value != 1
        good = isinstance(value, (int, float)) and value > 0 and not raw
        why = "raw logprobs require temperature 1" if raw else "must be positive"
        yield Finding(setting, SUPPORTED, "") if good else Finding(setting, UNSUPPORTED, why)
    elif key == _ROLLOUT + "expert_parallel_size":
        why = megatron_refusal("expert_model_parallel_size", value, {"num_moe_experts": others.get("num_moe_experts")})
        yield Finding(setting, UNSUPPORTED, why) if why else Finding(setting, SUPPORTED, "")
    elif key.startswith(_ENGINE_KWARGS) or key.removeprefix(_ROLLOUT) in VLLM:
        field = key.removeprefix(_ENGINE_KWARGS)
        why = vllm_refusal(VLLM.get(key.removeprefix(_ROLLOUT), field.split(".")[0].replace("-", "_")), value)
        yield Finding(setting, UNSUPPORTED, why) if why else Finding(setting, SUPPORTED, "")
    elif match := TRAINING.fullmatch(key):
        yield _training(setting, match[1], others)


def _training(setting: Setting, name: str, others: dict[str, Any]) -> Finding:
    if name in OWN:
        why = unmet(setting.value, *OWN[name])
        return Finding(setting, UNSUPPORTED, why) if why else Finding(setting, SUPPORTED, "")
    if FREE.fullmatch(name):
        return Finding(setting, SUPPORTED, "")
    why = megatron_refusal(name.removeprefix("override_transformer_config."), setting.value, others)
    return Finding(setting, UNSUPPORTED, why) if why else Finding(setting, SUPPORTED, "")
