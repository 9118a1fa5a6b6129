"""Real vLLM engines on a CPU with separate worker processes, and the plugin entry point that vLLM loads there.

Every worker must be aligned, and no engine may start after the plugin failed. test_layouts.py imports the helpers.
"""

import os
from importlib.metadata import entry_points

import pytest

from alignkit.config import Config
from alignkit.errors import InputError, UnsupportedError
from alignkit.runtime.ids import contract_id
from tests.vllm.conftest import ENGINE, reload, start


@pytest.fixture(scope="module", params=[1, pytest.param(2, marks=pytest.mark.slow)], ids=["tp1", "tp2"])
def engine(request, vllm_process, checkpoint):
    """Return (process, tp) of a patched multiprocess engine.

    No vLLM plugin is loaded: vLLM ignores plugins that fail to import, so alignment must not depend on one.
    """
    process = vllm_process(VLLM_ENABLE_V1_MULTIPROCESSING="1", VLLM_PLUGINS="")
    process(start, checkpoint(), {"tensor_parallel_size": request.param})
    return process, request.param


def greedy(state, prompts):
    from vllm import SamplingParams

    params = SamplingParams(temperature=0.0, max_tokens=16, ignore_eos=True, detokenize=False, logprobs=0)
    outputs = state.llm.generate([{"prompt_token_ids": p} for p in prompts], params, use_tqdm=False)
    answers = [o.outputs[0] for o in outputs]
    return [
        (list(a.token_ids), [step[t].logprob for t, step in zip(a.token_ids, a.logprobs, strict=True)]) for a in answers
    ]


def statuses(state):
    from alignkit.vllm import worker_status

    return worker_status(state.llm)


def structured(state):
    from vllm import SamplingParams
    from vllm.sampling_params import StructuredOutputsParams

    params = SamplingParams(logprobs=0, structured_outputs=StructuredOutputsParams(regex="a"))
    state.llm.generate([{"prompt_token_ids": [1, 2]}], params, use_tqdm=False)


@pytest.mark.slow
def test_worker_processes_match_an_in_process_engine(engine, rollout, prompts):
    process, _ = engine
    expected = rollout(("batch", "one", "prefix", "prompt_logprobs"))["batch"]
    assert process(greedy, prompts) == list(zip(expected.tokens, [x.tolist() for x in expected.logprobs], strict=True))


def test_every_worker_reports_its_patches(engine):
    process, tp = engine
    workers = process(statuses)
    assert len(workers) == tp
    assert all(w == workers[0] for w in workers)
    assert workers[0]["patched"] and workers[0]["contract"] == contract_id("cpu")
    assert workers[0]["modules"]["AlignedRowParallelLinear"] == 8


def test_a_rejected_request_raises_and_the_engine_survives(engine, prompts):
    process, _ = engine
    with pytest.raises(UnsupportedError, match="structured outputs"):
        process(structured)
    assert process(greedy, prompts[:1])


@pytest.fixture(scope="module")
def reloaded():
    """Return a dict for the answers after a reload, by number of workers."""
    return {}


def test_weights_are_reloaded_in_every_worker(engine, prompts, checkpoint, reloaded):
    process, tp = engine
    before = process(greedy, prompts)
    process(reload, checkpoint(seed=1))
    reloaded[tp] = process(greedy, prompts)
    process(reload, checkpoint())
    assert process(greedy, prompts) == before != reloaded[tp]
    assert all(r == reloaded[tp] for r in reloaded.values())


# The entry point.


def register_plugin(state, value):
    """Return the status after calling the entry point twice with a value of ALIGNKIT_VLLM."""
    from alignkit.vllm import status
    from alignkit.vllm.plugin import register

    os.environ["ALIGNKIT_VLLM"] = value
    register()
    register()
    return status()


def stock_worker_class(state, model):
    from vllm.engine.arg_utils import EngineArgs

    return EngineArgs(model, **ENGINE).create_engine_config().parallel_config.worker_cls


