"""Data parallelism in real vLLM on two or more GPUs, eager and with CUDA graphs; ranks may share GPUs (docs/gpu.md).

Part of `make gpu-test`. Only the engines of the selected tests start, several at once (concurrent_engines.py):
``python -m pytest -v tests/vllm/test_replicas_cuda.py -k dp2``. A test runs as soon as its engine has started.
"""

import os

import pytest
import torch

from alignkit.runtime.machine import most_ranks
from alignkit.vllm import versions
from tests.vllm.concurrent_engines import concurrent_engines
from tests.vllm.test_experts_cuda import EAGER, LENGTHS, V1, VOCAB, assert_every_path_matches_ops

DP2 = {"data_parallel_size": 2}
EP = DP2 | {"enable_expert_parallel": True}
TP2 = {"tensor_parallel_size": 2}
SMALL = {"max_num_seqs": 4, "max_num_batched_tokens": 1024}
"""Limits that fit the prompts, so that vLLM captures fewer graph sizes and alignkit tunes fewer GEMMs."""
ENGINES = {  # (model, name): (environment, engine options), fastest start first
    ("qwen3_moe", "dp2-ep2"): ({}, EAGER | EP),
    ("qwen3", "dp2-graphs"): ({}, DP2),
    ("qwen3_moe", "dp2-ep2-graphs"): ({}, EP),
    ("qwen3_moe", "dp2-ep2-chunked-graphs"): ({}, EP | {"max_num_batched_tokens": 64}),
    ("qwen3_moe", "dp2-ep2-full-graphs"): ({}, EP | {"compilation_config": {"cudagraph_mode": "FULL"}}),
    ("qwen3_moe", "dp2-ep2-v1-graphs"): (V1, EP),
    ("qwen3_moe", "dp2-tp2-graphs"): ({}, DP2),  # half of each expert per rank
    ("qwen3_moe", "dp2-ep2-gathered-graphs"): ({"ALIGNKIT_SYMMETRIC": "0"}, EP),
    ("qwen2_moe", "dp2-ep2-graphs"): ({}, EP),
    ("qwen3_moe", "tp2-dp2-ep4"): ({}, EAGER | EP | TP2),
    ("qwen3_moe", "tp2-dp2-ep4-graphs"): ({}, EP | TP2),
    ("qwen2_moe", "tp2-dp2-ep4-graphs"): ({}, EP | TP2),
}


def ranks(key):
    return 4 if key[1].startswith("tp2") else 2


pytestmark = pytest.mark.skipif(most_ranks() < 2, reason="needs 2 GPUs")


@pytest.fixture(autouse=True, scope="module")
def allowed():
    if not versions.installed().replicas:
        pytest.skip("unsupported on GPUs: to try it, set `replicas` in alignkit/vllm/versions.py")


@pytest.fixture(scope="module")
def prompts():
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(VOCAB, (n,), generator=generator).tolist() for n in LENGTHS]


@pytest.fixture(scope="module")
def engines(request, vllm_process, checkpoint, tmp_path_factory):
    """Yield processes with patched engines of the selected tests, by (model, name)."""
    chosen = [item.callspec.params["key"] for item in request.session.items if item.path == request.path]
    all_engines = {
        key: (environment, checkpoint(key[0], vocab=VOCAB), SMALL | options)
        for key, (environment, options) in ENGINES.items()
        if key in chosen and ranks(key) <= most_ranks()
    }
    at_once = max(2, (os.cpu_count() or 1) // 2)  # a start uses one core per rank (2 or 4)
    with concurrent_engines(vllm_process, all_engines, tmp_path_factory.mktemp("cache"), at_once) as engines:
        yield engines


@pytest.mark.parametrize("key", ENGINES, ids="-".join)
def test_every_path_gives_the_ops_logprobs(engines, checkpoint, prompts, key):
    """A single prompt leaves one replica idle; five prompts split into three and two."""
    if ranks(key) > most_ranks():
        pytest.skip(f"needs {ranks(key)} GPUs")
    arch, name = key
    models = [checkpoint(arch, vocab=VOCAB, seed=seed) for seed in (0, 1)]
    moe_layers = 4 if arch.endswith("moe") else 0
    process = engines[key]
    try:
        assert_every_path_matches_ops(process, *models, prompts, graphs=name.endswith("graphs"), moe_layers=moe_layers)
    finally:
        process.stop()  # release cores and memory for engines that still start
