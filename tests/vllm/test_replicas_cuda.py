"""vLLM's data parallelism on GPUs, eager and in CUDA graphs: as many GPUs as ranks, or fewer that they share (docs/gpu.md).

Only the engines of the tests that were chosen start, several side by side; a test runs as soon as its own has started:
``python -m pytest -v tests/vllm/test_replicas_cuda.py -k dp2``.
"""

import os

import pytest
import torch

from alignkit.check.machine import most_ranks
from alignkit.vllm import versions
from tests.vllm.test_cuda import side_by_side
from tests.vllm.test_experts_cuda import EAGER, LENGTHS, V1, VOCAB, assert_all_ways

DP2 = {"data_parallel_size": 2}
EP = DP2 | {"enable_expert_parallel": True}
TP2 = {"tensor_parallel_size": 2}
SMALL = {"max_num_seqs": 4, "max_num_batched_tokens": 1024}
"""What the prompts need. Graphs of fewer sizes are captured, and fewer products tried."""
ENGINES = {  # model and name: environment, options of the engine; first those that start sooner
    ("qwen3_moe", "dp2-ep2"): ({}, EAGER | EP),
    ("qwen3", "dp2-graphs"): ({}, DP2),
    ("qwen3_moe", "dp2-ep2-graphs"): ({}, EP),
    ("qwen3_moe", "dp2-ep2-chunked-graphs"): ({}, EP | {"max_num_batched_tokens": 64}),
    ("qwen3_moe", "dp2-ep2-full-graphs"): ({}, EP | {"compilation_config": {"cudagraph_mode": "FULL"}}),
    ("qwen3_moe", "dp2-ep2-v1-graphs"): (V1, EP),
    ("qwen3_moe", "dp2-tp2-graphs"): ({}, DP2),  # of each expert, half
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
        pytest.skip("refused on GPUs: to try it, set `replicas` in alignkit/vllm/versions.py")


@pytest.fixture(scope="module")
def prompts():
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(VOCAB, (n,), generator=generator).tolist() for n in LENGTHS]


@pytest.fixture(scope="module")
def engines(request, vllm_process, checkpoint, tmp_path_factory):
    """By model and name, a process with a patched engine, of those that a test will ask for."""
    chosen = [item.callspec.params["key"] for item in request.session.items if item.path == request.path]
    every = {
        key: (environment, checkpoint(key[0], vocab=VOCAB), SMALL | options)
        for key, (environment, options) in ENGINES.items()
        if key in chosen and ranks(key) <= most_ranks()
    }
    at_once = max(2, (os.cpu_count() or 1) // 2)  # a start keeps a core busy for each of its two or four ranks
    with side_by_side(vllm_process, every, tmp_path_factory.mktemp("cache"), at_once) as engines:
        yield engines


@pytest.mark.parametrize("key", ENGINES, ids="-".join)
def test_all_ways_to_a_logprob(engines, checkpoint, prompts, key):
    """One prompt at a time leaves the other replica without any; five go to both, three and two."""
    if ranks(key) > most_ranks():
        pytest.skip(f"needs {ranks(key)} GPUs")
    arch, name = key
    models = [checkpoint(arch, vocab=VOCAB, seed=seed) for seed in (0, 1)]
    mixtures = 4 if arch.endswith("moe") else 0
    process = engines[key]
    try:
        assert_all_ways(process, *models, prompts, graphs=name.endswith("graphs"), mixtures=mixtures)
    finally:
        process.stop()  # its cores and its memory are for those that still start
