"""Changes of weights on a GPU: sleep with offloaded memory, CUDA IPC, stale prefixes in compiled engines, fingerprints.

Part of `make gpu-test`. test_epochs.py and test_updates.py test the same rules on a CPU.
"""

import importlib.util
import random

import pytest
import torch
from safetensors.torch import load_file

import alignkit
from alignkit.errors import UnsupportedError
from tests.vllm import soak
from tests.vllm.concurrent_engines import concurrent_engines
from tests.vllm.conftest import built_model
from tests.vllm.test_epochs import by_apply_model, by_extension, by_reload, by_the_model, epochs_of, outputs, status

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

V1, SEPARATE = {"VLLM_USE_V2_MODEL_RUNNER": "0"}, {"VLLM_ENABLE_V1_MULTIPROCESSING": "1"}
SERIALIZE = {"VLLM_ALLOW_INSECURE_SERIALIZATION": "1"}
SLEEPS = {"enable_sleep_mode": True, "worker_extension_cls": "tests.vllm.test_updates_cuda.Extension"}
ENGINES = {  # name: environment, options of the engine, seed of the model
    "v2": ({}, SLEEPS, 0),
    "v1": (V1, SLEEPS, 0),
    "ipc": (SEPARATE | SERIALIZE, SLEEPS, 0),
    "seed 0": ({}, {"enforce_eager": True}, 0),
    "seed 5": ({}, {"enforce_eager": True}, 5),
}
if importlib.util.find_spec("ray"):  # vLLM's IPC engine imports it
    ENGINES["transfer"] = (SEPARATE | SERIALIZE, {"weight_transfer_config": {"backend": "ipc"}}, 0)


class Extension(soak.Extension):
    def load_handles(self, handles: dict) -> None:
        """Load tensors from another process's GPU memory, by the arguments of `rebuild_cuda_tensor`."""
        from torch.multiprocessing.reductions import rebuild_cuda_tensor

        weights = ((name, rebuild_cuda_tensor(*arguments)) for name, arguments in handles.items())
        self.model_runner.get_model().load_weights(weights)
        torch.cuda.synchronize()


@pytest.fixture(scope="module")
def engines(vllm_process, checkpoint, tmp_path_factory):
    """Yield processes with patched engines, by the names in `ENGINES`."""
    all_engines = {
        name: (environment, checkpoint(seed=seed), options) for name, (environment, options, seed) in ENGINES.items()
    }
    with concurrent_engines(vllm_process, all_engines, tmp_path_factory.mktemp("cache")) as engines:
        yield engines


@pytest.fixture(scope="module")
def expected(engines):
    """Logprobs of fresh engines by seed of the model."""
    return {seed: engines[f"seed {seed}"](logprobs) for seed in (0, 5)}


# Functions that run in an engine's process.


def greedy(state):
    """Return the number of cached tokens and the logprobs; the runners sample differently at other temperatures."""
    return outputs(state, temperature=0.0)


def logprobs(state):
    return greedy(state)[1]


def fingerprint(state):
    return alignkit.fingerprint(state.llm).tensors


def used(state):
    """Return the bytes of the GPU in use."""
    free, total = torch.cuda.mem_get_info()
    return total - free


def usage(state):
    """Return the bytes of vLLM's allocator for sleeping engines."""
    from vllm.device_allocator.cumem import CuMemAllocator

    return CuMemAllocator.get_instance().get_current_usage()


def sleep(state, level):
    state.llm.sleep(level=level)


def wake(state, *tags):
    state.llm.wake_up(list(tags) or None)


def handles_of(state, path):
    """Copy a checkpoint to this process's GPU memory and return the arguments that other processes rebuild it from."""
    from torch.multiprocessing.reductions import reduce_tensor

    state.sent = {name: t.cuda() for name, t in load_file(f"{path}/model.safetensors").items()}
    torch.cuda.synchronize()
    return {name: reduce_tensor(t)[1] for name, t in state.sent.items()}


def by_handles(state, path):
    state.llm.collective_rpc("load_handles", args=(handles_of(state, path),))


def by_transfer(state, path):
    state.llm.start_weight_update()
    update_by_ipc(state, path)
    state.llm.finish_weight_update()


def update_by_ipc(state, path):
    handles = handles_of(state, path)
    gpu = str(torch.cuda.get_device_properties(0).uuid)
    info = {
        "names": list(handles),
        "dtype_names": [str(t.dtype).removeprefix("torch.") for t in state.sent.values()],
        "shapes": [list(t.shape) for t in state.sent.values()],
        "ipc_handles": [{gpu: arguments} for arguments in handles.values()],
    }
    state.llm.update_weights({"update_info": info})


