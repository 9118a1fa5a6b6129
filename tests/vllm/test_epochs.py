"""Epochs of an engine's weights (alignkit/vllm/epochs.py, client.py): stale prefixes, updates in flight, and the soak.

The engines run in process; the soak starts an `AsyncLLM` with its own engine process.
"""

import asyncio
import random
from dataclasses import dataclass
from types import SimpleNamespace

import pytest

from alignkit.errors import InputError, UnsupportedError
from alignkit.identity.identity import MIXED
from alignkit.vllm.epochs import Epochs, holder, of, started, token_epochs
from tests.vllm import soak
from tests.vllm.conftest import ENGINE
from tests.vllm.test_updates import reload_path, start

PROMPT = [i * 37 % 2000 for i in range(130)]


# Counting


def arrive(epochs, tokens, finished=False):
    """Let tokens of the request "a" arrive."""
    total = epochs.count("a") + tokens
    epochs.count = lambda request: total
    reason = "length" if finished else None
    epochs.arrived([SimpleNamespace(request_id="a", new_token_ids=[7] * tokens, finish_reason=reason)])


def test_tokens_have_the_epoch_in_which_they_arrived():
    epochs = Epochs(epoch=3)
    epochs.add("a")
    arrive(epochs, 2)
    epochs.pause(cleared=True)
    epochs.change()
    epochs.change()
    epochs.resume()
    arrive(epochs, 1, finished=True)
    assert epochs.running == {} and epochs.of_request("a") is epochs.finished["a"]
    assert epochs.finished["a"].epochs(3) == [3, 3, 5]


def test_a_kept_kv_cache_makes_tokens_mixed_until_it_is_cleared():
    epochs = Epochs()
    epochs.add("a")
    arrive(epochs, 2)
    epochs.pause(cleared=False)
    epochs.change()
    epochs.resume()
    arrive(epochs, 2)
    epochs.change()
    arrive(epochs, 1)
    epochs.pause(cleared=True)
    epochs.resume()
    arrive(epochs, 2)
    assert epochs.running["a"].epochs(7) == [0, 0, MIXED, MIXED, MIXED, 2, 2]


@pytest.mark.parametrize("seed", range(20))
def test_spans_equal_a_list_of_all_tokens(seed):
    draw, epochs, expected = random.Random(seed), Epochs(), []
    epochs.add("a")
    epochs.pause(cleared=True)
    for _ in range(30):
        if draw.random() < 0.5:
            epochs.change()
        n = draw.randint(0, 3)
        arrive(epochs, n)
        expected += [epochs.epoch] * n
    assert epochs.running["a"].epochs(len(expected)) == expected
    assert epochs.running["a"].epochs(4) == expected[:4]


def test_an_update_needs_a_pause_with_a_cleared_cache():
    epochs = Epochs()
    assert epochs.why_not("load", False) is None
    epochs.add("a")
    for mixed in (False, True):
        reason = epochs.why_not("load", mixed)
        assert reason.startswith("load: must not change weights with requests in flight")
        assert "got 1 requests, not paused" in reason
    epochs.pause(cleared=False)
    assert "paused without clearing it" in epochs.why_not("load", False) and epochs.why_not("load", True) is None
    epochs.clear()
    assert epochs.why_not("load", False) is None
    epochs.resume()
    assert "not paused" in epochs.why_not("load", True)
    epochs.forget(["a"])
    assert epochs.why_not("load", False) is None


def test_salts_of_epochs_differ():
    epochs, salts = Epochs(), set()
    for _ in range(3):
        salts |= {epochs.salt(None), epochs.salt("user")}
        epochs.change()
    assert len(salts) == 6 and Epochs().salt(None) is None


def test_an_engine_that_has_gone_holds_nothing():
    config = object()
    first = started(config)
    assert of(config) is first
    first.add("a")
    assert holder("a")[0] is first
    other = started(object())
    other.add("a")
    assert holder("a") is None, "two engines have a request with this id"
    del first
    assert holder("a")[0] is other and of(config).running == {}


class SlowClient:
    """A client whose front end takes time for the outputs that have arrived."""

    def __init__(self, config) -> None:
        self.outputs_queue: asyncio.Queue = asyncio.Queue()

    async def get_output_async(self):
        return await self.outputs_queue.get()

    async def pause_scheduler_async(self, mode, clear_cache) -> None:
        if mode == "wait":
            await asyncio.sleep(0.05)

    async def resume_scheduler_async(self) -> None:
        pass

    async def sleep_async(self, level, mode) -> None:
        pass

    async def wake_up_async(self, tags) -> bool:
        await asyncio.sleep(0.05)
        return True

    async def collective_rpc_async(self, method, timeout=None, args=(), kwargs=None):
        await asyncio.sleep(0.01)
        return [("load_some: failed" if kwargs is None and args and args[-1] == "load_some" else None, "contract")]


