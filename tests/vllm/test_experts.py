"""MoE models in real vLLM on a CPU: logprobs equal tests/moe_reference.py in every batch and on one or two ranks.

A stock engine must differ. Unsupported options are rejected by name. test_experts_cuda.py and test_replicas.py import
the helpers.
"""

import json
import operator
import shutil
from functools import partial

import pytest
import torch

from alignkit.errors import UnsupportedError
from alignkit.testing import assert_bitwise_equal
from tests import moe_reference
from tests.vllm.conftest import ENGINE, built_model, reload
from tests.vllm.test_live import set_attribute

SIZES = {"hidden": 128, "layers": 2, "heads": 4, "kv_heads": 2, "head_dim": 32, "intermediate": 128, "vocab": 512}
LENGTHS = (3, 40, 64, 65, 130)
DTYPES = ("bfloat16", "float32")
MULTIPROCESS = {"VLLM_ENABLE_V1_MULTIPROCESSING": "1"}


@pytest.fixture(scope="module")
def small(checkpoint):
    """Return a function that gives the path of a small MoE checkpoint."""

    def make(arch="qwen3_moe", dtype="bfloat16", **sizes):
        return checkpoint(arch, getattr(torch, dtype), **SIZES | sizes)

    return make


@pytest.fixture(scope="module")
def prompts():
    generator = torch.Generator().manual_seed(2)
    return [torch.randint(512, (n,), generator=generator).tolist() for n in LENGTHS]


@pytest.fixture(scope="module", params=DTYPES)
def dtype(request):
    return request.param


@pytest.fixture(scope="module")
def engine(vllm_process, small, dtype):
    """Return a process with an engine whose prefill chunks are smaller than some prompts."""
    process = vllm_process()
    process(start, small(dtype=dtype), {"dtype": dtype, "max_num_batched_tokens": 64})
    return process


@pytest.fixture(scope="module")
def sampled(engine, prompts):
    """Return tokens and logprobs of all prompts in one batch."""
    return engine(generate, prompts)


@pytest.fixture(scope="module")
def spare(vllm_process):
    """Return a process for engines of a single test."""
    return vllm_process()


# Functions that run in the engine's process.


def start(state, model, options):
    from vllm import LLM

    from alignkit.vllm import patch_vllm

    if state.llm is not None:
        state.llm.llm_engine.engine_core.shutdown()
        state.llm = None
    with patch_vllm():
        state.llm = LLM(model, **ENGINE | options)


def start_stock(state, model, options):
    from vllm import LLM

    state.llm = LLM(model, **ENGINE | options)


def generate(state, prompts):
    """Return tokens and their logprobs per prompt."""
    from vllm import SamplingParams

    params = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True, detokenize=False, logprobs=0)
    outputs = state.llm.generate([{"prompt_token_ids": p} for p in prompts], params, use_tqdm=False)
    answers = [o.outputs[0] for o in outputs]
    return [
        (list(a.token_ids), [step[t].logprob for t, step in zip(a.token_ids, a.logprobs, strict=True)]) for a in answers
    ]


def generate_cached(state, prompts):
    """Return the numbers of cached tokens, and the answers with the prompts' KV blocks still cached."""
    from vllm import SamplingParams

    params = SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True, detokenize=False, logprobs=0)
    outputs = state.llm.generate([{"prompt_token_ids": p} for p in prompts], params, use_tqdm=False)
    return [o.num_cached_tokens for o in outputs], generate(state, prompts)


def one_at_a_time(state, prompts):
    state.llm.reset_prefix_cache()
    return [generate(state, [p])[0] for p in prompts]


