"""Logprobs of real vLLM on a GPU: the same bits in eager mode and CUDA graphs, with the V1 and V2 model runners.

Part of `make gpu-test`. The engines start concurrently, each in its own process (concurrent_engines.py).
test_experts_cuda.py imports `compilations`.
"""

import shutil
import timeit

import pytest
import torch

from alignkit.errors import UnsupportedError
from alignkit.runtime.ids import contract_id
from alignkit.runtime.machine import most_ranks
from tests.vllm.concurrent_engines import concurrent_engines, start
from tests.vllm.conftest import built_model, reload
from tests.vllm.test_engine import evaluate, generate, hidden_states
from tests.vllm.test_live import attention, hook, method_of_vllms_class, norm, set_attribute, worker
from tests.vllm.test_serve import complete, serving, with_tokenizer

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

VOCAB = 4096
LENGTHS = (1, 5, 16, 17, 33, 63, 64, 65, 127, 128, 129, 257, 400)
MODES = ("v2-eager", "v2-graphs", "v1-eager", "v1-graphs")
MAX_STEP_CHECK_SECONDS = 2e-5
"""Maximum time of a step's check, which runs before every step."""
ENGINES = {  # name: environment, options of the engine
    "v2-eager": ({}, {"enforce_eager": True}),
    "v2-graphs": ({}, {"enable_sleep_mode": True}),
    "v1-eager": ({"VLLM_USE_V2_MODEL_RUNNER": "0"}, {"enforce_eager": True}),
    "v1-graphs": ({"VLLM_USE_V2_MODEL_RUNNER": "0"}, {}),
    "chunked": ({}, {"max_num_batched_tokens": 64}),
    "full-graphs": ({}, {"compilation_config": {"cudagraph_mode": "FULL"}}),
    "multiprocess": ({"VLLM_ENABLE_V1_MULTIPROCESSING": "1", "VLLM_PLUGINS": ""}, {}),
    "processed": ({}, {"logprobs_mode": "processed_logprobs"}),
}
if most_ranks() > 1:
    ENGINES["tp2"] = ({"VLLM_ENABLE_V1_MULTIPROCESSING": "1"}, {"tensor_parallel_size": 2})


@pytest.fixture(scope="module")
def model(checkpoint):
    return checkpoint(vocab=VOCAB)


@pytest.fixture(scope="module")
def prompts():
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(VOCAB, (n,), generator=generator).tolist() for n in LENGTHS]


@pytest.fixture(scope="module")
def engines(vllm_process, model, tmp_path_factory):
    """Yield processes with patched engines, by the names in `ENGINES`."""
    all_engines = {name: (environment, model, options) for name, (environment, options) in ENGINES.items()}
    with concurrent_engines(vllm_process, all_engines, tmp_path_factory.mktemp("cache")) as engines:
        yield engines


@pytest.fixture(scope="module")
def expected(engines, prompts):
    """Greedy tokens, their ranks and logprobs: one request at a time, V2 runner, eager."""
    return engines["v2-eager"](one_at_a_time, prompts)


# Functions that run in an engine's process.


def one_at_a_time(state, prompts):
    return [generate(state, [p], temperature=0.0)[0] for p in prompts]


def batch(state, prompts):
    state.llm.reset_prefix_cache()
    return generate(state, prompts, temperature=0.0)


def prefix_hits(state, prompts):
    """Run a batch twice; return the second answers and their number of tokens from the prefix cache."""
    from vllm import SamplingParams

    batch(state, prompts)
    params = SamplingParams(temperature=0.0, max_tokens=1, detokenize=False)
    outputs = state.llm.generate([{"prompt_token_ids": p} for p in prompts], params, use_tqdm=False)
    return generate(state, prompts, temperature=0.0), sum(o.num_cached_tokens for o in outputs)


def prompt_logprobs(state, prompts, answers):
    return [(tokens, evaluate(state, prompt, tokens, 0)) for prompt, (tokens, _) in zip(prompts, answers, strict=True)]


def sampled(state, prompts):
    return generate(state, prompts, temperature=1.0, logprobs=5)


def top_five(state, prompts, answers):
    return [(tokens, evaluate(state, prompt, tokens, 5)) for prompt, (tokens, _) in zip(prompts, answers, strict=True)]


