"""Mixtures of experts: the same bits however vLLM comes to compute them, over ranks too, and what is refused."""

import json
import operator
import shutil
from functools import partial

import pytest
import torch

from alignkit.errors import UnsupportedError
from alignkit.testing import assert_bitwise_equal
from tests.vllm import moe
from tests.vllm.conftest import ENGINE
from tests.vllm.test_live import setting

SIZES = {"hidden": 128, "layers": 2, "heads": 4, "kv_heads": 2, "head_dim": 32, "intermediate": 128, "vocab": 512}
LENGTHS = (3, 40, 64, 65, 130)
DTYPES = ("bfloat16", "float32")
MULTIPROCESS = {"VLLM_ENABLE_V1_MULTIPROCESSING": "1"}


@pytest.fixture(scope="module")
def small(checkpoint):
    """A small checkpoint of a family with experts."""

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
    """In process, and with prompts of more than a chunk."""
    process = vllm_process()
    process(start, small(dtype=dtype), {"dtype": dtype, "max_num_batched_tokens": 64})
    return process


@pytest.fixture(scope="module")
def sampled(engine, prompts):
    """Tokens and logprobs of all prompts at once."""
    return engine(generate, prompts)


@pytest.fixture(scope="module")
def spare(vllm_process):
    """A process for engines that serve one test."""
    return vllm_process()


# What runs in the engine's process.


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
    """Per prompt: tokens and their logprobs."""
    from vllm import SamplingParams

    params = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True, detokenize=False, logprobs=0)
    outputs = state.llm.generate([{"prompt_token_ids": p} for p in prompts], params, use_tqdm=False)
    answers = [o.outputs[0] for o in outputs]
    return [
        (list(a.token_ids), [step[t].logprob for t, step in zip(a.token_ids, a.logprobs, strict=True)]) for a in answers
    ]


def again(state, prompts):
    """With the blocks of the prompts still cached, and how many tokens were."""
    from vllm import SamplingParams

    params = SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True, detokenize=False, logprobs=0)
    outputs = state.llm.generate([{"prompt_token_ids": p} for p in prompts], params, use_tqdm=False)
    return [o.num_cached_tokens for o in outputs], generate(state, prompts)


def one_by_one(state, prompts):
    state.llm.reset_prefix_cache()
    return [generate(state, [p])[0] for p in prompts]


def evaluate(state, prompts, tokens):
    """Of given tokens, by prompt logprobs."""
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


def reload(state, model):
    state.llm.collective_rpc("reload_weights", kwargs={"weights_path": model})
    state.llm.reset_prefix_cache()


def changed(state):
    """What a worker says with each of some parts replaced, then with all as they were."""
    model = state.llm.llm_engine.model_executor.driver_worker.worker.model_runner.get_model()
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
        put_back = setting(owner, name, value)
        seen.append(statuses(state)[0].get("replaced", ""))
        put_back()
    return seen, statuses(state)[0]["patched"]


def changed_shared(state):
    """The same of a shared expert."""
    model = state.llm.llm_engine.model_executor.driver_worker.worker.model_runner.get_model()
    mlp = model.model.layers[1].mlp
    seen = []
    for owner, name, value in (
        (mlp.experts, "_shared", None),
        (mlp.shared_expert, "expert_gate", None),
        (mlp.shared_expert_gate, "forward", lambda x: (x, None)),
        (mlp.shared_expert.down_proj, "reduce_results", False),
    ):
        put_back = setting(owner, name, value)
        seen.append(statuses(state)[0].get("replaced", ""))
        put_back()
    return seen, statuses(state)[0]["patched"]


def changed_choice(state):
    """The same of what chooses experts by sigmoid scores, and of rotary embeddings."""
    model = state.llm.llm_engine.model_executor.driver_worker.worker.model_runner.get_model()
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
        put_back = setting(owner, name, value)
        seen.append(statuses(state)[0].get("replaced", ""))
        put_back()
    return seen, statuses(state)[0]["patched"]


def configure(state, model, options):
    from vllm.engine.arg_utils import EngineArgs

    from alignkit.vllm import patch_vllm

    with patch_vllm():
        return EngineArgs(model, **ENGINE | options).create_engine_config() and None


def asked(state, model, part, field, value):
    """A configuration that vLLM itself refuses on the CPU, or without other packages."""
    from vllm.engine.arg_utils import EngineArgs

    from alignkit.vllm import patch_vllm
    from alignkit.vllm.refuse import refuse_config

    options = {"tensor_parallel_size": 2, "enable_expert_parallel": True}
    with patch_vllm():
        config = EngineArgs(model, **ENGINE | options).create_engine_config()
    setattr(operator.attrgetter(part)(config) if part else config, field, value)
    refuse_config(config)


