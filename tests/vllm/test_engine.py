"""One patched vLLM engine on a CPU, in a test's process: request parameters, and weight updates of a running engine.

Logprobs must equal those of the ops and of training. A new dense model family needs a case in
`test_decode_and_prefill_agree_for_other_architectures`.
"""

from contextlib import contextmanager

import pytest
import torch

from alignkit.errors import UnsupportedError
from alignkit.jobs.rollout import shut_down
from alignkit.runtime.ids import contract_id
from alignkit.testing import assert_bitwise_equal
from tests.ropes import ROPES
from tests.vllm.conftest import ENGINE, reload

PROMPT = [5, 900, 33, 1999, 0, 41, 7, 7, 1200, 64]


@pytest.fixture(scope="module")
def engine(vllm_process, checkpoint):
    """Return a process with a patched bf16 engine that has raw logprobs."""
    process = vllm_process()
    process(start, checkpoint(), {"dtype": "bfloat16"})
    return process


@pytest.fixture(scope="module")
def processed(vllm_process, checkpoint):
    """Return a process with a patched fp32 engine that has logprobs of the sampling distribution."""
    process = vllm_process()
    process(start, checkpoint(dtype=torch.float32), {"dtype": "float32", "logprobs_mode": "processed_logprobs"})
    return process


@pytest.fixture(scope="module")
def spare(vllm_process):
    """Return a process for engines of a single test."""
    return vllm_process()


# Functions that run in the engine's process.


def start(state, model, options):
    from vllm import LLM

    from alignkit.vllm import patch_vllm

    if state.llm is not None:
        shut_down(state.llm)
    state.patch = patch_vllm()
    state.llm = LLM(model, **ENGINE, **options)


def generate(state, prompts, **params):
    """Return (tokens, steps) per prompt; a step has vLLM's (rank, logprob) by token id."""
    from vllm import SamplingParams

    defaults = {"max_tokens": 12, "ignore_eos": True, "detokenize": False, "logprobs": 0}
    params = SamplingParams(**defaults | params)
    outputs = state.llm.generate([{"prompt_token_ids": p} for p in prompts], params, use_tqdm=False)
    answers = [o.outputs[0] for o in outputs]
    return [(list(a.token_ids), _table(a.token_ids, a.logprobs)) for a in answers]


def evaluate(state, prompt, tokens, top):
    """Return the steps of given tokens from prompt logprobs, in the format of `generate`."""
    from vllm import SamplingParams

    params = SamplingParams(max_tokens=1, prompt_logprobs=top, detokenize=False)
    (output,) = state.llm.generate([{"prompt_token_ids": prompt + tokens}], params, use_tqdm=False)
    return _table(tokens, output.prompt_logprobs[len(prompt) :])


def _table(tokens, steps):
    return [
        {token: (x.rank, x.logprob) for token, x in step.items()} | {"sampled": step[t].logprob}
        for t, step in zip(tokens, steps, strict=True)
    ]


def greedy(state):
    return generate(state, [PROMPT], temperature=0.0)


def sampled(state, top, temperature, top_p):
    return generate(state, [PROMPT], logprobs=top, temperature=temperature, top_p=top_p)[0]


def structured(state):
    from vllm.sampling_params import StructuredOutputsParams

    return generate(state, [PROMPT], structured_outputs=StructuredOutputsParams(regex="a"))


def with_params(state, params):
    return generate(state, [PROMPT], **params)


def no_logprobs(state):
    from vllm import SamplingParams

    params = SamplingParams(max_tokens=12, ignore_eos=True, detokenize=False, top_k=5)
    (output,) = state.llm.generate([{"prompt_token_ids": PROMPT}], params, use_tqdm=False)
    return list(output.outputs[0].token_ids), None


def training_logprobs(state, path, prompt, tokens, vocab_sizes):
    """Return the logprobs of `tokens` from Megatron-core, one list for each vocabulary size."""
    from alignkit.drift.files import Logprobs
    from alignkit.jobs import train
    from alignkit.megatron import set_vocab_size

    result = []

    def body(rank, job, model, contract):
        given = Logprobs([prompt], [tokens], [torch.zeros(len(tokens))], "none")
        for vocab_size in vocab_sizes:
            set_vocab_size(model, vocab_size)
            result.extend(train.recompute(model, given, "one"))

    train.launch({"model": path, "dtype": "bfloat16", "patched": True, "tp": 1}, body)
    return [values.tolist() for values in result]


