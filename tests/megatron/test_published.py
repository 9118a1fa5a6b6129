"""Published models (configs.json) at full size are aligned: real Megatron-core builds them on the meta device.

No weights are loaded and no forward runs. test_convert.py reads the same file.
"""

import json
from pathlib import Path

import pytest
import torch

from alignkit.convert import read_architecture
from alignkit.megatron import patch_megatron
from alignkit.megatron.build import rotary_arguments, transformer_config
from alignkit.megatron.supported import check_rotary, rotary_dim

PUBLISHED = json.loads((Path(__file__).parent / "configs.json").read_text())
for name in ("GLM-4.5", "GLM-4.5-Air"):  # 92 layers with 160 experts each would be slow
    PUBLISHED[name] = PUBLISHED[name] | {"num_hidden_layers": 6}


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_model_is_aligned(name, tmp_path, world):
    """The model is on the meta device, with the KV heads, layers and RoPE scaling of its config.json."""
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
    from alignkit.megatron.patch_model import report

    return report(model)["aligned"]