def hidden_of_steps(state, prompt, temperature):
    """Return logprobs of sampled tokens, and `ops.linear_logp` of the engine's hidden states."""
    from alignkit import ops

    model = built_model(state)
    with hidden_states() as seen:
        ((tokens, steps),) = generate(state, [prompt], temperature=temperature)
    hidden = torch.cat(seen)[: len(tokens)]  # an asynchronous scheduler runs a step ahead
    with torch.no_grad():
        expected = ops.linear_logp(
            hidden,
            model.lm_head.weight,
            torch.tensor(tokens, device=hidden.device),
            temperature=temperature,
            vocab_size=VOCAB,
        )
    return [s["sampled"] for s in steps], expected.tolist()


def sleep(state, model):
    state.llm.sleep(level=2)
    state.llm.wake_up()
    reload(state, model)


def statuses(state):
    from alignkit.vllm import worker_status

    return worker_status(state.llm)


def configure(state, model, options):
    from vllm.engine.arg_utils import EngineArgs

    EngineArgs(model, **options).create_engine_config()


def compilations(state, prompts):
    batch(state, prompts)
    return list(map(str, state.compilations))


# Tests.


@pytest.mark.parametrize("name", MODES)
def test_first_requests_compile_and_tune_nothing(engines, prompts, name):
    assert not set(engines[name](compilations, prompts))


@pytest.mark.parametrize("name", ENGINES)
def test_every_engine_matches_single_eager_requests(engines, expected, prompts, name):
    if name == "processed":
        # vLLM does not divide the logits of greedy requests by a temperature, so processed logprobs equal raw ones.
        assert engines[name](batch, prompts) == expected
    else:
        assert engines[name](batch, prompts) == expected
        answers = engines[name](prompt_logprobs, prompts, expected)
        assert [[s["sampled"] for s in steps] for _, steps in answers] == [
            [s["sampled"] for s in steps] for _, steps in expected
        ]


@pytest.mark.parametrize("name", ["v2-graphs", "v1-graphs"])
def test_single_requests_in_cuda_graphs_match_eager(engines, expected, prompts, name):
    assert engines[name](one_at_a_time, prompts) == expected


@pytest.mark.parametrize("name", MODES)
def test_prefix_cache_hits_match(engines, expected, prompts, name):
    answers, cached = engines[name](prefix_hits, prompts)
    assert cached > sum(LENGTHS) // 2
    assert answers == expected


@pytest.mark.parametrize("name", MODES)
def test_decode_and_prefill_agree_on_the_top_five_logprobs(engines, prompts, name):
    answers = engines[name](sampled, prompts)
    assert engines[name](top_five, prompts, answers) == answers


@pytest.mark.parametrize("temperature", [0.7, 1.0, 2.0])
def test_processed_logprobs_match_linear_logp(engines, prompts, temperature):
    logp, expected = engines["processed"](hidden_of_steps, prompts[5], temperature)
    assert logp == expected


@pytest.mark.parametrize("name", ["v2-graphs", "v1-graphs", "multiprocess"])
def test_reloaded_weights_reach_a_running_engine(engines, expected, prompts, model, checkpoint, name):
    other = checkpoint(vocab=VOCAB, seed=1)
    for process in (engines[name], engines["v2-eager"]):
        process(reload, other)
    updated = engines["v2-eager"](batch, prompts)
    assert updated != expected
    assert engines[name](batch, prompts) == updated
    for process in (engines[name], engines["v2-eager"]):
        process(reload, model)
    assert engines[name](batch, prompts) == expected


def test_sleep_and_reload_restore_the_bits(engines, expected, prompts, model):
    engines["v2-graphs"](sleep, model)
    assert engines["v2-graphs"](batch, prompts) == expected


@pytest.mark.parametrize("name", ENGINES)
def test_every_worker_reports_its_patches(engines, name):
    v1 = name.startswith("v1")
    for said in engines[name](statuses):
        assert said["patched"] and said["contract"] == contract_id("sm90")
        assert said["modules"]["AlignedRowParallelLinear"] == 8 and said["modules"]["AlignedAttentionImpl"] == 4
        assert said["modules"]["AlignedSampler" if v1 else "AlignedSamplerV2"] == 1
        assert said["symmetric_memory"] is (name == "tp2")


