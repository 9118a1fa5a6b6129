"""Where the drift of stock engines comes from: ``make gpu-where-drift``, or ``python benchmarks/where_drift.py``.

Engines run the same tokens with the same weights, each in a process of its own, and record what every point of the
model puts out, as `alignkit bisect` does. where_drift.json gets a row for each case as soon as both its sides have ended:

``stock``, ``batch_invariant``, ``hf``, ``aligned``
    Stock vLLM, eager; the same with VLLM_BATCH_INVARIANT=1; Hugging Face; each against stock Megatron-core. Aligned
    vLLM against aligned Megatron-core.
``compiled``
    Stock vLLM as it comes, with torch.compile, CUDA graphs and the runner that it chooses: logprobs alone, as nothing can
    be recorded inside a graph.
``exchanged``
    Stock against stock with one ``op`` computed by alignkit on both sides; "all" of them.
``alone``
    All ops by alignkit on both sides but this one, which is each engine's own.

A row: ``a`` and ``b``, engines with their settings; of the next tokens' logprobs ``tokens``, ``bit_equal``, ``max_abs`` and
``mean_abs``; ``points``, in the order of computation: how many of the ``compared`` tokens are ``differing`` and, over those
whose values were looked at, the numbers of `Values` in bisect.json (where an op is named only the ends of layers, and what
is outside of them); ``first``, the point that differs first; ``failure``, why there is none of these.
"""

from __future__ import annotations

import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch
from lib.models import SIZES, draw_lengths
from lib.options import parser as options_parser
from lib.results import H200, made_on, merge, read, run_name, write

from alignkit.check import plan
from alignkit.check.machine import gpus
from alignkit.check.model import make_checkpoint
from alignkit.check.plan import Job
from alignkit.check.run import execute, prepare
from alignkit.check.terminal import Terminal, console, interrupted_by_sigterm
from alignkit.convert import read_architecture
from alignkit.drift import Logprobs, bisect, load, save
from alignkit.drift.bisect import recording
from alignkit.drift.bisect.points import OPS
from alignkit.drift.bisect.run import module_of

KEY = ("case", "op")
ALL = "all"
COMPILED = "vllm-compiled"
CASES = ("stock", "aligned", "compiled", "batch_invariant", "hf", "exchanged", "alone")
QUICK = ("stock", "aligned", "compiled", "exchanged")
GPU_ONLY = ("compiled", "batch_invariant")
FAILURE = 600
"""Characters of its end in the file; the rest is in the engine's log."""


@dataclass(frozen=True)
class Case:
    """A row to be: a and b name recordings."""

    name: str
    op: str
    a: str
    b: str


def cases(names: list[str], ops: list[str]) -> list[Case]:
    """Those of `names`, the most telling first."""
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
            of = [*ops, ALL] if kind == "exchanged" and set(ops) == set(OPS) else ops
            found += [Case(kind, op, *(f"{engine}-{kind}-{op}" for engine in ("vllm", "megatron"))) for op in of]
    return found


def left(planned: list[Case], contents: dict) -> list[Case]:
    """Those that a result file has no row of, or one that failed."""
    good = {(row["case"], row["op"]) for row in contents.get("rows", []) if row["failure"] is None}
    return [case for case in planned if (case.name, case.op) not in good]


def swapped(name: str) -> list[str]:
    """The ops that alignkit computes on the stock side of this name."""
    _, _, rest = name.partition("-")
    kind, _, op = rest.partition("-")
    if kind == "alone":
        return [o for o in OPS if o != op]
    return [] if kind != "exchanged" else list(OPS) if op == ALL else [op]


def job(name: str, common: dict, out: Path) -> Job:
    """The engine that makes this recording."""
    if name == COMPILED:
        return Job(name, "alignkit.check.rollout", compiled(common, out))
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
    """Stock vLLM's job to look up the logprobs of all tokens, beginning with the second."""
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
        "max_num_batched_tokens": max(2048, sum(map(len, sequences))),  # all at once, as in the recordings
        "prompts": sequences,
        "max_tokens": 1,
        "temperature": 1.0,
        "seed": common["seed"],
        "tokens_from": str(tokens_from),
        "runs": [{"mode": "prompt_logprobs", "out": str(result)}],
    }


@dataclass
class Side:
    """What one engine gave. logprobs: fp32, of each row's next token; NaN where there is none."""

    recording: bisect.Recording | None
    logprobs: np.ndarray
    about: dict


def read_side(name: str, out: Path) -> Side:
    path = out / "recordings" / name
    if name == COMPILED:
        given = load(path)
        gap = torch.tensor([torch.nan])
        return Side(None, torch.cat([x for t in given.logprobs for x in (t, gap)]).numpy(), dict(given.meta))
    made = bisect.load(path)
    logprobs = made.values["logprob"].reshape(-1).float().numpy()
    about = {"engine": made.engine, "contract": made.contract} | {
        k: v for k, v in made.settings.items() if k not in ("versions", "device")
    }
    return Side(made, np.where(made.seen["logprob"].astype(bool), logprobs, np.nan), about)


