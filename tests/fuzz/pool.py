"""Worker processes that run one call at a time; a worker that dies or hangs is reported for its call and replaced."""

from __future__ import annotations

import contextlib
import faulthandler
import importlib
import multiprocessing as mp
import os
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Iterable, Iterator
from multiprocessing import connection

from tests.forks import preload

_context = mp.get_context("forkserver")
preload("tests.fuzz.preload")


def _serve(jobs, target: str, log: str) -> None:
    file = os.open(log, os.O_WRONLY | os.O_TRUNC)
    os.dup2(file, 2)
    # A module that other tests have preloaded may install its own SIGSEGV handler, which takes ten seconds.
    signal.signal(signal.SIGSEGV, signal.SIG_DFL)
    faulthandler.enable(sys.stderr)
    import torch

    torch.set_num_threads(1)
    module, _, name = target.partition(":")
    function = getattr(importlib.import_module(module), name)
    while (job := jobs.recv()) is not None:
        try:
            jobs.send((function(*job), None))
        except Exception:
            jobs.send((None, traceback.format_exc()))


class _Worker:
    def __init__(self, target: str):
        self.log = tempfile.NamedTemporaryFile("r", suffix=".log")  # noqa: SIM115 - open as long as the worker
        self.jobs, theirs = _context.Pipe()
        self.process = _context.Process(target=_serve, args=(theirs, target, self.log.name), daemon=True)
        self.process.start()
        theirs.close()
        self.job: tuple | None = None
        self.since = 0.0

    def give(self, job: tuple) -> None:
        self.job, self.since = job, time.monotonic()
        self.jobs.send(job)

    def stop(self) -> None:
        with contextlib.suppress(OSError):
            self.jobs.send(None)
        self.process.join(2)
        if self.process.is_alive():
            self.process.kill()
            self.process.join()
        self.log.close()

    def cause_of_death(self) -> str:
        """Return how the process died, and its innermost Python frames."""
        code = self.process.exitcode
        cause = signal.Signals(-code).name if code is not None and code < 0 else f"exit status {code}"
        frames = [line.strip() for line in self.log.read().splitlines() if line.lstrip().startswith("File ")]
        return f"{cause}: " + " < ".join(frames[:2])


def outcomes(target: str, jobs: Iterable[tuple], workers: int, timeout: float) -> Iterator[tuple[tuple, str, object]]:
    """Yield (job, outcome, value) as jobs end.

    The outcome and value are "done" and the result of ``target(*job)``, "failed" and the traceback, "crashed" and the
    cause of death, or, after `timeout` seconds, "hung" and the innermost frames.

    Args:
        target: ``module:function``.
        jobs: Argument tuples.
        workers: Number of processes.
        timeout: Time limit of a job in seconds.
    """
    remaining = iter(jobs)
    pool = [_Worker(target) for _ in range(workers)]
    try:
        for worker in list(pool):
            _next(worker, remaining)
        while busy := [w for w in pool if w.job is not None]:
            wait = min(w.since + timeout for w in busy) - time.monotonic()
            ready = connection.wait([w.jobs for w in busy], max(wait, 0))
            for worker in busy:
                if worker.jobs in ready:
                    try:
                        value, failure = worker.jobs.recv()
                    except (EOFError, ConnectionResetError):
                        worker.process.join()
                        yield worker.job, "crashed", worker.cause_of_death()
                        worker = _replace(pool, worker, target)
                    else:
                        yield (worker.job, "done", value) if failure is None else (worker.job, "failed", failure)
                    _next(worker, remaining)
                elif time.monotonic() - worker.since > timeout:
                    os.kill(worker.process.pid, signal.SIGABRT)  # faulthandler logs the stack
                    worker.process.join(5)
                    if worker.process.is_alive():
                        worker.process.kill()
                        worker.process.join()
                    yield worker.job, "hung", worker.cause_of_death()
                    _next(_replace(pool, worker, target), remaining)
    finally:
        for worker in pool:
            worker.stop()


def _next(worker: _Worker, remaining: Iterator[tuple]) -> None:
    job = next(remaining, None)
    if job is None:
        worker.job = None
    else:
        worker.give(job)


def _replace(pool: list[_Worker], worker: _Worker, target: str) -> _Worker:
    worker.log.close()
    worker.jobs.close()
    pool[pool.index(worker)] = new = _Worker(target)
    return new
