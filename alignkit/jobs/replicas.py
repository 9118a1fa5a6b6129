"""vLLM data parallelism behind the interface of ``vllm.LLM``: one front end and replicas that step together.

`rollout.engine` uses it if a job has ``dp`` > 1. Methods have the names and arguments of ``vllm.LLM``. A new vLLM
version may require other calls of its async engine here.
"""

from __future__ import annotations

import asyncio
import weakref
from typing import Any

PATIENCE = 60
"""Shutdown timeout of an engine's processes in seconds.

vLLM's default of 5 is too short on a busy machine: vLLM kills the processes, and raises if one exits meanwhile.
"""


class Replicas:
    """Engine with ``data_parallel_size`` replicas and the subset of the ``vllm.LLM`` interface used by rollouts.

    ``vllm.LLM`` supports one replica only; this class uses the async engine of vLLM's server. `arguments` are those of
    ``vllm.LLM``. The engine's processes stop on `shutdown` or when the object is garbage-collected.
    """

    def __init__(self, model: str, **arguments: Any) -> None:
        from vllm.engine.arg_utils import AsyncEngineArgs
        from vllm.v1.engine.async_llm import AsyncLLM

        async def start() -> AsyncLLM:  # needs a running event loop
            return AsyncLLM.from_engine_args(AsyncEngineArgs(model, disable_log_stats=True, **arguments))

        runner = asyncio.Runner()
        try:
            self._engine = runner.run(start())
        except BaseException:
            runner.close()
            raise
        self._run = runner.run
        self._shutdown = weakref.finalize(self, _end, self._engine, runner)
        self._replicas = arguments["data_parallel_size"]
        self._requests = 0
        self.vllm_config, self.engine_core = self._engine.vllm_config, self._engine.engine_core

    @property
    def llm_engine(self) -> Replicas:
        return self

    def generate(self, prompts: list[Any], params: Any, use_tqdm: bool = False) -> list[Any]:
        """Return the output of each prompt; prompts are sent to the replicas round-robin, starting with the first."""
        from vllm.sampling_params import RequestOutputKind

        params.output_kind = RequestOutputKind.FINAL_ONLY

        async def answer(index: int, prompt: Any) -> Any:
            self._requests += 1
            replica = index % self._replicas
            async for output in self._engine.generate(prompt, params, str(self._requests), data_parallel_rank=replica):
                if output.finished:
                    return output
            raise RuntimeError(f"prompt {index}: vLLM's engine ended the request without a finished output")

        async def answer_all() -> list[Any]:
            return await asyncio.gather(*(answer(i, prompt) for i, prompt in enumerate(prompts)))

        return self._run(answer_all())

    def collective_rpc(self, *args: Any, **kwargs: Any) -> list[Any]:
        """Call a method on the workers of all replicas; return the results of the first replica."""
        return self._run(self._engine.collective_rpc(*args, **kwargs))

    def reset_prefix_cache(self) -> None:
        """Reset the prefix cache of all replicas."""
        self._run(self._engine.reset_prefix_cache())

    def shutdown(self) -> None:
        """Stop the engine's processes and close the event loop; a second call does nothing."""
        self._shutdown()


def _end(engine: Any, runner: asyncio.Runner) -> None:
    engine.engine_core.shutdown(timeout=PATIENCE)
    engine.shutdown()
    runner.close()  # runs pending callbacks and cancels the remaining tasks
