"""Rollout against training on GPUs, pair by pair: ``make gpu-e2e``, or ``python benchmarks/e2e.py`` with options.

Real vLLM and Megatron-core engines, each in a process of its own, on random-weight models of a real size: 64 prompts
of 5 to 1500 tokens, 128 tokens sampled for each, bf16; one model more has few prompts of up to 32000 tokens. The rows
go to benchmarks/results/h200/e2e.json as they are made. Several commands (one for each model, say) fill one file: a row
replaces the row of the same key.

The file: ``rows``, as in check.json, with ``model``, ``rollout_tp``, ``rollout_dp``, ``training_tp``,
``sequence_parallel``, of the training too ``spec`` ("local" | "te", TransformerEngine's layer spec), ``ep``, ``pp`` and
``cp``, and ``run``, and ``runs``: by that name, the date, commit, versions, GPUs and options that the rows were made
with.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import NamedTuple

import torch
from lib.models import MIXTURES, SIZES, draw_lengths
from lib.options import parser as options_parser
from lib.results import H200, made_on, merge, read, run_name, write

from alignkit.check import plan
from alignkit.check.machine import gpus, installed, no_room
from alignkit.check.model import make_checkpoint
from alignkit.check.plan import Job, Row
from alignkit.check.run import Compared, WorkerError, compare_rows, execute, prepare
from alignkit.check.terminal import Terminal, console, interrupted_by_sigterm
from alignkit.convert import read_architecture

DTYPE = "bfloat16"
MODELS = {
    "qwen3": {"arch": "qwen3"},
    "qwen3-long": {"arch": "qwen3", "max_position": 40960},
    "llama-tied": {"arch": "llama", "tied": True},
    "qwen3-moe": {},
}
MIXTURE = "qwen3-moe"
"""Of widths of its own: `MIXTURES` has them."""
LONG = "qwen3-long"
"""Of prompts of its own, without stock engines and layouts: stock Megatron keeps the scores and logits of a whole sequence."""
PARTS = ("modes", "tp", "layouts", "stock")
"""Every mode of rollout and training on one rank; the tensor- and expert-parallel sizes crossed; TransformerEngine's layer spec,
pipeline stages and context parallelism, stock too where that can be, of dense models; some pairs of stock engines, of the first
model and of the mixture unless asked for."""
MODES, GPU_MODES = ("batch", "one", "prompt_logprobs", "prefix", "chunked"), ("eager", "v1")
"""Of rollout on one rank, and those that only a GPU has."""
LAYOUTS = {
    1: ("tp1-te",),
    2: ("tp2-sp-te", "tp1-pp2", "tp1-te-pp2", "tp1-cp2", "tp1-te-cp2"),
    4: ("tp4-sp-te", "tp2-sp-te-pp2", "tp2-sp-te-cp2", "tp1-te-pp2-cp2"),
}
"""Those of the trainings, by the GPUs that they need."""
STOCK_LAYOUTS = {1: ("tp1-te-padded", "tp1-te-packed"), 2: ("tp1-pp2-padded", "tp1-te-pp2-packed")}
CHUNK = 256
ROOM = 64 << 30
"""Bytes of a GPU that stock Megatron may take with the mixture: its weights are 11 GB, and there are the logits."""
KEY = ("model", "dtype", "rollout", "training", "patched")


class Given(NamedTuple):
    """What a model is given: so many prompts of up to `longest` tokens, and in training so many tokens at a time, with padding."""

    prompts: int
    longest: int
    micro_batch: int


GIVEN = {LONG: Given(6, 32000, 1 << 17)}
OTHERS = Given(64, 1500, 16384)
"""Stock Megatron keeps the logits of a micro-batch, 10 GB in fp32."""


def of_model(model: str, size: str) -> dict:
    """Arguments of `make_checkpoint`."""
    if model == MIXTURE:
        return MIXTURES["small-moe" if size == "small" else "qwen3-30b-a3b-8-layers"]
    return SIZES[size] | MODELS[model]


def rows(parts: Sequence[str], tp: int, gpu: bool = True) -> list[Row]:
    """The pairs of `parts`, with tensor-parallel sizes up to `tp`, and other layouts of as many ranks."""
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
                few = r != "batch" and engine != "tp1"
                chosen += [(r, f"{engine}-{mode}", True) for mode in (modes[1:] if few else modes)]
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


def mixture_rows(parts: Sequence[str], ranks: int, gpu: bool = True) -> list[Row]:
    """`rows` of the mixture: on up to `ranks` ranks, that have whole experts each or parts of all, and of replicas (vLLM's data
    parallelism). On a GPU some rollouts, named ``routed``, are there for what their routers choose."""
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
        few = ("tp1", "tp1-ep2", "tp2-sp")
        chosen += [(r, f"{t}-{mode}", True) for r in replicas for t in few for mode in modes[1:]]
        chosen += [(r, f"{t}-{mode}", True) for r in routed for t in trainings for mode in modes[1:]]
        chosen += [(f"tp{n}-ep-{r}", f"{t}-padded", True) for r in routed for n in sizes for t in ("tp1", f"tp1-ep{n}")]
    if "stock" in parts:
        rollouts = ["batch", "one", "prompt_logprobs", *routed]
        chosen += [(r, f"tp1-{mode}", False) for r in rollouts for mode in modes[:2]]
        if sizes:
            # On the CPU stock vLLM's workers die of an illegal instruction where they share experts.
            rollouts = ["batch", *(["tp2", "tp2-ep", "tp2-ep-routed"] if gpu else [])]
            chosen += [(r, f"{t}-padded", False) for r in rollouts for t in ("tp1", "tp2-sp", "tp1-ep2")]
    return [Row(DTYPE, *row) for row in dict.fromkeys(chosen)]


def engines_per_gpu(models: Sequence[str]) -> int:
    """How many engines of these models a GPU has room for, up to two."""
    if MIXTURE not in models or not torch.cuda.is_available():
        return 2
    return max(1, min(2, torch.cuda.get_device_properties(0).total_memory // ROOM))


def to_json(model: str, compared: Compared) -> dict:
    """A row of e2e.json."""
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


def leave_out_te(wanted: dict[str, list[Row]]) -> int:
    """Takes the rows with TransformerEngine's layer spec from `wanted`; how many those were."""
    every = sum(map(len, wanted.values()))
    for model, some in wanted.items():
        wanted[model] = [row for row in some if row.spec != "te"]
    return every - sum(map(len, wanted.values()))


