"""Processes that tests start on a CPU are forks of one that has imported what they need: that takes longer than most tests."""

import importlib
import multiprocessing
import os
import tempfile

import torch

METHOD = "spawn" if torch.cuda.is_available() else "forkserver"
"""CUDA cannot be used in a fork of a process that has looked for a device."""
_imported = []


def preload(*modules: str) -> None:
    """Has them imported there too. To be called where tests are collected: it is too late once a process has been started."""
    for module in ("tests.preload", *modules):
        if module not in _imported:
            _imported.append(module)
    multiprocessing.get_context("forkserver").set_forkserver_preload(_imported)


def begin(module: str, *arguments, fork_workers: bool = False):
    """``main(*arguments)`` of a module in a process with this one's variables. What is returned waits for its end, and raises
    with what it said if it failed. fork_workers: see `forking`."""
    said = tempfile.NamedTemporaryFile("r", suffix=".log")  # noqa: SIM115 - kept until it has been read
    context = multiprocessing.get_context(METHOD)
    process = context.Process(target=_main, args=(module, arguments, dict(os.environ), said.name, fork_workers))
    process.start()

    def end(timeout: float = 400) -> None:
        process.join(timeout)
        if process.exitcode is None:
            process.kill()
        with said:
            assert process.exitcode == 0, f"exit status {process.exitcode}\n{said.read()}"

    return end


def _main(module, arguments, environ, log, fork_workers):
    file = os.open(log, os.O_WRONLY)
    os.dup2(file, 1)
    os.dup2(file, 2)
    os.environ.clear()
    os.environ.update(environ)
    if fork_workers:
        forking()
    importlib.import_module(module).main(*arguments)


def forking() -> None:
    """From here on what this process would start anew is a fork of it on a CPU: vLLM's workers find it patched as it is."""
    if METHOD != "forkserver":
        return
    get = multiprocessing.get_context
    multiprocessing.get_context = lambda method=None: get("fork" if method == "spawn" else method)
