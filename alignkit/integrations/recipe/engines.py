"""Checks of the settings that a recipe passes to the engines, by the policy tables of the engine adapters.

No engine is imported. A row of a policy that reads a setting which a recipe does not have needs its field in `LATER`,
`OF_THE_MODEL` or `LAYOUT`. A supported family needs the names of its published models in `_DENSE` or `_OTHER`.
"""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

from alignkit.errors import AlignkitError
from alignkit.megatron import policy as megatron
from alignkit.models import ARCHITECTURES
from alignkit.models.config import read_architecture
from alignkit.vllm import policy as vllm

AT_DEFAULT = (None, False, 0, "", "none", [], {}, (), "None")
"""Values that count as the default of a restricted field."""
DEFAULTS: dict[str, Any] = {"expert_model_parallel_size": 1, "batch_p2p_comm": True, "moe_layer_freq": 1}
"""Megatron-core defaults outside `AT_DEFAULT`."""


def megatron_refusal(field: str, value: Any, others: dict[str, Any]) -> str | None:
    """Return why Megatron-core's TransformerConfig does not support `value` in a field, or None.

    others: the other fields that are set. There, `num_moe_experts` is 0 for a dense model and None for an unknown one.
    """
    policy = megatron.POLICY
    context = SimpleNamespace(**(LAYOUT | others))
    if field.startswith("moe_") and context.num_moe_experts == 0:
        return None  # dense models do not use it
    for row in policy.rows_for([field], DEFAULTS.get):
        judged = field in policy.restricted
        if field in OF_THE_MODEL or (not judged and (value in AT_DEFAULT or value == DEFAULTS.get(field, AT_DEFAULT))):
            continue
        if (refusal := row.refusal(value, context)) is not None:
            return refusal
    return None


LAYOUT = {
    "tensor_model_parallel_size": 1,
    "pipeline_model_parallel_size": 1,
    "recompute_granularity": None,
    "num_moe_experts": None,
    "moe_router_topk": 2,
    "moe_router_score_function": "softmax",
}
"""Fields that rows of other fields read, with Megatron-core's defaults."""
OF_THE_MODEL = frozenset("context_parallel_size num_query_groups params_dtype pipeline_dtype activation_func".split())
"""Fields that are objects or depend on the model's sizes, checked when the model is built."""


def unmet(value: Any, allowed: tuple[Any, ...], feature: str) -> str | None:
    """Return the requirement that `value` violates, or None if it is allowed. Other values enable the feature."""
    if value in allowed:
        return None
    return f"must be {' or '.join(map(str, allowed)) or 'unset'}; not supported: {feature}"


def vllm_refusal(field: str, value: Any) -> str | None:
    """Return why vLLM's engine does not support `value` in an argument, or None."""
    if value in (None, False):
        return None
    if field in ALLOWED:
        return unmet(value, *ALLOWED[field])
    table = next((table for _, table in vllm.PARTS if field in table.fields), None)
    if table is None:
        return None if field in FREE else "unknown argument of vLLM"
    context = SimpleNamespace(config=SimpleNamespace(model_config=SimpleNamespace(dtype="bfloat16")), version=None)
    for row in table.rows_for([field], lambda _: None):
        if field not in LATER and (refusal := row.refusal(value, context)) is not None:
            return refusal
    return None


LATER = frozenset(
    {"backend", "additional_config", "compilation_config", "mode", "all2all_backend", "enable_fault_tolerance"}
)
"""Fields that are checked when vLLM starts, because their rows need vLLM."""
FREE = frozenset(
    """additional_config api_server_count async_engine attention_backend compilation_config device_ids disable_log_stats
    enable_log_requests enable_prefix_caching enforce_eager generation_config gpu_memory_utilization hf_overrides
    load_format max_model_len max_num_batched_tokens max_num_seqs mm_processor_cache_gb mm_processor_kwargs seed
    skip_tokenizer_init swap_space
    tensor_parallel_size trust_remote_code disable_mm_preprocessor_cache limit_mm_per_prompt tokenizer dtype
    max_cudagraph_capture_size cudagraph_capture_sizes use_tqdm_on_load""".split()
)
"""Engine arguments that no configuration has as a field, or that do not affect numerics."""
ALLOWED: dict[str, tuple[tuple[Any, ...], str]] = {
    "enable_lora": ((), "LoRA"),
    "data_parallel_size": ((1,), "data parallelism inside vLLM, which is untested with frameworks"),
    "speculative_config": ((), "speculative decoding"),
    "kv_cache_dtype": (("auto", "bfloat16"), "a KV cache dtype other than the model's"),
    "cpu_offload_gb": ((0,), "weight offloading"),
    "calculate_kv_scales": ((), "a quantized KV cache"),
    "kv_transfer_config": ((), "KV cache transfer"),
    "enable_sequence_parallel": ((), "sequence parallelism by vLLM's compiler"),
    "enable_flashinfer_autotune": ((True,), "FlashInfer autotuning"),
}
"""Engine argument that sets part of a configuration -> (supported values, the feature that other values enable)."""