def evaluate(state, prompts, tokens):
    """Return the logprobs of given tokens from prompt logprobs."""
    from vllm import SamplingParams

    state.llm.reset_prefix_cache()
    params = SamplingParams(max_tokens=1, prompt_logprobs=0, detokenize=False)
    whole = [{"prompt_token_ids": p + t} for p, t in zip(prompts, tokens, strict=True)]
    outputs = state.llm.generate(whole, params, use_tqdm=False)
    return [
        [step[t].logprob for t, step in zip(ts, o.prompt_logprobs[len(p) :], strict=True)]
        for p, ts, o in zip(prompts, tokens, outputs, strict=True)
    ]


def statuses(state):
    from alignkit.vllm import worker_status

    return worker_status(state.llm)


def load_in_place(state, model):
    from safetensors.torch import load_file

    weights = load_file(f"{model}/model.safetensors")
    state.llm.apply_model(lambda m: m.load_weights(weights.items()) and None)
    state.llm.reset_prefix_cache()


def statuses_with_changed_experts(state):
    """Return the replacements that status reports for changed expert parts, and its state after restoring all."""
    model = built_model(state)
    runner = model.model.layers[1].mlp.experts
    experts = runner.routed_experts

    class Stock(torch.nn.Module):
        pass

    seen = []
    for owner, name, value in (
        (experts, "top_k", 3),
        (experts, "renormalize", False),
        (experts, "quant_method", Stock()),
        (runner, "forward", lambda hidden, logits: hidden),
        (runner.gate, "forward", lambda x: (x, None)),
    ):
        restore = set_attribute(owner, name, value)
        seen.append(statuses(state)[0].get("replaced", ""))
        restore()
    return seen, statuses(state)[0]["patched"]


def statuses_with_changed_shared_expert(state):
    """Return what `statuses_with_changed_experts` does, for changed parts of a shared expert."""
    model = built_model(state)
    mlp = model.model.layers[1].mlp
    seen = []
    for owner, name, value in (
        (mlp.experts, "_shared", None),
        (mlp.shared_expert, "expert_gate", None),
        (mlp.shared_expert_gate, "forward", lambda x: (x, None)),
        (mlp.shared_expert.down_proj, "reduce_results", False),
    ):
        restore = set_attribute(owner, name, value)
        seen.append(statuses(state)[0].get("replaced", ""))
        restore()
    return seen, statuses(state)[0]["patched"]


def statuses_with_changed_router(state):
    """Return what `statuses_with_changed_experts` does, for a sigmoid router and for rotary embeddings."""
    model = built_model(state)
    layer = model.model.layers[1]
    experts = layer.mlp.experts.routed_experts
    seen = []
    for owner, name, value in (
        (experts, "scoring_func", "softmax"),
        (experts, "e_score_correction_bias", None),
        (experts, "topk_group", 1),
        (layer.mlp.experts, "routed_scaling_factor", 1.0),
        (layer.self_attn.rotary_emb, "rotary_dim", 32),
    ):
        restore = set_attribute(owner, name, value)
        seen.append(statuses(state)[0].get("replaced", ""))
        restore()
    return seen, statuses(state)[0]["patched"]


def configure(state, model, options):
    from vllm.engine.arg_utils import EngineArgs

    from alignkit.vllm import patch_vllm

    with patch_vllm():
        return EngineArgs(model, **ENGINE | options).create_engine_config() and None


def check_config(state, model, part, field, value):
    """Check a configuration that vLLM itself rejects on a CPU or without optional packages."""
    from vllm.engine.arg_utils import EngineArgs

    from alignkit.vllm import patch_vllm
    from alignkit.vllm.refuse import refuse_config

    options = {"tensor_parallel_size": 2, "enable_expert_parallel": True}
    with patch_vllm():
        config = EngineArgs(model, **ENGINE | options).create_engine_config()
    setattr(operator.attrgetter(part)(config) if part else config, field, value)
    refuse_config(config)


# Tests.


def assert_same(actual, expected):
    assert [tokens for tokens, _ in actual] == [tokens for tokens, _ in expected]
    for (_, a), (_, b) in zip(actual, expected, strict=True):
        assert_bitwise_equal(torch.tensor(a), torch.tensor(b))


