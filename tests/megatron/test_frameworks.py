"""TransformerConfig settings of RL frameworks are accepted and change no bit of real Megatron-core's logprobs.

`frameworks.json` lists every field that a framework sets to another value than a plain TransformerConfig's default,
except sizes and initialization. It was collected by running the frameworks' own code with Megatron-core 0.19.2, for
Qwen2.5, Qwen3, Llama 3 and 3.2: NeMo-RL with `grpo_math_1B.yaml`, with and without recomputation; verl with
`engine/megatron.yaml` and two tensor-parallel ranks; slime with `scripts/models` and `run-qwen3-4B.sh`.
"""

import dataclasses
import json
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from alignkit.convert import read_architecture
from alignkit.megatron import patch_megatron
from alignkit.megatron.policy import UNUSED, check_config
from alignkit.testing import assert_bitwise_equal
from tests.megatron import workers

FRAMEWORKS = json.loads((Path(__file__).parent / "frameworks.json").read_text())
SETTINGS = sorted(
    {(field, json.dumps(v)) for fields in FRAMEWORKS.values() for field, values in fields.items() for v in values}
)
NEEDS_APEX = ("gradient_accumulation_fusion",)
"""Fields with which Megatron builds its output layer only if Apex is installed."""
SET_AFTER_CONSTRUCTION = ("apply_rope_fusion", "moe_permute_fusion", "attention_backend")
"""Fields that the test sets on an existing config.

Megatron accepts the fusions only with TransformerEngine, and the backend only once per process.
"""


def value(stored):
    """Return the Python value of an entry of `frameworks.json`."""
    from megatron.core.transformer.enums import AttnBackend

    if stored == "torch.nn.functional.silu":
        return F.silu
    if isinstance(stored, str) and stored.startswith("torch."):
        return getattr(torch, stored.removeprefix("torch."))
    if isinstance(stored, str) and stored.startswith("AttnBackend."):
        return AttnBackend[stored.removeprefix("AttnBackend.")]
    return stored


def known(config, fields):
    """Return the `fields` that this Megatron-core version has."""
    names = {f.name for f in dataclasses.fields(config)}
    return {name: value for name, value in fields.items() if name in names}


@pytest.mark.parametrize("field, stored", SETTINGS)
def test_each_setting_is_accepted(field, stored, checkpoint, world):
    from alignkit.megatron.build import transformer_config

    config = transformer_config(read_architecture(checkpoint("qwen3")), torch.bfloat16)
    for name, given in known(config, {field: value(json.loads(stored))}).items():
        setattr(config, name, given)
    check_config(config)


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_all_settings_of_a_framework_change_no_bit(framework, checkpoint, rows, world):
    """Compares losses of a model built with the settings, and the fused and unfused cross entropy."""
    from megatron.core.fusions.fused_cross_entropy import fused_vocab_parallel_cross_entropy
    from megatron.core.transformer.transformer_config import TransformerConfig

    own = ("params_dtype", "tensor_model_parallel_size", "sequence_parallel", "qk_layernorm", "add_qkv_bias", "bf16")
    fields = {
        name: value(values[-1]) for name, values in FRAMEWORKS[framework].items() if name not in (*own, *NEEDS_APEX)
    }
    fields = known(TransformerConfig, fields)
    path = checkpoint("qwen3")
    fields["layernorm_epsilon"] = read_architecture(path).norm_eps
    tokens, positions, labels, counted = workers.batch(rows)
    with patch_megatron(300), torch.no_grad():
        expected = workers.build(path, torch.bfloat16)(tokens, positions, None, labels=labels)
        model = workers.build(
            path, torch.bfloat16, **{k: v for k, v in fields.items() if k not in SET_AFTER_CONSTRUCTION}
        )
        for name in fields.keys() & SET_AFTER_CONSTRUCTION:
            setattr(model.config, name, fields[name])
        assert_bitwise_equal(model(tokens, positions, None, labels=labels), expected, framework)
        if model.config.mtp_num_layers is not None:
            model.config.mtp_num_layers = None  # Megatron-core up to 0.18 returns logits only if this is None
        logits = model(tokens, positions, None).transpose(0, 1).contiguous()
        fused = fused_vocab_parallel_cross_entropy(logits, labels.t(), model.pg_collection.tp).t()
        assert_bitwise_equal(fused[counted], expected[counted], "fused function")
        loss = model.compute_language_model_loss(labels, logits)
        assert_bitwise_equal(loss[counted], expected[counted], "the model's own loss")


def test_unused_fields_exist_in_transformer_config(world):
    from megatron.core.transformer.transformer_config import TransformerConfig

    names = {f.name for f in dataclasses.fields(TransformerConfig)}
    newer = {"mtp_use_repeated_layer", "mtp_detach_heads", "use_fused_weighted_squared_relu", "flash_attention_version"}
    for kind in ("hybridep", "ncclep", "paged_stash", "quantile_balancing", "flex_dispatcher_num_sms"):
        newer |= {name for fields in UNUSED.values() for name in fields.split() if kind in name}
    for reason, fields in UNUSED.items():
        assert reason and names.issuperset(set(fields.split()) - newer), reason
