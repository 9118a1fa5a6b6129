"""Origin of the drift of stock engines, by op: ``make gpu-where-drift``, or ``python benchmarks/where_drift.py``.

Engines process the same tokens with the same weights in separate processes, and record the output of each point of the
model, as `alignkit bisect` does. benchmarks/results/h200/where_drift.jsonl gets a row for each case once both its
engines are done. The cases:

``stock``, ``batch_invariant``, ``hf``, ``aligned``
    Stock vLLM in eager mode, the same with VLLM_BATCH_INVARIANT=1, and Hugging Face, each against stock Megatron-core;
    aligned vLLM against aligned Megatron-core.
``compiled``
    Stock vLLM in its default mode (torch.compile, CUDA graphs), with logprobs alone, because points inside a CUDA graph
    cannot be recorded.
``exchanged``
    Stock engines with one ``op`` computed by alignkit on both sides, or "all" ops.
``alone``
    Stock engines with all ops but ``op`` computed by alignkit on both sides.

The fields of a row, which ``tables.py`` reads:

``a``, ``b``
    The two engines and their settings.
``tokens``, ``bit_equal``, ``max_abs``, ``mean_abs``
    Number, equality and difference of the next tokens' logprobs.
``points``
    Points in order of computation. Each has the number of ``compared`` and of ``differing`` tokens, and the fields of
    `Values` in bisect.json over the sampled tokens. Rows with an ``op`` have the ends of layers and the points outside
    of layers alone.
``first``
    The first point that differs.
``failure``
    The reason why the other fields are missing, or null.
"""

from __future__ import annotations

import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch
from lib.models import SIZES, random_lengths
from lib.options import parser as options_parser
from lib.results import H200, distinct, merge, read, run_info, run_name, sources, stale, write

from alignkit import bisect
from alignkit.bisect import recording
from alignkit.bisect.points import OPS
from alignkit.bisect.run import module_of
from alignkit.convert import read_architecture
from alignkit.drift import Logprobs, load, save
from alignkit.jobs.execute import execute, prepare
from alignkit.jobs.job import Job, draw_prompts
from alignkit.jobs.model import make_checkpoint
from alignkit.jobs.terminal import Terminal, console, interrupted_by_sigterm
from alignkit.runtime.machine import gpus

KEY = ("case", "op")
ALL = "all"
COMPILED = "vllm-compiled"
CASES = ("stock", "aligned", "compiled", "batch_invariant", "hf", "exchanged", "alone")
QUICK = ("stock", "aligned", "compiled", "exchanged")
GPU_ONLY = ("compiled", "batch_invariant")
FAILURE_CHARS = 600
"""Characters of an engine's log to keep in ``failure``, from its end."""


@dataclass(frozen=True)
class Case:
    """A planned row; `a` and `b` are names of recordings."""

    name: str
    op: str
    a: str
    b: str


def cases(names: list[str], ops: list[str]) -> list[Case]:
    """Return the cases of `names`, in order of priority."""
    pairs = {
        "stock": ("vllm", "megatron"),
        "aligned": ("vllm-aligned", "megatron-aligned"),
        "compiled": (COMPILED, "megatron"),
        "batch_invariant": ("vllm-batch-invariant", "megatron"),
        "hf": ("hf", "megatron"),
    }
    found = [Case(name, "", *pairs[name]) for name in CASES if name in names and name in pairs]
    for kind in ("exchanged", "alone"):
        if kind in names:
            swapped_ops = [*ops, ALL] if kind == "exchanged" and set(ops) == set(OPS) else ops
            found += [
                Case(kind, op, *(f"{engine}-{kind}-{op}" for engine in ("vllm", "megatron"))) for op in swapped_ops
            ]
    return found


def remaining(planned: list[Case], contents: dict) -> list[Case]:
    """Return the cases without a row, or with a failed row, in a result file."""
    good = {(row["case"], row["op"]) for row in contents.get("rows", []) if row["failure"] is None}
    return [case for case in planned if (case.name, case.op) not in good]


def swapped(name: str) -> list[str]:
    """Return the ops that alignkit computes in the recording of this name."""
    _, _, rest = name.partition("-")
    kind, _, op = rest.partition("-")
    if kind == "alone":
        return [o for o in OPS if o != op]
    return [] if kind != "exchanged" else list(OPS) if op == ALL else [op]


def job(name: str, common: dict, out: Path) -> Job:
    """Return the job that produces a recording."""
    if name == COMPILED:
        return Job(name, "alignkit.jobs.rollout", compiled(common, out))
    engine = name.partition("-")[0]
    spec = common | {
        "engine": engine,
        "patched": name.endswith("-aligned"),
        "batch_invariant": name == "vllm-batch-invariant",
        "swap": swapped(name),
        "runs": [{"out": str(out / "recordings" / name / recording.JSON)}],
    }
    return Job(name, module_of(engine), spec)