_DENSE = {
    r"distill[-_]?llama|llama-?[23]|llama3|smollm2|deepseek-(llm|math|coder-(1\.3|6\.7|33)b)|eurus": "LlamaForCausalLM",
    r"distill[-_]?qwen|qwen-?2|openmath-nemotron|acereason|skywork-or1|openr1-qwen|nanov?-?math": "Qwen2ForCausalLM",
    r"qwen3": "Qwen3ForCausalLM",
    r"ministral|mistral-(7b|nemo)": "MistralForCausalLM",
}
"""Pattern of a model's name -> its architecture."""
_OTHER = {
    r"[-_.]?(vl|omni|audio)\b|vl-|-vl|llava|internvl|geo3k|vision": "a multimodal model",
    r"gemma": "Gemma3ForCausalLM",
    r"gpt-oss": "GptOssForCausalLM",
    r"qwen-?3[._-]?(5|6)|qwen3-next|qwen36": "Qwen3_5MoeForConditionalGeneration",
    r"qwen3.*-?a\d+b": "Qwen3MoeForCausalLM",
    r"qwen(1\.5|2|2\.5)-?moe|qwen(1\.5|2).*a\d": "Qwen2MoeForCausalLM",
    r"glm-?4\.[567](-air)?(-base)?$": "Glm4MoeForCausalLM",
    r"mixtral": "MixtralForCausalLM",
    r"deepseek-?(v2|v3|v4|r1(?!-distill)|coder-v2)|moonlight|kimi|dsv\d|deepseek-671": "DeepseekV3ForCausalLM",
    r"glm-?\d|hy-?v?\d|hunyuan|minimax|step-?\d|ling-|ring-|mimo|nemotron-?(h|3|nano|super|ultra)|"
    r"nano-?v\d|nanov\d|llama-4": ("its architecture"),
}
"""The same for MoE and unsupported models. The first match counts, and these patterns come before `_DENSE`."""


class Model(NamedTuple):
    """Facts about a model."""

    supported: bool | None
    """None if unknown."""
    why: str
    experts: int | None
    """Number of experts; 0 for a dense model, None if unknown."""


_EXPERTS = {"Qwen3MoeForCausalLM": 128, "MixtralForCausalLM": 8}
"""Number of experts of the models that the patterns recognize."""


def model(name: Any) -> Model:
    """Return the facts about a model from its folder's config.json, or from its name if there is no such folder."""
    text = str(name)
    if Path(text).is_dir():
        try:
            found = read_architecture(text)
        except AlignkitError as e:
            return Model(False, str(e), None)
        return Model(True, f"{ARCHITECTURES_BY_FAMILY[found.family]} (config.json)", found.experts or 0)
    last = text.rstrip("/").lower()
    last = "/".join(last.split("/")[-2:])
    for table in (_OTHER, _DENSE):
        for pattern, architecture in table.items():
            if re.search(pattern, last):
                family = ARCHITECTURES.get(architecture)
                if family is None:
                    return Model(False, f"{architecture} is not supported", None)
                experts = _EXPERTS.get(architecture) if family.experts else 0
                return Model(True, f"{architecture} (inferred from the name)", experts)
    return Model(None, "the name implies no known family; config.json is checked when the run starts", None)


ARCHITECTURES_BY_FAMILY = {family.name: architecture for architecture, family in ARCHITECTURES.items()}
