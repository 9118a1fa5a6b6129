"""Runs a check: real engines in processes of their own, before and after patching, then the comparison."""

from __future__ import annotations

import json
import math
import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch

from ..config import Config, config
from ..contract.experts import ExpertTree
from ..convert import Architecture, Checkpoint, check_weights, read_architecture
from ..drift import DriftReport, Logprobs, compare, load
from ..drift.compare import finite_or_none
from ..errors import AlignkitError, InputError, UnsupportedError
from . import forks, plan
from . import routing as routed
from .forks import Fork
from .machine import family, gpus, installed, machine, most_ranks, no_room, require_environment
from .model import HEADS, KV_HEADS, MAX_POSITION, make_checkpoint
from .plan import Job, Row
from .train import check_layout

_LOG_TAIL = 30
_MARK = ".alignkit-{}"
"""A file that says which command wrote what is in this directory, so that the next run of it may delete that."""


class WorkerError(AlignkitError, RuntimeError):
    """An engine's process failed; the message ends with the tail of its log."""


@dataclass
class Options:
    """out: directory for everything the check writes.
    model: HF checkpoint directory; None makes a random-weight one for each dtype.
    family: of the model that is made. None: a dense one, and one of experts beside it for a few rows.
    dtypes: from `plan.DTYPES`.
    tp: largest tensor-parallel size; 1 leaves tensor-parallel rows out. None: 2, or 1 on a machine with one GPU.
    full: every pair of rollout and training instead of a subset.
    trainings: names of trainings, as in `plan.Row`, that a batch is compared with instead of all that.
    max_tokens, temperature, seed: of the sampling.
    timeout: seconds that one engine's process may take.
    """

    out: Path
    model: Path | None = None
    family: str | None = None
    dtypes: list[str] = field(default_factory=lambda: list(plan.DTYPES))
    tp: int = None  # pyright: ignore[reportAssignmentType] - the default is this machine's, below
    full: bool = False
    trainings: list[str] = field(default_factory=list)
    max_tokens: int = 64
    temperature: float = 1.0
    seed: int = 0
    timeout: float = 1800.0

    def __post_init__(self) -> None:
        if self.tp is None:
            self.tp = min(2, most_ranks() or 2)


@dataclass
class Compared:
    """A row with its report and, for plots, what was compared."""

    row: Row
    report: DriftReport
    rollout: Logprobs
    training: Logprobs
    routing: tuple[int, int] | None = None
    """Of a mixture of experts: how many tokens had other experts in training, and of how many that is known."""

    def to_json(self) -> dict:
        """A row of check.json."""
        numbers = self.report.to_json()
        numbers.pop("worst")
        head = ("tokens", "bit_equal", "max_abs", "mean_abs")
        return (
            ({"model": self.row.model} if self.row.model else {})
            | {
                "dtype": self.row.dtype,
                "rollout": self.row.rollout,
                "training": self.row.training,
                "patched": self.row.patched,
            }
            | {k: numbers[k] for k in head}
            | {k: v for k, v in numbers.items() if k not in head}
            | ({} if self.routing is None else {"rerouted": self.routing[0], "routed": self.routing[1]})
        )


@dataclass
class Result:
    compared: list[Compared]
    info: dict
    """Machine, versions, contract, options, and the seconds each engine took."""

    @property
    def failures(self) -> list[str]:
        """One sentence for each patched row that is not equal to the last bit."""
        return [
            f"{c.row}: {c.report.bit_equal} of {c.report.tokens} tokens are bit-equal; "
            f"the first that is not: {c.report.first_difference}"
            for c in self.compared
            if c.row.patched and not c.report.all_equal
        ] + [
            f"{c.row}: {c.routing[0]} of {c.routing[1]} tokens had other experts in training"
            for c in self.compared
            if c.row.patched and c.routing and c.routing[0]
        ]


class Progress:
    """What a check tells while it runs; to be overridden."""

    def planned(self, jobs: list[Job]) -> None: ...

    def started(self, job: Job) -> None: ...

    def ended(self, job: Job, seconds: float, failure: str | None) -> None: ...