def statuses(state):
    from alignkit.vllm import status, worker_status

    return status(), worker_status(state.llm)


def head(state, soft_cap, scale, with_bias):
    """Return the logits' dtype and shape, the engine's logprobs of random hidden states, and `ops.linear_logp`'s."""
    from alignkit import ops

    def compare(model):
        generator = torch.Generator().manual_seed(3)
        hidden = torch.randn(9, 512, generator=generator).bfloat16()
        weight = model.lm_head.weight
        bias = torch.randn(len(weight), generator=generator).bfloat16() if with_bias else None
        target = torch.randint(2000, (9,), generator=generator)
        processor = model.logits_processor
        before = processor.soft_cap, processor.scale
        processor.soft_cap, processor.scale = soft_cap, scale
        with torch.no_grad():
            logits = processor(model.lm_head, hidden, bias)
            logp = sampler.compute_logprobs(logits).gather(1, target[:, None])[:, 0]
            expected = ops.linear_logp(
                hidden, weight, target, bias=bias, soft_cap=soft_cap, logit_scale=scale, vocab_size=2000
            )
        processor.soft_cap, processor.scale = before
        return logits.dtype, tuple(logits.shape), logp, expected

    sampler = _worker(state).model_runner.sampler
    return state.llm.apply_model(compare)[0]


@contextmanager
def hidden_states():
    """Yield a list that receives the inputs of the LM head. Hooks on modules are rejected."""
    from alignkit import ops

    head_logits, seen = ops.head_logits, []

    def record(hidden, *args, **kwargs):
        seen.append(hidden.clone())
        return head_logits(hidden, *args, **kwargs)

    ops.head_logits = record
    try:
        yield seen
    finally:
        ops.head_logits = head_logits


def hidden_of_steps(state, temperature):
    """Return the logprobs of sampled tokens, and `ops.linear_logp` of the engine's hidden states."""
    from alignkit import ops

    model = _worker(state).model_runner.get_model()
    with hidden_states() as seen:
        ((tokens, steps),) = generate(state, [PROMPT], temperature=temperature)
    with torch.no_grad():
        expected = ops.linear_logp(
            torch.cat(seen), model.lm_head.weight, torch.tensor(tokens), temperature=temperature, vocab_size=2000
        )
    return torch.tensor([s["sampled"] for s in steps]), expected


def mixed_batch(state):
    """Return answers to a greedy request, in a batch with a random request and alone."""
    from vllm import SamplingParams

    common = {"max_tokens": 12, "ignore_eos": True, "detokenize": False, "logprobs": 0}
    params = [SamplingParams(temperature=t, **common) for t in (0.0, 0.7)]
    prompts = [{"prompt_token_ids": PROMPT}, {"prompt_token_ids": PROMPT[::-1]}]
    both = state.llm.generate(prompts, params, use_tqdm=False)[0].outputs[0]
    ((tokens, steps),) = generate(state, [PROMPT], temperature=0.0)
    return list(both.token_ids), _table(both.token_ids, both.logprobs), tokens, steps


def load_in_place(state, model):
    """Copy the weights of another checkpoint into the running model."""
    from safetensors.torch import load_file

    weights = load_file(f"{model}/model.safetensors")
    state.llm.apply_model(lambda m: m.load_weights(weights.items()) and None)
    state.llm.reset_prefix_cache()


