"""What frameworks set on Megatron's TransformerConfig: each setting changes no bit, or is refused with its reason.

`frameworks.json` was collected by running the frameworks' own code with Megatron-core 0.19.2: every field that is then away
from the default of a plain TransformerConfig, but for sizes and initialisation. Models: Qwen2.5, Qwen3, Llama 3 and 3.2.
NeMo-RL with its `grpo_math_1B.yaml`, with and without recomputation; verl with its `engine/megatron.yaml`, two tensor-parallel
ranks; slime with the arguments of its `scripts/models` and `run-qwen3-4B.sh`.
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
"""Megatron's own output layer is built with it only where Apex is installed."""
AFTERWARDS = ("apply_rope_fusion", "moe_permute_fusion", "attention_backend")
"""Megatron takes two of these only where TransformerEngine is installed, and one only once in a process: they are set on
a configuration that exists."""


def value(shown):
    """What a value of the file stands for."""
    from megatron.core.transformer.enums import AttnBackend

    if shown == "torch.nn.functional.silu":
        return F.silu
    if isinstance(shown, str) and shown.startswith("torch."):
        return getattr(torch, shown.removeprefix("torch."))
    if isinstance(shown, str) and shown.startswith("AttnBackend."):
        return AttnBackend[shown.removeprefix("AttnBackend.")]
    return shown


def known(config, fields):
    """`fields` without those that this version of Megatron-core lacks."""
    names = {f.name for f in dataclasses.fields(config)}
    return {name: value for name, value in fields.items() if name in names}


@pytest.mark.parametrize("field, shown", SETTINGS)
def test_each_setting(field, shown, checkpoint, world):
    from alignkit.megatron.build import transformer_config

    config = transformer_config(read_architecture(checkpoint("qwen3")), torch.bfloat16)
    for name, given in known(config, {field: value(json.loads(shown))}).items():
        setattr(config, name, given)
    check_config(config)


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_all_settings_of_a_framework_change_no_bit(framework, checkpoint, rows, world):
    """On a model that is built with them: the same losses and, of the unfused and fused functions, the same bits."""
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
        model = workers.build(path, torch.bfloat16, **{k: v for k, v in fields.items() if k not in AFTERWARDS})
        for name in fields.keys() & AFTERWARDS:
            setattr(model.config, name, fields[name])
        assert_bitwise_equal(model(tokens, positions, None, labels=labels), expected, framework)
        if model.config.mtp_num_layers is not None:
            model.config.mtp_num_layers = None  # up to 0.18, Megatron only gives logits of a model that has it so
        logits = model(tokens, positions, None).transpose(0, 1).contiguous()
        fused = fused_vocab_parallel_cross_entropy(logits, labels.t(), model.pg_collection.tp).t()
        assert_bitwise_equal(fused[counted], expected[counted], "fused function")
        loss = model.compute_language_model_loss(labels, logits)
        assert_bitwise_equal(loss[counted], expected[counted], "the model's own loss")


def test_every_reason_is_about_fields_that_there_are(world):
    from megatron.core.transformer.transformer_config import TransformerConfig

    names = {f.name for f in dataclasses.fields(TransformerConfig)}
    newer = {"mtp_use_repeated_layer", "mtp_detach_heads", "use_fused_weighted_squared_relu", "flash_attention_version"}
    for kind in ("hybridep", "ncclep", "paged_stash", "quantile_balancing", "flex_dispatcher_num_sms"):
        newer |= {name for fields in UNUSED.values() for name in fields.split() if kind in name}
    for reason, fields in UNUSED.items():
        assert reason and names.issuperset(set(fields.split()) - newer), reason