def run(options: Options, progress: Progress) -> Result:
    """Runs the check and writes `check.json` and `run.json` into `options.out`.

    Raises InputError or UnsupportedError before anything runs, WorkerError if an engine's process fails or
    writes something other than it was asked for. However it ends, no engine of its own is left running.
    """
    architecture = _check_options(options)
    out = options.out
    prepare(out)
    started = time.monotonic()
    gpu = bool(gpus())

    def made(folder: str, family: str, dtypes: list[str]) -> dict[str, Path]:
        """A model for each dtype."""
        folders = {dtype: out / f"{folder}-{dtype}" for dtype in dtypes}
        kv_heads = max(KV_HEADS, options.tp)  # each rank has at least one
        return {
            dtype: make_checkpoint(path, family, getattr(torch, dtype), seed=options.seed, kv_heads=kv_heads).resolve()
            for dtype, path in folders.items()
        }

    def planned(rows: list[Row], models: dict[str, Path]) -> tuple[list[Row], list[list[int]], list[Job]]:
        """Rows, prompts and engines of one model."""
        of = read_architecture(next(iter(models.values())))
        prompts = plan.draw_prompts(of.vocab, options.seed)
        sampling = {"max_tokens": options.max_tokens, "temperature": options.temperature, "seed": options.seed}
        jobs = plan.jobs(rows, out.resolve(), models, prompts, gpu=gpu, experts=of.experts > 0, **sampling)
        return rows, prompts, jobs

    if options.model:
        models = dict.fromkeys(options.dtypes, options.model.resolve())
    else:
        models = made("model", options.family or "qwen3", options.dtypes)
    architecture = architecture or read_architecture(models[options.dtypes[0]])
    if options.trainings:
        rows = plan.against_batch(options.dtypes, options.trainings)
    else:
        rows = plan.rows(options.dtypes, options.tp, options.full, gpu, architecture.experts > 0)
    for row in rows:
        check_layout(architecture, patched=row.patched, **row.layout)  # pyright: ignore[reportArgumentType]
    parts = [planned(rows, models)]
    if options.model is None and options.family is None and not options.trainings:
        few = plan.mixture_rows(options.dtypes[0])
        parts.append(planned(few, made(plan.MIXTURE, plan.MIXTURE, options.dtypes[:1])))
    jobs = [job for *_, jobs in parts for job in jobs]
    jobs.sort(key=lambda job: (bool(job.needs), -job.slots))  # the models side by side, wide engines first
    if gpu and (most := max(map(needed, jobs))) > len(gpus()):
        raise InputError(f"training: an engine needs {most} GPUs, there are {len(gpus())}")
    seconds, _ = execute(jobs, out, options.timeout, progress)
    compared = [c for rows, prompts, _ in parts for c in compare_rows(rows, out, prompts)]
    info = machine() | {
        "contract": family().contract_id,
        "model": asdict(architecture),
        "full": options.full,
        "trainings": options.trainings,
        "tp": options.tp,
        "max_tokens": options.max_tokens,
        "temperature": options.temperature,
        "seed": options.seed,
        "seconds": seconds | {"all": round(time.monotonic() - started, 1)},
    }
    write_json(out / "check.json", [c.to_json() for c in compared])
    write_json(out / "run.json", info)
    return Result(compared, info)


def bisect_command(options: Options, result: Result) -> str | None:
    """The command that finds where the first patched row that is not equal begins to differ; None if it takes none of them."""
    unequal = [c.row for c in result.compared if c.row.patched and not c.report.all_equal and not c.row.model]
    taken = [
        row
        for row in unequal
        if row.layout == {"tp": row.training_tp, "ep": 1, "pp": 1, "cp": 1, "spec": "local"}
        and row.rollout_dp == 1
        and not row.rollout_ep
    ]
    if not taken:
        return None
    row = taken[0]
    rollout = "aligned-vllm" + (f":tp={row.rollout_tp}" if row.rollout_tp > 1 else "")
    mode = row.training.rpartition("-")[2]
    training = f"aligned-megatron:tp={row.training_tp},mode={mode}"
    model = options.model or options.out / f"model-{row.dtype}"
    return shlex.join(
        [
            "alignkit",
            "bisect",
            rollout,
            training,
            "--model",
            str(model),
            "--dtype",
            row.dtype,
            "--tokens",
            str(plan.rollout_file(options.out, row)),
        ]
    )