def after_undo(state, model):
    """Undo the patch; return the state of a new engine and whether the old one still gives the same bits."""
    from vllm import LLM

    from alignkit.vllm import patch_vllm, status, worker_status

    assert patch_vllm() is state.patch
    old = state.llm
    before = greedy(state)
    state.patch.undo()
    state.patch.undo()
    stock = LLM(model, dtype="bfloat16", **ENGINE)
    layers = {type(m).__module__ for m in stock.apply_model(lambda m: list(m.modules()))[0]}
    result = {
        "status": status(),
        "new": worker_status(stock),
        "old": worker_status(old),
        "aligned_modules": sorted(m for m in layers if m.startswith("alignkit")),
        "kept": greedy(state) == before,
    }
    with patch_vllm():
        result["again"] = status()["patched"]
        try:
            state.llm = stock
            greedy(state)
        except UnsupportedError as e:
            result["stock_while_patched"] = str(e)
    result["after"] = status()["patched"]
    return result


def _worker(state):
    return state.llm.llm_engine.model_executor.driver_worker.worker


# Tests.


def test_status_reports_contract_and_patched_modules(engine):
    process, workers = engine(statuses)
    assert process["patched"] and process["contract"] == contract_id("cpu")
    assert "vllm.engine.arg_utils.EngineArgs.create_engine_config" in process["names"]
    (worker,) = workers
    assert worker["patched"] and worker["contract"] == contract_id("cpu") and worker["vllm"].startswith("0.32")
    assert worker["symmetric_memory"] is False
    assert worker["modules"] == {
        "AlignedQKVParallelLinear": 4,
        "AlignedRowParallelLinear": 8,
        "AlignedMergedColumnParallelLinear": 4,
        "AlignedRMSNorm": 17,
        "AlignedQwen3Attention": 4,
        "AlignedSiluAndMul": 4,
        "AlignedRotaryEmbedding": 1,
        "AlignedAttentionImpl": 4,
        "AlignedVocabParallelEmbedding": 1,
        "AlignedParallelLMHead": 1,
        "AlignedLogitsProcessor": 1,
        "AlignedSampler": 1,
    }


@pytest.mark.parametrize("temperature, top_p", [(1.0, 1.0), (0.7, 0.9)])
def test_decode_and_prefill_agree_on_top_k_logprobs(engine, temperature, top_p):
    """Compare the sampled token, the top five and their ranks. Raw logprobs ignore temperature and top_p."""
    tokens, decoded = engine(sampled, 5, temperature, top_p)
    assert all(len(step) >= 6 for step in decoded)
    assert engine(evaluate, PROMPT, tokens, 5) == decoded


@pytest.mark.parametrize(
    "soft_cap, scale, bias", [(None, 1.0, False), (None, 1.0, True), (5.0, 1.0, False), (5.0, 0.25, True)]
)
def test_head_logprobs_match_linear_logp(engine, soft_cap, scale, bias):
    dtype, shape, logp, expected = engine(head, soft_cap, scale, bias)
    assert dtype == torch.float32 and shape == (9, 2000)
    assert_bitwise_equal(logp, expected)


def test_structured_outputs_are_rejected(engine):
    with pytest.raises(UnsupportedError, match="structured outputs"):
        engine(structured)
    assert engine(greedy)  # the engine survives


@pytest.mark.parametrize("temperature", [0.7, 1.0, 2.0])
def test_processed_logprobs_match_linear_logp(processed, temperature):
    logp, expected = processed(hidden_of_steps, temperature)
    assert_bitwise_equal(logp, expected)


def test_a_greedy_request_keeps_its_processed_logprobs_in_a_random_batch(processed):
    tokens, steps, tokens_alone, steps_alone = processed(mixed_batch)
    assert tokens == tokens_alone and steps == steps_alone


@pytest.mark.parametrize(
    "params",
    [
        {"top_k": 5},
        {"top_p": 0.9},
        {"min_p": 0.1},
        {"presence_penalty": 0.5},
        {"frequency_penalty": 0.5},
        {"repetition_penalty": 1.1},
        {"logit_bias": {3: 1.0}},
        {"allowed_token_ids": [1, 2]},
        {"min_tokens": 2},
    ],
    ids=lambda p: next(iter(p)),
)
def test_processed_logprobs_reject_params_that_change_the_distribution(processed, params):
    with pytest.raises(UnsupportedError, match=next(iter(params))):
        processed(with_params, params)


