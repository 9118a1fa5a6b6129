"""Engines' processes on a CPU: forks of one that has imported the engine, which takes longer than most of what they do.

On a GPU there are none: CUDA cannot be used in a fork of a process that has looked for a device.
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

_VLLM = ("vllm.entrypoints.llm", "vllm.v1.engine.llm_engine", "vllm.v1.worker.cpu_worker")
_MEGATRON = ("megatron.core.models.gpt.gpt_layer_specs", "megatron.core.parallel_state")
_IMPORTS = {
    "alignkit.check.rollout": _VLLM,
    "alignkit.check.train": _MEGATRON,
    "alignkit.drift.bisect.vllm_side": _VLLM,
    "alignkit.drift.bisect.megatron_side": _MEGATRON,
}
"""What is imported before a fork, by the module whose ``main([path])`` is then called."""
_AT_IMPORT = ("PYTHON", "LD_", "OMP_", "TORCH", "VLLM_")
"""How the names of variables begin that are read when Python starts, or torch or vLLM is imported."""


def known(module: str) -> bool:
    return module in _IMPORTS


class Fork:
    """A process, as far as `subprocess.Popen` is used here."""

    def __init__(self, server: _Server, pid: int):
        self._server, self.pid = server, pid
        self.returncode: int | None = None

    def poll(self) -> int | None:
        if self.returncode is None:
            self.returncode = self._server.status(self.pid)
        return self.returncode

    def wait(self, timeout: float) -> int:
        until = time.monotonic() + timeout
        while (status := self.poll()) is None:
            if time.monotonic() > until:
                raise subprocess.TimeoutExpired(f"process {self.pid}", timeout)
            time.sleep(0.02)
        return status


class _Server:
    """The process that is forked. It ends with the one that started it, and so do the forks that are left."""

    def __init__(self, imports: tuple[str, ...], env: dict[str, str]):
        self._connection, theirs = Pipe()
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", __name__, str(theirs.fileno()), *imports],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                env=env,
                pass_fds=[theirs.fileno()],
                start_new_session=True,
            )

    def alive(self) -> bool:
        return not self._connection.closed and self._process.poll() is None

    def start(self, module: str, path: Path, log: Path, env: dict[str, str]) -> Fork:
        pid = self._ask((module, str(path), str(log), env, os.getcwd()))
        assert pid is not None
        return Fork(self, pid)

    def status(self, pid: int) -> int | None:
        try:
            return self._ask(pid)
        except (EOFError, OSError):
            return -signal.SIGKILL

    def _ask(self, what) -> int | None:
        try:
            self._connection.send(what)
            return self._connection.recv()
        except BaseException:  # an answer still to come would be taken for that to another question
            self._connection.close()
            raise


_servers: dict[tuple, _Server] = {}
forked = False
"""Whether this process is one."""


def prepare(module: str, env: dict[str, str]) -> None:
    """Begins to import what a `start` with the same module and variables needs."""
    _server(module, env)


def start(module: str, path: Path, log: Path, env: dict[str, str]) -> Fork:
    """Calls ``main([path])`` of a `known` module in a process group of its own, with these variables, what it says in `log`."""
    return _server(module, env).start(module, path, log, env)


def _server(module: str, env: dict[str, str]) -> _Server:
    imports = _IMPORTS[module]
    if imports is _VLLM:
        from . import rollout

        env = rollout.ENVIRON | rollout.EAGER | env
    read = tuple(sorted(item for item in env.items() if item[0].startswith(_AT_IMPORT)))
    key = imports, read
    if key not in _servers or not _servers[key].alive():
        _servers[key] = _Server(imports, env)
    return _servers[key]


def _main(fd: int, imports: list[str]) -> None:
    """The server: a fork for each job, and for each number the status of that process or None."""
    connection = Connection(fd)
    for name in imports:
        with contextlib.suppress(Exception):  # it fails again in the fork, which has a log to say so
            importlib.import_module(name)
    left: set[int] = set()
    while True:
        try:
            asked = connection.recv()
        except EOFError:
            for pid in left:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(pid, signal.SIGKILL)
            os._exit(0)  # taking apart what was imported would take seconds
        if isinstance(asked, int):
            pid, status = os.waitpid(asked, os.WNOHANG)
            left.discard(pid)
            connection.send(os.waitstatus_to_exitcode(status) if pid else None)
        elif pid := os.fork():
            with contextlib.suppress(PermissionError, ProcessLookupError):  # the fork was faster
                os.setpgid(pid, pid)
            left.add(pid)
            connection.send(pid)
        else:
            connection.close()
            return _run(*asked)


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
    from alignkit.check import forks

    forks.forked = True  # of the module that others import: this is __main__
    importlib.import_module(module).main([path])


if __name__ == "__main__":
    _main(int(sys.argv[1]), sys.argv[2:])
