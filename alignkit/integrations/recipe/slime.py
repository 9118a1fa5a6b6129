"""Rules for slime's arguments. slime samples with SGLang, so none of its recipes is supported.

The rules still name every other setting that would need a change. alignkit has no integration for slime.
"""

from __future__ import annotations

from collections.abc import Iterator

from . import SUPPORTED, UNKNOWN, UNSUPPORTED, Finding
from .engines import megatron_refusal, model
from .reading import Recipe, Setting

_SAMPLED = {"--rollout-top-p": (1, 1.0), "--rollout-top-k": (-1,)}
"""Sampling argument -> supported values."""
_DROPOUT = ("--attention-dropout", "--hidden-dropout")
_MEGATRON = (
    "--tensor-model-parallel-size --pipeline-model-parallel-size --context-parallel-size --expert-model-parallel-size "
    "--num-experts --multi-latent-attention --recompute-granularity --recompute-method --recompute-num-layers "
    "--sequence-parallel --attention-softmax-in-fp32 --cp-comm-type --mtp-num-layers --moe-layer-freq"
).split()
"""Arguments that are fields of Megatron's TransformerConfig."""
_FIELDS = {"--num-experts": "num_moe_experts"}
"""Argument -> field of the TransformerConfig, if the names differ."""


def judge(recipe: Recipe) -> Iterator[Finding]:
    """Yield the findings of `examine`."""
    yield Finding(Setting("rollout", "sglang"), UNSUPPORTED, "slime samples with SGLang; only vLLM is supported")
    if (setting := recipe.settings.get("--hf-checkpoint")) is not None:
        found = model(setting.value)
        yield Finding(setting, {True: SUPPORTED, False: UNSUPPORTED, None: UNKNOWN}[found.supported], found.why)
    others = {key[2:].replace("-", "_"): setting.value for key, setting in recipe.settings.items()}
    for key, setting in recipe.settings.items():
        if key in _SAMPLED:
            good = setting.value in _SAMPLED[key]
            yield (
                Finding(setting, SUPPORTED, "")
                if good
                else Finding(setting, UNSUPPORTED, "training recomputes logprobs from the tokens alone")
            )
        elif key in _DROPOUT:
            yield (
                Finding(setting, SUPPORTED, "")
                if not setting.value
                else Finding(setting, UNSUPPORTED, "must be 0 (dropout)")
            )
        elif key in _MEGATRON:
            why = megatron_refusal(_FIELDS.get(key, key[2:].replace("-", "_")), setting.value, others)
            yield Finding(setting, UNSUPPORTED, why) if why else Finding(setting, SUPPORTED, "")


def uses_megatron(recipe: Recipe) -> bool:
    """Return whether the recipe trains with Megatron-core."""
    return recipe.get("--train-backend", "megatron") == "megatron"
