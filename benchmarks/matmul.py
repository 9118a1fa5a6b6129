"""Time of linear layers' GEMMs against cuBLAS and others, on one GPU: ``make gpu-matmul``; options in MATMUL_ARGS.

The GEMMs are bf16: the layers of Qwen3-8B, and one rank's of Llama-70B at TP 8. ``--draw SEED`` measures random GEMMs
instead, with layer, tensor-parallel size, pass and M sampled from all dense sizes of Qwen2.5, Qwen3, Llama 2 and Llama
3, and reports the distribution of the ratios. The result file is benchmarks/results/h200/matmul.jsonl
(``lib/results.py``). The fields of a row, which ``tables.py`` reads:

``case``
    Model and layer; for k-trees, and for row-parallel layers measured with fewer leaves, also the leaves.
``impl``
    "cublas" (torch.matmul); "alignkit"; "vllm" (its batch-invariant GEMM); "deep_gemm"; "cublas-starved" (torch.matmul
    without a workspace, so without split-K), which needs a separate process: --starved.
``pass``
    "forward"; "dgrad"; "wgrad", rounded to bf16; "wgrad, added", accumulated into an fp32 main_grad.
``m``, ``n``, ``k``
    M, and the weight's shape.
``draw``
    Seed of a random GEMM, whose case is like ``qwen3-8b.down@2/4``: one of two ranks, with four leaves. None otherwise.
``by``
    alignkit's kernel and its split, for random GEMMs.
``ms``, ``x``
    Median GPU time with a cold cache, and relative to "cublas" from interleaved runs ("cublas-starved": to the file's
    "cublas"). None if "cublas" failed. Up to M = 256 the time is an average over a CUDA graph of GEMMs with different
    weights, as in a decode step.

``--candidates FILE`` instead times all algorithms for each random GEMM and compares their bytes. Its rows, which
``fit_linear.py`` reads, have ``cublas`` (ms), ``by``, ``ways`` (ms by algorithm) and ``wrong`` (algorithms with
different bytes).
"""

from __future__ import annotations

import importlib
import math
import os
import random
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from statistics import geometric_mean
from typing import NamedTuple

import torch
from lib import spread
from lib.linear_algorithms import algorithms, chosen
from lib.models import DENSE
from lib.options import error_text, time_is_up
from lib.options import parser as options_parser
from lib.results import H200, backend, distinct, merge, read, run_info, run_name, sources, stale, with_sources, write
from lib.stopwatch import Stopwatch
from torch.nn.functional import linear

from alignkit.ops.linear import matmul
from alignkit.ops.linear.problem import Product as Description

MEASURED_OPS = ("linear",)
KEY = ("case", "impl", "pass", "m", "draw")
FEW = tuple(2**i for i in range(9))
"""Values of M that are timed in a CUDA graph."""
MANY = tuple(2**i for i in range(9, 15))
TRAINED = (2048, 8192)
"""Values of M of the backward passes."""
PASSES = ("forward", "dgrad", "wgrad", "wgrad, added")
COLD_BYTES = 1 << 28
"""Bytes of a graph's weights, which exceed L2."""
MAX_WEIGHTS = 16
"""Largest number of GEMMs in a graph."""
STARVED = ":0:0"
"""Value of CUBLAS_WORKSPACE_CONFIG that disables the workspace."""
RANDOM_CELLS = 400
"""Default number of random GEMMs, which take about 90 s on an H200."""
RANKS = (1, 2, 4, 8)
PASS_WEIGHTS = (9, 1, 1, 1)
"""Sampling weights of `PASSES`."""


@dataclass(frozen=True)
class Case:
    name: str
    n: int
    k: int
    leaves: int = 1
    rows: tuple[int, ...] = FEW + MANY
    trained: bool = True
    bias: bool = False


Cell = tuple[Case, int, str]
"""A measurement: case, M, pass."""