def assert_matches_ops(found, path, prompts, device="cpu"):
    """Assert that the logprobs equal those of the ops on unsharded weights."""
    for prompt, (tokens, logprobs) in zip(prompts, found, strict=True):
        assert_bitwise_equal(torch.tensor(logprobs), moe_reference.logprobs(path, prompt, tokens, device))


def test_status_reports_patched_modules(engine):
    (worker,) = engine(statuses)
    assert worker["patched"]
    assert worker["modules"] == {
        "AlignedQKVParallelLinear": 2,
        "AlignedRowParallelLinear": 2,
        "AlignedGateLinear": 2,
        "AlignedMoERunner": 2,
        "AlignedExpertsMethod": 2,
        "AlignedRMSNorm": 9,
        "AlignedQwen3MoeAttention": 2,
        "AlignedRotaryEmbedding": 1,
        "AlignedAttentionImpl": 2,
        "AlignedVocabParallelEmbedding": 1,
        "AlignedParallelLMHead": 1,
        "AlignedLogitsProcessor": 1,
        "AlignedSampler": 1,
    }


def test_a_batch_matches_the_ops(engine, sampled, prompts, small, dtype):
    """Prefill runs in chunks of 64 tokens, mixed with decode."""
    assert_matches_ops(sampled, small(dtype=dtype), prompts)


def test_single_cached_and_prefilled_requests_match_the_batch(engine, sampled, prompts):
    assert_same(engine(one_at_a_time, prompts), sampled)
    cached, hits = engine(generate_cached, prompts)
    assert max(cached) >= 128
    assert_same(hits, sampled)
    tokens = [tokens for tokens, _ in sampled]
    assert_same(list(zip(tokens, engine(evaluate, prompts, tokens), strict=True)), sampled)


@pytest.mark.parametrize(
    "arch, number_type, expert_parallel, sizes",
    [
        pytest.param("qwen3_moe", "bfloat16", False, {}, marks=pytest.mark.slow),
        pytest.param("qwen3_moe", "bfloat16", True, {}, marks=pytest.mark.matrix),
        pytest.param("qwen3_moe", "float32", True, {"dense_layers": (1,)}, marks=pytest.mark.slow),
        pytest.param("qwen2_moe", "bfloat16", False, {"dense_layers": (0,)}, marks=pytest.mark.matrix),
        ("qwen2_moe", "bfloat16", True, {"dense_layers": (0,)}),
        pytest.param("glm4_moe", "bfloat16", False, {"options": ("attention_bias",)}, marks=pytest.mark.matrix),
        pytest.param("glm4_moe", "float32", True, {}, marks=pytest.mark.slow),
    ],
    ids=[
        "bfloat16-tp2",
        "bfloat16-ep2",
        "dense-float32-ep2",
        "shared-dense-bfloat16-tp2",
        "shared-dense-bfloat16-ep2",
        "glm-bfloat16-tp2",
        "glm-float32-ep2",
    ],
)
def test_two_ranks_match_the_ops(vllm_process, small, prompts, arch, number_type, expert_parallel, sizes):
    """TP halves every expert, EP halves the list of experts. Shared experts and dense layers are halved in both."""
    process, path = vllm_process(fork_workers=True, **MULTIPROCESS), small(arch, dtype=number_type, **sizes)
    options = {"dtype": number_type, "tensor_parallel_size": 2, "enable_expert_parallel": expert_parallel}
    process(start, path, options)
    workers = process(statuses)
    assert len(workers) == 2 and all(w["patched"] for w in workers)
    found = process(generate, prompts)
    assert_matches_ops(found, path, prompts)
    tokens = [tokens for tokens, _ in found]
    assert_same(list(zip(tokens, process(evaluate, prompts, tokens), strict=True)), found)
    process(reload, other := small(arch, dtype=number_type, seed=1, **sizes))
    assert_matches_ops(process(generate, prompts[-1:]), other, prompts[-1:])


