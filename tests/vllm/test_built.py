"""What vLLM builds is what alignkit reads from config.json, or it is refused."""

import json
import shutil

import pytest
from safetensors.torch import load_file, save_file

from alignkit.errors import UnsupportedError
from tests.vllm.conftest import ENGINE
from tests.vllm.test_live import SMALL


@pytest.fixture(scope="module")
def process(vllm_process):
    return vllm_process()


@pytest.fixture
def changed(checkpoint, tmp_path):
    """A copy of a checkpoint with other fields in config.json, and with a head beside the embedding it is tied to."""

    def make(arch="qwen3", head=None, tied=False, **fields):
        model = shutil.copytree(checkpoint(arch, **SMALL, tied=tied), tmp_path / "model")
        config = json.loads((model / "config.json").read_text())
        (model / "config.json").write_text(json.dumps(config | fields))
        if head is not None:
            weights = load_file(model / "model.safetensors")
            weights["lm_head.weight"] = weights["model.embed_tokens.weight"] * head
            save_file(weights, model / "model.safetensors", {"format": "pt"})
        return str(model)

    return make


def build(state, model, **options):
    from vllm import LLM

    from alignkit.vllm import patch_vllm, worker_status

    with patch_vllm():
        state.llm = LLM(model, dtype="bfloat16", **ENGINE | {"max_model_len": 128} | options)
    return worker_status(state.llm)[0]["patched"]


def overridden(state, model, overrides):
    return build(state, model, hf_overrides=overrides)


def test_a_tied_checkpoint_with_a_head_of_its_own(process, changed):
    """vLLM unties it; the training side takes config.json's word and leaves the head out."""
    with pytest.raises(UnsupportedError, match="tie_word_embeddings"):
        process(build, changed(head=0.5, tied=True))


def test_a_tied_checkpoint_with_a_copy_of_the_embedding(process, changed):
    assert process(build, changed(head=1, tied=True))


def test_a_scale_of_the_logits(process, changed):
    with pytest.raises(UnsupportedError, match="logit_scale"):
        process(build, changed("llama", logit_scale=0.5))


@pytest.mark.parametrize(
    "overrides, name",
    [
        ({"rms_norm_eps": 1e-3}, "rms_norm_eps"),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}}, "rope_theta"),
    ],
    ids=lambda v: v if isinstance(v, str) else "",
)
def test_a_configuration_that_is_not_that_of_config_json(process, checkpoint, overrides, name):
    with pytest.raises(UnsupportedError, match=name):
        process(overridden, checkpoint(**SMALL), overrides)


def test_what_alignkit_does_not_read_in_config_json(process, changed):
    with pytest.raises(UnsupportedError, match="config.json: attention_bias"):
        process(build, changed("llama", attention_bias=True))


def test_a_scale_that_only_an_override_asks_for(process, checkpoint):
    """Mistral's attention takes it from the configuration, and no module shows it."""
    scaling = {"llama_4_scaling": {"original_max_position_embeddings": 16, "beta": 0.1}}
    with pytest.raises(UnsupportedError, match="llama_4_scaling"):
        process(overridden, checkpoint("mistral", **SMALL), scaling)