def config_hashes(state, model):
    """Return the compile-cache keys of a stock, an aligned and another stock configuration."""
    from vllm.engine.arg_utils import EngineArgs

    from alignkit.vllm import patch_vllm

    def stock():
        return EngineArgs(model, **ENGINE, attention_backend="CPU_ATTN").create_engine_config().compute_hash()

    before = stock()
    with patch_vllm():
        aligned = stock()
    return before, aligned, stock()


def async_worker_statuses(state, model):
    """Return the status of the workers of an `AsyncLLM`."""
    import asyncio

    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM

    from alignkit.vllm import patch_vllm, worker_status

    async def ask():
        with patch_vllm():
            engine = AsyncLLM.from_engine_args(AsyncEngineArgs(model, **ENGINE))
        try:
            return await worker_status(engine)
        finally:
            engine.shutdown()

    return asyncio.run(ask())


def config_before_patch(state, model):
    from vllm.engine.arg_utils import EngineArgs
    from vllm.v1.engine.llm_engine import LLMEngine

    from alignkit.vllm import patch_vllm

    config = EngineArgs(model, **ENGINE).create_engine_config()
    with patch_vllm():
        LLMEngine.from_vllm_config(config)


def test_the_plugin_patches_only_when_enabled(vllm_process, checkpoint):
    process = vllm_process()
    for no in ("", "0", " False", "no", "OFF"):
        assert process(register_plugin, no) == {"patched": False}
    assert process(stock_worker_class, checkpoint()) == "vllm.v1.worker.cpu_worker.CPUWorker"
    with pytest.raises(UnsupportedError, match="created before patch_vllm"):
        process(config_before_patch, checkpoint())
    assert process(register_plugin, "1")["patched"]
    assert process(stock_worker_class, checkpoint()) == "alignkit.vllm.worker.AlignedWorker"


@pytest.mark.parametrize("value", ["1", " 1", "true", "Yes", "ON\n"])
def test_true_values_enable_the_plugin(value):
    assert Config.vllm.of(value)


@pytest.mark.parametrize("value", ["2", "y", "aligned", "1,1", "-"])
def test_other_values_are_rejected(value):
    with pytest.raises(InputError, match=f"ALIGNKIT_VLLM: must be a boolean .*, got '{value}'"):
        Config.vllm.of(value)


def start_twice(state, model, value):
    """Start an engine twice in a process that has not loaded vLLM's plugins; return both errors."""
    from vllm import LLM

    os.environ["ALIGNKIT_VLLM"] = value
    errors = []
    for _ in range(2):
        try:
            LLM(model, **ENGINE)
            errors.append(None)
        except Exception as e:
            errors.append(f"{type(e).__name__}: {e}")
    return errors


def start_twice_with_unknown_version(state, model):
    from alignkit.vllm.versions import VALIDATED

    os.environ["ALIGNKIT_CERTIFICATES"] = "/nonexistent"
    VALIDATED.clear()
    return start_twice(state, model, "yes")


@pytest.mark.parametrize(
    "fails, named",
    [
        (
            lambda process, model: process(start_twice, model, "sure"),
            "must be a boolean (1/on/true/yes or 0/false/no/off), got 'sure'",
        ),
        (
            lambda process, model: process(start_twice_with_unknown_version, model),
            "is neither validated nor proved on this machine",
        ),
    ],
    ids=["word", "version"],
)
def test_no_engine_starts_after_the_plugin_failed(vllm_process, checkpoint, fails, named):
    """A second attempt must fail too, although vLLM loads plugins once per process."""
    first, second = fails(vllm_process(), checkpoint())
    assert named in first and named in second


def test_stock_and_aligned_engines_have_separate_compile_caches(vllm_process, checkpoint):
    before, aligned, after = vllm_process()(config_hashes, checkpoint())
    assert before == after != aligned


def test_workers_of_an_async_engine_are_aligned(vllm_process, checkpoint):
    (worker,) = vllm_process(fork_workers=True)(async_worker_statuses, checkpoint())
    assert worker["patched"] and worker["contract"] == contract_id("cpu")


def test_the_plugin_is_an_entry_point_of_vllm():
    (found,) = entry_points(group="vllm.general_plugins", name="alignkit")
    assert found.value == "alignkit.vllm.plugin:register"
