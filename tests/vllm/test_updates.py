"""Changes of an engine's weights (alignkit/vllm/updates.py): whole checkpoints of its model alone are loaded."""

import gc
import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from alignkit.convert import read_architecture
from alignkit.errors import InputError, UnsupportedError
from alignkit.vllm.updates import Updates
from tests.vllm.conftest import ENGINE

DOWN = "model.layers.1.mlp.down_proj.weight"


def start(state, model):
    from vllm import LLM

    from alignkit.vllm import patch_vllm

    state.patch = patch_vllm()
    state.llm = None  # an engine of this process ends before the next one starts
    gc.collect()
    state.llm = LLM(model, dtype="bfloat16", enable_prefix_caching=False, **ENGINE)


def logprobs(state):
    from vllm import SamplingParams

    params = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True, detokenize=False, logprobs=0)
    (output,) = state.llm.generate([{"prompt_token_ids": [1, 2, 3]}], params, use_tqdm=False)
    answer = output.outputs[0]
    return [step[t].logprob for t, step in zip(answer.token_ids, answer.logprobs, strict=True)]


def reload_path(state, path):
    state.llm.collective_rpc("reload_weights", kwargs={"weights_path": str(path)})


def reload_tensors(state, path, without):
    tensors = [(name, t) for name, t in load_file(f"{path}/model.safetensors").items() if name not in without]
    state.llm.collective_rpc("reload_weights", kwargs={"weights_iterator": tensors})


@pytest.fixture(scope="module")
def engine(vllm_process, checkpoint):
    process = vllm_process(VLLM_PLUGINS="")
    process(start, checkpoint())
    return process


def edited(path, folder, config=(), without=(), **tensors):
    """Return a copy of a checkpoint with other fields of config.json, without some tensors, or with other ones."""
    shutil.copytree(path, folder)
    fields = json.loads((folder / "config.json").read_text()) | dict(config)
    (folder / "config.json").write_text(json.dumps(fields))
    weights = {name: t for name, t in load_file(folder / "model.safetensors").items() if name not in without}
    save_file(weights | tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


@pytest.mark.parametrize(
    "change, message",
    [
        (
            dict(config={"rms_norm_eps": 1e-3}),
            "weights_path: config.json must describe the engine's model, whose norm_eps",
        ),
        (
            dict(config={"rope_theta": 77.0, "rope_parameters": None}),
            "whose rope_base is .* got 77.0. Make a new engine",
        ),
        (dict(without=(DOWN,)), f"the checkpoint has no tensor '{DOWN}'"),
        (
            dict(extra=torch.zeros(3)),
            "must have only the tensors of qwen3 with this config.json, got 1 others, first 'extra'",
        ),
        ({DOWN: torch.zeros(3, 3)}, f"{DOWN}: must have shape"),
    ],
    ids=["norm", "rope", "missing", "extra", "shape"],
)
def test_other_files_are_rejected_before_anything_changes(change, message, engine, checkpoint, tmp_path):
    before = engine(logprobs)
    path = edited(checkpoint(seed=5), tmp_path / "other", **change)
    with pytest.raises((InputError, UnsupportedError), match=message):
        engine(reload_path, path)
    assert engine(logprobs) == before


def test_a_whole_checkpoint_is_loaded(engine, checkpoint):
    before = engine(logprobs)
    engine(reload_path, checkpoint(seed=5))
    after = engine(logprobs)
    engine(reload_tensors, checkpoint(), ())
    assert before == engine(logprobs) != after


def test_half_a_checkpoint_stops_the_engine_by_name(engine, vllm_process, checkpoint):
    process = vllm_process(VLLM_PLUGINS="")
    process(start, checkpoint())
    engine(reload_path, checkpoint(seed=5))
    other = engine(logprobs)
    for whole in (True, False):
        with pytest.raises(InputError, match=f"weights_iterator: must yield every tensor of the model, .* '{DOWN}'"):
            process(reload_tensors, checkpoint(seed=5), (DOWN,))
        if whole:
            process(reload_path, checkpoint(seed=5))
            assert process(logprobs) == other
    reason = "reload_weights: failed and may have changed some of the weights"
    with pytest.raises(UnsupportedError, match=f"^{reason}"):
        process(logprobs)
    for _ in range(2):
        with pytest.raises(UnsupportedError, match=f"a step was rejected, so make a new engine. Reason: {reason}"):
            process(logprobs)
    process(start, checkpoint(seed=5))
    assert process(logprobs) == other


def test_steps_wait_for_the_end_of_an_update(checkpoint):
    updates = Updates(read_architecture(checkpoint()))
    updates.step()
    updates.begin("start_weight_update")
    with pytest.raises(UnsupportedError, match="start_weight_update: must be finished before the next request"):
        updates.step()
    updates.end()
    updates.step()
    with pytest.raises(KeyboardInterrupt), updates.changing("reload_weights"):
        raise KeyboardInterrupt
    with pytest.raises(UnsupportedError, match="reload_weights: failed .*KeyboardInterrupt.* make a new engine"):
        updates.step()
    with updates.changing("reload_weights"), pytest.raises(UnsupportedError, match="must be finished"):
        updates.step()
    updates.step()