def compare_rows(rows: list[Row], out: Path, prompts: list[list[int]]) -> list[Compared]:
    """Compares the files that the engines of `rows` wrote below `out`.

    Raises WorkerError for a file that is not what was asked for: a comparison of anything else proves nothing."""
    read: dict[Path, Logprobs] = {}
    compared = []
    for row in rows:
        pair, files = [], (plan.rollout_file(out, row), plan.training_file(out, row))
        for path in files:
            if path not in read:
                read[path] = _read(path, row.patched, prompts)
            pair.append(read[path])
        try:
            routing = [routed.file_of(path) for path in files]
            seen = routed.rerouted(*routing) if all(path.exists() for path in routing) else None
            compared.append(Compared(row, compare(*pair), *pair, routing=seen))
        except InputError as e:
            raise WorkerError(f"{row}: {e}") from None
    return compared


def _check_options(options: Options) -> Architecture | None:
    """Everything that can be refused before an engine starts. Returns what the given model is, None without one."""
    for name, module in (("vLLM", "vllm"), ("Megatron-core", "megatron.core")):
        if not installed(module):
            raise UnsupportedError(f"{name} is not installed here; the check compares the real engines")
    require_environment()
    if not options.dtypes or any(d not in plan.DTYPES for d in options.dtypes):
        raise InputError(f"dtype: {options.dtypes}, expected some of {', '.join(plan.DTYPES)}")
    if options.tp < 1:
        raise InputError(f"tp: {options.tp} is not positive")
    if problem := no_room(options.tp):
        raise InputError(f"tp: {problem}")
    if options.max_tokens < 1:
        raise InputError(f"max_tokens: {options.max_tokens} is not positive")
    if not 0 <= options.temperature < math.inf:
        raise InputError(f"temperature: {options.temperature} is not a finite number from 0")
    if not 0 <= options.seed < 2**32:
        raise InputError(f"seed: {options.seed} is not in [0, 2^32)")
    if not options.timeout > 0:
        raise InputError(f"timeout: {options.timeout} is not positive")
    plan.against_batch([], options.trainings)
    check_out(options.out)
    if options.model is not None:
        return _check_model(options.model, options)
    _check_sizes(options, MAX_POSITION)
    if HEADS % options.tp:
        raise InputError(f"tp: {options.tp} ranks do not divide the model's {HEADS} heads")
    return None


def check_out(out: Path, command: str = "check") -> None:
    """InputError unless a run of the command may write to this directory, and delete what an earlier one has left there."""
    if out.exists():
        if not out.is_dir():
            raise InputError(f"out: {out} is not a directory")
        if any(out.iterdir()) and not (out / _MARK.format(command)).exists():
            raise InputError(f"out: {out} holds something else than an earlier {command}")


def _check_model(path: Path, options: Options) -> Architecture:
    """Whether engines can be started on it, as far as config.json and the headers of its weights say."""
    architecture = read_architecture(path)
    architecture.check_tp(options.tp)
    if architecture.experts and ExpertTree.of(architecture.experts).groups % options.tp:
        raise UnsupportedError(f"tp: {options.tp} ranks cannot share the sum over {architecture.experts} experts")
    _check_sizes(options, architecture.max_position)
    check_weights(architecture, Checkpoint(path))
    return architecture


def _check_sizes(options: Options, positions: int) -> None:
    longest = max(plan.PROMPT_LENGTHS) + options.max_tokens
    if longest > positions:
        raise InputError(f"max_tokens: sequences of {longest} tokens do not fit the model's {positions} positions")


