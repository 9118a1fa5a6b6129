"""Logprob bits of rollout against training on GPUs: ``make gpu-e2e``, or ``python benchmarks/e2e.py`` with options.

Real vLLM and Megatron-core engines run in separate processes on random-weight models of realistic size, in bf16. Each
of 64 prompts has 5 to 1500 tokens and 128 sampled tokens; the model qwen3-long has 6 prompts of up to 32000 tokens.
benchmarks/results/h200/e2e.jsonl is updated after each pair. Several commands, such as one per model, can share the
file; a new row replaces the row with the same key.

A row (``lib/results.py``) has the fields of check.json and ``model``, ``rollout_tp``, ``rollout_dp``, ``training_tp``,
``sequence_parallel``, ``spec`` (layer spec, "local" or "te" for TransformerEngine), ``ep``, ``pp`` and ``cp``. A run
has the options.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import NamedTuple

import torch
from lib.models import MOE_SIZES, SIZES, random_lengths
from lib.options import parser as options_parser
from lib.results import H200, distinct, merge, read, run_info, run_name, sources, stale, write

from alignkit.check import plan
from alignkit.check.plan import Row
from alignkit.check.run import Compared, compare_rows
from alignkit.convert import read_architecture
from alignkit.jobs.execute import WorkerError, execute, prepare
from alignkit.jobs.job import Job, draw_prompts
from alignkit.jobs.model import make_checkpoint
from alignkit.jobs.terminal import Terminal, console, interrupted_by_sigterm
from alignkit.runtime.machine import gpus, installed, no_room

DTYPE = "bfloat16"
MODELS = {
    "qwen3": {"arch": "qwen3"},
    "qwen3-long": {"arch": "qwen3", "max_position": 40960},
    "llama-tied": {"arch": "llama", "tied": True},
    "qwen3-moe": {},
}
MOE_MODEL = "qwen3-moe"
"""The MoE model, whose sizes are in `MOE_SIZES`."""
LONG = "qwen3-long"
"""The model with long prompts, without stock engines and layouts: stock Megatron-core stores all scores and logits."""
PARTS = ("modes", "tp", "layouts", "stock")
"""Groups of pairs.

"modes" has all modes of rollout and training on one rank. "tp" crosses the tensor- and expert-parallel sizes. "layouts"
has TransformerEngine's layer spec, PP and CP, for dense models, also stock where supported. "stock" has pairs of stock
engines; by default, only of the first model and the MoE model.
"""
MODES, GPU_MODES = ("batch", "one", "prompt_logprobs", "prefix", "chunked"), ("eager", "v1")
"""Modes of rollout on one rank, and those that need a GPU."""
LAYOUTS = {
    1: ("tp1-te",),
    2: ("tp2-sp-te", "tp1-pp2", "tp1-te-pp2", "tp1-cp2", "tp1-te-cp2"),
    4: ("tp4-sp-te", "tp2-sp-te-pp2", "tp2-sp-te-cp2", "tp1-te-pp2-cp2"),
}
"""Training layouts by the number of GPUs that they need."""
STOCK_LAYOUTS = {1: ("tp1-te-padded", "tp1-te-packed"), 2: ("tp1-pp2-padded", "tp1-te-pp2-packed")}
CHUNK = 256
ROOM = 64 << 30
"""GPU memory, in bytes, for an engine of the MoE model: 11 GB of weights, and stock Megatron-core's logits."""
KEY = ("model", "dtype", "rollout", "training", "patched")


class Workload(NamedTuple):
    """Prompts and micro-batches of a model."""

    prompts: int
    longest: int
    """Tokens of the longest prompt."""
    micro_batch: int
    """Tokens of a training micro-batch, padding included."""


WORKLOADS = {LONG: Workload(6, 32000, 1 << 17)}
DEFAULT = Workload(64, 1500, 16384)
"""A micro-batch has 10 GB of fp32 logits, which stock Megatron-core materializes."""


def model_sizes(model: str, size: str) -> dict:
    """Return the arguments of `make_checkpoint` for a model."""
    if model == MOE_MODEL:
        return MOE_SIZES["small-moe" if size == "small" else "qwen3-30b-a3b-8-layers"]
    return SIZES[size] | MODELS[model]