def random_cells(seed: int, count: int, trees: bool = False) -> list[Cell]:
    """Return distinct random GEMMs; `trees`: k-trees alone.

    Model, tensor-parallel size, layer and pass are sampled; M is log-uniform. A longer list extends a shorter one.
    """
    rng, found = random.Random(seed), {}
    while len(found) < count:
        name = rng.choice(list(DENSE))
        ranks = rng.choice([r for r in RANKS if DENSE[name].shares(r)])
        layer, (n, k, leaves, bias) = rng.choice(list(DENSE[name].layers(ranks).items()))
        (pass_name,) = rng.choices(PASSES, PASS_WEIGHTS)
        smallest = 1 if pass_name == "forward" else FEW[-1] + 1
        m = round(math.exp(rng.uniform(math.log(smallest), math.log(MANY[-1]))))
        case = Case(f"{name}.{layer}@{ranks}/{leaves}", n, k, leaves, (), False, bias)
        if not trees or (leaves > 1 and pass_name == "forward"):
            found[case, m, pass_name] = None
    return list(found)


def _layers(model: str, shapes: dict[str, tuple[int, int]]) -> list[Case]:
    return [Case(f"{model}.{layer}", n, k) for layer, (n, k) in shapes.items()]


CASES = (
    *_layers("8b", {"qkv": (6144, 4096), "gate_up": (24576, 4096), "lm_head": (151936, 4096)}),
    Case("8b.o/8", 4096, 4096, 8),
    Case("8b.down/8", 4096, 12288, 8),
    *(
        Case(f"8b.{layer}/{leaves}", 4096, k, leaves, MANY, False)
        for layer, k in (("o", 4096), ("down", 12288))
        for leaves in (1, 2, 4)
    ),
    *_layers(
        "70b",
        {
            "qkv": (1280, 8192),
            "o": (8192, 1024),
            "gate_up": (7168, 8192),
            "down": (8192, 3584),
            "lm_head": (16032, 8192),
        },
    ),
)