def test_calls_that_overlap_or_are_cancelled(vllm_process):
    """No pause is noted that has ended meanwhile, and no news is lost."""
    vllm_process()(_overlapping_calls)


def _overlapping_calls(_):
    from alignkit.vllm import client

    async def cancelled(call, after):
        task = asyncio.ensure_future(call)
        await asyncio.sleep(after)
        task.cancel()
        (result,) = await asyncio.gather(task, return_exceptions=True)
        assert isinstance(result, asyncio.CancelledError)

    async def run():
        config = object()
        slow, epochs = client.aligned(SlowClient)(config), of(config)
        await slow.collective_rpc_async("check_health")
        pause = asyncio.ensure_future(slow.pause_scheduler_async("wait", True))
        await asyncio.sleep(0)
        await slow.resume_scheduler_async()
        await pause
        assert not epochs.paused, "it has been resumed before it paused"
        await slow.sleep_async(1, "keep")
        assert epochs.paused and epochs.cleared
        await cancelled(slow.wake_up_async(), 0.02)
        assert not epochs.paused, "steps may run"
        await slow.wake_up_async()
        await slow.pause_scheduler_async("keep", True)
        await slow.pause_scheduler_async("wait", False)
        assert epochs.paused and not epochs.cleared, "steps ran until it answered"
        await slow.resume_scheduler_async()
        slow._failed, epochs.told = "load_some", None
        await cancelled(slow._tell_async(), 0.005)
        await slow._tell_async()
        assert epochs.problem == "load_some: failed", "the news is told again"
        epochs.problem = None
        request = SimpleNamespace(request_id="b", cache_salt=None)
        slow._settled.clear()  # an update runs
        await cancelled(slow.add_request_async(request), 0.005)
        assert slow.outputs_queue.get_nowait().outputs[0].request_id == "b", "the front end forgets it"
        handler = asyncio.ensure_future(asyncio.sleep(0))
        await handler
        engine = Engine(SimpleNamespace(request_states={}), handler)
        slow.count_by(engine)
        epochs.add("c")
        slow.outputs_queue.put_nowait(None)
        await asyncio.wait_for(slow.pause_scheduler_async("keep", True), 5)  # nothing processes outputs any more

    asyncio.run(run())


@dataclass
class Engine:
    """The parts of an `AsyncLLM` that its client reads. Unlike a SimpleNamespace it can be referenced weakly."""

    output_processor: SimpleNamespace
    output_handler: asyncio.Task | None = None


def test_a_change_waits_until_the_front_end_has_processed_the_tokens_before_it(vllm_process):
    assert vllm_process()(_change_behind_a_slow_front_end) == ([1, 2, 3, 4, 5], [(0, 0), (5, 2)])


def _change_behind_a_slow_front_end(_):
    from alignkit.vllm import client

    async def run():
        config, processed = object(), []
        slow = client.aligned(SlowClient)(config)
        state = SimpleNamespace(detokenizer=SimpleNamespace(num_output_tokens=lambda: len(processed)))
        engine = Engine(SimpleNamespace(request_states={"a": state}))
        slow.count_by(engine)
        of(config).add("a")

        async def front_end():
            while True:
                outputs = await slow.get_output_async()
                await asyncio.sleep(0.02)
                processed.extend(outputs)

        engine.output_handler = task = asyncio.ensure_future(front_end())
        for tokens in ([1, 2], [3], [4, 5]):
            slow.outputs_queue.put_nowait(tokens)
        await slow.pause_scheduler_async("keep", True)
        before = list(processed)
        await slow.collective_rpc_async("reload_weights")
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await asyncio.wait_for(slow.collective_rpc_async("reload_weights"), 5)  # nothing processes outputs any more
        return before, of(config).running["a"].spans

    return asyncio.run(run())


# Engines


def outputs(state, **options):
    """Return the request output of `PROMPT`, and the logprobs of each completion."""
    from vllm import SamplingParams

    params = SamplingParams(max_tokens=8, ignore_eos=True, detokenize=False, logprobs=0, seed=1, **options)
    (output,) = state.llm.generate([{"prompt_token_ids": PROMPT}], params, use_tqdm=False)
    return output.num_cached_tokens, [
        [step[t].logprob for t, step in zip(c.token_ids, c.logprobs, strict=True)] for c in output.outputs
    ]


def epochs_of(state, **options):
    from vllm import SamplingParams

    params = SamplingParams(max_tokens=3, ignore_eos=True, detokenize=False, seed=1, **options)
    (output,) = state.llm.generate([{"prompt_token_ids": PROMPT}], params, use_tqdm=False)
    return token_epochs(output), output.kv_transfer_params["alignkit"]


def status(state):
    from alignkit.vllm import worker_status

    return worker_status(state.llm)[0]


