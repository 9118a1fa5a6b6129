"""Engine processes on a CPU, forked from a server that has imported the engine, to save the import time.

Forks are not used with GPUs: CUDA does not work in a fork of a process that has queried devices. Forks affect the
duration of a check alone: `run` starts modules that `_IMPORTS` lacks as ordinary processes.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import signal
import subprocess
import sys
import time
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path

_VLLM = ("vllm.entrypoints.llm", "vllm.v1.engine.llm_engine", "vllm.v1.worker.cpu_worker", "alignkit.vllm.versions")
_MEGATRON = ("megatron.core.models.gpt.gpt_layer_specs", "megatron.core.parallel_state", "alignkit.megatron.versions")
_IMPORTS = {
    "alignkit.jobs.rollout": _VLLM,
    "alignkit.jobs.train": _MEGATRON,
    "alignkit.bisect.vllm_side": _VLLM,
    "alignkit.bisect.megatron_side": _MEGATRON,
}
"""Modules to import before a fork, keyed by the module whose ``main([path])`` the fork calls."""
_AT_IMPORT = ("PYTHON", "LD_", "OMP_", "TORCH", "VLLM_")
"""Prefixes of environment variables that are read when Python starts or torch or vLLM is imported.

Jobs that differ in such a variable get different servers.
"""


def known(module: str) -> bool:
    return module in _IMPORTS


class Fork:
    """Forked process with the subset of the `subprocess.Popen` interface used by `run`."""

    def __init__(self, server: _Server, pid: int):
        self._server, self.pid = server, pid
        self.returncode: int | None = None

    def poll(self) -> int | None:
        if self.returncode is None:
            self.returncode = self._server.status(self.pid)
        return self.returncode

    def wait(self, timeout: float) -> int:
        deadline = time.monotonic() + timeout
        while (status := self.poll()) is None:
            if time.monotonic() > deadline:
                raise subprocess.TimeoutExpired(f"process {self.pid}", timeout)
            time.sleep(0.02)
        return status


class _Server:
    """Client of the fork server, a process that exits together with its forks when this process exits."""

    def __init__(self, imports: tuple[str, ...], env: dict[str, str]):
        self._connection, server_end = Pipe()
        with server_end:
            self._process = subprocess.Popen(
                [sys.executable, "-m", __name__, str(server_end.fileno()), *imports],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                env=env,
                pass_fds=[server_end.fileno()],
                start_new_session=True,
            )

    def alive(self) -> bool:
        return not self._connection.closed and self._process.poll() is None

    def start(self, module: str, path: Path, log: Path, env: dict[str, str]) -> Fork:
        pid = self._request((module, str(path), str(log), env, os.getcwd()))
        assert pid is not None
        return Fork(self, pid)

    def status(self, pid: int) -> int | None:
        try:
            return self._request(pid)
        except (EOFError, OSError):
            return -signal.SIGKILL

    def _request(self, message) -> int | None:
        try:
            self._connection.send(message)
            return self._connection.recv()
        except BaseException:  # otherwise a late reply would be taken for the reply to the next request
            self._connection.close()
            raise


_servers: dict[tuple, _Server] = {}
forked = False
"""True in a forked process."""


def prepare(module: str, env: dict[str, str]) -> None:
    """Start a server, if needed, that imports the modules for a later `start` with equal arguments."""
    _server(module, env)


def start(module: str, path: Path, log: Path, env: dict[str, str]) -> Fork:
    """Fork a process group that calls ``main([path])`` of a `known` module with this environment, output in `log`."""
    return _server(module, env).start(module, path, log, env)


def _server(module: str, env: dict[str, str]) -> _Server:
    imports = _IMPORTS[module]
    if imports is _VLLM:
        from . import rollout

        env = rollout.ENVIRON | rollout.EAGER | env
    variables = tuple(sorted(item for item in env.items() if item[0].startswith(_AT_IMPORT)))
    key = imports, variables
    if key not in _servers or not _servers[key].alive():
        _servers[key] = _Server(imports, env)
    return _servers[key]


def _main(fd: int, imports: list[str]) -> None:
    """Run the server: fork for a job message, reply with the exit status or None for a process id."""
    connection = Connection(fd)
    for name in imports:
        with contextlib.suppress(Exception):  # the import fails again in the fork, which has a log
            module = importlib.import_module(name)
            if name.startswith("alignkit."):
                module.VERSIONS.inspect_installed()
    children: set[int] = set()
    while True:
        try:
            message = connection.recv()
        except EOFError:
            for pid in children:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(pid, signal.SIGKILL)
            os._exit(0)  # skips interpreter teardown, which takes seconds
        if isinstance(message, int):
            pid, status = os.waitpid(message, os.WNOHANG)
            children.discard(pid)
            connection.send(os.waitstatus_to_exitcode(status) if pid else None)
        elif pid := os.fork():
            with contextlib.suppress(PermissionError, ProcessLookupError):  # the fork has already called setpgid
                os.setpgid(pid, pid)
            children.add(pid)
            connection.send(pid)
        else:
            connection.close()
            return _run(*message)


def _run(module: str, path: str, log: str, env: dict[str, str], folder: str) -> None:
    os.setpgid(0, 0)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(file, 1)
    os.dup2(file, 2)
    os.close(file)
    os.environ.clear()
    os.environ.update(env)
    os.chdir(folder)
    from alignkit.jobs import forks

    forks.forked = True  # on the imported module; this module is __main__
    importlib.import_module(module).main([path])


if __name__ == "__main__":
    _main(int(sys.argv[1]), sys.argv[2:])
