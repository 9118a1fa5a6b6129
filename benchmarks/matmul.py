"""The matrix products of the linear layers beside stock cuBLAS and others, on one GPU: ``make gpu-matmul``; options in
MATMUL_ARGS.

bf16, the layers of Qwen3-8B, and a rank's of Llama-70B at TP 8. The file (benchmarks/results/h200/matmul.json) is
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
``ms``, ``x``
    Median time on the device, cold cache; over that of "cublas", timed by turns ("cublas-starved": over the file's).
    None where "cublas" failed. Up to 256 rows it is a share of the time of a CUDA graph of products with different
    weights, as a decoding step has them.
"""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, partial

import torch
from lib.options import parser as options_parser
from lib.options import time_is_up, told
from lib.results import H200, backend, made_on, merge, read, run_name, write
from lib.stopwatch import Stopwatch

from alignkit.ops.linear import matmul

KEY = ("case", "impl", "pass", "m")
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


@dataclass(frozen=True)
class Case:
    name: str
    n: int
    k: int
    leaves: int = 1
    rows: tuple[int, ...] = FEW + MANY
    trained: bool = True


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
    def dy(self) -> torch.Tensor:
        return self._random(self.m, self.case.n)

    @cached_property
    def main_grad(self) -> torch.Tensor:
        return torch.zeros(self.case.n, self.case.k, device=self.device)


# Implementations: by pass, a function of the problem and a weight.

Product = Callable[[Problem, torch.Tensor], object]


def _cublas() -> dict[str, Product]:
    return {
        "forward": lambda p, w: p.x @ w.t(),
        "dgrad": lambda p, w: p.dy @ w,
        "wgrad": lambda p, w: p.dy.t() @ p.x,
        "wgrad, added": lambda p, w: torch.addmm(p.main_grad, p.dy.t(), p.x, out_dtype=torch.float32, out=p.main_grad),
    }


def _alignkit() -> dict[str, Product]:
    rounded = partial(matmul, out_dtype=torch.bfloat16)
    return {
        "forward": lambda p, w: rounded(p.x, w, leaves=p.case.leaves),
        "dgrad": lambda p, w: rounded(p.dy, w.t()),
        "wgrad": lambda p, w: rounded(p.dy.t(), p.x.t()),
        "wgrad, added": lambda p, w: matmul(p.dy.t(), p.x.t(), out=p.main_grad),
    }


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
    times = watch.medians([*runs.values()], seconds) if runs else []
    ms = {name: t / len(problem.weights) for name, t in zip(runs, times, strict=True)}
    return [
        {
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


def plan(names: list[str] | None) -> list[tuple[Case, int, str]]:
    """Cases whose name begins with one of `names`, rows and passes, in order."""
    todo = []
    for case in CASES:
        if names is None or case.name.startswith(tuple(names)):
            todo += [(case, m, "forward") for m in case.rows]
            todo += [(case, m, which) for m in TRAINED if case.trained for which in PASSES[1:]]
    return todo


def starved(rows: list[dict], old: list[dict]) -> list[dict]:
    """Stock's rows of a process without a workspace, over stock's with one."""
    stock = {(r["case"], r["pass"], r["m"]): r["ms"] for r in old if r["impl"] == "cublas"}
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


def described(rows: list[dict]) -> str:
    """A line for the rows of a measurement."""
    times = (f"{r['impl']} {r['ms'] * 1e3:.1f} us" + ("" if r["x"] is None else f" ({r['x']:.2f})") for r in rows)
    return f"{rows[0]['case']}, {rows[0]['m']} rows, {rows[0]['pass']}: {', '.join(times)}"


def main(arguments: list[str] | None = None) -> int:
    parser = options_parser(__doc__, H200 / "matmul.json", seconds=0.1, resume=True)
    parser.add_argument("--cases", nargs="+", help="beginnings of their names; default: all")
    parser.add_argument("--impl", nargs="+", choices=IMPLS, default=list(IMPLS))
    parser.add_argument("--starved", action="store_true", help="afterwards cublas without a workspace too")
    options = parser.parse_args(arguments)

    started, device = time.monotonic(), torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.manual_seed(0)
    name = run_name()
    info = made_on(packages=["deep-gemm"], seconds=options.seconds, backend=backend(device))
    old = read(options.json)
    hungry = os.environ.get("CUBLAS_WORKSPACE_CONFIG") == STARVED
    watch, impls = Stopwatch(device), loaded(["cublas"] if hungry else options.impl)
    own = "cublas-starved" if hungry else "cublas"
    had = {(r["case"], r["m"], r["pass"]) for r in old.get("rows", []) if r["impl"] == own} if options.resume else set()
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
            print(described(found), flush=True)
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
