"""Process layouts of RL frameworks, with real vLLM: an external launcher, worker extensions and derived worker classes.

extension.py and derived.py hold the classes. Helpers are in test_processes.py.
"""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from alignkit.errors import UnsupportedError
from alignkit.testing import free_port
from tests.vllm.conftest import ENGINE, reload, start
from tests.vllm.test_processes import greedy, statuses


class Launched:
    """Two processes with torchrun's variables, one tensor-parallel rank each. Calls run on both."""

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
    """Delete leftover shared memory of vLLM's CPU ranks, whose fixed names under a launcher block the next engine."""
    for file in Path("/dev/shm").glob("-tp:0-*cpushm_*"):
        file.unlink()


@pytest.fixture(scope="module")
def alone(vllm_process, checkpoint):
    """Return a process with an engine of one worker."""
    process = vllm_process()
    process(start, checkpoint())
    return process


@pytest.mark.slow
def test_external_launcher_ranks_match_one_worker(launched, alone, checkpoint, prompts):
    """Compare initial weights and weights updated in buckets."""
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


def test_a_derived_worker_class_matches_alignkits(vllm_process, alone, checkpoint, prompts):
    """The derived methods work, and logprobs match alignkit's worker before and after they load weights."""
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
        ("Overrides", "must not override execute_model, load_model"),
        ("Stock", "must derive from alignkit"),
        ("Between", "its other base classes must precede alignkit"),
        ("nowhere", "cannot be imported"),
    ],
)
def test_unsupported_worker_classes_are_rejected(alone, checkpoint, worker, why):
    with pytest.raises(UnsupportedError, match=f"worker_cls tests.vllm.derived.{worker}: {why}"):
        alone(configured, checkpoint(), f"tests.vllm.derived.{worker}")


def configured(state, model, worker):
    from vllm.engine.arg_utils import EngineArgs

    EngineArgs(model, worker_cls=worker, **ENGINE).create_engine_config()
