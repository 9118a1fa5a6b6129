"""Layouts that RL frameworks start vLLM in: processes that a launcher started, with a worker extension that loads weights."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from alignkit.errors import UnsupportedError
from alignkit.testing import free_port
from tests.vllm.conftest import ENGINE
from tests.vllm.test_processes import greedy, reload, start, statuses


class Launched:
    """Two processes with the variables that torchrun sets, each an engine's tensor-parallel rank. Calls go to both."""

    def __init__(self, vllm_process):
        port = str(free_port())
        ranks = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        self.processes = [vllm_process(RANK=str(r), LOCAL_RANK=str(r), **ranks) for r in range(2)]
        self.pool = ThreadPoolExecutor(2)

    def __call__(self, function, *args):
        return list(self.pool.map(lambda process: process(function, *args), self.processes))


def launch(state, model):
    from vllm import LLM

    from alignkit.vllm import patch_vllm

    state.patch = patch_vllm()
    state.llm = LLM(
        model,
        dtype="bfloat16",
        tensor_parallel_size=2,
        distributed_executor_backend="external_launcher",
        worker_extension_cls="tests.vllm.extension.Buckets",
        **ENGINE,
    )


def load_in_buckets(state, model):
    found = state.llm.collective_rpc("load_in_buckets", args=(str(Path(model) / "model.safetensors"), 5))
    state.llm.reset_prefix_cache()
    return found


@pytest.fixture(scope="module")
def launched(vllm_process, checkpoint):
    ranks = Launched(vllm_process)
    forget_shared_memory()
    try:
        ranks(launch, checkpoint())
    finally:
        forget_shared_memory()
    return ranks


def forget_shared_memory():
    """vLLM's CPU ranks name theirs by the engine, which has no name under a launcher: what one leaves stops the next."""
    for file in Path("/dev/shm").glob("-tp:0-*cpushm_*"):
        file.unlink()


@pytest.fixture(scope="module")
def alone(vllm_process, checkpoint):
    """An engine in one process."""
    process = vllm_process()
    process(start, checkpoint(), 1)
    return process


def test_an_external_launcher_and_weights_in_buckets(launched, alone, checkpoint, prompts):
    """Both ranks give the bits of an engine of one worker, of the weights that it began with and of those that came."""
    first = alone(greedy, prompts)
    assert launched(greedy, prompts) == [first, first]
    assert all(count[0] > 20 for count in launched(load_in_buckets, checkpoint(seed=1)))
    alone(reload, checkpoint(seed=1))
    second = alone(greedy, prompts)
    assert second != first
    assert launched(greedy, prompts) == [second, second]
    for (worker,) in launched(statuses):
        assert worker["patched"] and worker["modules"]["AlignedRowParallelLinear"] == 8


def start_derived(state, model, worker):
    from vllm import LLM

    from alignkit.vllm import patch_vllm

    state.patch = patch_vllm()
    state.llm = LLM(model, dtype="bfloat16", worker_cls=f"tests.vllm.derived.{worker}", **ENGINE)


def test_a_worker_class_that_derives_from_alignkits(vllm_process, alone, checkpoint, prompts):
    """Its methods are there, and the bits are those of alignkit's own, also of weights that they load."""
    process = vllm_process()
    process(start_derived, checkpoint(), "Mine")
    alone(reload, checkpoint())
    first = alone(greedy, prompts)
    assert process(greedy, prompts) == first
    assert process(load_in_buckets, checkpoint(seed=1))[0] > 20
    alone(reload, checkpoint(seed=1))
    assert process(greedy, prompts) == alone(greedy, prompts) != first
    assert process(statuses)[0]["modules"]["AlignedRowParallelLinear"] == 8


@pytest.mark.parametrize(
    "worker, why",
    [
        ("Overrides", "it overrides execute_model, load_model"),
        ("Stock", "it does not derive from alignkit"),
        ("Between", "bases of its own do not all stand before"),
        ("nowhere", "it cannot be imported"),
    ],
)
def test_other_worker_classes_are_refused(alone, checkpoint, worker, why):
    with pytest.raises(UnsupportedError, match=f"worker_cls tests.vllm.derived.{worker}: {why}"):
        alone(configured, checkpoint(), f"tests.vllm.derived.{worker}")


def configured(state, model, worker):
    from vllm.engine.arg_utils import EngineArgs

    EngineArgs(model, worker_cls=worker, **ENGINE).create_engine_config()