# What is asked of it.


def assert_same(actual, expected):
    assert [tokens for tokens, _ in actual] == [tokens for tokens, _ in expected]
    for (_, a), (_, b) in zip(actual, expected, strict=True):
        assert_bitwise_equal(torch.tensor(a), torch.tensor(b))


def assert_composed(found, path, prompts, device="cpu"):
    """Against the ops on whole weights."""
    for prompt, (tokens, logprobs) in zip(prompts, found, strict=True):
        assert_bitwise_equal(torch.tensor(logprobs), moe.logprobs(path, prompt, tokens, device))


def test_status(engine):
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


def test_a_batch_is_what_the_ops_compute(engine, sampled, prompts, small, dtype):
    """In chunks of 64 tokens, mixed with decoding."""
    assert_composed(sampled, small(dtype=dtype), prompts)


def test_one_at_a_time_cached_and_evaluated(engine, sampled, prompts):
    assert_same(engine(one_by_one, prompts), sampled)
    cached, hits = engine(again, prompts)
    assert max(cached) >= 128
    assert_same(hits, sampled)
    tokens = [tokens for tokens, _ in sampled]
    assert_same(list(zip(tokens, engine(evaluate, prompts, tokens), strict=True)), sampled)


@pytest.mark.parametrize(
    "arch, number_type, expert_parallel, sizes",
    [
        ("qwen3_moe", "bfloat16", False, {}),
        pytest.param("qwen3_moe", "bfloat16", True, {}, marks=pytest.mark.slow),
        pytest.param("qwen3_moe", "float32", True, {"dense_layers": (1,)}, marks=pytest.mark.slow),
        pytest.param("qwen2_moe", "bfloat16", False, {"dense_layers": (0,)}, marks=pytest.mark.slow),
        ("qwen2_moe", "bfloat16", True, {"dense_layers": (0,)}),
        pytest.param("glm4_moe", "bfloat16", False, {"options": ("attention_bias",)}, marks=pytest.mark.slow),
        ("glm4_moe", "float32", True, {}),
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
def test_over_ranks(vllm_process, small, prompts, arch, number_type, expert_parallel, sizes):
    """Each rank has half of every expert, or half of the experts, and half of a shared one, and of a layer without
    experts; whole prompts."""
    process, path = vllm_process(fork_workers=True, **MULTIPROCESS), small(arch, dtype=number_type, **sizes)
    options = {"dtype": number_type, "tensor_parallel_size": 2, "enable_expert_parallel": expert_parallel}
    process(start, path, options)
    workers = process(statuses)
    assert len(workers) == 2 and all(w["patched"] for w in workers)
    found = process(generate, prompts)
    assert_composed(found, path, prompts)
    tokens = [tokens for tokens, _ in found]
    assert_same(list(zip(tokens, process(evaluate, prompts, tokens), strict=True)), found)
    process(reload, other := small(arch, dtype=number_type, seed=1, **sizes))
    assert_composed(process(generate, prompts[-1:]), other, prompts[-1:])


@pytest.mark.parametrize("update", [load_in_place, reload], ids=lambda f: f.__name__)
def test_weights_updated_in_place_reach_the_experts(engine, small, dtype, sampled, prompts, update):
    engine(update, other := small(dtype=dtype, seed=1))
    assert_composed(engine(generate, prompts[1:2]), other, prompts[1:2])
    engine(update, small(dtype=dtype))
    assert_same(engine(generate, prompts), sampled)


def test_replaced_parts_are_named(engine):
    seen, patched = engine(changed)
    wanted = (
        "num_experts_per_tok",
        "norm_topk_prob",
        "quant_method (Stock)",
        "forward is replaced",
        "forward is replaced",
    )
    assert [name in said for name, said in zip(wanted, seen, strict=True)] == [True] * 5, seen
    assert patched


@pytest.mark.parametrize("arch", ["qwen3_moe", "qwen2_moe"])
def test_a_stock_engine_differs(vllm_process, small, prompts, arch):
    """Without the patch the comparisons above fail: they do have something to find."""
    path, process = small(arch, dtype="float32"), vllm_process()
    process(start_stock, path, {"dtype": "float32"})
    stock = process(generate, prompts)
    for prompt, (tokens, found) in zip(prompts, stock, strict=True):
        expected = moe.logprobs(path, prompt, tokens)
        assert not torch.equal(torch.tensor(found), expected)
        assert torch.allclose(torch.tensor(found), expected, atol=1e-3)  # and the model is the same


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
def test_other_mixtures(spare, small, prompts, arch, sizes):
    spare(start, path := small(arch, **sizes), {"dtype": "bfloat16"})
    assert_composed(spare(generate, prompts), path, prompts)


def assert_served_and_updated(process, made, prompts):
    """In a batch and alone, and with other weights in place; made: a checkpoint, of a seed."""
    process(start, path := made(), {"dtype": "bfloat16", "max_num_batched_tokens": 64})
    sampled = process(generate, prompts)
    assert_composed(sampled, path, prompts)
    assert_same(process(one_by_one, prompts), sampled)
    process(load_in_place, other := made(seed=1))
    assert_composed(process(generate, prompts[1:2]), other, prompts[1:2])


def test_sigmoid_scores(spare, small, prompts):
    """And a bias, groups, a factor, a quarter of each head rotated; with weights updated in place, the bias too, and not when
    a part of it is replaced."""
    sizes = {"groups": 4, "top_groups": 2, "rotary_factor": 0.25, "layers": 3}
    assert_served_and_updated(spare, partial(small, "glm4_moe", **sizes), prompts)
    seen, patched = spare(changed_choice)
    wanted = (
        "scores of experts",
        "a bias of the choice",
        "n_group / topk_group",
        "routed_scaling_factor",
        "partial_rotary_factor",
    )
    assert [name in said for name, said in zip(wanted, seen, strict=True)] == [True] * len(wanted), seen
    assert patched


def test_a_shared_expert(spare, small, prompts):
    """Alone too, after a layer without experts, with weights updated in place, and not when a part of it is replaced."""
    assert_served_and_updated(spare, partial(small, "qwen2_moe", experts=6, dense_layers=(0,)), prompts)
    seen, patched = spare(changed_shared)
    wanted = ("a shared expert", "a gate of the shared expert", "forward is replaced", "reduce_results=False")
    assert [name in said for name, said in zip(wanted, seen, strict=True)] == [True] * len(wanted), seen
    assert patched


@pytest.mark.parametrize(
    "name, part, field, value",
    [
        ("load balancing of experts .EPLB.", "parallel_config", "enable_eplb", True),
        ("redundant experts", "parallel_config.eplb_config", "num_redundant_experts", 2),
        ("round_robin placement of experts", "parallel_config", "expert_placement_strategy", "round_robin"),
        ("all2all_backend deepep_low_latency", "parallel_config", "all2all_backend", "deepep_low_latency"),
        ("elastic expert parallelism", "parallel_config", "enable_elastic_ep", True),
        ("micro-batches that overlap", "parallel_config", "enable_dbo", True),
        ("return of routed experts", "aux_output_config", "enable_return_routed_experts", True),
        ("quantization .fp8.", "model_config", "quantization", "fp8"),
        ("LoRA", "", "lora_config", "some"),
    ],
)
def test_engine_options_refused(spare, small, name, part, field, value):
    with pytest.raises(UnsupportedError, match=name):
        spare(asked, small(), part, field, value)


@pytest.mark.parametrize(
    "sizes, expert_parallel, name",
    [
        (
            {"arch": "qwen2_moe", "experts": 8, "shared_intermediate": 32},
            True,
            "tensor_parallel_size 4 .the contract cuts 32 features of a shared expert into 2 parts",
        ),
        ({"experts": 6, "top_k": 2}, True, "tensor_parallel_size 4 .the contract cuts 6 experts into 2 parts"),
        (
            {"intermediate": 32},
            False,
            "tensor_parallel_size 4 .the contract cuts 32 features of an expert into 2 parts",
        ),
        (
            {"dense_layers": (0,), "dense_intermediate": 32},
            False,
            "tensor_parallel_size 4 .the contract cuts 32 features of a layer without experts into 2 parts",
        ),
    ],
)
def test_ranks_that_cannot_share(spare, small, sizes, expert_parallel, name):
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
def test_models_refused(spare, small, tmp_path, change, name):
    model = shutil.copytree(small(), tmp_path / "model")
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | change))
    with pytest.raises(UnsupportedError, match=name):
        spare(configure, str(model), {})


def simulated(state, model):
    import os

    os.environ["VLLM_MOE_ROUTING_SIMULATION_STRATEGY"] = "uniform_random"
    try:
        start(state, model, {"dtype": "bfloat16"})
    finally:
        del os.environ["VLLM_MOE_ROUTING_SIMULATION_STRATEGY"]


def overridden(state, model, overrides):
    start(state, model, {"dtype": "bfloat16", "hf_overrides": overrides})


def test_what_is_built_otherwise(spare, small):
    with pytest.raises(UnsupportedError, match="router RoutingSimulatorRouter"):
        spare(simulated, small())
    with pytest.raises(UnsupportedError, match="norm_topk_prob .False is built"):
        spare(overridden, small(), {"norm_topk_prob": False})