def fingerprint(state):
    import alignkit

    return alignkit.fingerprint(state.llm).digest


def cached(state, model):
    """Start an engine with prefix caching."""
    from vllm import LLM

    from alignkit.vllm import patch_vllm

    state.patch = patch_vllm()
    state.llm = LLM(model, dtype="bfloat16", worker_extension_cls="tests.vllm.soak.Extension", **ENGINE)


def by_reload(state, path):
    reload_path(state, path)


def by_extension(state, path):
    state.llm.collective_rpc("load_files", args=(path,))


def by_apply_model(state, path):
    from safetensors.torch import load_file

    state.llm.apply_model(lambda model: model.load_weights(load_file(f"{path}/model.safetensors").items()) and None)


def by_sleep(state, path):
    state.llm.sleep(0)
    reload_path(state, path)
    state.llm.wake_up()


def by_the_model(state, path):
    """Load as TRL does: through the model of an engine in this process."""
    from safetensors.torch import load_file

    worker = state.llm.llm_engine.model_executor.driver_worker.worker
    worker.model_runner.get_model().load_weights(load_file(f"{path}/model.safetensors").items())


@pytest.fixture(scope="module")
def engine(vllm_process, checkpoint):
    process = vllm_process(VLLM_PLUGINS="")
    process(cached, checkpoint())
    return process


@pytest.fixture(scope="module")
def expected(vllm_process, checkpoint):
    """Return the outputs of fresh engines by seed of the model."""
    found = {}
    for seed in (0, 5):
        process = vllm_process(VLLM_PLUGINS="")
        process(start, checkpoint(seed=seed))
        found[seed] = process(_outputs_of_two)
    return found


def _outputs_of_two(state):
    return outputs(state, n=2)[1]


@pytest.mark.parametrize("update", [by_reload, by_extension, by_apply_model, by_sleep, by_the_model])
def test_cached_prefixes_of_other_weights_are_not_used(update, engine, expected, checkpoint):
    for seed in (5, 0):
        engine(update, checkpoint(seed=seed))
        assert engine(_outputs_of_two) == expected[seed]
        assert engine(_hits) >= 96, "the prefix is cached in the new epoch"
        before = engine(status)["epoch"]
        assert engine(_epochs)[0] == {0: [before] * 3, 1: [before] * 3}


def _hits(state):
    return outputs(state)[0]


def _epochs(state):
    return epochs_of(state, n=2)


def test_the_identity_is_in_the_status_and_in_outputs(engine, checkpoint):
    engine(by_reload, checkpoint(seed=5))
    state = engine(status)
    assert state["weights"] is None
    digest = engine(fingerprint)
    again = engine(status)
    assert again == state | {"weights": digest}
    found = engine(_epochs)[1]
    assert found["weights"] == {str(state["epoch"]): digest} and found["contract"] == state["contract"]
    engine(by_reload, checkpoint())
    assert engine(status)["weights"] is None and engine(status)["epoch"] == state["epoch"] + 1


def test_a_call_that_fails_is_a_problem_until_a_whole_checkpoint_is_loaded(engine, checkpoint, expected):
    with pytest.raises(Exception, match="the sender has gone"):
        engine(_fail, checkpoint(seed=5))
    with pytest.raises(UnsupportedError, match="load_weights|load_some: failed and may have changed some"):
        engine(_hits)
    with pytest.raises(Exception, match="no_such_method"):
        engine(_unknown)
    engine(by_extension, checkpoint())
    assert engine(_outputs_of_two) == expected[0]
    with pytest.raises(Exception, match="no_such_method"):
        engine(_unknown)
    assert engine(_outputs_of_two) == expected[0], "nothing ran"


def _fail(state, path):
    state.llm.collective_rpc("load_some", args=(path,))


def _unknown(state):
    state.llm.collective_rpc("no_such_method")


def test_an_update_between_the_steps_of_a_request_is_rejected(engine, checkpoint, expected):
    error, answers = engine(_update_between_steps, checkpoint(seed=5))
    assert error.startswith("reload_weights: must not change weights with requests in flight")
    assert answers == expected[0][:1]


def _update_between_steps(state, path):
    from vllm import SamplingParams

    engine = state.llm.llm_engine
    params = SamplingParams(max_tokens=8, ignore_eos=True, detokenize=False, logprobs=0, seed=1)
    engine.add_request("in flight", {"prompt_token_ids": PROMPT}, params)
    done, error = [], None
    while not done:
        done = [output for output in engine.step() if output.finished]
        if error is None:
            with pytest.raises(UnsupportedError) as caught:
                reload_path(state, path)
            error = str(caught.value)
    (completion,) = done[0].outputs
    return error, [[step[t].logprob for t, step in zip(completion.token_ids, completion.logprobs, strict=True)]]


