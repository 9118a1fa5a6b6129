"""Rejection of models that real vLLM builds differently from config.json: another head, scale or override.

The rejections happen when a worker has built the model. test_rejections.py tests those before the engine starts.
"""

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
def modified_checkpoint(checkpoint, tmp_path):
    """Return a function that copies a checkpoint, changes config.json and may add a head beside a tied embedding."""

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


def build_with_overrides(state, model, overrides):
    return build(state, model, hf_overrides=overrides)


def test_a_tied_checkpoint_with_a_different_head_is_rejected(process, modified_checkpoint):
    """Differing tied heads: vLLM unties them, while training follows config.json and drops the head."""
    with pytest.raises(UnsupportedError, match="tie_word_embeddings"):
        process(build, modified_checkpoint(head=0.5, tied=True))


def test_a_tied_checkpoint_with_a_copy_of_the_embedding_is_accepted(process, modified_checkpoint):
    assert process(build, modified_checkpoint(head=1, tied=True))


def errors_after_failed_loads(state, model, tensors):
    """Return the errors of a load that fails, a later load of the whole checkpoint, and the checks after them."""
    from alignkit.vllm import worker_status

    def error(function, *args, **kwargs):
        try:
            return str(function(*args, **kwargs))
        except Exception as e:
            return f"{type(e).__name__}: {e}"

    rpc, found = state.llm.collective_rpc, []
    for weights in ({"weights_iterator": tensors}, {"weights_path": model}):
        rejected = error(rpc, "reload_weights", kwargs=weights)
        step = error(state.llm.generate, [{"prompt_token_ids": [1, 2]}], use_tqdm=False)
        applied = error(state.llm.apply_model, lambda model: None)
        found.append((rejected, step, worker_status(state.llm)[0].get("replaced"), applied))
    return found


def test_after_a_failed_load_checks_name_the_load(vllm_process, checkpoint):
    """The load leaves the head of a tied model on the meta device, and vLLM cannot load over it."""
    model = checkpoint(**SMALL, tied=True)
    process = vllm_process()
    process(build, model)
    tensors = dict(load_file(f"{model}/model.safetensors"))
    tensors["model.layers.1.mlp.down_proj.weight"] = tensors["model.layers.1.mlp.down_proj.weight"][:3]
    first, second = process(errors_after_failed_loads, model, list(tensors.items()))
    for (_, *later), rejected in ((first, "AssertionError"), (second, "AssertionError")):
        for text in later:
            assert f"reload_weights: failed and may have changed some of the weights ({rejected}" in text
            assert "tie_word_embeddings" not in text


def test_a_logit_scale_is_rejected(process, modified_checkpoint):
    with pytest.raises(UnsupportedError, match="logit_scale"):
        process(build, modified_checkpoint("llama", logit_scale=0.5))


@pytest.mark.parametrize(
    "overrides, name",
    [
        ({"rms_norm_eps": 1e-3}, "rms_norm_eps"),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}}, "rope_theta"),
    ],
    ids=lambda v: v if isinstance(v, str) else "",
)
def test_overrides_of_config_json_are_rejected(process, checkpoint, overrides, name):
    with pytest.raises(UnsupportedError, match=name):
        process(build_with_overrides, checkpoint(**SMALL), overrides)


def test_an_unsupported_field_of_config_json_is_rejected(process, modified_checkpoint):
    with pytest.raises(UnsupportedError, match="config.json: attention_bias"):
        process(build, modified_checkpoint("llama", attention_bias=True))


def test_an_attention_scale_set_by_an_override_is_rejected(process, checkpoint):
    """Mistral's attention reads the scale from the configuration; no module stores it."""
    scaling = {"llama_4_scaling": {"original_max_position_embeddings": 16, "beta": 0.1}}
    with pytest.raises(UnsupportedError, match="llama_4_scaling"):
        process(build_with_overrides, checkpoint("mistral", **SMALL), scaling)