def prepare(
    out: Path,
    files: tuple[str, ...] = ("check.json", "run.json", "report.html"),
    folders: tuple[str, ...] = ("logprobs", "logs", "jobs"),
    command: str = "check",
) -> None:
    """An empty place to write to: nothing of an earlier run can be taken for a result of this one."""
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
    """Runs all jobs, `per_gpu` at once on each GPU, or without one as many as there are cores and no fewer than `per_gpu`,
    each when its inputs are there; `out` has been prepared.

    Returns (the seconds of each job that succeeded, by name why each other failed). The first failure stops all
    and raises WorkerError, unless `keep_going`: then all runs that do not read what was not made.
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
    made: set[Path] = set()
    lost: set[Path] = set()
    try:
        while waiting or running:
            for job in list(waiting):
                distinct = list(dict.fromkeys(free)) if devices else free
                slots = needed(job) if devices else job.slots
                if running and slots > len(distinct):  # one wider than the machine has it for itself
                    continue
                if not made.union(lost).issuperset(job.needs):
                    continue
                waiting.remove(job)
                job.leave_out(lost)
                if job.needs and not job.outputs:
                    failures[job.name] = "what it reads was not made"
                    progress.ended(job, 0.0, failures[job.name])
                    continue
                held = distinct[:slots]
                for slot in held:
                    free.remove(slot)
                running[job] = _Running(_start(job, out, held if devices else None), held)
                progress.started(job)
            for job, run in list(running.items()):
                if run.process.poll() is None and run.elapsed <= timeout:
                    continue
                failure = _failure(job, run.process, timeout, out)
                stop(run.process)  # and what it may have left in its process group
                del running[job]
                free += run.held
                if failure and not keep_going:
                    raise WorkerError(f"{job.name}: {failure}")
                made.update(path for path in job.outputs if path.exists())
                lost.update(path for path in job.outputs if not path.exists())
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
    """GPUs that a job holds."""
    return -(-job.slots // config.ranks_per_gpu)


class _Running:
    """A job's process, since when it runs, and what it holds of the machine's slots."""

    def __init__(self, process: subprocess.Popen | Fork, held: list[str]):
        self.process, self.held, self._since = process, held, time.monotonic()

    @property
    def elapsed(self) -> float:
        return time.monotonic() - self._since


def _failure(job: Job, process: subprocess.Popen | Fork, timeout: float, out: Path) -> str | None:
    """Why the job has failed, None if it has not: it has ended, or its time is over."""
    if process.poll() is None:
        problem = f"no result after {timeout:.0f} s"
    elif process.returncode:
        problem = f"exit status {process.returncode}"
    else:
        missing = [path.name for path in job.outputs if not path.exists()]
        if not missing:
            return None
        problem = f"it ended without writing {', '.join(missing)}"
    return f"{problem}\n{_tail(job, out)}"


def _start(job: Job, out: Path, devices: list[str] | None) -> subprocess.Popen | Fork:
    path, log = out / "jobs" / f"{job.name}.json", _log(job, out)
    plan.write(job, path)
    env = _environ()
    if devices is None and forks.known(job.module):
        return forks.start(job.module, path, log, env)
    if devices is not None:
        env["CUDA_VISIBLE_DEVICES"] = ",".join(devices)
    with log.open("wb") as said:
        # A session of its own, so that it can be stopped with all that it starts.
        return subprocess.Popen(
            [sys.executable, "-m", job.module, str(path)],
            stdin=subprocess.DEVNULL,
            stdout=said,
            stderr=subprocess.STDOUT,
            env=env,
            start_new_session=True,
        )


def _environ() -> dict[str, str]:
    env = {"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"} | os.environ
    env.pop(Config.vllm.name, None)  # the job alone says whether its engine is patched
    return env


def stop(process: subprocess.Popen | Fork) -> None:
    """Ends a worker and what it started; no error if they have ended."""
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
    return f"the end of {path}:\n" + "\n".join("  | " + line for line in lines)


def _read(path: Path, patched: bool, prompts: list[list[int]]) -> Logprobs:
    """A worker's file, which must be what was asked for."""
    logprobs = load(path)
    contract = family().contract_id if patched else "stock"
    if logprobs.contract != contract:
        raise WorkerError(f"{path}: contract {logprobs.contract!r}, expected {contract!r}")
    if logprobs.prompts != prompts:
        raise WorkerError(f"{path}: its prompts are not those of the job")
    empty = [i for i, tokens in enumerate(logprobs.tokens) if not tokens]
    if empty:
        raise WorkerError(f"{path}: nothing was sampled in sequence {empty[0]}")
    return logprobs


def write_json(path: Path, value) -> None:
    path.write_text(json.dumps(finite_or_none(value), indent=1, allow_nan=False) + "\n")
