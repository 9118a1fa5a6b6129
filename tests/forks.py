"""Start of test processes: on a CPU, forks of a server that has already imported the modules, which saves seconds each.

With a GPU, processes are spawned. A folder whose processes need more imports adds its own preload.py (`preload`).
"""

import importlib
import multiprocessing
import os
import tempfile

import torch

METHOD = "spawn" if torch.cuda.is_available() else "forkserver"
"""Start method: a fork cannot use CUDA once its parent has queried for a device."""
_imported = []


def preload(*modules: str) -> None:
    """Add modules to the fork server's imports; call it at collection, before the first process starts."""
    for module in ("tests.preload", *modules):
        if module not in _imported:
            _imported.append(module)
    multiprocessing.get_context("forkserver").set_forkserver_preload(_imported)


def start_process(module: str, *arguments, fork_workers: bool = False):
    """Run ``main(*arguments)`` of a module in a new process that has this process's environment.

    Args:
        module: Module to import.
        *arguments: Arguments of its ``main``.
        fork_workers: Call `use_fork_for_spawn` in the process first.

    Returns:
        A function that joins the process, and fails with the process's output unless its exit status is 0.
    """
    log = tempfile.NamedTemporaryFile("r", suffix=".log")  # noqa: SIM115 - open until it has been read
    context = multiprocessing.get_context(METHOD)
    process = context.Process(target=_main, args=(module, arguments, dict(os.environ), log.name, fork_workers))
    process.start()

    def join(timeout: float = 400) -> None:
        process.join(timeout)
        if process.exitcode is None:
            process.kill()
        with log:
            assert process.exitcode == 0, f"exit status {process.exitcode}\n{log.read()}"

    return join


def _main(module, arguments, environ, log, fork_workers):
    file = os.open(log, os.O_WRONLY)
    os.dup2(file, 1)
    os.dup2(file, 2)
    os.environ.clear()
    os.environ.update(environ)
    if fork_workers:
        use_fork_for_spawn()
    importlib.import_module(module).main(*arguments)


def use_fork_for_spawn() -> None:
    """Replace spawn by fork in this process on a CPU, so that vLLM's workers inherit its patches."""
    if METHOD != "forkserver":
        return
    get = multiprocessing.get_context
    multiprocessing.get_context = lambda method=None: get("fork" if method == "spawn" else method)
