"""Driver of a check: runs stock and patched engines in separate processes and compares their logprobs.

`plan` decides which engines run, and `report` shows the result. docs/drift.md documents check.json and run.json;
benchmarks store the same fields, so a renamed field must change there too. `jobs.execute` runs the engines.
"""

from __future__ import annotations

import math
import shlex
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch

from ..contract.experts import ExpertTree
from ..convert import Architecture, Checkpoint, check_weights, read_architecture
from ..drift import DriftReport, Logprobs, compare, load
from ..errors import InputError, UnsupportedError
from ..jobs import routing as routed
from ..jobs.execute import INSTALL, Progress, WorkerError, check_out, execute, prepare, write_json
from ..jobs.job import DTYPES, Job, draw_prompts
from ..jobs.model import HEADS, KV_HEADS, MAX_POSITION, make_checkpoint
from ..jobs.train import check_layout, check_spec
from ..runtime.machine import family, gpus, installed, machine, most_ranks, no_room, require_environment
from . import plan
from .plan import Row

_CHANGED = "The file was changed, or another run wrote to the same --out; run the check again with a new --out"
"""Cause and remedy if an engine's file does not hold the prompts of this run."""


def default_tp() -> int:
    """Return the largest tensor-parallel size of a check without --tp: 2, or 1 on a machine with one GPU."""
    return min(2, most_ranks() or 2)


@dataclass
class Options:
    """Options of a check.

    out: output directory.
    model: HF checkpoint directory. None generates a random-weight model per dtype.
    family: family of the generated model. None: a dense model, and an MoE model for two additional pairs.
    dtypes: subset of `jobs.job.DTYPES`.
    tp: maximum tensor-parallel size; 1 omits tensor-parallel rows. None: 2, or 1 on a machine with one GPU.
    full: every pair of rollout and training instead of a subset.
    trainings: names of trainings, as in `plan.Row`. Only these are then compared, each with the rollout ``batch``.
    pairs: (rollout, training) pairs, as in `plan.Row`, for each dtype. Only these are then compared, patched.
    max_tokens: tokens sampled per prompt.
    temperature: sampling temperature.
    seed: seed of weights, prompts and sampling.
    timeout: time limit of one engine process in seconds.
    """

    out: Path
    model: Path | None = None
    family: str | None = None
    dtypes: list[str] = field(default_factory=lambda: list(DTYPES))
    tp: int = None  # pyright: ignore[reportAssignmentType] - machine-dependent default, set in __post_init__
    full: bool = False
    trainings: list[str] = field(default_factory=list)
    pairs: list[tuple[str, str]] = field(default_factory=list)
    max_tokens: int = 64
    temperature: float = 1.0
    seed: int = 0
    timeout: float = 1800.0

    def __post_init__(self) -> None:
        if self.tp is None:
            self.tp = default_tp()


@dataclass
class Compared:
    """A row with its report and, for plots, the compared logprobs."""

    row: Row
    report: DriftReport
    rollout: Logprobs
    training: Logprobs
    routing: tuple[int, int] | None = None
    """MoE models: (tokens routed to other experts in training, tokens whose experts are known on both sides)."""

    def to_json(self) -> dict:
        """Return the row of check.json."""
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
    """Result of a check."""

    compared: list[Compared]
    info: dict
    """Machine, versions, contract, options and the seconds of each engine."""

    @property
    def failures(self) -> list[str]:
        """One sentence per patched row that is not bit-equal or has rerouted tokens."""
        return [
            f"{c.row}: {c.report.bit_equal} of {c.report.tokens} tokens are bit-equal; "
            f"first difference: {c.report.first_difference}"
            for c in self.compared
            if c.row.patched and not c.report.all_equal
        ] + [
            f"{c.row}: {c.routing[0]} of {c.routing[1]} tokens were routed to other experts in training"
            for c in self.compared
            if c.row.patched and c.routing and c.routing[0]
        ]