def test_weights_that_change_between_the_steps_of_preempted_requests(engine, checkpoint):
    assert engine(_load_between_steps, checkpoint(seed=5)) == [0, 0, 0, -1, -1, -1, -1, -1]
    engine(by_reload, checkpoint())


def _load_between_steps(state, path):
    from vllm import SamplingParams

    engine, done, steps = state.llm.llm_engine, [], 0
    first = engine.engine_core._epochs.epoch
    params = SamplingParams(max_tokens=8, ignore_eos=True, detokenize=False, seed=1)
    engine.add_request("preempted", {"prompt_token_ids": PROMPT}, params)
    while not done:
        done, steps = [output for output in engine.step() if output.finished], steps + 1
        if steps == 3:
            assert engine.reset_prefix_cache(reset_running_requests=True)
            by_the_model(state, path)
    return [epoch - first * (epoch != MIXED) for epoch in token_epochs(done[0])[0]]


def test_a_stream_of_inputs_is_rejected(engine):
    with pytest.raises(UnsupportedError, match="^prompt: must be one prompt, got a stream of inputs"):
        engine(_stream)


def _stream(state):
    from vllm import SamplingParams

    state.llm.llm_engine.input_processor.process_inputs(
        "a", {"prompt_token_ids": [1]}, SamplingParams(), resumable=True
    )


def test_an_engine_keeps_its_epochs_after_the_patch(engine):
    before, first, after, left = engine(_without_the_patch)
    assert before == after == {0: [first] * 3}
    assert left == {}


def _without_the_patch(state):
    """Return the epochs of a request before and after `undo`, the engine's epoch, and what is left of the requests."""
    from alignkit.vllm import patch_vllm

    before, _ = epochs_of(state)
    state.patch.undo()
    try:
        after, _ = epochs_of(state)
    finally:
        state.patch = patch_vllm()
    engine = of(state.llm.llm_engine.vllm_config)
    return before, engine.epoch, after, engine.finished | engine.running


def test_epochs_need_all_tokens_of_the_request(engine):
    message = (
        "output: must have all 3 tokens of completion 0, as with RequestOutputKind.FINAL_ONLY or CUMULATIVE, got 1"
    )
    with pytest.raises(InputError, match=message):
        engine(_last_of_a_stream)


def _last_of_a_stream(state):
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    engine, delta = state.llm.llm_engine, RequestOutputKind.DELTA
    engine.add_request(
        "a", {"prompt_token_ids": PROMPT}, SamplingParams(max_tokens=3, ignore_eos=True, output_kind=delta)
    )
    while engine.has_unfinished_requests():
        outputs = engine.step()
    token_epochs(outputs[0])


def test_an_update_that_has_not_begun_cannot_fail(engine):
    """The call is rejected by vLLM before it changes anything."""
    assert list(engine(_finish_nothing)) == [0]


def _finish_nothing(state):
    with pytest.raises(Exception, match="Weight transfer not configured"):
        state.llm.collective_rpc("finish_weight_update")
    return epochs_of(state)[0]


def test_outputs_of_other_engines_have_no_epochs():
    with pytest.raises(InputError, match="output: must be a finished output of an aligned engine"):
        token_epochs(SimpleNamespace(kv_transfer_params=None, outputs=[]))


# Schedules


@pytest.mark.parametrize("mixed, schedules", [("0", 4), ("1", 3)], ids=["strict", "mixed"])
def test_every_logprob_is_of_the_model_that_its_epoch_names(mixed, schedules, vllm_process, tmp_path):
    """Random schedules; `python -m tests.vllm.soak` runs more of them. The seed is new in each run."""
    models, half = soak.prepare(tmp_path)
    seed = random.randrange(10**6)
    process = vllm_process(VLLM_ENABLE_V1_MULTIPROCESSING="1", VLLM_PLUGINS="", ALIGNKIT_MIXED_UPDATES=mixed)
    result = process(soak.run_async, models, half, [seed + i for i in range(schedules)])

    def reference(model, sequences):
        other = vllm_process()
        other(soak.start, model)
        return other(soak.logprobs, sequences)

    verdicts = soak.verify(result, reference)
    assert not result.failures, (seed, result.failures[:3])
    assert verdicts["equal"] > 10 and verdicts["other"] == 0
    assert mixed == "1" or verdicts["mixed"] == 0


def test_the_soak_notices_stale_tokens():
    answer = soak.Answer([1], [2, 3], [-1.0, -2.0], [0, 1])
    result = soak.Result({}, [(answer, {0: "a", 1: "b"})], [])
    verdicts = soak.verify(result, lambda model, sequences: [[-1.0, -2.0 if model == "a" else -3.0]])
    assert verdicts == {"equal": 1, "other": 1} and "is of ['a']" in result.failures[0]
