"""Models that people train, at their published sizes: their configurations, and Megatron's models of them without weights."""

import json
from pathlib import Path

import pytest
import torch

from alignkit.convert import read_architecture
from alignkit.megatron import patch_megatron
from alignkit.megatron.build import rotary_arguments, transformer_config
from alignkit.megatron.supported import check_rotary, rotary_dim

PUBLISHED = json.loads((Path(__file__).parent / "configs.json").read_text())
for name in ("GLM-4.5", "GLM-4.5-Air"):  # of 92 layers with 160 experts each no test needs more than a few
    PUBLISHED[name] = PUBLISHED[name] | {"num_hidden_layers": 6}


@pytest.mark.parametrize("name", PUBLISHED)
def test_megatrons_model_is_taken_over(name, tmp_path, world):
    """On the meta device; with as many KV heads and layers as there are, and the scaling that config.json asks for."""
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
    from megatron.core.models.gpt.gpt_model import GPTModel

    (tmp_path / "config.json").write_text(json.dumps(PUBLISHED[name]))
    arch = read_architecture(tmp_path)
    config = transformer_config(arch, torch.bfloat16)
    spec = get_gpt_decoder_block_spec(config, use_transformer_engine=False, normalization="RMSNorm")
    with patch_megatron(arch.vocab), torch.device("meta"):
        model = GPTModel(
            config,
            spec,
            vocab_size=arch.padded_vocab(1),
            max_sequence_length=arch.max_position,
            share_embeddings_and_output_weights=arch.tied,
            **rotary_arguments(arch),
        )
        aligned = [op for path, op in status_of(model).items() if path.startswith("decoder.layers.")]
        assert aligned.count("attention") == arch.layers
        assert aligned.count("moe_router") == sum(map(arch.has_experts, range(arch.layers)))
        assert check_rotary(model) == (arch.rope_base, arch.rope_scaling) and rotary_dim(model) == arch.rotary_dim


def status_of(model):
    from alignkit.megatron.adopt import report

    return report(model)["aligned"]