def compiled(common: dict, out: Path) -> dict:
    """Return stock vLLM's job that computes the logprobs of all tokens but the first."""
    sequences = common["sequences"]
    tokens_from, result = out / "recordings/tokens", out / "recordings" / COMPILED
    prompts, tokens = [s[:1] for s in sequences], [s[1:] for s in sequences]
    save(tokens_from, Logprobs(prompts, tokens, [torch.zeros(len(t)) for t in tokens], "none"))
    return {
        "model": common["model"],
        "dtype": common["dtype"],
        "patched": False,
        "tp": 1,
        "eager": False,
        "runner": "v2",
        "max_num_batched_tokens": max(2048, sum(map(len, sequences))),  # one step, as in the recordings
        "prompts": sequences,
        "max_tokens": 1,
        "temperature": 1.0,
        "seed": common["seed"],
        "tokens_from": str(tokens_from),
        "runs": [{"mode": "prompt_logprobs", "out": str(result)}],
    }


@dataclass
class Side:
    """The results of one engine; `logprobs` are fp32, of each position's next token, NaN if there is none."""

    recording: bisect.Recording | None
    logprobs: np.ndarray
    about: dict


def read_side(name: str, out: Path) -> Side:
    path = out / "recordings" / name
    if name == COMPILED:
        saved = load(path)
        gap = torch.tensor([torch.nan])
        return Side(None, torch.cat([x for t in saved.logprobs for x in (t, gap)]).numpy(), dict(saved.meta))
    loaded = bisect.load(path)
    logprobs = loaded.values["logprob"].reshape(-1).float().numpy()
    about = {"engine": loaded.engine, "contract": loaded.contract} | {
        k: v for k, v in loaded.settings.items() if k not in ("versions", "device")
    }
    return Side(loaded, np.where(loaded.seen["logprob"].astype(bool), logprobs, np.nan), about)


def row(case: Case, a: Side, b: Side) -> dict:
    """Return a row of where_drift.jsonl."""
    both = ~(np.isnan(a.logprobs) | np.isnan(b.logprobs))
    x, y = a.logprobs[both], b.logprobs[both]
    d = np.abs(x.astype(np.float64) - y.astype(np.float64))
    result = empty(case) | {
        "a": a.about,
        "b": b.about,
        "tokens": int(both.sum()),
        "bit_equal": int((x.view(np.int32) == y.view(np.int32)).sum()),
        "max_abs": float(d.max()),
        "mean_abs": float(d.mean()),
    }
    if a.recording is not None and b.recording is not None:
        found = bisect.compare(a.recording, b.recording)
        first = found.suspect
        result |= {
            "compared": found.compared,
            "missing": found.missing,
            "first": None if first is None else brief(first),
            "points": [brief(p) for p in found.points if not case.op or outside(p.point)],
        }
    return result


def brief(point: bisect.PointDifference) -> dict:
    values = asdict(point.values) if point.values else {}
    return {k: getattr(point, k) for k in ("point", "op", "differing", "compared", "dtypes")} | {
        k: values.get(k) for k in ("tokens", "median_ulps", "max_ulps", "relative", "mean_abs", "max_abs")
    }


def outside(point: str) -> bool:
    """Return whether a point is the end of a layer or outside of all layers."""
    return point.endswith(".residual") or not point.startswith("layers.")


def empty(case: Case) -> dict:
    return {"case": case.name, "op": case.op, "failure": None}


def shorten(failure: str) -> str:
    """Return a failure's first line and the end of the engine's log."""
    reason, _, log = failure.partition("\n")
    return f"{reason}: {log[-FAILURE_CHARS:].strip()}"


class Comparisons(Terminal):
    """A progress display that computes and saves each row once both its engines are done."""

    def __init__(self, screen, path: Path, info: dict, waiting: list[Case], out: Path):
        super().__init__(screen)
        self.name, self.info, self.rows = run_name(), info, []
        self._path, self._waiting, self._out = path, list(waiting), out
        self._failures: dict[str, str | None] = {}

    def ended(self, job: Job, seconds: float, failure: str | None) -> None:
        super().ended(job, seconds, failure)
        self._failures[job.name] = failure
        for case in [c for c in self._waiting if self._failures.keys() >= {c.a, c.b}]:
            self._waiting.remove(case)
            problems = [f"{n}: {shorten(self._failures[n])}" for n in (case.a, case.b) if self._failures[n]]
            if problems:
                self.rows.append(empty(case) | {"failure": "; ".join(problems)})
            else:
                self.rows.append(row(case, *(read_side(n, self._out) for n in (case.a, case.b))))
        self.save()

    def save(self) -> None:
        if self.rows:
            write(self._path, merge(read(self._path), self.name, self.info, self.rows, KEY))