def rows(parts: Sequence[str], tp: int, gpu: bool = True) -> list[Row]:
    """Return the pairs of `parts` with at most `tp` ranks per engine."""
    sizes = [n for n in (2, 4) if n <= tp]
    modes = ("one", "padded", "packed")
    chosen: list[tuple[str, str, bool]] = []
    if "modes" in parts:
        rollouts = [*MODES, *(GPU_MODES if gpu else ())]
        chosen += [(r, f"tp1-{mode}", True) for r in rollouts for mode in modes]
    if "tp" in parts:
        engines = ["tp1"] + [f"tp{n}{sp}" for n in sizes for sp in ("", "-sp")]
        for r in ["batch"] + [f"tp{n}" for n in sizes]:
            for engine in engines:
                if r == "batch" and engine == "tp1":
                    continue
                both_parallel = r != "batch" and engine != "tp1"
                chosen += [(r, f"{engine}-{mode}", True) for mode in (modes[1:] if both_parallel else modes)]
    if "layouts" in parts:
        chosen += [
            ("batch", f"{t}-{m}", True) for n, some in LAYOUTS.items() for t in some for m in modes[1:] if n <= tp
        ]
        chosen += [("batch", t, False) for n, some in STOCK_LAYOUTS.items() for t in some if n <= tp]
    if "stock" in parts:
        chosen += [(r, f"tp1-{mode}", False) for r in ("batch", "one", "prompt_logprobs") for mode in modes[:2]]
        if sizes:
            chosen += [(r, t, False) for r in ("batch", "tp2") for t in ("tp1-padded", "tp2-padded")]
    return [Row(DTYPE, *row) for row in dict.fromkeys(chosen)]


def moe_rows(parts: Sequence[str], ranks: int, gpu: bool = True) -> list[Row]:
    """Return the pairs of the MoE model with at most `ranks` ranks per engine.

    Experts are sharded by expert or tensor parallelism; rollouts also have data-parallel replicas. On a GPU, the
    rollouts named ``routed`` record the experts that their routers select.
    """
    sizes = [n for n in (2, 4) if n <= ranks]
    modes = ("one", "padded", "packed")
    routed = ["routed"] if gpu else []
    chosen: list[tuple[str, str, bool]] = []
    if "modes" in parts:
        rollouts = [*MODES, *routed, *(GPU_MODES if gpu else ())]
        chosen += [(r, f"tp1-{mode}", True) for r in rollouts for mode in modes]
    if "tp" in parts and sizes:
        rollouts = ["batch"] + [f"tp{n}{ep}" for n in sizes for ep in ("", "-ep")]
        replicas = ["dp2", *(f"dp{n}-ep" for n in sizes), *(["tp2-dp2-ep"] if 4 in sizes else [])]
        trainings = [
            "tp1",
            *(f"tp1-ep{n}" for n in sizes),
            "tp2",
            "tp2-sp",
            "tp2-ep2",
            *(f"tp2-sp-ep{n}" for n in sizes),
        ]
        chosen += [(r, f"{t}-{mode}", True) for r in rollouts for t in trainings for mode in modes[1:]]
        some = ("tp1", "tp1-ep2", "tp2-sp")
        chosen += [(r, f"{t}-{mode}", True) for r in replicas for t in some for mode in modes[1:]]
        chosen += [(r, f"{t}-{mode}", True) for r in routed for t in trainings for mode in modes[1:]]
        chosen += [(f"tp{n}-ep-{r}", f"{t}-padded", True) for r in routed for n in sizes for t in ("tp1", f"tp1-ep{n}")]
    if "stock" in parts:
        rollouts = ["batch", "one", "prompt_logprobs", *routed]
        chosen += [(r, f"tp1-{mode}", False) for r in rollouts for mode in modes[:2]]
        if sizes:
            # On the CPU, stock vLLM's workers crash with an illegal instruction under expert parallelism.
            rollouts = ["batch", *(["tp2", "tp2-ep", "tp2-ep-routed"] if gpu else [])]
            chosen += [(r, f"{t}-padded", False) for r in rollouts for t in ("tp1", "tp2-sp", "tp1-ep2")]
    return [Row(DTYPE, *row) for row in dict.fromkeys(chosen)]