def run(options: Options, progress: Progress) -> Result:
    """Run the check and write `check.json` and `run.json` into `options.out`.

    Raises InputError or UnsupportedError before an engine starts, and WorkerError if an engine process fails or writes
    an unexpected file. All engine processes are stopped on return and on error.
    """
    architecture = _check_options(options)
    out = options.out
    prepare(out)
    started = time.monotonic()
    gpu = bool(gpus())

    def make_models(folder: str, family: str, dtypes: list[str]) -> dict[str, Path]:
        """Write a model for each dtype."""
        folders = {dtype: out / f"{folder}-{dtype}" for dtype in dtypes}
        kv_heads = max(KV_HEADS, options.tp)  # at least one per rank
        return {
            dtype: make_checkpoint(path, family, getattr(torch, dtype), seed=options.seed, kv_heads=kv_heads).resolve()
            for dtype, path in folders.items()
        }

    def make_plan(rows: list[Row], models: dict[str, Path]) -> tuple[list[Row], list[list[int]], list[Job]]:
        """Return the rows, prompts and jobs of one model."""
        arch = read_architecture(next(iter(models.values())))
        prompts = draw_prompts(arch.vocab, options.seed, plan.PROMPT_LENGTHS)
        sampling = {"max_tokens": options.max_tokens, "temperature": options.temperature, "seed": options.seed}
        jobs = plan.jobs(rows, out.resolve(), models, prompts, gpu=gpu, experts=arch.experts > 0, **sampling)
        return rows, prompts, jobs

    if options.model:
        models = dict.fromkeys(options.dtypes, options.model.resolve())
    else:
        models = make_models("model", options.family or "qwen3", options.dtypes)
    architecture = architecture or read_architecture(models[options.dtypes[0]])
    if options.pairs:
        rows = [Row(dtype, *pair, True) for dtype in options.dtypes for pair in options.pairs]
    elif options.trainings:
        rows = plan.against_batch(options.dtypes, options.trainings)
    else:
        rows = plan.rows(options.dtypes, options.tp, options.full, gpu, architecture.experts > 0)
    for row in rows:
        try:
            architecture.check_tp(row.training_tp)
        except UnsupportedError as e:
            if options.model is None and HEADS % row.training_tp == 0:
                ranks = row.training_tp
                raise UnsupportedError(f"{e}; pass --tp {ranks} to create a model for {ranks} ranks") from None
        check_layout(architecture, patched=row.patched, **row.layout)  # pyright: ignore[reportArgumentType]
    parts = [make_plan(rows, models)]
    if options.model is None and options.family is None and not options.trainings and not options.pairs:
        moe_rows = plan.mixture_rows(options.dtypes[0])
        parts.append(make_plan(moe_rows, make_models(plan.MIXTURE, plan.MIXTURE, options.dtypes[:1])))
    jobs = [job for *_, jobs in parts for job in jobs]
    jobs.sort(key=lambda job: (bool(job.needs), -job.slots))  # all models interleaved, engines with most ranks first
    widest = max(jobs, key=lambda job: job.slots)
    if problem := no_room(widest.slots):
        raise InputError(f"training: engine {widest.name}: the number of ranks {problem}")
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
    """Return the `alignkit bisect` command for the first unequal patched row that bisect supports; None if none."""
    unequal = [c.row for c in result.compared if c.row.patched and not c.report.all_equal and not c.row.model]
    supported = [
        row
        for row in unequal
        if row.layout == {"tp": row.training_tp, "ep": 1, "pp": 1, "cp": 1, "spec": "local"}
        and row.rollout_dp == 1
        and not row.rollout_ep
    ]
    if not supported:
        return None
    row = supported[0]
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
    """Compare the files that the engines of `rows` wrote below `out`.

    Raises WorkerError if a file does not hold the contract and prompts that its engine was started with.
    """
    loaded: dict[Path, Logprobs] = {}
    compared = []
    for row in rows:
        pair, files = [], (plan.rollout_file(out, row), plan.training_file(out, row))
        for path in files:
            if path not in loaded:
                loaded[path] = _read(path, row.patched, prompts)
            pair.append(loaded[path])
        try:
            routing_files = [routed.file_of(path) for path in files]
            counts = routed.rerouted(*routing_files) if all(path.exists() for path in routing_files) else None
            compared.append(Compared(row, compare(*pair), *pair, routing=counts))
        except InputError as e:
            raise WorkerError(f"{row}: {e}") from None
    return compared