class Problem:
    """Random operands of a case, created on first use."""

    def __init__(self, case: Case, m: int, device: torch.device):
        self.case, self.m, self.device = case, m, device

    def _random(self, *shape: int) -> torch.Tensor:
        return torch.randn(shape, dtype=torch.bfloat16, device=self.device)

    @cached_property
    def x(self) -> torch.Tensor:
        return self._random(self.m, self.case.k)

    @cached_property
    def weights(self) -> list[torch.Tensor]:
        nbytes = 2 * self.case.n * self.case.k
        count = min(-(-COLD_BYTES // nbytes), MAX_WEIGHTS) if self.m <= FEW[-1] else 1
        return [self._random(self.case.n, self.case.k) for _ in range(count)]

    @cached_property
    def bias(self) -> torch.Tensor | None:
        return self._random(self.case.n) if self.case.bias else None

    @cached_property
    def dy(self) -> torch.Tensor:
        return self._random(self.m, self.case.n)

    @cached_property
    def main_grad(self) -> torch.Tensor:
        return torch.zeros(self.case.n, self.case.k, device=self.device)

    def gemm(self, pass_name: str, weight: torch.Tensor) -> Gemm:
        """Return the arguments of `alignkit.ops.linear.matmul` for a pass."""
        if pass_name == "forward":
            return Gemm(self.x, weight, self.case.leaves, self.bias)
        if pass_name == "dgrad":
            return Gemm(self.dy, weight.t())
        return Gemm(self.dy.t(), self.x.t(), out=self.main_grad if pass_name == "wgrad, added" else None)


class Gemm(NamedTuple):
    """A GEMM a [M, K] . b [N, K]^T, rounded to bf16, or accumulated into `out` if given."""

    a: torch.Tensor
    b: torch.Tensor
    leaves: int = 1
    bias: torch.Tensor | None = None
    out: torch.Tensor | None = None

    def output(self) -> torch.Tensor:
        """Return `out`, or a new tensor for the result."""
        if self.out is not None:
            return self.out
        return torch.empty(len(self.a), len(self.b), dtype=self.a.dtype, device=self.a.device)

    def describe(self, out: torch.Tensor) -> Description:
        name = backend(self.a.device)
        return Description.of(name, self.a, self.b, self.leaves, self.bias, out, self.out is not None)


# Implementations: functions of a problem and a weight, by pass.

Run = Callable[[Problem, torch.Tensor], object]


def _cublas() -> dict[str, Run]:
    return {
        "forward": lambda p, w: linear(p.x, w, p.bias),
        "dgrad": lambda p, w: p.dy @ w,
        "wgrad": lambda p, w: p.dy.t() @ p.x,
        "wgrad, added": lambda p, w: torch.addmm(p.main_grad, p.dy.t(), p.x, out_dtype=torch.float32, out=p.main_grad),
    }


def _alignkit() -> dict[str, Run]:
    def run(pass_name: str, p: Problem, weight: torch.Tensor) -> torch.Tensor:
        a, b, leaves, bias, out = p.gemm(pass_name, weight)
        return matmul(a, b, leaves=leaves, bias=bias, out=out, out_dtype=torch.bfloat16)

    return {pass_name: partial(run, pass_name) for pass_name in PASSES}


def _vllm() -> dict[str, Run]:
    try:
        module = importlib.import_module("vllm.model_executor.layers.batch_invariant")
    except ModuleNotFoundError:  # moved in newer releases
        module = importlib.import_module("vllm.model_executor.determinism.batch_invariant")
    return {"forward": lambda p, w: module.matmul_persistent(p.x, w.t())}


def _deep_gemm() -> dict[str, Run]:
    import deep_gemm

    def forward(p, w):
        out = torch.empty(p.m, p.case.n, dtype=torch.bfloat16, device=p.device)
        deep_gemm.bf16_gemm_nt(p.x, w, out)

    return {"forward": forward}


IMPLS: dict[str, Callable[[], dict[str, Run]]] = {
    "cublas": _cublas,
    "alignkit": _alignkit,
    "vllm": _vllm,
    "deep_gemm": _deep_gemm,
}


def prepared(gemm: Run, problem: Problem) -> Callable[[], object]:
    """Return the call to time: the GEMM with each of the weights, as a CUDA graph if M is small."""

    def run():
        for weight in problem.weights:
            gemm(problem, weight)

    if problem.device.type == "cpu" or problem.m > FEW[-1]:
        return run
    run()
    torch.cuda.synchronize(problem.device)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return graph.replay


def measure(
    problem: Problem, pass_name: str, impls: dict[str, dict[str, Run]], watch: Stopwatch, seconds: float
) -> list[dict]:
    """Return a row for each implementation that supports the pass and does not fail."""
    case, runs = problem.case, {}
    for name, passes in impls.items():
        if pass_name not in passes:
            continue
        try:
            runs[name] = prepared(passes[pass_name], problem)
            runs[name]()
            watch.synchronize()
        except Exception as e:  # a peer may raise anything
            runs.pop(name, None)
            print(f"FAILED: {case.name}, {problem.m} rows, {pass_name}, {name}: {error_text(e, 200)}", flush=True)
    ms = _medians(problem, runs, watch, seconds)
    return [
        {
            "draw": None,
            "case": case.name,
            "impl": name,
            "pass": pass_name,
            "m": problem.m,
            "n": case.n,
            "k": case.k,
            "ms": t,
            "x": t / ms["cublas"] if "cublas" in ms else None,
        }
        for name, t in ms.items()
    ]


def _medians(problem: Problem, runs: dict[str, Callable], watch: Stopwatch, seconds: float) -> dict[str, float]:
    """Return the milliseconds of one GEMM by each implementation."""
    times = watch.medians([*runs.values()], seconds) if runs else []
    return {name: t / len(problem.weights) for name, t in zip(runs, times, strict=True)}


def described(problem: Problem, pass_name: str) -> tuple[Gemm, Description, torch.Tensor]:
    """Return a pass's GEMM, its description for dispatch, and its output."""
    gemm = problem.gemm(pass_name, problem.weights[0])
    out = gemm.output()
    return gemm, gemm.describe(out), out


def measure_random(
    problem: Problem, pass_name: str, impls: dict[str, dict[str, Run]], watch: Stopwatch, seconds: float
) -> list[dict]:
    """Return the rows of `measure`, with alignkit's kernel in ``by``."""
    rows = measure(problem, pass_name, impls, watch, seconds)
    by = chosen(described(problem, pass_name)[1])
    return [row | ({"by": by} if row["impl"] == "alignkit" else {}) for row in rows]


def measure_algorithms(problem: Problem, pass_name: str, watch: Stopwatch, seconds: float) -> dict:
    """Return the row of --candidates for a GEMM."""
    gemm, description, out = described(problem, pass_name)
    want = None if gemm.out is not None else matmul(*gemm[:2], leaves=gemm.leaves, bias=gemm.bias, to=out).clone()
    runs = {"cublas": prepared(_cublas()[pass_name], problem)}
    wrong, failed = [], []
    for name, algorithm in algorithms(description).items():

        def run(p: Problem, weight: torch.Tensor, algorithm=algorithm) -> None:
            a, b, _, bias, _ = p.gemm(pass_name, weight)
            algorithm(a, b, bias, out)

        try:
            out.zero_()
            run(problem, problem.weights[0])
            if want is not None and not torch.equal(out.view(torch.int16), want.view(torch.int16)):
                wrong.append(name)
            runs[name] = prepared(run, problem)
        except Exception as e:
            failed.append(name)
            print(
                f"FAILED: {problem.case.name}, {problem.m} rows, {pass_name}, {name}: {error_text(e, 200)}", flush=True
            )
    ms = _medians(problem, runs, watch, seconds)
    return {
        "case": problem.case.name,
        "pass": pass_name,
        "m": problem.m,
        "n": problem.case.n,
        "k": problem.case.k,
        "leaves": problem.case.leaves,
        "bias": problem.case.bias,
        "cublas": ms.pop("cublas"),
        "by": chosen(description),
        "ways": dict(sorted(ms.items(), key=lambda item: item[1])),
        "wrong": wrong,
        "failed": failed,
    }


def run_candidates(options, cells: list[Cell], started: float, device: torch.device) -> int:
    """Time all algorithms for each cell; the file is updated every few seconds."""
    watch, name, rows, reported = Stopwatch(device), run_name(), [], time.monotonic()
    info = run_info(ops=MEASURED_OPS, draw=options.draw, seconds=options.seconds, backend=backend(device))
    for i, (case, m, pass_name) in enumerate(cells):
        if time_is_up(options, started):
            break
        rows.append(measure_algorithms(Problem(case, m, device), pass_name, watch, options.seconds))
        row, last = rows[-1], i + 1 == len(cells)
        if row["wrong"]:
            print(
                f"DIFFERENT BITS from the chosen algorithm: {case.name}, {m} rows, {pass_name}: "
                + ", ".join(row["wrong"]),
                flush=True,
            )
        if last or time.monotonic() - reported > 5:
            reported = time.monotonic()
            write(options.candidates, {"runs": {name: info}, "rows": [row | {"run": name} for row in rows]})
            print(f"{i + 1} of {len(cells)} GEMMs, {reported - started:.0f} s", flush=True)
    write(options.candidates, {"runs": {name: info}, "rows": [row | {"run": name} for row in rows]})
    groups: dict[str, list[dict]] = {}
    for row in rows:
        if row["by"] in row["ways"]:
            kind = "k-trees" if row["leaves"] > 1 and row["pass"] == "forward" else row["pass"]
            groups.setdefault(f"{kind}, {'up to' if row['m'] <= FEW[-1] else 'above'} {FEW[-1]} rows", []).append(row)
    for group, members in groups.items():
        for name, fastest in (("chosen", False), ("fastest", True)):
            xs = [(min(r["ways"].values()) if fastest else r["ways"][r["by"]]) / r["cublas"] for r in members]
            summary = f"{geometric_mean(xs):.3f} of cublas (geometric mean), p95 {spread.quantile(xs, 0.95):.2f}"
            print(f"{group}, {len(members)} GEMMs: {name} algorithm: {summary}")
    print(f"{len(rows)} of {len(cells)} GEMMs, {time.monotonic() - started:.0f} s; {options.candidates}")
    return int(any(row["wrong"] for row in rows))


def plan(names: list[str] | None) -> list[Cell]:
    """Return the cells of the cases whose names begin with one of `names`."""
    remaining = []
    for case in CASES:
        if names is None or case.name.startswith(tuple(names)):
            remaining += [(case, m, "forward") for m in case.rows]
            remaining += [(case, m, pass_name) for m in TRAINED if case.trained for pass_name in PASSES[1:]]
    return remaining


def starved(rows: list[dict], old: list[dict]) -> list[dict]:
    """Return cuBLAS's rows without a workspace, relative to the file's rows with one."""
    stock = {(r["case"], r["pass"], r["m"]): r["ms"] for r in old if r["impl"] == "cublas" and r["draw"] is None}
    mine = [row for row in rows if row["impl"] == "cublas"]
    with_workspace = [stock.get((row["case"], row["pass"], row["m"])) for row in mine]
    return [
        row | {"impl": "cublas-starved", "x": row["ms"] / ms if ms else None}
        for row, ms in zip(mine, with_workspace, strict=True)
    ]


def loaded(names: list[str]) -> dict[str, dict[str, Run]]:
    """Import implementations; skip those that fail."""
    found = {}
    for name in names:
        try:
            found[name] = IMPLS[name]()
        except Exception as e:  # a peer may raise anything
            print(f"skipped {name}: {error_text(e, 200)}", flush=True)
    return found


def line(rows: list[dict]) -> str:
    """Return a line of output for the rows of a measurement."""
    times = (f"{r['impl']} {r['ms'] * 1e3:.1f} us" + ("" if r["x"] is None else f" ({r['x']:.2f})") for r in rows)
    return f"{rows[0]['case']}, {rows[0]['m']} rows, {rows[0]['pass']}: {', '.join(times)}"


def run_random(options, seed: int, cells: list[Cell], started: float, device: torch.device) -> int:
    """Time random cells of a seed with cuBLAS and alignkit, and report the distribution of the ratios."""
    watch, impls = Stopwatch(device), loaded([name for name in ("cublas", "alignkit") if name in options.impl])
    name, info = (run_name(), run_info(ops=MEASURED_OPS, draw=seed, seconds=options.seconds, backend=backend(device)))
    old, rows, done, reported = _read(options.json), [], 0, started
    for case, m, pass_name in cells:
        if time_is_up(options, started):
            break
        found = measure_random(Problem(case, m, device), pass_name, impls, watch, options.seconds)
        rows += [row | {"draw": seed} for row in found]
        write(options.json, merge(old, name, info, rows, KEY))
        done += 1
        if time.monotonic() - reported > 5:
            reported = time.monotonic()
            print(f"{done} of {len(cells)} GEMMs, {reported - started:.0f} s", flush=True)
    ours = [row for row in rows if row["impl"] == "alignkit" and row["x"] is not None]
    print(spread.tables(ours) if ours else "no ratios: no GEMM was timed with both cublas and alignkit")
    print(f"{done} of {len(cells)} GEMMs, {time.monotonic() - started:.0f} s; {options.json}")
    return 0


def _read(path: Path) -> dict:
    """Read the result file; rows of older versions get ``draw`` None."""
    old = read(path)
    return old | {"rows": [{"draw": None} | row for row in old["rows"]]} if old else old


def main(arguments: list[str] | None = None) -> int:
    parser = options_parser(__doc__, H200 / "matmul.jsonl", seconds=0.1, resume=True)
    parser.add_argument("--cases", nargs="+", help="prefixes of case names; default: all")
    parser.add_argument(
        "--impl", nargs="+", choices=IMPLS, default=list(IMPLS), help="implementations to measure; default: all"
    )
    parser.add_argument("--starved", action="store_true", help="also measure cublas without a workspace")
    parser.add_argument("--draw", type=int, metavar="SEED", help="measure random GEMMs with cublas and alignkit")
    parser.add_argument("--cells", type=int, default=RANDOM_CELLS, help="number of random GEMMs")
    parser.add_argument("--trees", action="store_true", help="draw k-trees only; needs --draw")
    parser.add_argument(
        "--candidates",
        type=Path,
        metavar="FILE",
        help="time all algorithms for each random GEMM, and write them to FILE; needs --draw",
    )
    options = parser.parse_args(arguments)
    if (options.candidates or options.trees) and options.draw is None:
        parser.error(f"{'--candidates' if options.candidates else '--trees'}: requires --draw SEED")

    started, device = time.monotonic(), torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.manual_seed(0)
    if options.draw is not None:
        cells = random_cells(options.draw, options.cells, options.trees)
        if options.candidates:
            return run_candidates(options, cells, started, device)
        return run_random(options, options.draw, cells, started, device)
    if options.only_stale:
        rows = stale(_read(options.json), sources(*MEASURED_OPS), KEY)
        for (seed,) in distinct((row for row in rows if row["draw"] is not None), "draw"):
            mine = set(distinct((row for row in rows if row["draw"] == seed), "case", "m", "pass"))
            cells = [cell for cell in random_cells(seed, options.cells) if (cell[0].name, *cell[1:]) in mine]
            run_random(options, seed, cells, started, device)
    name = run_name()
    info = run_info(ops=MEASURED_OPS, packages=["deep-gemm"], seconds=options.seconds, backend=backend(device))
    old = _read(options.json)
    is_starved = os.environ.get("CUBLAS_WORKSPACE_CONFIG") == STARVED
    watch, impls = Stopwatch(device), loaded(["cublas"] if is_starved else options.impl)
    own = "cublas-starved" if is_starved else "cublas"
    measured = (
        {
            (r["case"], r["m"], r["pass"])
            for r in with_sources(old, info["sources"])["rows"]
            if r["impl"] == own and r["draw"] is None
        }
        if options.resume
        else set()
    )
    remaining = [
        (case, m, pass_name) for case, m, pass_name in plan(options.cases) if (case.name, m, pass_name) not in measured
    ]
    if options.only_stale:
        old_rows = [row for row in stale(old, info["sources"], KEY) if row["impl"] == own or not is_starved]
        found = distinct((row for row in old_rows if row["draw"] is None), "case", "m", "pass")
        remaining = [(case, m, name) for case, m, name in plan(options.cases) if (case.name, m, name) in found]
    rows: list[dict] = []
    problem, done = None, 0
    for case, m, pass_name in remaining:
        if time_is_up(options, started):
            break
        if problem is None or (problem.case, problem.m) != (case, m):
            problem = Problem(case, m, device)
        found, done = measure(problem, pass_name, impls, watch, options.seconds), done + 1
        rows += starved(found, old.get("rows", [])) if is_starved else found
        if found:
            print(line(found), flush=True)
        write(options.json, merge(old, name, info, rows, KEY))
    print(
        f"{done} of {len(remaining)} measurements, {len(rows)} rows, {time.monotonic() - started:.0f} s; {options.json}"
    )
    if not options.starved or is_starved:
        return 0
    same_arguments = [a for a in (arguments if arguments is not None else sys.argv[1:]) if a != "--starved"]
    return subprocess.run(
        [sys.executable, __file__, *same_arguments], check=False, env=os.environ | {"CUBLAS_WORKSPACE_CONFIG": STARVED}
    ).returncode


if __name__ == "__main__":
    sys.exit(main())
