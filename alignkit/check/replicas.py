"""vLLM's data parallelism for those who know ``vllm.LLM``: one front end, and replicas that step together."""

from __future__ import annotations

import asyncio
import weakref
from typing import Any

PATIENCE = 60
"""Seconds that an engine's processes have to end. vLLM's five are too few on a busy machine: it kills them, and raises if one ends just
then."""


class Replicas:
    """What of a ``vllm.LLM`` the rollouts of a check ask for, of an engine with ``data_parallel_size`` replicas. vLLM's LLM has one
    only; its server has several, by the class that is used here.

    arguments: of ``vllm.LLM``. `shutdown` ends the engine's processes; so does the end of the last reference to it.
    """

    def __init__(self, model: str, **arguments: Any) -> None:
        from vllm.engine.arg_utils import AsyncEngineArgs
        from vllm.v1.engine.async_llm import AsyncLLM

        async def start() -> AsyncLLM:  # it looks for a loop that runs
            return AsyncLLM.from_engine_args(AsyncEngineArgs(model, disable_log_stats=True, **arguments))

        runner = asyncio.Runner()
        try:
            self._engine = runner.run(start())
        except BaseException:
            runner.close()
            raise
        self._wait = runner.run
        self._shutdown = weakref.finalize(self, _end, self._engine, runner)
        self._replicas = arguments["data_parallel_size"]
        self._asked = 0
        self.vllm_config, self.engine_core = self._engine.vllm_config, self._engine.engine_core

    @property
    def llm_engine(self) -> Replicas:
        return self

    def generate(self, prompts: list[Any], params: Any, use_tqdm: bool = False) -> list[Any]:
        """The output of each prompt, sent to the replicas in turn, the first one to the first."""
        from vllm.sampling_params import RequestOutputKind

        params.output_kind = RequestOutputKind.FINAL_ONLY

        async def answer(index: int, prompt: Any) -> Any:
            self._asked += 1
            where = index % self._replicas
            async for output in self._engine.generate(prompt, params, str(self._asked), data_parallel_rank=where):
                if output.finished:
                    return output
            raise RuntimeError(f"prompt {index}: no answer")

        async def every() -> list[Any]:
            return await asyncio.gather(*(answer(i, prompt) for i, prompt in enumerate(prompts)))

        return self._wait(every())

    def collective_rpc(self, *args: Any, **kwargs: Any) -> list[Any]:
        """Of the workers of the first replica; all are called."""
        return self._wait(self._engine.collective_rpc(*args, **kwargs))

    def reset_prefix_cache(self) -> None:
        """Of all replicas."""
        self._wait(self._engine.reset_prefix_cache())

    def shutdown(self) -> None:
        """Ends the engine's processes and what waits for them here. A second call does nothing."""
        self._shutdown()


def _end(engine: Any, runner: asyncio.Runner) -> None:
    engine.engine_core.shutdown(timeout=PATIENCE)
    engine.shutdown()
    runner.close()  # it runs what these have left to do, and cancels every task that still waits