def statuses_with_replaced_parts(state):
    """Return the status with each of several parts replaced in turn, and the status after restoring all."""
    model, seen = worker(state).model_runner.get_model(), []
    for replace in (logprobs_of_the_sampler, norm, hook, method_of_vllms_class, attention):
        restore = replace(state, model)
        seen.append(statuses(state)[0].get("replaced"))
        restore()
    return seen, statuses(state)[0]["patched"]


def logprobs_of_the_sampler(state, model):
    return set_attribute(worker(state).model_runner.sampler, "sample", lambda *args: None)


@pytest.mark.parametrize("name", MODES)
def test_status_names_a_replaced_part(engines, name):
    seen, patched = engines[name](statuses_with_replaced_parts)
    parts = (
        "sampler: sample: must be AlignedSampler",
        "input_layernorm (RMSNorm)",
        "forward hook",
        "Qwen3Attention.forward: must be the method that vllm defines",
        "impl.forward: must be AlignedAttentionImpl's method",
    )
    for text, part in zip(seen, parts, strict=True):
        assert part in text
    assert patched


def step_check_seconds(state):
    """Return the time of a step's check in seconds, the minimum of 20 repeats."""
    return min(timeit.repeat(worker(state)._watch.step, number=100, repeat=20)) / 100


def test_a_step_check_costs_microseconds(engines):
    assert engines["v2-graphs"](step_check_seconds) < MAX_STEP_CHECK_SECONDS


def test_a_hook_stops_an_eager_engine(vllm_process, model, tmp_path):
    """Use a separate engine: an engine stopped within a step may be unusable."""
    process = vllm_process(VLLM_USE_V2_MODEL_RUNNER="1", VLLM_CACHE_ROOT=str(tmp_path), HF_HUB_OFFLINE="1")
    process(start, model, {"enforce_eager": True})
    with pytest.raises(UnsupportedError, match="forward hook"):
        process(generate_with_hook, [[1, 2, 3]])


def generate_with_hook(state, prompts):
    hook(state, worker(state).model_runner.get_model())
    generate(state, prompts, max_tokens=100)


def test_a_served_completion_has_the_same_bits(expected, prompts, model, tmp_path):
    pytest.importorskip("uvicorn", reason="vLLM's HTTP server needs uvicorn, which is not installed")
    env = {"VLLM_CACHE_ROOT": str(tmp_path / "cache"), "HF_HUB_OFFLINE": "1", "VLLM_USE_FLASHINFER_SAMPLER": "0"}
    options = [
        "--dtype",
        "bfloat16",
        "--max-model-len",
        "512",
        "--max-num-seqs",
        "16",
        "--gpu-memory-utilization",
        "0.1",
        "--kv-cache-memory-bytes",  # vLLM's memory profiling fails if another process frees memory meanwhile
        str(64 << 20),
    ]
    model = with_tokenizer(shutil.copytree(model, tmp_path / "model"), VOCAB)
    with serving(model, options, tmp_path / "log", env) as server:
        for prompt, (tokens, steps) in list(zip(prompts, expected, strict=True))[:4]:
            choice = complete(server, model, prompt, temperature=0.0)
            assert choice["token_ids"] == tokens
            assert choice["logprobs"]["token_logprobs"] == [s["sampled"] for s in steps]


@pytest.mark.parametrize(
    "name, options",
    [
        pytest.param(
            "enable_sp",
            {
                "tensor_parallel_size": 2,
                "compilation_config": {"pass_config": {"enable_sp": True, "sp_min_token_num": 1}},
            },
            marks=pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs 2 GPUs: vLLM checks them first"),
        ),
        ("cache_dir", {"compilation_config": {"cache_dir": "mine"}}),
        ("compilation mode", {"compilation_config": {"mode": 2}}),
    ],
    ids=lambda v: v if isinstance(v, str) else "",
)
def test_unsupported_compilation_options_are_rejected(engines, model, name, options):
    with pytest.raises(UnsupportedError, match=name):
        engines["v1-eager"](configure, model, options)