@pytest.mark.parametrize("update", [load_in_place, reload], ids=lambda f: f.__name__)
def test_weights_updated_in_place_reach_the_experts(engine, small, dtype, sampled, prompts, update):
    engine(update, other := small(dtype=dtype, seed=1))
    assert_matches_ops(engine(generate, prompts[1:2]), other, prompts[1:2])
    engine(update, small(dtype=dtype))
    assert_same(engine(generate, prompts), sampled)


def test_status_names_replaced_parts(engine):
    seen, patched = engine(statuses_with_changed_experts)
    wanted = ("num_experts_per_tok", "norm_topk_prob", "quant_method (Stock)", "forward: must be ", "forward: must be ")
    assert [name in said for name, said in zip(wanted, seen, strict=True)] == [True] * 5, seen
    assert patched


@pytest.mark.parametrize("arch", ["qwen3_moe", "qwen2_moe"])
def test_a_stock_engine_differs(vllm_process, small, prompts, arch):
    """The comparisons above fail without the patch, so they can detect a difference."""
    path, process = small(arch, dtype="float32"), vllm_process()
    process(start_stock, path, {"dtype": "float32"})
    stock = process(generate, prompts)
    for prompt, (tokens, found) in zip(prompts, stock, strict=True):
        expected = moe_reference.logprobs(path, prompt, tokens)
        assert not torch.equal(torch.tensor(found), expected)
        assert torch.allclose(torch.tensor(found), expected, atol=1e-3)  # the same model


@pytest.mark.parametrize(
    "arch, sizes",
    [
        ("mixtral", {"experts": 6, "top_k": 2}),
        (
            "qwen3_moe",
            {"experts": 5, "top_k": 5, "normalize_top_k": False, "tied": True, "layers": 3, "dense_layers": (0, 2)},
        ),
    ],
)
def test_other_moe_models_match_the_ops(spare, small, prompts, arch, sizes):
    spare(start, path := small(arch, **sizes), {"dtype": "bfloat16"})
    assert_matches_ops(spare(generate, prompts), path, prompts)


def assert_served_and_updated(process, make_seeded, prompts):
    """Assert that a batch, single requests and updated weights match the ops; `make_seeded` gives a checkpoint."""
    process(start, path := make_seeded(), {"dtype": "bfloat16", "max_num_batched_tokens": 64})
    sampled = process(generate, prompts)
    assert_matches_ops(sampled, path, prompts)
    assert_same(process(one_at_a_time, prompts), sampled)
    process(load_in_place, other := make_seeded(seed=1))
    assert_matches_ops(process(generate, prompts[1:2]), other, prompts[1:2])


def test_sigmoid_routing_matches_the_ops(spare, small, prompts):
    """Cover the expert bias, groups, the routed factor, partial rotary embedding, weight updates and replaced parts."""
    sizes = {"groups": 4, "top_groups": 2, "rotary_factor": 0.25, "layers": 3}
    assert_served_and_updated(spare, partial(small, "glm4_moe", **sizes), prompts)
    seen, patched = spare(statuses_with_changed_router)
    wanted = (
        "router score function",
        "router bias",
        "n_group / topk_group",
        "routed_scaling_factor",
        "partial_rotary_factor",
    )
    assert [name in said for name, said in zip(wanted, seen, strict=True)] == [True] * len(wanted), seen
    assert patched


def test_a_shared_expert_matches_the_ops(spare, small, prompts):
    """Cover single requests, a preceding dense layer, weight updates and replaced parts."""
    assert_served_and_updated(spare, partial(small, "qwen2_moe", experts=6, dense_layers=(0,)), prompts)
    seen, patched = spare(statuses_with_changed_shared_expert)
    wanted = ("shared expert: must be ", "shared expert gate", "forward: must be ", "reduce_results: must be True")
    assert [name in said for name, said in zip(wanted, seen, strict=True)] == [True] * len(wanted), seen
    assert patched


