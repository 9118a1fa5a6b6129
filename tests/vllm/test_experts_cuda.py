"""Mixtures of experts on a GPU, in vLLM's eager mode: ``python -m pytest tests/vllm/test_experts_cuda.py``."""

import pytest
import torch

from alignkit.contract import contract_id
from tests.vllm.test_experts import (
    assert_composed,
    assert_same,
    evaluate,
    generate,
    one_by_one,
    reload,
    start,
    statuses,
)

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

LENGTHS = (1, 16, 65, 130, 400)
OPTIONS = {"dtype": "bfloat16", "max_num_seqs": 16, "block_size": 16, "gpu_memory_utilization": 0.1}
ENGINES = {  # environment, options of the engine
    "v2": ({}, {}),
    "v1": ({"VLLM_USE_V2_MODEL_RUNNER": "0"}, {}),
    "chunked": ({}, {"max_num_batched_tokens": 64}),
}
if torch.cuda.device_count() > 1:
    ranks = {"VLLM_ENABLE_V1_MULTIPROCESSING": "1"}
    ENGINES["tp2"] = (ranks, {"tensor_parallel_size": 2})
    ENGINES["ep2"] = (ranks, {"tensor_parallel_size": 2, "enable_expert_parallel": True})


@pytest.fixture(scope="module")
def prompts():
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(2000, (n,), generator=generator).tolist() for n in LENGTHS]


@pytest.mark.parametrize("arch", ["qwen3_moe", "qwen2_moe", "mixtral"])
@pytest.mark.parametrize("name", ENGINES)
def test_all_ways_to_a_logprob(vllm_process, checkpoint, prompts, arch, name):
    environment, options = ENGINES[name]
    process = vllm_process(**{"VLLM_USE_V2_MODEL_RUNNER": "1", "VLLM_USE_FLASHINFER_SAMPLER": "0"} | environment)
    process(start, checkpoint(arch), OPTIONS | options)
    for worker in process(statuses):
        assert worker["patched"] and worker["contract"] == contract_id("cuda")
        assert worker["modules"]["AlignedMoERunner"] == 4
    batch = process(generate, prompts)
    assert_composed(batch, checkpoint(arch), prompts, "cuda")
    assert_same(process(one_by_one, prompts), batch)
    tokens = [tokens for tokens, _ in batch]
    assert_same(list(zip(tokens, process(evaluate, prompts, tokens), strict=True)), batch)
    process(reload, other := checkpoint(arch, seed=1))
    assert_composed(process(generate, prompts), other, prompts, "cuda")
