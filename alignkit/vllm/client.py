"""Clients of the engine core that count changes of the weights: every request and every such call passes through them.

vLLM sends requests and calls to the engine core in order, over one of five client classes. `epochs` holds the rules,
this file the hooks into vLLM's classes.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import queue
import weakref
from collections.abc import Callable, Iterator
from typing import Any

from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs, FinishReason

from alignkit.config import config
from alignkit.engines.hook_points import relies_on
from alignkit.vllm import epochs
from alignkit.vllm.frontend import RefusedRequest

CLIENTS = ("InprocClient", "SyncMPClient", "AsyncMPClient", "DPAsyncMPClient", "DPLBAsyncMPClient")
"""vLLM's client classes that its engines create."""
Client: Any = object
"""For type checkers: the client of `CLIENTS` that follows `AlignedClient` in the MRO."""


@relies_on(
    "v1/engine/core_client.py:InprocClient",
    members="get_output add_request abort_requests collective_rpc sleep wake_up reset_prefix_cache",
)
@relies_on(
    "v1/engine/core_client.py:SyncMPClient",
    members="get_output add_request abort_requests collective_rpc sleep wake_up reset_prefix_cache",
)
@relies_on("v1/engine/core_client.py:SyncMPClient.get_output", mentions="outputs_queue wave_complete engines_running")
@relies_on("v1/engine/core_client.py:AsyncMPClient.get_output_async", mentions="outputs_queue")
@relies_on(
    "v1/engine/core_client.py:AsyncMPClient",
    members="""
        add_request_async abort_requests_async collective_rpc_async sleep_async wake_up_async pause_scheduler_async
        resume_scheduler_async reset_prefix_cache_async
    """,
)
@relies_on("v1/engine/core_client.py:AsyncMPClient._ensure_output_queue_task", mentions="output_handler")
@relies_on("v1/engine/core_client.py:EngineCoreClient.make_client", mentions="SyncMPClient InprocClient")
@relies_on(
    "v1/engine/core_client.py:EngineCoreClient.make_async_mp_client",
    mentions="AsyncMPClient DPAsyncMPClient DPLBAsyncMPClient",
)
@relies_on("v1/engine/__init__.py:EngineCoreRequest", members="request_id cache_salt")
@relies_on("v1/engine/__init__.py:EngineCoreOutput", members="request_id new_token_ids finish_reason")
@relies_on("v1/core/kv_cache_utils.py:generate_block_hash_extra_keys", mentions="cache_salt")
class AlignedClient(Client):
    """A client of an aligned engine. Its methods override those of the vLLM client with which `aligned` combines it."""

    def __init__(self, vllm_config, *args, **kwargs) -> None:
        self._epochs = epochs.of(vllm_config)
        self._asleep = self._versioned = False
        self._holders = 0
        self._failed: str | None = None
        self._settled = asyncio.Event()
        self._settled.set()
        self._read: list = []  # outputs of a synchronous client that arrived before a change
        self._processed = False
        self._turn = 0  # number of the last call that pauses or resumes
        self._engine: Callable[[], Any] = lambda: None
        me = weakref.ref(self)  # the epochs must not keep the client, and so the engine, alive
        self._epochs.count = lambda request: 0 if (client := me()) is None else client._count(request)
        super().__init__(vllm_config, *args, **kwargs)

    # Requests

    def add_request(self, request) -> None:
        self._tell()
        self._add(request)
        super().add_request(request)

    async def add_request_async(self, request) -> None:
        try:
            while not self._settled.is_set() or self._untold():
                await self._settled.wait()
                await self._tell_async()
            if (reason := self._epochs.refusal()) is not None:  # since the front end has accepted the request
                raise RefusedRequest(reason)
        except BaseException:
            ended = EngineCoreOutput(request.request_id, [], finish_reason=FinishReason.ABORT)
            self.outputs_queue.put_nowait(EngineCoreOutputs(outputs=[ended]))  # the front end forgets it
            raise
        self._add(request)
        await super().add_request_async(request)

    def _add(self, request) -> None:
        request.cache_salt = self._epochs.salt(request.cache_salt)
        self._epochs.add(request.request_id)

    def abort_requests(self, request_ids) -> None:
        self._epochs.forget(request_ids)
        super().abort_requests(request_ids)

    async def abort_requests_async(self, request_ids) -> None:
        self._epochs.forget(request_ids)
        await super().abort_requests_async(request_ids)

    # Outputs

    def get_output(self):
        self._tell()  # a worker of this process may have changed its weights between two steps
        if self._read:
            outputs = self._read.pop(0)
            if outputs.wave_complete is not None:  # vLLM does the same
                self.engines_running = False
            return outputs
        outputs = super().get_output()
        self._epochs.arrived(outputs.outputs)
        return outputs

    async def get_output_async(self):
        self._processed = True  # vLLM asks for outputs after it has processed the ones before
        outputs = await super().get_output_async()
        self._processed = False
        return outputs

    async def process_engine_outputs(self, outputs) -> None:
        """Note outputs when they arrive, because only then their order among the answers to calls is known."""
        self._epochs.arrived(outputs.outputs)
        inherited = getattr(super(), "process_engine_outputs", None)
        if inherited is not None:  # a static method
            await inherited(self, outputs)

    def count_by(self, engine) -> None:
        """Count tokens by an `LLMEngine` or `AsyncLLM`, which owns this client."""
        self._engine = weakref.ref(engine)

    @relies_on("v1/engine/output_processor.py:OutputProcessor.__init__", mentions="request_states")
    @relies_on("v1/engine/output_processor.py:RequestState.make_request_output", mentions="num_output_tokens")
    def _count(self, request: str) -> int:
        """Return the number of a request's tokens that have arrived. The front end has processed all but `_read`."""
        engine = self._engine()
        state = None if engine is None else engine.output_processor.request_states.get(request)
        processed = 0 if state is None or state.detokenizer is None else state.detokenizer.num_output_tokens()
        unread = (each for outputs in self._read for each in outputs.outputs if each.request_id == request)
        return processed + sum(len(each.new_token_ids) for each in unread)

    def _reads_outputs(self) -> bool:
        """Return whether the front end of an `AsyncLLM` goes on to process outputs."""
        engine = self._engine()
        handler = None if engine is None else engine.output_handler
        return handler is not None and not handler.done()

    async def _process_outputs(self) -> None:
        """Wait until the front end has processed the outputs of requests in flight, so that `_count` is right."""
        while self._epochs.paused and self._epochs.running and self._reads_outputs():
            if self._processed and self.outputs_queue.empty():
                return
            await asyncio.sleep(0.001)

    # Calls that may change the weights

    def collective_rpc(self, method, timeout=None, args=(), kwargs=None):
        if _reads(method):
            self._tell()
            return super().collective_rpc(method, timeout, args, kwargs)
        try:
            with self._change(_name(method)):
                return super().collective_rpc(method, timeout, args, kwargs)
        finally:
            self._tell()

    async def collective_rpc_async(self, method, timeout=None, args=(), kwargs=None):
        if _reads(method):
            await self._tell_async()
            return await super().collective_rpc_async(method, timeout, args, kwargs)
        await self._process_outputs()
        try:
            with self._change(_name(method)):
                return await super().collective_rpc_async(method, timeout, args, kwargs)
        finally:
            await self._tell_async()

    def wake_up(self, tags=None):
        self._check_wake_up(tags)
        with self._change("wake_up") if self._asleep else contextlib.nullcontext():
            before = self._steps_may_run()
            awake = super().wake_up(tags)
        self._woken(tags, awake, before)
        self._tell()
        return awake

    async def wake_up_async(self, tags=None):
        await self._process_outputs()
        self._check_wake_up(tags)
        with self._change("wake_up") if self._asleep else contextlib.nullcontext():
            before = self._steps_may_run()
            awake = await super().wake_up_async(tags)
        self._woken(tags, awake, before)
        await self._tell_async()
        return awake

    @contextlib.contextmanager
    def _change(self, what: str) -> Iterator[None]:
        """Count the block as a change of the weights, and hold back requests meanwhile."""
        self._read_queue()
        if (reason := self._epochs.why_not(what, config.mixed_updates)) is not None:
            raise RefusedRequest(reason)
        queued = getattr(getattr(self, "engine_core", None), "batch_queue", None)
        if queued and self._epochs.keeps_cache():  # a step of this process ran before the change, unlike its outputs
            raise RefusedRequest(f"{what}: must not change weights before the outputs of the last step have been read")
        self._epochs.change()
        with self._holding():
            try:
                yield
            except BaseException:
                self._failed = what
                raise
            finally:
                self._epochs.changed()
                self._epochs.told = None

    @contextlib.contextmanager
    def _holding(self) -> Iterator[None]:
        """Hold back requests within the block."""
        self._holders += 1
        self._settled.clear()
        try:
            yield
        finally:
            self._holders -= 1
            if not self._holders:
                self._settled.set()

    def _read_queue(self) -> None:
        """Count the outputs that a synchronous client has received and not yet read."""
        waiting = getattr(self, "outputs_queue", None)
        if isinstance(waiting, queue.Queue):
            with contextlib.suppress(queue.Empty):
                while not isinstance(outputs := waiting.get_nowait(), Exception):
                    self._epochs.arrived(outputs.outputs)
                    self._read.append(outputs)
                waiting.put(outputs)  # the engine is dead: `get_output` raises the error

    # Messages to the workers

    def _untold(self) -> bool:
        self._epochs.notice()
        return self._epochs.told != self._epochs.epoch

    def _tell(self) -> None:
        """Tell the workers the epoch, and learn whether the weights are those of one model."""
        if self._untold():
            with self._telling() as news:
                self._learn(super().collective_rpc("alignkit_epoch", None, news))
                if not self._versioned and hasattr(super(), "set_weight_version"):
                    super().set_weight_version(self._version())

    async def _tell_async(self) -> None:
        if self._untold():
            with self._holding(), self._telling() as news:  # until it is known whether the weights are whole
                self._learn(await super().collective_rpc_async("alignkit_epoch", None, news))
                if not self._versioned and hasattr(super(), "set_weight_version_async"):
                    await super().set_weight_version_async(self._version())

    @contextlib.contextmanager
    def _telling(self) -> Iterator[tuple]:
        """Yield the news for the workers; they are told again if the block fails or is cancelled."""
        failed, self._failed = self._failed, None
        self._epochs.told = self._epochs.epoch
        try:
            yield self._epochs.epoch, config.mixed_updates, failed
        except BaseException:
            self._epochs.told = None
            self._failed = self._failed or failed
            raise

    def _learn(self, answers: list[tuple[str | None, str]]) -> None:
        self._epochs.problem = next((problem for problem, _ in answers if problem), None)
        self._epochs.contract = answers[0][1]

    def _version(self) -> str:
        return f"epoch {self._epochs.epoch}"

    def set_weight_version(self, weight_version: str) -> None:
        self._versioned = True
        super().set_weight_version(weight_version)

    async def set_weight_version_async(self, weight_version: str) -> None:
        self._versioned = True
        await super().set_weight_version_async(weight_version)

    # Pauses. A pause counts once its answer has arrived, unless a later call has resumed or paused meanwhile.

    def sleep(self, level: int = 1, mode: str = "abort") -> None:
        turn = self._pauses(mode)
        super().sleep(level, mode)
        self._read_queue()
        if mode == "abort" and hasattr(self, "engine_core"):
            self._epochs.forget(list(self._epochs.running))  # an engine in this process sends no outputs for them
        self._slept(level)
        self._pause(level >= 1, turn)
        self._tell()

    async def sleep_async(self, level: int = 1, mode: str = "abort") -> None:
        turn = self._pauses(mode)
        await super().sleep_async(level, mode)
        self._slept(level)
        with self._holding():
            await self._paused(level >= 1, turn)
        await self._tell_async()

    def _slept(self, level: int) -> None:
        self._asleep |= level >= 1
        self._epochs.told = None

    def _pauses(self, mode: str) -> int:
        """Return the number of a call that pauses. With the mode "wait", steps run until it answers."""
        if mode == "wait":
            self._epochs.resume()
        self._turn += 1
        return self._turn

    def _pause(self, cleared: bool, turn: int) -> None:
        """Note the pause of call `turn`, unless a later call has paused or resumed."""
        if turn == self._turn:
            self._epochs.pause(cleared)

    def _steps_may_run(self) -> tuple[bool, bool, int]:
        """Note that steps may run from now on; return the state before."""
        before = self._epochs.paused, self._epochs.cleared
        self._turn += 1
        self._epochs.resume()
        return *before, self._turn

    def _check_wake_up(self, tags) -> None:
        """Reject a wake-up that would run steps with weights that are those of no model."""
        if _resumes(tags) and self._asleep and self._epochs.problem is not None and self._epochs.running:
            raise RefusedRequest(f"wake_up: {self._epochs.problem}. Wake the weights first: wake_up(tags=['weights'])")

    def _woken(self, tags, awake: bool | None, before: tuple[bool, bool, int]) -> None:
        # vLLM resumes steps once all memory is resident again; before 0.27 it does not return whether it has.
        if awake or (awake is None and _resumes(tags)):
            self._asleep = False
            return
        paused, cleared, turn = before
        if paused:
            self._pause(cleared, turn)

    async def pause_scheduler_async(self, mode: str = "abort", clear_cache: bool = True) -> None:
        turn = self._pauses(mode)
        await super().pause_scheduler_async(mode, clear_cache)
        await self._paused(clear_cache, turn)

    async def pause_generation_async(self, mode: str = "abort", clear_cache: bool = True) -> None:
        turn = self._pauses(mode)
        await super().pause_generation_async(mode, clear_cache)
        await self._paused(clear_cache, turn)

    async def _paused(self, cleared: bool, turn: int) -> None:
        self._pause(False, turn)
        await self._process_outputs()
        self._pause(cleared, turn)

    async def resume_scheduler_async(self) -> None:
        await self._settled.wait()
        await self._tell_async()
        if self._epochs.problem is not None and self._epochs.running:
            raise RefusedRequest(f"resume_generation: {self._epochs.problem}")
        self._steps_may_run()
        await super().resume_scheduler_async()

    def reset_prefix_cache(self, reset_running_requests: bool = False, reset_connector: bool = False) -> bool:
        done = super().reset_prefix_cache(reset_running_requests, reset_connector)
        self._read_queue()
        return self._reset(done, reset_running_requests and self._epochs.paused)

    async def reset_prefix_cache_async(self, reset_running_requests=False, reset_connector=False) -> bool:
        paused, turn = self._epochs.paused, self._turn
        done = await super().reset_prefix_cache_async(reset_running_requests, reset_connector)
        await self._process_outputs()
        return self._reset(done, reset_running_requests and paused and turn == self._turn)

    def _reset(self, done: bool, running: bool) -> bool:
        if done and running:
            self._epochs.clear()
        return done


@relies_on("v1/engine/llm_engine.py:LLMEngine.__init__", mentions="engine_core output_processor")
@relies_on("v1/engine/async_llm.py:AsyncLLM.__init__", mentions="engine_core output_processor output_handler")
def counting(init):
    """Wrap the constructor of vLLM's engines to let the client count tokens."""

    @functools.wraps(init)
    def construct(self, *args, **kwargs) -> None:
        init(self, *args, **kwargs)
        if isinstance(self.engine_core, AlignedClient):
            self.engine_core.count_by(self)

    return construct


def aligned(cls: type) -> type:
    """Return the aligned client that derives from one of vLLM's client classes."""
    return type(cls.__name__, (AlignedClient, cls), {"__module__": cls.__module__})


def _resumes(tags) -> bool:
    """Return whether a wake-up with these tags can end the sleep, after which steps run."""
    return not tags or "kv_cache" in tags or "scheduling" in tags


def _name(method: Any) -> str:
    return method if isinstance(method, str) else f"{getattr(method, '__name__', type(method).__name__)}()"


def _reads(method: Any) -> bool:
    return isinstance(method, str) and (
        method in epochs.READS or method in config.read_methods.replace(",", " ").split()
    )