@pytest.mark.parametrize(
    "name, part, field, value",
    [
        ("expert load balancing, EPLB.: must be False, got True", "parallel_config", "enable_eplb", True),
        ("num_redundant_experts: must be 0, got 2", "parallel_config.eplb_config", "num_redundant_experts", 2),
        (
            "expert_placement_strategy: must be linear, got round_robin",
            "parallel_config",
            "expert_placement_strategy",
            "round_robin",
        ),
        (
            "all2all_backend: must be .*, got deepep_low_latency",
            "parallel_config",
            "all2all_backend",
            "deepep_low_latency",
        ),
        ("elastic expert parallelism", "parallel_config", "enable_elastic_ep", True),
        ("overlapping micro-batches", "parallel_config", "enable_dbo", True),
        ("return of routed experts", "aux_output_config", "enable_return_routed_experts", True),
        ("quantization: must be None, got fp8", "model_config", "quantization", "fp8"),
        ("LoRA", "", "lora_config", "some"),
    ],
)
def test_unsupported_engine_options_are_rejected(spare, small, name, part, field, value):
    with pytest.raises(UnsupportedError, match=name):
        spare(check_config, small(), part, field, value)


@pytest.mark.parametrize(
    "sizes, expert_parallel, name",
    [
        (
            {"arch": "qwen2_moe", "experts": 8, "shared_intermediate": 32},
            True,
            "tensor_parallel_size: must divide 2, "
            "because the contract splits the 32 features of a shared expert into 2 parts, got 4",
        ),
        (
            {"experts": 6, "top_k": 2},
            True,
            "tensor_parallel_size: must divide 2, because the contract splits the 6 experts into 2 parts, got 4",
        ),
        (
            {"intermediate": 32},
            False,
            "tensor_parallel_size: must divide 2, "
            "because the contract splits the 32 features of an expert into 2 parts, got 4",
        ),
        (
            {"dense_layers": (0,), "dense_intermediate": 32},
            False,
            "tensor_parallel_size: must divide 2, "
            "because the contract splits the 32 features of a layer without experts into 2 parts, got 4",
        ),
    ],
)
def test_ranks_that_cannot_split_the_model_are_rejected(spare, small, sizes, expert_parallel, name):
    options = {"tensor_parallel_size": 4, "enable_expert_parallel": expert_parallel}
    with pytest.raises(UnsupportedError, match=name):
        spare(configure, small(kv_heads=4, **sizes), options)


@pytest.mark.parametrize(
    "change, name",
    [
        ({"shared_expert_intermediate_size": 64}, "shared_expert_intermediate_size"),
        ({"mlp_only_layers": [2]}, "mlp_only_layers"),
        ({"decoder_sparse_step": 3}, "decoder_sparse_step"),
    ],
)
def test_unsupported_config_json_fields_are_rejected(spare, small, tmp_path, change, name):
    model = shutil.copytree(small(), tmp_path / "model")
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | change))
    with pytest.raises(UnsupportedError, match=name):
        spare(configure, str(model), {})


def start_with_simulated_routing(state, model):
    import os

    os.environ["VLLM_MOE_ROUTING_SIMULATION_STRATEGY"] = "uniform_random"
    try:
        start(state, model, {"dtype": "bfloat16"})
    finally:
        del os.environ["VLLM_MOE_ROUTING_SIMULATION_STRATEGY"]


def start_with_overrides(state, model, overrides):
    start(state, model, {"dtype": "bfloat16", "hf_overrides": overrides})


def test_routing_that_differs_from_config_json_is_rejected(spare, small):
    with pytest.raises(UnsupportedError, match="router RoutingSimulatorRouter"):
        spare(start_with_simulated_routing, small())
    with pytest.raises(UnsupportedError, match="norm_topk_prob: must be true according to config.json, got false"):
        spare(start_with_overrides, small(), {"norm_topk_prob": False})
