"""Mixtures of experts on a GPU, in vLLM's default mode (compiled, in CUDA graphs) and in its eager one.

The engines start side by side, each in a process of its own: ``python -m pytest tests/vllm/test_experts_cuda.py``.
"""

import pytest
import torch

from alignkit.check.machine import most_ranks
from alignkit.contract import contract_id
from tests.vllm.test_cuda import late, side_by_side
from tests.vllm.test_experts import assert_composed, assert_same, evaluate, generate, one_by_one, reload, statuses

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

VOCAB = 2000
LENGTHS = (1, 16, 65, 130, 400)
EAGER, V1 = {"enforce_eager": True}, {"VLLM_USE_V2_MODEL_RUNNER": "0"}
ENGINES = {  # model and name: environment, options of the engine
    ("qwen3_moe", "eager"): ({}, EAGER),
    ("qwen3_moe", "v1-eager"): (V1, EAGER),
    ("qwen3_moe", "chunked"): ({}, EAGER | {"max_num_batched_tokens": 64}),
    ("qwen3_moe", "graphs"): ({}, {}),
    ("qwen3_moe", "v1-graphs"): (V1, {}),
    ("qwen2_moe", "eager"): ({}, EAGER),
    ("qwen2_moe", "graphs"): ({}, {}),
    ("mixtral", "eager"): ({}, EAGER),
    ("mixtral", "graphs"): ({}, {}),
}
if most_ranks() > 1:
    ranks = {"VLLM_ENABLE_V1_MULTIPROCESSING": "1"}
    tp2 = {"tensor_parallel_size": 2}
    ep2 = tp2 | {"enable_expert_parallel": True}
    ENGINES |= {
        ("qwen3_moe", "tp2"): (ranks, EAGER | tp2),
        ("qwen3_moe", "ep2"): (ranks, EAGER | ep2),
        ("qwen3_moe", "tp2-graphs"): (ranks, tp2),
        ("qwen3_moe", "ep2-graphs"): (ranks, ep2),
        ("qwen2_moe", "ep2-graphs"): (ranks, ep2),
        ("mixtral", "ep2-graphs"): (ranks, ep2),
    }


@pytest.fixture(scope="module")
def prompts():
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(VOCAB, (n,), generator=generator).tolist() for n in LENGTHS]


@pytest.fixture(scope="module")
def engines(vllm_process, checkpoint, tmp_path_factory):
    """By model and name, a process with a patched engine, started as `ENGINES` says."""
    models = {arch: checkpoint(arch, vocab=VOCAB) for arch, _ in ENGINES}
    every = {key: (environment, models[key[0]], options) for key, (environment, options) in ENGINES.items()}
    with side_by_side(vllm_process, every, tmp_path_factory.mktemp("cache"), at_once=6) as engines:
        yield engines


def together(state, prompts):
    state.llm.reset_prefix_cache()
    return generate(state, prompts)


def captured(state):
    """Whether the engine has compiled its model, and has CUDA graphs."""
    config = state.llm.llm_engine.vllm_config.compilation_config
    return config.mode.name == "VLLM_COMPILE", config.cudagraph_mode.name != "NONE"


@pytest.mark.parametrize("key", [key for key in ENGINES if key[1].endswith(("eager", "graphs"))], ids="-".join)
def test_first_requests_find_everything_warm(engines, prompts, key):
    """Before any other test. Of ranks only their front end is seen here."""
    assert not set(engines[key](late, prompts))


@pytest.mark.parametrize("key", ENGINES, ids="-".join)
def test_all_ways_to_a_logprob(engines, checkpoint, prompts, key):
    """Steps of decoding are replays of one graph, each with other experts."""
    arch, name = key
    models = [checkpoint(arch, vocab=VOCAB, seed=seed) for seed in (0, 1)]
    assert_all_ways(engines[key], *models, prompts, graphs=name.endswith("graphs"), mixtures=4)


def assert_all_ways(process, model, other, prompts, *, graphs, mixtures):
    """An engine of `model` gives the ops' logprobs however it comes to them, and of `other` when it has its weights."""
    assert process(captured) == (graphs, graphs)
    for worker in process(statuses):
        assert worker["patched"] and worker["contract"] == contract_id("cuda")
        assert worker["modules"].get("AlignedMoERunner", 0) == mixtures
    alone = process(one_by_one, prompts)
    assert_composed(alone, model, prompts, "cuda")
    batch = process(together, prompts)
    assert_same(batch, alone)
    assert_same(process(generate, prompts), batch)  # from the prefix cache
    tokens = [tokens for tokens, _ in batch]
    assert_same(list(zip(tokens, process(evaluate, prompts, tokens), strict=True)), batch)
    process(reload, other)
    assert_composed(process(generate, prompts), other, prompts, "cuda")