def begin(state):
    state.llm.start_weight_update()


def finish(state):
    state.llm.finish_weight_update()


def flips(state, seed, count):
    """Flip one bit of a random element `count` times; return how many times the fingerprint named its parameter."""
    rng, before, noticed = random.Random(seed), alignkit.fingerprint(state.llm), 0
    masks = [1 << n for n in range(15)] + [-1 << 15]
    model = built_model(state)
    parameters = [p for p in model.parameters() if p.dtype == torch.bfloat16 and p.shape[0] != 2048]
    for _ in range(count):
        bits = rng.choice(parameters).detach().view(torch.int16).reshape(-1)
        index, mask = rng.randrange(len(bits)), rng.choice(masks)
        bits[index] ^= mask
        noticed += "the weights differ" in (before.difference(alignkit.fingerprint(state.llm)) or "")
        bits[index] ^= mask
    return noticed, before.difference(alignkit.fingerprint(state.llm))


# Tests.


@pytest.mark.parametrize("update", [by_reload, by_extension, by_apply_model, by_the_model])
@pytest.mark.parametrize("name", ["v2", "v1"])
def test_cached_prefixes_of_other_weights_are_not_used(name, update, engines, expected, checkpoint):
    for seed in (5, 0):
        engines[name](update, checkpoint(seed=seed))
        assert engines[name](logprobs) == expected[seed]
        cached, again = engines[name](greedy)
        assert cached >= 64 and again == expected[seed], "the prefix is cached in the new epoch"
        epoch = engines[name](status)["epoch"]
        assert engines[name](epochs_of)[0] == {0: [epoch] * 3}


@pytest.mark.parametrize("name", ["v2", "v1"])
def test_a_sleep_with_offloaded_weights_keeps_the_model(name, engines, expected):
    engine = engines[name]
    assert engine(logprobs) == expected[0]
    epoch, held, on_gpu = engine(status)["epoch"], engine(usage), engine(used)
    engine(sleep, 1)
    assert on_gpu - engine(used) > held / 2, "the memory must be released"
    engine(wake)
    cached, again = engine(greedy)
    assert again == expected[0] and cached == 0
    assert engine(status)["epoch"] == epoch + 1


@pytest.mark.parametrize("level", [1, 2])
@pytest.mark.parametrize("name", ["v2", "v1"])
def test_weights_that_are_loaded_before_the_cache_wakes(name, level, engines, expected, checkpoint):
    """Wake the weights, load others, wake the cache: the order of RL frameworks."""
    engine = engines[name]
    for seed in (5, 0):
        engine(sleep, level)
        engine(wake, "weights")
        engine(by_reload, checkpoint(seed=seed))
        engine(wake, "kv_cache")
        assert engine(greedy) == (0, expected[seed])


@pytest.mark.parametrize("name", ["v2", "v1"])
def test_discarded_weights_are_rejected_until_they_are_loaded(name, engines, expected, checkpoint):
    engine = engines[name]
    engine(sleep, 2)
    engine(wake)
    for _ in range(2):
        with pytest.raises(UnsupportedError, match=r"^sleep\(level=2\): has discarded the weights"):
            engine(logprobs)
    engine(by_reload, checkpoint())
    assert engine(logprobs) == expected[0]


def test_weights_of_another_process_by_cuda_ipc(engines, expected, checkpoint):
    for seed in (5, 0):
        engines["ipc"](by_handles, checkpoint(seed=seed))
        assert engines["ipc"](logprobs) == expected[seed]


@pytest.mark.skipif("transfer" not in ENGINES, reason="vLLM's IPC weight transfer imports ray, which is not installed")
def test_vllms_ipc_weight_transfer(engines, expected, checkpoint):
    engine = engines["transfer"]
    for seed in (5, 0):
        engine(by_transfer, checkpoint(seed=seed))
        assert engine(logprobs) == expected[seed]
    engine(begin)
    with pytest.raises(UnsupportedError, match="^start_weight_update: must be finished before the next request"):
        engine(logprobs)
    engine(update_by_ipc, checkpoint(seed=5))
    engine(finish)
    assert engine(logprobs) == expected[5]


@pytest.mark.parametrize("name", ["v2", "v1"])
def test_an_engine_has_the_fingerprint_of_its_files(name, engines, checkpoint):
    for seed in (5, 0):
        engines[name](by_reload, checkpoint(seed=seed))
        assert engines[name](fingerprint) == alignkit.fingerprint(checkpoint(seed=seed)).tensors


def test_every_flipped_bit_is_found(engines, checkpoint):
    engines["v2"](by_reload, checkpoint())
    assert engines["v2"](flips, random.randrange(10**6), 200) == (200, None)