class Harvest(Terminal):
    """Compares and saves each row as soon as both its engines have written their files."""

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
    """Returns the exit status: 0 if every patched row is equal to the last bit, 1 if one is not, 2 if an engine
    failed, after all others have run."""
    parser = options_parser(__doc__, H200 / "e2e.json")
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--parts", nargs="+", choices=PARTS, help="default: all; stock for the first model only")
    parser.add_argument("--rollouts", nargs="+", help="only rows of these, as in the file; default: all")
    parser.add_argument("--trainings", nargs="+", help="likewise")
    parser.add_argument("--tp", type=int, default=min(4, len(gpus()) or 1), help="largest number of ranks")
    parser.add_argument("--size", choices=SIZES, default="large", help="of the models")
    parser.add_argument("--prompts", type=int, help=f"default: {OTHERS.prompts}; of {LONG} {GIVEN[LONG].prompts}")
    parser.add_argument(
        "--longest", type=int, help=f"prompt, in tokens; default: {OTHERS.longest}; of {LONG} {GIVEN[LONG].longest}"
    )
    parser.add_argument("--max-tokens", type=int, default=128, help="sampled for each prompt")
    parser.add_argument("--per-gpu", type=int, help="engines that share a GPU; default: 2, or as many mixtures as fit")
    parser.add_argument("--timeout", type=float, default=300.0, help="seconds that one engine may take")
    parser.add_argument("--out", type=Path, default=Path("check-results/e2e"), help="logprob files and logs")
    options = parser.parse_args(arguments)
    if problem := no_room(options.tp):
        parser.error(f"--tp: {problem}")

    per_gpu = options.per_gpu or engines_per_gpu(options.models)

    started = time.monotonic()
    out = options.out.resolve()
    prepare(out)
    with_stock = (next(iter(MODELS)), MIXTURE)
    prompts, given = {}, {}
    for model in options.models:
        usual = GIVEN.get(model, OTHERS)
        given[model] = usual._replace(
            prompts=options.prompts or usual.prompts, longest=options.longest or usual.longest
        )
        lengths = draw_lengths(given[model].prompts, given[model].longest)
        prompts[model] = plan.draw_prompts(SIZES[options.size]["vocab"], 0, lengths)
    parts = {model: options.parts or (PARTS if model in with_stock else PARTS[:-1]) for model in options.models}
    if LONG in parts:
        parts[LONG] = [part for part in parts[LONG] if part in ("modes", "tp")]
    wanted = {
        model: [
            row
            for row in (mixture_rows if model == MIXTURE else rows)(parts[model], options.tp, bool(gpus()))
            if row.rollout in (options.rollouts or [row.rollout])
            and row.training in (options.trainings or [row.training])
        ]
        for model in options.models
    }
    left_out = 0 if installed("transformer_engine") else leave_out_te(wanted)
    jobs, shapes = [], {}
    for model in options.models:
        path = make_checkpoint(out / model / "model", dtype=getattr(torch, DTYPE), **of_model(model, options.size))
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
            micro_batch=given[model].micro_batch,
            prefix=f"{model}-",
            experts=model == MIXTURE,
        )
    jobs.sort(key=lambda job: (bool(job.needs), -job.slots))  # the models side by side, wide engines first
    screen = console()
    screen.print(
        f"{' and '.join(options.models)}: {sum(map(len, wanted.values()))} rows; the models are made "
        f"({time.monotonic() - started:.0f} s)"
        + (f"; TransformerEngine is not installed: {left_out} rows are left out" if left_out else "")
    )
    info = made_on(
        packages=("transformer-engine",),
        models=shapes,
        parts=parts,
        tp=options.tp,
        given={model: of._asdict() | {"prompt_tokens": sum(map(len, prompts[model]))} for model, of in given.items()},
        max_tokens=options.max_tokens,
        temperature=1.0,
        seed=0,
        chunk=CHUNK,
        per_gpu=per_gpu,
    )
    harvest = Harvest(screen, options.json, info, {k: list(v) for k, v in wanted.items()}, out, prompts)
    with interrupted_by_sigterm(), harvest:
        seconds, failures = execute(jobs, out, options.timeout, harvest, keep_going=True, per_gpu=per_gpu)
    info["seconds"] = seconds | {"all": round(time.monotonic() - started, 1)}
    harvest.save()

    for patched in (False, True):
        mine = [row for row in harvest.rows if row["patched"] == patched]
        if mine:
            screen.print(
                f"{'aligned' if patched else 'stock'}: {sum(r['bit_equal'] for r in mine)} of "
                f"{sum(r['tokens'] for r in mine)} logprobs are bit-equal, in {len(mine)} of "
                f"{sum(row.patched == patched for mine in wanted.values() for row in mine)} rows; "
                f"largest difference {max(r['max_abs'] for r in mine):.1e}"
            )
    for problem in harvest.problems:
        screen.print(f"not equal: {problem}", soft_wrap=True, markup=False)
    for name in failures:
        screen.print(f"failed: {name}", soft_wrap=True, markup=False)
    screen.print(f"{info['seconds']['all']} s; {options.json}", soft_wrap=True)
    return 2 if failures else int(bool(harvest.problems))


if __name__ == "__main__":
    sys.exit(main())
