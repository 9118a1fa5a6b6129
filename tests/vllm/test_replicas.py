"""Data parallelism in real vLLM on a CPU: replicas give the bits of one engine.

The models are dense, or MoE models whose experts are sharded over the replicas or not.

Helpers are in test_experts.py. Most layouts are slow (`make test-slow`).
"""

import gc
import operator
import os

import pytest
import torch

from alignkit.errors import UnsupportedError
from alignkit.jobs.rollout import shut_down
from tests.vllm.conftest import ENGINE
from tests.vllm.test_experts import (
    SIZES,
    assert_matches_ops,
    assert_same,
    configure,
    evaluate,
    generate,
    one_at_a_time,
    reload,
    start,
    statuses,
)

LENGTHS = (3, 40, 64, 65, 130)


@pytest.fixture(scope="module")
def small(checkpoint):
    def make(arch="qwen3_moe", **sizes):
        return checkpoint(arch, torch.bfloat16, **SIZES | sizes)

    return make


@pytest.fixture(scope="module")
def prompts():
    generator = torch.Generator().manual_seed(3)
    return [torch.randint(512, (n,), generator=generator).tolist() for n in LENGTHS]


@pytest.fixture(scope="module")
def spare(vllm_process):
    """Return a process for configurations."""
    return vllm_process()


def start_replicas(state, model, options):
    """Start the engine of vLLM's server with two replicas."""
    from alignkit.jobs.replicas import Replicas
    from alignkit.vllm import patch_vllm

    with patch_vllm():
        state.llm = Replicas(model, **ENGINE | {"dtype": "bfloat16", "data_parallel_size": 2} | options)


def redirect_stderr(state, log):
    """Redirect the process's stderr to a file."""
    os.dup2(os.open(log, os.O_WRONLY | os.O_CREAT), 2)


def shut_down_and_drop(state):
    shut_down(state.llm)
    drop(state)


def drop(state):
    state.llm = None
    gc.collect()  # asyncio reports pending tasks on destruction


def assert_ends_quietly(process, log):
    """Assert that the process exits with status 0 and that asyncio reported no pending tasks."""
    process.stop()
    process.join()
    assert process.exitcode == 0
    said = log.read_text()
    assert not [word for word in ("Task", "Traceback", "loop is closed", "never awaited") if word in said], said


@pytest.mark.parametrize(
    "arch, options, sizes",
    [
        ("qwen3_moe", {"enable_expert_parallel": True, "max_num_batched_tokens": 64}, {}),
        pytest.param("qwen3_moe", {}, {"dense_layers": (1,)}, marks=pytest.mark.matrix),
        pytest.param("qwen2_moe", {"enable_expert_parallel": True}, {"dense_layers": (0,)}, marks=pytest.mark.matrix),
        pytest.param("glm4_moe", {"enable_expert_parallel": True}, {}, marks=pytest.mark.slow),
        pytest.param(
            "qwen3_moe", {"enable_expert_parallel": True, "tensor_parallel_size": 2}, {}, marks=pytest.mark.matrix
        ),
        pytest.param("qwen3_moe", {"tensor_parallel_size": 2}, {}, marks=pytest.mark.matrix),
        pytest.param(
            "qwen2_moe", {"enable_expert_parallel": True, "tensor_parallel_size": 2}, {}, marks=pytest.mark.slow
        ),
    ],
    ids=["ep2", "dense-tp2", "shared-dense-ep2", "glm-ep2", "tp2-ep4", "tp4", "shared-tp2-ep4"],
)
def test_replicas_that_share_experts_match_the_ops(vllm_process, small, prompts, tmp_path, arch, options, sizes):
    """Cover unequal batches, an idle replica, chunked prefill and reloaded weights."""
    process, path = vllm_process(fork_workers=True), small(arch, **sizes)
    process(redirect_stderr, tmp_path / "log")
    process(start_replicas, path, options)
    workers = process(statuses)
    assert len(workers) == options.get("tensor_parallel_size", 1) and all(w["patched"] for w in workers)
    found = process(generate, prompts)
    assert_matches_ops(found, path, prompts)
    assert_same(process(one_at_a_time, prompts[::-1]), found[::-1])
    tokens = [tokens for tokens, _ in found]
    assert_same(list(zip(tokens, process(evaluate, prompts, tokens), strict=True)), found)
    process(reload, other := small(arch, seed=1, **sizes))
    assert_matches_ops(process(generate, prompts[-2:]), other, prompts[-2:])
    process(shut_down_and_drop)
    assert_ends_quietly(process, tmp_path / "log")


def test_replicas_of_a_dense_model_match_one_engine(vllm_process, small, prompts, tmp_path):
    """Replicas of a dense model share nothing; each is an engine of one rank."""
    process, alone = vllm_process(fork_workers=True), vllm_process()
    alone(start, path := small("qwen3"), {"dtype": "bfloat16"})
    process(redirect_stderr, tmp_path / "log")
    process(start_replicas, path, {})
    assert process(statuses) == alone(statuses)
    assert_same(process(generate, prompts), alone(generate, prompts))
    process(drop)
    assert_ends_quietly(process, tmp_path / "log")


def check_config(state, model, part, field, value):
    """Check a configuration that vLLM itself rejects on a CPU or without optional packages."""
    from vllm.engine.arg_utils import EngineArgs

    from alignkit.vllm import patch_vllm
    from alignkit.vllm.refuse import refuse_config

    with patch_vllm():
        config = EngineArgs(model, **ENGINE | {"data_parallel_size": 2}).create_engine_config()
    setattr(operator.attrgetter(part)(config), field, value)
    refuse_config(config)


@pytest.mark.parametrize(
    "name, field, value",
    [
        ("expert load balancing, EPLB.: must be False, got True", "enable_eplb", True),
        ("all2all_backend: must be .*, got deepep_high_throughput", "all2all_backend", "deepep_high_throughput"),
        ("fault-tolerant data parallelism", "enable_fault_tolerance", True),
        ("overlapping micro-batches", "enable_dbo", True),
        ("elastic expert parallelism", "enable_elastic_ep", True),
    ],
)
def test_unsupported_options_are_rejected(spare, small, name, field, value):
    with pytest.raises(UnsupportedError, match=name):
        spare(check_config, small(), "parallel_config", field, value)


@pytest.mark.parametrize(
    "sizes, expert_parallel, name",
    [
        (
            {"experts": 6, "top_k": 2},
            True,
            r"tensor_parallel_size \* data_parallel_size: must divide 2, "
            "because the contract splits the 6 experts into 2 parts, got 4",
        ),
        (
            {"intermediate": 32},
            False,
            r"tensor_parallel_size \* data_parallel_size: must divide 2, "
            "because the contract splits the 32 features of an expert into 2 parts, got 4",
        ),
    ],
)
def test_replicas_that_cannot_split_the_experts_are_rejected(spare, small, sizes, expert_parallel, name):
    """Shared experts and dense layers are sharded only within a replica."""
    options = {"tensor_parallel_size": 2, "data_parallel_size": 2, "enable_expert_parallel": expert_parallel}
    with pytest.raises(UnsupportedError, match=name):
        spare(configure, small(**sizes), options)
    spare(configure, small("qwen2_moe", shared_intermediate=32, dense_layers=(0,), dense_intermediate=32), options)
