"""MoE models in real vLLM on one or two GPUs, compiled with CUDA graphs (vLLM's default) and eager.

Part of `make gpu-test`. Every engine must match tests/moe_reference.py. The engines start concurrently, each in its own
process (concurrent_engines.py).
"""

import pytest
import torch

from alignkit.convert import read_architecture
from alignkit.runtime.ids import contract_id
from alignkit.runtime.machine import most_ranks
from tests.vllm.concurrent_engines import concurrent_engines
from tests.vllm.test_cuda import compilations
from tests.vllm.test_experts import assert_matches_ops, assert_same, evaluate, generate, one_at_a_time, reload, statuses

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
    ("glm4_moe", "eager"): ({}, EAGER),
    ("glm4_moe", "v1-graphs"): (V1, {}),
    ("glm4_moe", "graphs"): ({}, {}),
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
        ("glm4_moe", "ep2-graphs"): (ranks, ep2),
    }


@pytest.fixture(scope="module")
def prompts():
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(VOCAB, (n,), generator=generator).tolist() for n in LENGTHS]


@pytest.fixture(scope="module")
def engines(vllm_process, checkpoint, tmp_path_factory):
    """Yield processes with patched engines, by the keys (model, name) of `ENGINES`."""
    models = {arch: checkpoint(arch, vocab=VOCAB) for arch, _ in ENGINES}
    all_engines = {key: (environment, models[key[0]], options) for key, (environment, options) in ENGINES.items()}
    with concurrent_engines(vllm_process, all_engines, tmp_path_factory.mktemp("cache"), at_once=6) as engines:
        yield engines


def batch_without_cache(state, prompts):
    state.llm.reset_prefix_cache()
    return generate(state, prompts)


def compiled_and_captured(state):
    """Return whether the engine compiles its model, and whether it captures CUDA graphs."""
    config = state.llm.llm_engine.vllm_config.compilation_config
    return config.mode.name == "VLLM_COMPILE", config.cudagraph_mode.name != "NONE"


@pytest.mark.parametrize("key", [key for key in ENGINES if key[1].endswith(("eager", "graphs"))], ids="-".join)
def test_first_requests_compile_and_tune_nothing(engines, prompts, key):
    """Run this test before any other. With several ranks it observes only the front-end process."""
    assert not set(engines[key](compilations, prompts))


@pytest.mark.parametrize("key", ENGINES, ids="-".join)
def test_every_path_gives_the_ops_logprobs(engines, checkpoint, prompts, key):
    """Decode steps replay one graph with different experts each."""
    arch, name = key
    models = [checkpoint(arch, vocab=VOCAB, seed=seed) for seed in (0, 1)]
    read = read_architecture(models[0])
    moe_layers = sum(map(read.has_experts, range(read.layers)))
    assert_every_path_matches_ops(engines[key], *models, prompts, graphs=name.endswith("graphs"), moe_layers=moe_layers)


def assert_every_path_matches_ops(process, model, other, prompts, *, graphs, moe_layers):
    """Assert that every path of an engine of `model` matches the ops, also with the weights of `other`."""
    assert process(compiled_and_captured) == (graphs, graphs)
    for worker in process(statuses):
        assert worker["patched"] and worker["contract"] == contract_id("cuda")
        assert worker["modules"].get("AlignedMoERunner", 0) == moe_layers
    alone = process(one_at_a_time, prompts)
    assert_matches_ops(alone, model, prompts, "cuda")
    batch = process(batch_without_cache, prompts)
    assert_same(batch, alone)
    assert_same(process(generate, prompts), batch)  # from the prefix cache
    tokens = [tokens for tokens, _ in batch]
    assert_same(list(zip(tokens, process(evaluate, prompts, tokens), strict=True)), batch)
    process(reload, other)
    assert_matches_ops(process(generate, prompts), other, prompts, "cuda")