def require_engines(command: str) -> None:
    """Raise UnsupportedError if an engine that the command runs is not installed."""
    for name, module in (("vLLM", "vllm"), ("Megatron-core", "megatron.core")):
        if not installed(module):
            raise UnsupportedError(f"alignkit {command} requires {name}, which is not installed. {INSTALL[module]}")


def _check_options(options: Options) -> Architecture | None:
    """Validate the options before an engine starts; return the given model's architecture, None without a model."""
    require_engines("check")
    require_environment()
    if not options.dtypes or any(d not in DTYPES for d in options.dtypes):
        raise InputError(f"dtype: expected one or more of {', '.join(DTYPES)}, got {options.dtypes}")
    if options.tp < 1:
        raise InputError(f"tp: must be positive, got {options.tp}")
    if problem := no_room(options.tp):
        raise InputError(f"tp: {problem}")
    if options.max_tokens < 1:
        raise InputError(f"max_tokens: must be positive, got {options.max_tokens}")
    if not 0 <= options.temperature < math.inf:
        raise InputError(f"temperature: must be at least 0 and finite, got {options.temperature}")
    if not 0 <= options.seed < 2**32:
        raise InputError(f"seed: must be in [0, 2^32), got {options.seed}")
    if not options.timeout > 0:
        raise InputError(f"timeout: must be positive, got {options.timeout}")
    for row in plan.against_batch(options.dtypes, options.trainings):
        check_spec(row.spec)
    check_out(options.out)
    if options.model is not None:
        return _check_model(options.model, options)
    _check_sizes(options, MAX_POSITION)
    if HEADS % options.tp:
        raise InputError(f"tp: must divide the random-weight model's heads = {HEADS}, got {options.tp}")
    return None


def _check_model(path: Path, options: Options) -> Architecture:
    """Validate the model's config.json and weight headers; return its architecture."""
    architecture = read_architecture(path)
    architecture.check_tp(options.tp)
    if architecture.experts and ExpertTree.of(architecture.experts).groups % options.tp:
        raise UnsupportedError(
            f"tp: must divide {ExpertTree.of(architecture.experts).groups}, the largest power of two that divides the "
            f"model's {architecture.experts} experts, got {options.tp}"
        )
    _check_sizes(options, architecture.positions)
    check_weights(architecture, Checkpoint(path))
    return architecture


def _check_sizes(options: Options, positions: int) -> None:
    longest = max(plan.PROMPT_LENGTHS)
    if options.max_tokens > positions - longest:
        raise InputError(
            f"max_tokens: must be at most {positions - longest} (the model's {positions} positions minus the longest "
            f"prompt's {longest} tokens), got {options.max_tokens}"
        )


def _read(path: Path, patched: bool, prompts: list[list[int]]) -> Logprobs:
    """Read an engine's file; raise WorkerError if its contract, prompts or tokens are not those of this run."""
    logprobs = load(path)
    contract = family().contract_id if patched else "stock"
    if logprobs.contract != contract:
        engine = "a patched" if patched else "an unpatched"
        raise WorkerError(
            f"{path}: contract: expected {contract!r}, that of {engine} engine on this machine, got "
            f"{logprobs.contract!r}"
        )
    given = logprobs.prompts
    if len(given) != len(prompts):
        raise WorkerError(
            f"{path}: prompts: must be the {len(prompts)} prompts that alignkit check gave the engine, got "
            f"{len(given)}. {_CHANGED}"
        )
    differing = [i for i, prompt in enumerate(prompts) if given[i] != prompt]
    if differing:
        raise WorkerError(
            f"{path}: prompts[{differing[0]}]: must be the prompt that alignkit check gave the engine, got other "
            f"token ids. {_CHANGED}"
        )
    empty = [i for i, tokens in enumerate(logprobs.tokens) if not tokens]
    if empty:
        raise WorkerError(f"{path}: tokens[{empty[0]}]: must have at least one sampled token, got none")
    return logprobs
