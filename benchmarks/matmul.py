"""The matrix products of the linear layers beside stock cuBLAS and others, on one GPU: ``make gpu-matmul``; options in
MATMUL_ARGS.

bf16, the layers of Qwen3-8B, and a rank's of Llama-70B at TP 8. ``--draw SEED``: layers, ranks, passes and rows drawn from
all dense sizes of Qwen2.5, Qwen3, Llama 2 and Llama 3, and a report of how the times are spread. The file (benchmarks/results/h200/matmul.json) is
``{"runs": {...}, "rows": [...]}``; ``runs``: by the rows' ``run``, what they were made on. A row:

``case``
    Model and layer; of a row-parallel one with more than one leaf, or measured as if it had fewer, also the leaves.
``impl``
    "cublas", which is torch.matmul; "alignkit"; "vllm", its batch-invariant product; "deep_gemm"; "cublas-starved",
    torch.matmul without a workspace, and so without splits of k. The last needs a process of its own: --starved.
``pass``
    "forward"; "dgrad"; "wgrad", rounded to bf16; "wgrad, added", to an fp32 main_grad.
``m``, ``n``, ``k``
    Rows, and the weight's shape.
``draw``
    The seed of a drawn product, whose case is like ``qwen3-8b.down@2/4``: a rank's of two, and the leaves that it has. None of
    the others.
``by``
    Of a drawn product, and "alignkit": the kernel that was chosen, and how it divides the work.
``ms``, ``x``
    Median time on the device, cold cache; over that of "cublas", timed by turns ("cublas-starved": over the file's).
    None where "cublas" failed. Up to 256 rows it is a share of the time of a CUDA graph of products with different
    weights, as a decoding step has them.

``--candidates FILE`` instead times every way to compute each drawn product, which all have the same bits, and compares their
bytes. Its rows have ``cublas`` (ms), ``by``, ``ways`` (ms by way) and ``wrong``, the ways whose bytes are others.
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
from lib.models import DENSE
from lib.options import parser as options_parser
from lib.options import time_is_up, told
from lib.results import H200, backend, made_on, merge, of_sources, read, run_name, write
from lib.stopwatch import Stopwatch
from lib.ways import chosen, ways
from torch.nn.functional import linear

from alignkit.ops.linear import matmul
from alignkit.ops.linear.problem import Product as Described

KEY = ("case", "impl", "pass", "m", "draw")
FEW = tuple(2**i for i in range(9))
"""Rows that are timed in a graph."""
MANY = tuple(2**i for i in range(9, 15))
TRAINED = (2048, 8192)
"""Rows of the backward passes."""
PASSES = ("forward", "dgrad", "wgrad", "wgrad, added")
COLD = 1 << 28
"""Bytes of the weights of a graph, which no cache holds."""
MOST = 16
"""Products of a graph."""
STARVED = ":0:0"
"""CUBLAS_WORKSPACE_CONFIG for no workspace."""
DRAWN = 400
"""Products of a draw, about 90 s on an H200."""
RANKS = (1, 2, 4, 8)
SHARES = (9, 1, 1, 1)
"""Of the passes in a draw."""


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
"""What is measured: a case, rows, a pass."""


def draw(seed: int, count: int, trees: bool = False) -> list[Cell]:
    """Drawn products, each once: a model, ranks that can share it, a layer, a pass, and rows, whose logarithm is uniform. The
    first of many are those of few. `trees`: only k-trees."""
    rng, found = random.Random(seed), {}
    while len(found) < count:
        name = rng.choice(list(DENSE))
        ranks = rng.choice([r for r in RANKS if DENSE[name].shares(r)])
        layer, (n, k, leaves, bias) = rng.choice(list(DENSE[name].layers(ranks).items()))
        (which,) = rng.choices(PASSES, SHARES)
        least = 1 if which == "forward" else FEW[-1] + 1
        m = round(math.exp(rng.uniform(math.log(least), math.log(MANY[-1]))))
        case = Case(f"{name}.{layer}@{ranks}/{leaves}", n, k, leaves, (), False, bias)
        if not trees or (leaves > 1 and which == "forward"):
            found[case, m, which] = None
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
    """Random operands of a case, each made when first needed."""

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
        count = min(-(-COLD // nbytes), MOST) if self.m <= FEW[-1] else 1
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

    def described(self, which: str, weight: torch.Tensor) -> Asked:
        """What a pass asks of `alignkit.ops.linear.matmul`."""
        if which == "forward":
            return Asked(self.x, weight, self.case.leaves, self.bias)
        if which == "dgrad":
            return Asked(self.dy, weight.t())
        return Asked(self.dy.t(), self.x.t(), out=self.main_grad if which == "wgrad, added" else None)


class Asked(NamedTuple):
    """a [M, K] . b [N, K]^T; the result, rounded, is new, or it is added to `out`."""

    a: torch.Tensor
    b: torch.Tensor
    leaves: int = 1
    bias: torch.Tensor | None = None
    out: torch.Tensor | None = None

    def new(self) -> torch.Tensor:
        """Place for the result."""
        if self.out is not None:
            return self.out
        return torch.empty(len(self.a), len(self.b), dtype=self.a.dtype, device=self.a.device)

    def product(self, out: torch.Tensor) -> Described:
        where = backend(self.a.device)
        return Described.of(where, self.a, self.b, self.leaves, self.bias, out, self.out is not None)


# Implementations: by pass, a function of the problem and a weight.

Product = Callable[[Problem, torch.Tensor], object]


def _cublas() -> dict[str, Product]:
    return {
        "forward": lambda p, w: linear(p.x, w, p.bias),
        "dgrad": lambda p, w: p.dy @ w,
        "wgrad": lambda p, w: p.dy.t() @ p.x,
        "wgrad, added": lambda p, w: torch.addmm(p.main_grad, p.dy.t(), p.x, out_dtype=torch.float32, out=p.main_grad),
    }


def _alignkit() -> dict[str, Product]:
    def product(which: str, p: Problem, weight: torch.Tensor) -> torch.Tensor:
        a, b, leaves, bias, out = p.described(which, weight)
        return matmul(a, b, leaves=leaves, bias=bias, out=out, out_dtype=torch.bfloat16)

    return {which: partial(product, which) for which in PASSES}


def _vllm() -> dict[str, Product]:
    try:
        module = importlib.import_module("vllm.model_executor.layers.batch_invariant")
    except ModuleNotFoundError:  # it moved
        module = importlib.import_module("vllm.model_executor.determinism.batch_invariant")
    return {"forward": lambda p, w: module.matmul_persistent(p.x, w.t())}


def _deep_gemm() -> dict[str, Product]:
    import deep_gemm

    def forward(p, w):
        out = torch.empty(p.m, p.case.n, dtype=torch.bfloat16, device=p.device)
        deep_gemm.bf16_gemm_nt(p.x, w, out)

    return {"forward": forward}


IMPLS: dict[str, Callable[[], dict[str, Product]]] = {
    "cublas": _cublas,
    "alignkit": _alignkit,
    "vllm": _vllm,
    "deep_gemm": _deep_gemm,
}


def prepared(product: Product, problem: Problem) -> Callable[[], object]:
    """What is timed: the product with each of the weights; of few rows as a graph."""

    def run():
        for weight in problem.weights:
            product(problem, weight)

    if problem.device.type == "cpu" or problem.m > FEW[-1]:
        return run
    run()
    torch.cuda.synchronize(problem.device)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return graph.replay


def measure(
    problem: Problem, which: str, impls: dict[str, dict[str, Product]], watch: Stopwatch, seconds: float
) -> list[dict]:
    """A row for each implementation that has the pass and does not fail."""
    case, runs = problem.case, {}
    for name, passes in impls.items():
        if which not in passes:
            continue
        try:
            runs[name] = prepared(passes[which], problem)
            runs[name]()
            watch.synchronize()
        except Exception as e:  # a peer may raise whatever it likes
            runs.pop(name, None)
            print(f"FAILED: {case.name}, {problem.m} rows, {which}, {name}: {told(e, 200)}", flush=True)
    ms = _medians(problem, runs, watch, seconds)
    return [
        {
            "draw": None,
            "case": case.name,
            "impl": name,
            "pass": which,
            "m": problem.m,
            "n": case.n,
            "k": case.k,
            "ms": t,
            "x": t / ms["cublas"] if "cublas" in ms else None,
        }
        for name, t in ms.items()
    ]


def _medians(problem: Problem, runs: dict[str, Callable], watch: Stopwatch, seconds: float) -> dict[str, float]:
    """Milliseconds of a product by each."""
    times = watch.medians([*runs.values()], seconds) if runs else []
    return {name: t / len(problem.weights) for name, t in zip(runs, times, strict=True)}


def described(problem: Problem, which: str) -> tuple[Asked, Described, torch.Tensor]:
    """What is asked, how it is described, and a place for the result."""
    asked = problem.described(which, problem.weights[0])
    out = asked.new()
    return asked, asked.product(out), out


def measure_drawn(
    problem: Problem, which: str, impls: dict[str, dict[str, Product]], watch: Stopwatch, seconds: float
) -> list[dict]:
    """As `measure`; of alignkit also who computed it."""
    rows = measure(problem, which, impls, watch, seconds)
    by = chosen(described(problem, which)[1])
    return [row | ({"by": by} if row["impl"] == "alignkit" else {}) for row in rows]


def measure_ways(problem: Problem, which: str, watch: Stopwatch, seconds: float) -> dict:
    """The row of --candidates for a product."""
    asked, product, out = described(problem, which)
    want = None if asked.out is not None else matmul(*asked[:2], leaves=asked.leaves, bias=asked.bias, to=out).clone()
    runs = {"cublas": prepared(_cublas()[which], problem)}
    wrong, failed = [], []
    for name, way in ways(product).items():

        def run(p: Problem, weight: torch.Tensor, way=way) -> None:
            a, b, _, bias, _ = p.described(which, weight)
            way(a, b, bias, out)

        try:
            out.zero_()
            run(problem, problem.weights[0])
            if want is not None and not torch.equal(out.view(torch.int16), want.view(torch.int16)):
                wrong.append(name)
            runs[name] = prepared(run, problem)
        except Exception as e:
            failed.append(name)
            print(f"FAILED: {problem.case.name}, {problem.m} rows, {which}, {name}: {told(e, 200)}", flush=True)
    ms = _medians(problem, runs, watch, seconds)
    return {
        "case": problem.case.name,
        "pass": which,
        "m": problem.m,
        "n": problem.case.n,
        "k": problem.case.k,
        "leaves": problem.case.leaves,
        "bias": problem.case.bias,
        "cublas": ms.pop("cublas"),
        "by": chosen(product),
        "ways": dict(sorted(ms.items(), key=lambda item: item[1])),
        "wrong": wrong,
        "failed": failed,
    }


def candidates(options, cells: list[Cell], started: float, device: torch.device) -> int:
    """Every way for each cell; the file is written once in a while."""
    watch, rows, reported = Stopwatch(device), [], time.monotonic()
    info = made_on(ops=["linear"], draw=options.draw, seconds=options.seconds, backend=backend(device))
    for i, (case, m, which) in enumerate(cells):
        if time_is_up(options, started):
            break
        rows.append(measure_ways(Problem(case, m, device), which, watch, options.seconds))
        row, last = rows[-1], i + 1 == len(cells)
        if row["wrong"]:
            print(f"OTHER BITS: {case.name}, {m} rows, {which}: {', '.join(row['wrong'])}", flush=True)
        if last or time.monotonic() - reported > 5:
            reported = time.monotonic()
            write(options.candidates, {"info": info, "rows": rows})
            print(f"{i + 1} of {len(cells)}, {reported - started:.0f} s", flush=True)
    write(options.candidates, {"info": info, "rows": rows})
    groups: dict[str, list[dict]] = {}
    for row in rows:
        if row["by"] in row["ways"]:
            kind = "k-trees" if row["leaves"] > 1 and row["pass"] == "forward" else row["pass"]
            groups.setdefault(f"{kind}, {'up to' if row['m'] <= FEW[-1] else 'above'} {FEW[-1]} rows", []).append(row)
    for group, of in groups.items():
        for name, least in (("the choice", False), ("the fastest way", True)):
            xs = [(min(r["ways"].values()) if least else r["ways"][r["by"]]) / r["cublas"] for r in of]
            told = f"{geometric_mean(xs):.3f} of cublas, 95% at most {spread.quantile(xs, 0.95):.2f}"
            print(f"{group}, {len(of)}: {name}: {told}")
    print(f"{len(rows)} of {len(cells)} products, {time.monotonic() - started:.0f} s; {options.candidates}")
    return int(any(row["wrong"] for row in rows))


def plan(names: list[str] | None) -> list[Cell]:
    """Cases whose name begins with one of `names`, rows and passes, in order."""
    todo = []
    for case in CASES:
        if names is None or case.name.startswith(tuple(names)):
            todo += [(case, m, "forward") for m in case.rows]
            todo += [(case, m, which) for m in TRAINED if case.trained for which in PASSES[1:]]
    return todo


def starved(rows: list[dict], old: list[dict]) -> list[dict]:
    """Stock's rows of a process without a workspace, over stock's with one."""
    stock = {(r["case"], r["pass"], r["m"]): r["ms"] for r in old if r["impl"] == "cublas" and r["draw"] is None}
    mine = [row for row in rows if row["impl"] == "cublas"]
    with_one = [stock.get((row["case"], row["pass"], row["m"])) for row in mine]
    return [
        row | {"impl": "cublas-starved", "x": row["ms"] / ms if ms else None}
        for row, ms in zip(mine, with_one, strict=True)
    ]


def loaded(names: list[str]) -> dict[str, dict[str, Product]]:
    """The implementations that can be imported."""
    found = {}
    for name in names:
        try:
            found[name] = IMPLS[name]()
        except Exception as e:  # as in measure()
            print(f"without {name}: {told(e, 200)}", flush=True)
    return found


def told_of(rows: list[dict]) -> str:
    """A line for the rows of a measurement."""
    times = (f"{r['impl']} {r['ms'] * 1e3:.1f} us" + ("" if r["x"] is None else f" ({r['x']:.2f})") for r in rows)
    return f"{rows[0]['case']}, {rows[0]['m']} rows, {rows[0]['pass']}: {', '.join(times)}"


def drawn(options, cells: list[Cell], started: float, device: torch.device) -> int:
    """The drawn cells by stock and by alignkit, and how their times are spread."""
    watch, impls = Stopwatch(device), loaded([name for name in ("cublas", "alignkit") if name in options.impl])
    name, info = (
        run_name(),
        made_on(ops=["linear"], draw=options.draw, seconds=options.seconds, backend=backend(device)),
    )
    old, rows, done, reported = _read(options.json), [], 0, started
    for case, m, which in cells:
        if time_is_up(options, started):
            break
        rows += measure_drawn(Problem(case, m, device), which, impls, watch, options.seconds)
        done += 1
        if time.monotonic() - reported > 5:
            reported = time.monotonic()
            print(f"{done} of {len(cells)}, {reported - started:.0f} s", flush=True)
    rows = [row | {"draw": options.draw} for row in rows]
    write(options.json, merge(old, name, info, rows, KEY))
    ours = [row for row in rows if row["impl"] == "alignkit" and row["x"] is not None]
    print(spread.tables(ours) if ours else "nothing to compare")
    print(f"{done} of {len(cells)} products, {time.monotonic() - started:.0f} s; {options.json}")
    return 0


def _read(path: Path) -> dict:
    """The file; its rows of before there were drawn ones say that they are not."""
    old = read(path)
    return old | {"rows": [{"draw": None} | row for row in old["rows"]]} if old else old


def main(arguments: list[str] | None = None) -> int:
    parser = options_parser(__doc__, H200 / "matmul.json", seconds=0.1, resume=True)
    parser.add_argument("--cases", nargs="+", help="beginnings of their names; default: all")
    parser.add_argument("--impl", nargs="+", choices=IMPLS, default=list(IMPLS))
    parser.add_argument("--starved", action="store_true", help="afterwards cublas without a workspace too")
    parser.add_argument("--draw", type=int, metavar="SEED", help="drawn products, by cublas and alignkit")
    parser.add_argument("--cells", type=int, default=DRAWN, help="how many are drawn")
    parser.add_argument("--trees", action="store_true", help="only k-trees are drawn")
    parser.add_argument("--candidates", type=Path, metavar="FILE", help="every way to compute each drawn product")
    options = parser.parse_args(arguments)
    if (options.candidates or options.trees) and options.draw is None:
        parser.error("--candidates and --trees need --draw")

    started, device = time.monotonic(), torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.manual_seed(0)
    if options.draw is not None:
        cells = draw(options.draw, options.cells, options.trees)
        return (candidates if options.candidates else drawn)(options, cells, started, device)
    name = run_name()
    info = made_on(ops=["linear"], packages=["deep-gemm"], seconds=options.seconds, backend=backend(device))
    old = _read(options.json)
    hungry = os.environ.get("CUBLAS_WORKSPACE_CONFIG") == STARVED
    watch, impls = Stopwatch(device), loaded(["cublas"] if hungry else options.impl)
    own = "cublas-starved" if hungry else "cublas"
    had = (
        {
            (r["case"], r["m"], r["pass"])
            for r in of_sources(old, info["sources"])["rows"]
            if r["impl"] == own and r["draw"] is None
        }
        if options.resume
        else set()
    )
    todo = [(case, m, which) for case, m, which in plan(options.cases) if (case.name, m, which) not in had]
    rows: list[dict] = []
    problem, done = None, 0
    for case, m, which in todo:
        if time_is_up(options, started):
            break
        if problem is None or (problem.case, problem.m) != (case, m):
            problem = Problem(case, m, device)
        found, done = measure(problem, which, impls, watch, options.seconds), done + 1
        rows += starved(found, old.get("rows", [])) if hungry else found
        if found:
            print(told_of(found), flush=True)
        write(options.json, merge(old, name, info, rows, KEY))
    print(f"{done} of {len(todo)} measurements, {len(rows)} rows, {time.monotonic() - started:.0f} s; {options.json}")
    if not options.starved or hungry:
        return 0
    again = [a for a in (arguments if arguments is not None else sys.argv[1:]) if a != "--starved"]
    return subprocess.run(
        [sys.executable, __file__, *again], check=False, env=os.environ | {"CUBLAS_WORKSPACE_CONFIG": STARVED}
    ).returncode


if __name__ == "__main__":
    sys.exit(main())