def row(case: Case, a: Side, b: Side) -> dict:
    """A row of where_drift.json."""
    both = ~(np.isnan(a.logprobs) | np.isnan(b.logprobs))
    x, y = a.logprobs[both], b.logprobs[both]
    d = np.abs(x.astype(np.float64) - y.astype(np.float64))
    made = empty(case) | {
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
        made |= {
            "compared": found.compared,
            "missing": found.missing,
            "first": None if first is None else brief(first),
            "points": [brief(p) for p in found.points if not case.op or outside(p.point)],
        }
    return made


def brief(point: bisect.PointDifference) -> dict:
    values = asdict(point.values) if point.values else {}
    return {k: getattr(point, k) for k in ("point", "op", "differing", "compared", "dtypes")} | {
        k: values.get(k) for k in ("tokens", "median_ulps", "max_ulps", "relative", "mean_abs", "max_abs")
    }


def outside(point: str) -> bool:
    """Whether it is the end of a layer, or of none."""
    return point.endswith(".residual") or not point.startswith("layers.")


def empty(case: Case) -> dict:
    return {"case": case.name, "op": case.op, "failure": None}


def told(failure: str) -> str:
    """What happened, and the last that the engine said."""
    what, _, log = failure.partition("\n")
    return f"{what}: {log[-FAILURE:].strip()}"


class Harvest(Terminal):
    """Makes and saves each row as soon as both its engines have ended."""

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
            problems = [f"{n}: {told(self._failures[n])}" for n in (case.a, case.b) if self._failures[n]]
            if problems:
                self.rows.append(empty(case) | {"failure": "; ".join(problems)})
            else:
                self.rows.append(row(case, *(read_side(n, self._out) for n in (case.a, case.b))))
        self.save()

    def save(self) -> None:
        if self.rows:
            write(self._path, merge(read(self._path), self.name, self.info, self.rows, KEY))


def main(arguments: list[str] | None = None) -> int:
    """Returns the exit status: 0, 1 if the aligned engines differ, 2 if an engine failed, after all others have run."""
    device = "cuda" if gpus() else "cpu"
    results = H200 if gpus() else H200.with_name("cpu")
    parser = options_parser(__doc__, results / "where_drift.json", resume=True)
    parser.add_argument(
        "--device", choices=("cuda", "cpu"), default=device, help="the one that the engines here run on"
    )
    parser.add_argument("--cases", nargs="+", choices=CASES, help="default: all that this device can run")
    parser.add_argument("--ops", nargs="+", choices=OPS, default=list(OPS), help="to exchange, and to leave alone")
    parser.add_argument("--quick", action="store_true", help=f"only the cases {', '.join(QUICK)}")
    parser.add_argument("--size", choices=SIZES, default="large" if gpus() else "small", help="of the model")
    parser.add_argument("--sequences", type=int, default=8)
    parser.add_argument("--longest", type=int, default=600 if gpus() else 60, help="sequence, in tokens")
    parser.add_argument("--sample", type=int, default=32, help="tokens whose values are looked at, at every point")
    parser.add_argument("--per-gpu", type=int, default=8 if gpus() else 1, help="engines that share a GPU")
    parser.add_argument(
        "--timeout", type=float, default=150.0 if gpus() else 600.0, help="seconds that one engine may take"
    )
    parser.add_argument("--out", type=Path, default=Path("check-results/where-drift"), help="recordings and logs")
    options = parser.parse_args(arguments)
    if options.device != device:
        parser.error(f"--device {options.device}: the engines here run on {device}")
    wanted = options.cases or (QUICK if options.quick else CASES)
    wanted = [name for name in wanted if gpus() or name not in GPU_ONLY]

    started = time.monotonic()
    out = options.out.resolve()
    prepare(out, (), ("recordings", "logs", "jobs"))
    sizes = SIZES[options.size]
    model = make_checkpoint(out / "model", "qwen3", **sizes)
    sequences = plan.draw_prompts(sizes["vocab"], 0, draw_lengths(options.sequences, options.longest))
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
        planned = left(planned, read(options.json))
    jobs = [job(name, common, out) for name in dict.fromkeys(n for case in planned for n in (case.a, case.b))]
    jobs.sort(key=lambda one: one.name != COMPILED)  # it takes longest
    info = made_on(
        model=asdict(read_architecture(model)),
        lengths=list(map(len, sequences)),
        dtype="bfloat16",
        sample=len(common["sample"]),
        seed=0,
    )
    screen = console()
    harvest = Harvest(screen, options.json, info, planned, out)
    with interrupted_by_sigterm(), harvest:
        seconds, failures = execute(jobs, out, options.timeout, harvest, keep_going=True, per_gpu=options.per_gpu)
    info["seconds"] = seconds | {"all": round(time.monotonic() - started, 1)}
    harvest.save()

    for made in harvest.rows:
        name = f"{made['case']} {made['op']}".strip()
        if made["failure"] is None:
            said = f"{made['bit_equal']} of {made['tokens']} logprobs equal, mean |d| {made['mean_abs']:.2e}"
            if "points" in made:
                said += f"; first point that differs: {made['first']['point'] if made['first'] else 'none'}"
        else:
            said = f"failed: {made['failure']}"
        screen.print(f"{name:<24} {said}", soft_wrap=True, markup=False)
    screen.print(f"{info['seconds']['all']} s; {options.json}", soft_wrap=True)
    if failures:
        return 2
    return int(any(made["case"] == "aligned" and differs(made) for made in harvest.rows))


def differs(made: dict) -> bool:
    return made["first"] is not None or made["bit_equal"] != made["tokens"]


if __name__ == "__main__":
    sys.exit(main())
