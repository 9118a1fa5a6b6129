"""Changes of an engine's weights (alignkit/vllm/updates.py): whole checkpoints of its model alone are loaded."""

import gc
import json
import shutil
import weakref
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file, save_file

from alignkit.convert import read_architecture
from alignkit.errors import InputError, UnsupportedError
from alignkit.vllm.epochs import Epochs
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


def test_half_a_checkpoint_is_rejected_until_a_whole_one_is_loaded(engine, checkpoint):
    engine(reload_path, checkpoint(seed=5))
    other = engine(logprobs)
    reason = "reload_weights: failed and may have changed some of the weights"
    for _ in range(2):
        message = f"weights_iterator: must yield every tensor of the model, .* '{DOWN}'"
        with pytest.raises(InputError, match=message):
            engine(reload_tensors, checkpoint(seed=5), (DOWN,))
        for _ in range(2):
            with pytest.raises(UnsupportedError, match=f"^{reason} .*'{DOWN}'.* Load a whole checkpoint"):
                engine(logprobs)
        engine(reload_path, checkpoint(seed=5))
        assert engine(logprobs) == other
    engine(reload_path, checkpoint())


def test_an_engine_is_freed_with_its_last_reference(engine):
    """A cycle of references would keep its memory for good, because vLLM freezes the objects of a new engine."""
    assert engine(_free)


def _free(state):
    client = weakref.ref(state.llm.llm_engine.engine_core)
    state.llm = None
    return client() is None


@pytest.fixture
def updates(checkpoint):
    """Return the updates of a worker that holds the requests "a" and "b", and has the epoch 1."""
    updates = Updates(read_architecture(checkpoint()), Epochs(), lambda: ["a", "b"])
    updates.tell(1, False, None)
    return updates


def scheduled(new=(), again=(), resumed=(), finished=()):
    """Return the parts of a `SchedulerOutput` that are read. Each argument: ids of requests."""
    return SimpleNamespace(
        scheduled_new_reqs=[SimpleNamespace(req_id=request) for request in new],
        scheduled_cached_reqs=SimpleNamespace(req_ids=list(again), resumed_req_ids=set(resumed)),
        finished_req_ids=set(finished),
    )


def test_steps_wait_for_the_end_of_an_update(updates):
    updates.step(scheduled(again="ab"))
    updates.begin("start_weight_update")
    with pytest.raises(UnsupportedError, match="start_weight_update: must be finished before the next request"):
        updates.step(scheduled())
    assert "update_weights: failed" in updates.tell(2, False, "update_weights")
    updates.finish()
    with pytest.raises(UnsupportedError, match="update_weights: failed"):
        updates.step(scheduled())
    updates.begin("start_weight_update")
    updates.finish()
    updates.step(scheduled())
    with pytest.raises(KeyboardInterrupt), updates.changing("reload_weights"):
        raise KeyboardInterrupt
    with pytest.raises(UnsupportedError, match="reload_weights: failed .*KeyboardInterrupt.* make a new engine"):
        updates.step(scheduled())
    with updates.changing("reload_weights"), pytest.raises(UnsupportedError, match="must be finished"):
        updates.step(scheduled())
    updates.step(scheduled())


def test_a_worker_needs_the_epoch(checkpoint):
    updates = Updates(read_architecture(checkpoint()), Epochs(), list)
    with pytest.raises(UnsupportedError, match="must get its requests from a process that patch_vllm"):
        updates.step(scheduled(new="a"))
    updates.tell(0, False, None)
    updates.step(scheduled(new="a"))
    updates.touch()
    updates.step(scheduled(again="a"))
    with pytest.raises(UnsupportedError, match="weights: must be changed by calls of the engine"):
        updates.step(scheduled(new="b"))
    updates.tell(1, False, None)
    updates.step(scheduled(new="b"))


def test_a_warm_up_has_no_front_end(checkpoint):
    updates = Updates(read_architecture(checkpoint()), Epochs(), list)
    with updates.warming_up():
        updates.step(scheduled(new=["a warm-up"]))
        updates.step(scheduled(again=["a warm-up"]))
    with pytest.raises(UnsupportedError, match="must get its requests from a process"):
        updates.step(scheduled(new=["a"]))


@pytest.mark.parametrize("change", ["tell", "touch"])
def test_requests_with_an_older_kv_cache_are_rejected(change, updates):
    updates.tell(2, False, None) if change == "tell" else updates.touch()
    with pytest.raises(UnsupportedError, match="weights: must not change with requests in flight.*got 1 requests"):
        updates.step(scheduled(again="a"))
    if change == "touch":  # the front end does not know yet
        with pytest.raises(UnsupportedError, match="weights: must be changed by calls of the engine"):
            updates.step(scheduled(again="a", resumed="a"))
        updates.tell(2, False, None)
    updates.step(scheduled(again="a", resumed="a"))  # its KV cache is computed again
    updates.step(scheduled(again="a", finished="b"))
    updates.step(scheduled(again="ab"))  # another request with the id of a finished one


def test_mixed_updates_keep_the_kv_cache(updates):
    updates.tell(2, True, None)
    updates.step(scheduled(again="ab"))


def test_weights_are_whole_when_every_tensor_has_been_loaded(updates, checkpoint):
    names = list(read_architecture(checkpoint()).hf_shapes())
    load = updates.watch(lambda weights: [None for _ in weights])
    updates.discarded()
    for name in names:
        with pytest.raises(UnsupportedError, match=r"sleep\(level=2\): has discarded the weights. Load a whole"):
            updates.step(scheduled())
        load([(name, None)])
    updates.step(scheduled())

    def fail(weights):
        raise RuntimeError("no space")

    with pytest.raises(RuntimeError):
        updates.watch(fail)([])
    with pytest.raises(UnsupportedError, match="load_weights: failed .*RuntimeError: no space"):
        updates.step(scheduled())
    load([(name, None) for name in names])
    updates.step(scheduled())


def test_a_failed_call_is_a_problem_until_a_whole_checkpoint_is_loaded(updates):
    assert updates.tell(2, False, "update_from_ipc").startswith("update_from_ipc: failed and may have changed some")
    with pytest.raises(UnsupportedError, match="update_from_ipc: failed"):
        updates.step(scheduled())
    with updates.changing("reload_weights"):
        pass
    assert updates.tell(3, False, None) is None
