"""Fixtures that run real vLLM in separate processes, as vLLM changes torch.distributed, threads and the environment.

`vllm_process` gives a process that runs a test's functions; settings.py holds the engines' options. Without vLLM the
folder is skipped.
"""

import contextlib
import json
import multiprocessing
import os
import traceback
from types import MappingProxyType, SimpleNamespace

import pytest
import torch

from alignkit.drift import load
from alignkit.jobs.model import make_checkpoint
from alignkit.jobs.rollout import shut_down
from tests.forks import METHOD, preload, start_process, use_fork_for_spawn
from tests.vllm.settings import ENGINE, ENV

pytest.importorskip("vllm", reason="vLLM is not installed")

preload("tests.vllm.preload")

CALL_TIMEOUT = 400
"""Timeout of one call in seconds, such as the start of an engine while others start."""


class VllmProcess:
    """A process that runs functions ``f(state, *args)``; `state` keeps their data between calls, such as an engine."""

    def __init__(self, fork: bool = METHOD == "forkserver", fork_workers: bool = False, **env: str):
        """Start the process.

        Args:
            fork: Fork a server process that has imported vLLM and done nothing else. The import takes ten seconds.
                The fork writes to the server's stdout and stderr.
            fork_workers: Fork the engine's own processes too. They inherit the patch, as they do on a GPU. On a CPU,
                vLLM spawns them by default.
            **env: Environment variables of the process.
        """
        context = multiprocessing.get_context("forkserver" if fork else "spawn")
        self._connection, child = context.Pipe()
        before = dict(os.environ)
        os.environ.update(ENV | env)
        try:
            self._process = context.Process(target=_serve, args=(child, dict(os.environ), fork_workers))
            self._process.start()
        finally:
            os.environ.clear()
            os.environ.update(before)
        child.close()

    def __call__(self, function, *args):
        """Return the function's result, or raise its exception with the process's traceback as a note."""
        self._connection.send((function, args))
        if not self._connection.poll(CALL_TIMEOUT):
            raise TimeoutError(f"{function.__name__} took more than {CALL_TIMEOUT} s")
        result, error, trace = self._connection.recv()
        if error is not None:
            error.add_note(trace)
            raise error
        return result

    @property
    def exitcode(self):
        return self._process.exitcode

    def stop(self):
        with contextlib.suppress(ConnectionError):  # the process has exited
            self._connection.send(None)

    def join(self):
        self._process.join(30)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()


def _serve(connection, env, fork_workers):
    os.environ.clear()
    os.environ.update(env)
    if fork_workers:
        use_fork_for_spawn()
    state = SimpleNamespace(llm=None)
    while (call := connection.recv()) is not None:
        function, args = call
        try:
            answer = (function(state, *args), None, "")
        except Exception as e:
            answer = (None, _portable(e), traceback.format_exc())
        connection.send(answer)
    if state.llm is not None:
        shut_down(state.llm)


def start(state, model, options=MappingProxyType({}), aligned=True):
    """Start the engine of a `VllmProcess`."""
    from vllm import LLM

    from alignkit.vllm import patch_vllm

    if aligned:
        state.patch = patch_vllm()
    state.llm = LLM(model, dtype="bfloat16", **ENGINE | options)


def built_model(state):
    """Return the model of an engine in this process."""
    return state.llm.llm_engine.model_executor.driver_worker.worker.model_runner.get_model()


def reload(state, model):
    """Load another checkpoint into the engine of a `VllmProcess`."""
    state.llm.collective_rpc("reload_weights", kwargs={"weights_path": model})
    state.llm.reset_prefix_cache()


def _portable(error):
    """Return the error as its nearest base class that the test process can unpickle without vLLM."""
    for kind in type(error).__mro__:
        if kind.__module__ in ("alignkit.errors", "builtins"):
            return kind(str(error))


@pytest.fixture(scope="module")
def vllm_process():
    """Return a function that starts a `VllmProcess`, which ends with the module."""
    started = []

    def start(**options):
        started.append(VllmProcess(**options))
        return started[-1]

    yield start
    for process in started:
        process.stop()
    for process in started:
        process.join()


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory):
    """Return a function that gives the path of a random-weight checkpoint. Checkpoints are cached."""
    paths = {}

    def get(arch="qwen3", dtype=torch.bfloat16, **kwargs):
        key = (arch, dtype, repr(sorted(kwargs.items())))
        if key not in paths:
            paths[key] = make_checkpoint(tmp_path_factory.mktemp("model") / arch, arch, dtype, **kwargs)
        return str(paths[key])

    return get


@pytest.fixture(scope="session")
def prompts():
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(2000, (n,), generator=generator).tolist() for n in (3, 40, 64, 65, 130)]


@pytest.fixture(scope="session")
def rollout(tmp_path_factory, checkpoint, prompts):
    """Return a function that runs `alignkit.jobs.rollout` and returns logprobs by mode. Results are cached."""
    results = {}

    def run(modes, dtype=torch.bfloat16, patched=True, chunk=None, temperature=0.0, tp=1):
        key = (modes, dtype, patched, chunk, temperature, tp)
        if key in results:
            return results[key]
        folder = tmp_path_factory.mktemp("rollout")
        job = {
            "model": checkpoint(dtype=dtype),
            "dtype": str(dtype).removeprefix("torch."),
            "patched": patched,
            "tp": tp,
            "max_num_batched_tokens": chunk,
            "prompts": prompts,
            "max_tokens": 16,
            "temperature": temperature,
            "seed": 0,
            "tokens_from": str(folder / "batch"),
            "runs": [{"mode": m, "out": str(folder / m)} for m in modes],
        }
        (folder / "job.json").write_text(json.dumps(job))
        start_process("alignkit.jobs.rollout", [str(folder / "job.json")], fork_workers=tp > 1)(timeout=240)
        results[key] = {m: load(folder / m) for m in modes}
        return results[key]

    return run