def engines_per_gpu(models: Sequence[str]) -> int:
    """Return the number of engines of these models that fit on a GPU, at most two."""
    if MOE_MODEL not in models or not torch.cuda.is_available():
        return 2
    return max(1, min(2, torch.cuda.get_device_properties(0).total_memory // ROOM))


def to_json(model: str, compared: Compared) -> dict:
    """Return a row of e2e.jsonl."""
    row = compared.row
    return {
        "model": model,
        "rollout_tp": row.rollout_tp,
        "rollout_dp": row.rollout_dp,
        "training_tp": row.training_tp,
        "sequence_parallel": row.sequence_parallel,
        "spec": row.spec,
        "ep": row.training_ep,
        "pp": row.training_pp,
        "cp": row.training_cp,
    } | compared.to_json()


def remove_te(wanted: dict[str, list[Row]]) -> int:
    """Remove the rows with TransformerEngine's layer spec from `wanted` and return their number."""
    before = sum(map(len, wanted.values()))
    for model, all_rows in wanted.items():
        wanted[model] = [row for row in all_rows if row.spec != "te"]
    return before - sum(map(len, wanted.values()))


class Comparisons(Terminal):
    """A progress display that compares and saves each row once both its engines have written their files."""

    def __init__(
        self,
        screen,
        path: Path,
        info: dict,
        waiting: dict[str, list[Row]],
        out: Path,
        prompts: dict[str, list[list[int]]],
    ):
        super().__init__(screen)
        self.name = run_name()
        self.info, self.rows, self.problems = info, [], []
        self._path, self._waiting, self._out, self._prompts = path, waiting, out, prompts

    def ended(self, job: Job, seconds: float, failure: str | None) -> None:
        super().ended(job, seconds, failure)
        for model, waiting in self._waiting.items():
            out = self._out / model
            for row in list(waiting):
                if not (plan.rollout_file(out, row).exists() and plan.training_file(out, row).exists()):
                    continue
                waiting.remove(row)
                try:
                    (compared,) = compare_rows([row], out, self._prompts[model])
                except WorkerError as e:
                    self.problems.append(f"{model} {row}: {e}")
                    continue
                self.rows.append(to_json(model, compared))
                if row.patched and not compared.report.all_equal:
                    self.problems.append(f"{model} {row}: {compared.report.first_difference}")
        self.save()

    def save(self) -> None:
        if self.rows:
            write(self._path, merge(read(self._path), self.name, self.info, self.rows, KEY))


def main(arguments: list[str] | None = None) -> int:
    """Return the exit status: 0 if all patched rows are bit-equal, 1 if one is not, 2 if an engine failed."""
    parser = options_parser(__doc__, H200 / "e2e.jsonl")
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS), help="models to run; default: all")
    parser.add_argument(
        "--parts",
        nargs="+",
        choices=PARTS,
        help="groups of pairs; default: all, but stock only for the first model and the MoE model",
    )
    parser.add_argument("--rollouts", nargs="+", help="rollouts to run, as named in the result file; default: all")
    parser.add_argument("--trainings", nargs="+", help="trainings to run, as named in the result file; default: all")
    parser.add_argument("--tp", type=int, default=min(4, len(gpus()) or 1), help="largest number of ranks of an engine")
    parser.add_argument("--size", choices=SIZES, default="large", help="size of the models")
    parser.add_argument(
        "--prompts", type=int, help=f"number of prompts; default: {DEFAULT.prompts}; {LONG}: {WORKLOADS[LONG].prompts}"
    )
    parser.add_argument(
        "--longest",
        type=int,
        help=f"tokens of the longest prompt; default: {DEFAULT.longest}; {LONG}: {WORKLOADS[LONG].longest}",
    )
    parser.add_argument("--max-tokens", type=int, default=128, help="tokens to sample per prompt")
    parser.add_argument("--per-gpu", type=int, help="engines that share a GPU; default: 2 if both fit")
    parser.add_argument("--timeout", type=float, default=300.0, help="time limit of an engine, in seconds")
    parser.add_argument("--out", type=Path, default=Path("check-results/e2e"), help="folder for logprob files and logs")
    options = parser.parse_args(arguments)
    if problem := no_room(options.tp):
        parser.error(f"--tp: {problem}")

    per_gpu = options.per_gpu or engines_per_gpu(options.models)

    started = time.monotonic()
    out = options.out.resolve()
    prepare(out)
    with_stock = (next(iter(MODELS)), MOE_MODEL)
    prompts, workloads = {}, {}
    for model in options.models:
        default = WORKLOADS.get(model, DEFAULT)
        workloads[model] = default._replace(
            prompts=options.prompts or default.prompts, longest=options.longest or default.longest
        )
        lengths = random_lengths(workloads[model].prompts, workloads[model].longest)
        prompts[model] = draw_prompts(SIZES[options.size]["vocab"], 0, lengths)
    with_stock = MODELS if options.only_stale else with_stock
    parts = {model: options.parts or (PARTS if model in with_stock else PARTS[:-1]) for model in options.models}
    if LONG in parts:
        parts[LONG] = [part for part in parts[LONG] if part in ("modes", "tp")]
    wanted = {
        model: [
            row
            for row in (moe_rows if model == MOE_MODEL else rows)(parts[model], options.tp, bool(gpus()))
            if row.rollout in (options.rollouts or [row.rollout])
            and row.training in (options.trainings or [row.training])
        ]
        for model in options.models
    }
    if options.only_stale:
        found = distinct(stale(read(options.json), sources(), KEY), *KEY)
        for model, planned in wanted.items():
            wanted[model] = [r for r in planned if (model, r.dtype, r.rollout, r.training, r.patched) in found]
        options.models = [model for model in options.models if wanted[model]]
    skipped = 0 if installed("transformer_engine") else remove_te(wanted)
    jobs, shapes = [], {}
    for model in options.models:
        path = make_checkpoint(out / model / "model", dtype=getattr(torch, DTYPE), **model_sizes(model, options.size))
        shapes[model] = asdict(read_architecture(path))
        (out / model / "logprobs").mkdir(exist_ok=True)
        jobs += plan.jobs(
            wanted[model],
            out / model,
            {DTYPE: path},
            prompts[model],
            max_tokens=options.max_tokens,
            temperature=1.0,
            seed=0,
            gpu=bool(gpus()),
            chunk=CHUNK,
            micro_batch=workloads[model].micro_batch,
            prefix=f"{model}-",
            experts=model == MOE_MODEL,
        )
    jobs.sort(key=lambda job: (bool(job.needs), -job.slots))  # models interleaved, engines with many ranks first
    screen = console()
    screen.print(
        f"{' and '.join(options.models)}: {sum(map(len, wanted.values()))} rows; models written "
        f"({time.monotonic() - started:.0f} s)"
        + (f"; TransformerEngine is not installed: {skipped} rows skipped" if skipped else "")
    )
    info = run_info(
        packages=("transformer-engine",),
        models=shapes,
        parts=parts,
        tp=options.tp,
        given={
            model: workload._asdict() | {"prompt_tokens": sum(map(len, prompts[model]))}
            for model, workload in workloads.items()
        },
        max_tokens=options.max_tokens,
        temperature=1.0,
        seed=0,
        chunk=CHUNK,
        per_gpu=per_gpu,
    )
    comparisons = Comparisons(screen, options.json, info, {k: list(v) for k, v in wanted.items()}, out, prompts)
    with interrupted_by_sigterm(), comparisons:
        seconds, failures = execute(jobs, out, options.timeout, comparisons, keep_going=True, per_gpu=per_gpu)
    info["seconds"] = seconds | {"all": round(time.monotonic() - started, 1)}
    comparisons.save()

    for patched in (False, True):
        mine = [row for row in comparisons.rows if row["patched"] == patched]
        if mine:
            screen.print(
                f"{'aligned' if patched else 'stock'}: {sum(r['bit_equal'] for r in mine)} of "
                f"{sum(r['tokens'] for r in mine)} logprobs are bit-equal, in {len(mine)} of "
                f"{sum(row.patched == patched for mine in wanted.values() for row in mine)} rows; "
                f"largest difference {max(r['max_abs'] for r in mine):.1e}"
            )
    for problem in comparisons.problems:
        screen.print(f"different: {problem}", soft_wrap=True, markup=False)
    for name in failures:
        screen.print(f"failed: {name}; log in {out / 'logs'}", soft_wrap=True, markup=False)
    screen.print(f"{info['seconds']['all']} s; {options.json}", soft_wrap=True)
    return 2 if failures else int(bool(comparisons.problems))


if __name__ == "__main__":
    sys.exit(main())