@pytest.mark.parametrize(
    "params",
    [{"prompt_logprob_token_ids": [[1, 2]] * 3}, {"prompt_logprob_start": 1}, {"trace_decode_token_ids": [1, 2]}],
    ids=lambda p: next(iter(p)),
)
def test_unknown_fields_of_a_request_are_rejected(engine, params):
    """With and without logprobs: an unknown field may ask for logprobs itself."""
    for logprobs in (0, None):
        with pytest.raises(UnsupportedError, match=f"^SamplingParams: {next(iter(params))}.*: must be None, got"):
            engine(with_params, params | {"logprobs": logprobs})


def test_requests_without_logprobs_accept_these_params(processed):
    tokens, _ = processed(no_logprobs)
    assert len(tokens) == 12


@pytest.fixture(scope="module")
def other_weights(spare, checkpoint):
    """Return another checkpoint and the answers of an engine started on it."""
    spare(start, checkpoint(seed=1), {"dtype": "bfloat16"})
    return checkpoint(seed=1), spare(greedy)


@pytest.mark.parametrize("update", [load_in_place, reload], ids=lambda f: f.__name__)
def test_weights_updated_in_place_reach_the_logprobs(engine, checkpoint, other_weights, update):
    path, expected = other_weights
    first = engine(greedy)
    engine(update, path)
    assert engine(greedy) == expected != first
    engine(update, checkpoint())
    assert engine(greedy) == first


@pytest.mark.parametrize(
    "arch, dtype, tied",
    [("llama", torch.bfloat16, True), ("qwen2", torch.float32, False), ("mistral", torch.bfloat16, False)],
)
def test_decode_and_prefill_agree_for_other_architectures(spare, checkpoint, arch, dtype, tied):
    spare(start, checkpoint(arch, dtype, tied=tied), {"dtype": str(dtype).removeprefix("torch.")})
    tokens, decoded = spare(sampled, 5, 1.0, 1.0)
    assert spare(evaluate, PROMPT, tokens, 5) == decoded


def test_a_smaller_vocabulary_matches_training(spare, vllm_process, checkpoint):
    """Ids beyond the vocabulary are never sampled. Logprobs equal those of training with that vocabulary."""
    options = {"dtype": "bfloat16", "additional_config": {"alignkit_vocab_size": 700}}
    spare(start, checkpoint(), options)
    prompt = [token % 700 for token in PROMPT]
    tokens, decoded = spare(generate, [prompt])[0]
    assert max(tokens) < 700
    actual = torch.tensor([step["sampled"] for step in decoded], dtype=torch.float32)
    cut, whole = map(torch.tensor, vllm_process()(training_logprobs, checkpoint(), prompt, tokens, [700, 2000]))
    assert_bitwise_equal(cut, actual)
    assert not torch.equal(whole, actual)


@pytest.mark.parametrize("arch, rope", [("llama", "llama3"), ("qwen3", "yarn")])
def test_scaled_rope_matches_prefill_and_training(spare, vllm_process, checkpoint, arch, rope):
    """Decode, prefill and training give the same bits, and these differ from an unscaled model's."""
    path, unscaled = checkpoint(arch, rope_scaling=ROPES[rope]), checkpoint(arch)
    spare(start, path, {"dtype": "bfloat16"})
    tokens, decoded = spare(generate, [PROMPT * 8])[0]
    actual = torch.tensor([step["sampled"] for step in decoded], dtype=torch.float32)
    assert [step["sampled"] for step in spare(evaluate, PROMPT * 8, tokens, 0)] == actual.tolist()
    (expected,) = vllm_process()(training_logprobs, path, PROMPT * 8, tokens, [2000])
    assert_bitwise_equal(torch.tensor(expected), actual)
    (other,) = vllm_process()(training_logprobs, unscaled, PROMPT * 8, tokens, [2000])
    assert not torch.equal(torch.tensor(other), actual)


def test_undo_makes_new_engines_stock(engine, checkpoint):
    seen = engine(after_undo, checkpoint())
    assert seen["status"] == {"patched": False}
    assert seen["new"] == [{"patched": False}] and seen["aligned_modules"] == []
    assert seen["old"][0]["patched"] and seen["kept"]
    assert seen["again"] and not seen["after"]
    assert "created before patch_vllm" in seen["stock_while_patched"]