def main(arguments: list[str] | None = None) -> int:
    """Return the exit status: 1 if the aligned engines differ, 2 if an engine failed, else 0."""
    device = "cuda" if gpus() else "cpu"
    results = H200 if gpus() else H200.with_name("cpu")
    parser = options_parser(__doc__, results / "where_drift.jsonl", resume=True)
    parser.add_argument(
        "--device", choices=("cuda", "cpu"), default=device, help="device of the engines, which must be this machine's"
    )
    parser.add_argument("--cases", nargs="+", choices=CASES, help="cases to run; default: all that the device supports")
    parser.add_argument("--ops", nargs="+", choices=OPS, default=list(OPS), help="ops of the cases exchanged and alone")
    parser.add_argument("--quick", action="store_true", help=f"run only the cases {', '.join(QUICK)}")
    parser.add_argument("--size", choices=SIZES, default="large" if gpus() else "small", help="model size")
    parser.add_argument("--sequences", type=int, default=8, help="number of sequences")
    parser.add_argument("--longest", type=int, default=600 if gpus() else 60, help="longest sequence, in tokens")
    parser.add_argument("--sample", type=int, default=32, help="tokens whose values are compared at each point")
    parser.add_argument("--per-gpu", type=int, default=8 if gpus() else 1, help="engines that share a GPU")
    parser.add_argument(
        "--timeout", type=float, default=150.0 if gpus() else 600.0, help="time limit of an engine, in seconds"
    )
    parser.add_argument(
        "--out", type=Path, default=Path("check-results/where-drift"), help="folder for recordings and logs"
    )
    options = parser.parse_args(arguments)
    if options.device != device:
        parser.error(f"--device: must be {device}, the device of the engines on this machine, got {options.device}")
    wanted = options.cases or (QUICK if options.quick else CASES)
    wanted = [name for name in wanted if gpus() or name not in GPU_ONLY]

    started = time.monotonic()
    out = options.out.resolve()
    prepare(out, (), ("recordings", "logs", "jobs"))
    sizes = SIZES[options.size]
    model = make_checkpoint(out / "model", "qwen3", **sizes)
    sequences = draw_prompts(sizes["vocab"], 0, random_lengths(options.sequences, options.longest))
    rows = sum(map(len, sequences))
    common = {
        "model": str(model),
        "weights": recording.weights_digest(model),
        "dtype": "bfloat16",
        "tp": 1,
        "mode": "padded",
        "chunk": None,
        "decode": 0,
        "seed": 0,
        "keep": None,
        "sample": np.linspace(0, rows - 1, min(rows, options.sample)).astype(int).tolist(),
        "sequences": sequences,
    }
    planned = cases(wanted, options.ops)
    if options.resume:
        planned = remaining(planned, read(options.json))
    if options.only_stale:
        found = distinct(stale(read(options.json), sources(), KEY), *KEY)
        planned = [case for case in planned if (case.name, case.op) in found]
    jobs = [job(name, common, out) for name in dict.fromkeys(n for case in planned for n in (case.a, case.b))]
    jobs.sort(key=lambda each: each.name != COMPILED)  # the longest job first
    info = run_info(
        model=asdict(read_architecture(model)),
        lengths=list(map(len, sequences)),
        dtype="bfloat16",
        sample=len(common["sample"]),
        seed=0,
    )
    screen = console()
    comparisons = Comparisons(screen, options.json, info, planned, out)
    with interrupted_by_sigterm(), comparisons:
        seconds, failures = execute(jobs, out, options.timeout, comparisons, keep_going=True, per_gpu=options.per_gpu)
    info["seconds"] = seconds | {"all": round(time.monotonic() - started, 1)}
    comparisons.save()

    for each in comparisons.rows:
        name = f"{each['case']} {each['op']}".strip()
        if each["failure"] is None:
            text = f"{each['bit_equal']} of {each['tokens']} logprobs equal, mean |d| {each['mean_abs']:.2e}"
            if "points" in each:
                text += f"; first point that differs: {each['first']['point'] if each['first'] else 'none'}"
        else:
            text = f"failed: {each['failure']}"
        screen.print(f"{name:<24} {text}", soft_wrap=True, markup=False)
    screen.print(f"{info['seconds']['all']} s; {options.json}", soft_wrap=True)
    if failures:
        return 2
    return int(any(each["case"] == "aligned" and differs(each) for each in comparisons.rows))


def differs(row: dict) -> bool:
    return row["first"] is not None or row["bit_equal"] != row["tokens"]


if __name__ == "__main__":
    sys.exit(main())
