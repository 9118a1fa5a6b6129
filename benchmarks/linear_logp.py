"""`linear_logp` beside every peer that is installed, on one GPU: ``make gpu-logp``; options in LOGP_ARGS.

Logprobs of target tokens from bf16 hidden states [n, d] and a bf16 head [v, d], all in one process: this project's op,
torch (eager and compiled), Liger's Triton and CuTe kernels, CCE, verl's kernel, QuACK. Without options: three shapes of
training, and decoding. A peer that is not installed or fails is an entry of ``meta.errors``, and the others go on.

The file (benchmarks/results/h200/linear_logp.json) is ``{"meta": {...}, "rows": [...]}``. ``meta.runs``: by the rows'
``run``, what they were made on. A row:

``n``, ``d``, ``v``, ``impl``, ``pass``
    "forward"; "forward_backward", to the gradients of both inputs; "decode", the logits of n requests, and
    their logprobs but for "gemm" and "alignkit, logits".
``ms``
    Median time on the device, cold cache.
``x``
    ``ms`` over that of the bf16 product of the logits by cuBLAS ("gemm"), timed by turns with it.
``mib``
    Peak of the allocator's memory above the inputs and the gradients of both, which must be returned. What an
    implementation keeps between calls counts in the row that first allocates it. None on the CPU.
``err``
    Largest absolute error of a logprob against fp32 logits; None where only a sum comes out.
``err_grad``
    Of both gradients against fp32, the larger of the largest errors, each as a share of the gradient's largest value;
    None where fp32 would take long.
``x_copy``
    Decoding only: ``ms`` over the time of reading the head at the speed of a copy of it, timed by turns too. That time
    is the row of the implementation "copy".

The gradient of each token is random; but Liger's Triton kernel, which is fastest so, and QuACK are asked for that of a
sum. "+entropy": the entropy comes out too and has a gradient. verl's kernel always computes it.
"""

from __future__ import annotations

import argparse
import gc
import math
import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, partial

import torch
from lib.options import parser as options_parser
from lib.options import time_is_up
from lib.results import H200, backend, keys, made_on, merge, of_sources, read, run_name, write
from lib.stopwatch import Stopwatch
from torch.nn.functional import cross_entropy, linear

from alignkit.check.machine import version
from alignkit.ops import head_logits, linear_logp, token_logp

Shape = tuple[int, int, int]
"""n, d, v."""
PASSES = ("forward", "forward_backward", "decode")
TRAINING = PASSES[:2]
SHAPES: tuple[Shape, ...] = ((4096, 4096, 128256), (4096, 2048, 151936), (8192, 5120, 151936))
DECODE: tuple[Shape, ...] = tuple((2**i, 4096, 151936) for i in range(7))
DIMENSIONS = (1024, 2048, 4096, 5120, 8192)
VOCABULARIES = (32000, 128256, 151936, 262144)
SHARDS = (1, 2, 4, 8)
"""Ranks of tensor parallelism: each computes that part of a vocabulary."""
KEY = ("n", "d", "v", "impl", "pass")
PACKAGES = ("liger-kernel", "cut-cross-entropy", "quack-kernels", "nvidia-cutlass-dsl", "verl")
CHUNK = 1 << 28
"""Logits that the fp32 reference holds at a time."""
GRADIENT_FLOP = 1e14
"""Work beyond which there is no fp32 reference of the gradients."""


# Implementations: (hidden, weight, target) -> logp [n], or (logp, entropy), or a scalar, the sum of -logp.


def _torch(hidden, weight, target):
    return -cross_entropy(linear(hidden, weight).float(), target, reduction="none")


def _compiled():
    torch.compiler.reset()  # each shape is compiled for itself, however many there are
    return torch.compile(_torch, dynamic=False)


def _decode(hidden, weight, target):
    return token_logp(head_logits(hidden, weight), target[:, None])[:, 0]


def _liger():
    from liger_kernel.ops import LigerFusedLinearCrossEntropyFunction

    def logp(hidden, weight, target):
        reduction = "sum" if hidden.requires_grad else "none"
        loss = LigerFusedLinearCrossEntropyFunction.apply(
            hidden, weight, target, None, None, -100, 0.0, 0.0, reduction
        )[0]
        return loss if reduction == "sum" else -loss

    return logp


def _liger_sm90(entropy: bool):
    os.environ.setdefault("LIGER_SCALED_CE_SM90_VALIDATE_TARGETS", "0")  # its check of the targets waits for the GPU
    from liger_kernel.ops.cutedsl.ops import fused_scaled_cross_entropy_sm90 as sm90

    def logp(hidden, weight, target):
        out = sm90.LigerFusedScaledCrossEntropySM90Function.apply(hidden, weight, target, 1.0, -100, 1, entropy)
        return (-out[0], out[1]) if entropy else -out

    return logp


def _cce(filter_eps: str | None):
    from cut_cross_entropy import linear_cross_entropy

    return lambda hidden, weight, target: (
        -linear_cross_entropy(hidden, weight, target, reduction="none", filter_eps=filter_eps)
    )


def _verl():
    from verl.utils.kernel.linear_cross_entropy import linear_cross_entropy

    return lambda hidden, weight, target: linear_cross_entropy(hidden, weight, target, 1.0, "none")[0]


def _quack():
    from quack.linear_cross_entropy import chunked_linear_cross_entropy

    return lambda hidden, weight, target: chunked_linear_cross_entropy(hidden, weight, target, reduction="sum")


@dataclass(frozen=True)
class Impl:
    """How to get an implementation: `load` imports it and returns the function, for one shape."""

    load: Callable[[], Callable]
    passes: tuple[str, ...] = TRAINING
    decode: Callable | None = None
    """The function for decoding, if it is another."""
    total: bool = False
    """Forward + backward is of the sum of -logp, not of a gradient for each token."""
    entropy: bool = False
    own: bool = False


IMPLS = {
    "copy": Impl(lambda: None, ("decode",)),  # its time is that of the head alone
    "gemm": Impl(lambda: lambda hidden, weight, target: linear(hidden, weight), ("forward", "decode")),
    "alignkit": Impl(lambda: linear_logp, PASSES, decode=_decode, own=True),
    "alignkit+entropy": Impl(lambda: partial(linear_logp, return_entropy=True), entropy=True, own=True),
    "alignkit, keeping": Impl(lambda: partial(linear_logp, keep_logits=True), ("forward_backward",), own=True),
    "alignkit, logits": Impl(lambda: lambda hidden, weight, target: head_logits(hidden, weight), ("decode",), own=True),
    "torch": Impl(lambda: _torch, PASSES),
    "torch.compile": Impl(_compiled),
    "liger-sm90": Impl(partial(_liger_sm90, False)),
    "liger-sm90+entropy": Impl(partial(_liger_sm90, True), entropy=True),
    "quack": Impl(_quack, total=True),
    "verl": Impl(_verl),
    "liger": Impl(_liger, total=True),
    "cce": Impl(partial(_cce, "high")),
    "cce, unfiltered": Impl(partial(_cce, None)),
}


# The sizes.


def shape(text: str) -> Shape:
    """``4096x2048x151936``: n, d, v."""
    try:
        n, d, v = (int(part) for part in text.split("x"))
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not like 4096x2048x151936 (n, d, v)") from None
    if min(n, d, v) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} has a size below 1")
    return n, d, v


def sweep() -> list[Shape]:
    """Along n, along v with every shard of it, and every d with every v."""
    along_n = [(2**i, 4096, 151936) for i in range(16)]
    along_v = [(4096, 4096, v // ranks) for ranks in SHARDS for v in VOCABULARIES]
    return list(dict.fromkeys(along_n + along_v + [(4096, d, v) for d in DIMENSIONS for v in VOCABULARIES]))


def plan(shapes: list[Shape] | None, swept: bool, passes: list[str] | None) -> list[tuple[Shape, tuple[str, ...]]]:
    """What is measured, in order: shapes and their passes."""
    if shapes:
        wanted = [(s, tuple(passes or TRAINING)) for s in shapes]
    else:
        training = dict.fromkeys([*SHAPES, *(sweep() if swept else [])])
        wanted = [*((s, PASSES[2:]) for s in DECODE), *((s, TRAINING) for s in training)]
    chosen = [(s, tuple(p for p in found if p in (passes or PASSES))) for s, found in wanted]
    return [(s, found) for s, found in chosen if found]


# Measuring.


class Problem:
    """Random inputs of a shape, and what comes out in fp32."""

    def __init__(self, size: Shape, device: torch.device):
        self.size, self.device = size, device
        n, d, v = size
        self.hidden = torch.randn(n, d, dtype=torch.bfloat16, device=device)
        self.weight = torch.randn(v, d, dtype=torch.bfloat16, device=device).mul_(2.5 / math.sqrt(d))
        self.target = torch.randint(v, (n,), device=device)
        self.gradient, self.entropy_gradient = torch.randn(2, n, device=device)
        self._gradients: dict[tuple[bool, bool], tuple[torch.Tensor, torch.Tensor]] = {}

    @property
    def inputs(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        return self.hidden, self.weight, self.target

    @cached_property
    def spare(self) -> torch.Tensor:
        """Where copies of the head go."""
        return torch.empty_like(self.weight)

    def _chunks(self):
        """Rows, their hidden states and their log-softmax, in fp32; and the head."""
        torch.backends.cuda.matmul.allow_tf32 = False
        weight = self.weight.float()
        for rows in torch.arange(self.size[0], device=self.device).split(max(CHUNK // self.size[2], 1)):
            hidden = self.hidden[rows].float()
            yield rows, hidden, (hidden @ weight.t()).log_softmax(-1), weight

    @cached_property
    def logp(self) -> torch.Tensor:
        return torch.cat([logp.gather(1, self.target[rows, None])[:, 0] for rows, _, logp, _ in self._chunks()])

    def gradients(self, impl: Impl) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Of hidden and weight, by what `impl` is given to go back from; None if that would take long."""
        kind = (impl.total, impl.entropy)
        if 6 * math.prod(self.size) > GRADIENT_FLOP:
            return None
        if kind not in self._gradients:
            dh = torch.empty(self.hidden.shape, dtype=torch.float32, device=self.device)
            dw = torch.zeros(self.weight.shape, dtype=torch.float32, device=self.device)
            for rows, hidden, logp, weight in self._chunks():
                p = logp.exp()
                g = torch.full_like(logp[:, :1], -1.0) if impl.total else self.gradient[rows, None]
                dz = p * -g
                if impl.entropy:
                    entropy = -(p * logp).sum(1, keepdim=True)
                    dz -= self.entropy_gradient[rows, None] * p * (logp + entropy)
                dz.scatter_add_(1, self.target[rows, None], g)
                dh[rows] = dz @ weight
                dw.addmm_(dz.t(), hidden)
            self._gradients[kind] = dh, dw
        return self._gradients[kind]


def _outputs(out) -> tuple[torch.Tensor, ...]:
    return out if isinstance(out, tuple) else (out,)


def _allocated(device: torch.device) -> int:
    return torch.cuda.memory_allocated(device) if device.type == "cuda" else 0


def calls(problem: Problem, impl: Impl, which: str) -> tuple[Callable[[], torch.Tensor], tuple[torch.Tensor, ...]]:
    """What is timed, which returns the first output; and the leaves that it gives gradients."""
    function = impl.decode if which == "decode" and impl.decode else impl.load()
    if which != "forward_backward":

        def forward():
            with torch.no_grad():
                return _outputs(function(*problem.inputs))[0]

        return forward, ()
    leaves = tuple(t.detach().requires_grad_() for t in (problem.hidden, problem.weight))

    def forward_backward():
        for leaf in leaves:
            leaf.grad = None
        outs = _outputs(function(*leaves, problem.target))
        given = (problem.gradient.new_ones(()) if impl.total else problem.gradient, problem.entropy_gradient)
        outs = outs[: 2 if impl.entropy else 1]  # a gradient too many is given where there is no entropy
        torch.autograd.backward(outs, [g.to(out.dtype) for out, g in zip(outs, given, strict=False)])
        return outs[0].detach()

    return forward_backward, leaves


def measure(problem: Problem, name: str, which: str, watch: Stopwatch, seconds: float) -> dict:
    """A row, but for its run."""
    impl, device = IMPLS[name], problem.device
    (n, d, v), copy = problem.size, partial(problem.spare.copy_, problem.weight) if which == "decode" else None
    gemm, _ = calls(problem, IMPLS["gemm"], "forward")
    row = {"n": n, "d": d, "v": v, "impl": name, "pass": which}
    if name == "copy":
        copied, product = watch.medians([copy, gemm], seconds)
        return row | {"ms": copied / 2, "x": copied / 2 / product, "mib": None, "err": None, "x_copy": 1.0}
    gemm()
    before = _allocated(device)
    run, leaves = calls(problem, impl, which)
    run()  # compiles, and allocates what is kept
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
    out, mib = run(), None
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        returned = sum(leaf.grad.nbytes for leaf in leaves)
        mib = max(torch.cuda.max_memory_allocated(device) - before - returned, 0) / 2**20
    errors: dict = {"err": (out - problem.logp).abs().max().item() if out.shape == problem.target.shape else None}
    if leaves:
        expected = problem.gradients(impl)
        errors["err_grad"] = (
            None
            if expected is None
            else max(
                ((leaf.grad - e).abs().max() / e.abs().max()).item() for leaf, e in zip(leaves, expected, strict=True)
            )
        )
    del out
    *copied, product, ms = watch.medians([*([copy] if copy else []), gemm, run], seconds)
    return (
        row | {"ms": ms, "x": ms / product, "mib": mib} | errors | ({"x_copy": ms / (copied[0] / 2)} if copied else {})
    )


# The file.


def contents(old: dict, name: str, info: dict, rows: list[dict], errors: list[dict]) -> dict:
    """The contents of the result file after run `name`: what a row or an error says of the same anew is replaced."""
    meta = old.get("meta", {})
    merged = merge({"runs": meta.get("runs", {}), "rows": old.get("rows", [])}, name, info, rows, KEY)
    anew = {tuple(entry.get(k) for k in KEY) for entry in rows + errors}
    started = {row["impl"] for row in rows}
    kept = [
        e
        for e in meta.get("errors", [])
        if tuple(e.get(k) for k in KEY) not in anew and not ("n" not in e and e["impl"] in started)
    ]
    return {"meta": {"runs": merged["runs"], "errors": kept + errors}, "rows": merged["rows"]}


def described(row: dict) -> str:
    """A line for a row."""
    parts = [
        f"{row['n']} x {row['d']} x {row['v']} {row['pass']}, {row['impl']}: {row['ms']:.3f} ms",
        f"{row['x']:.2f} gemm",
    ]
    for key, text in (
        ("x_copy", "{:.2f} copy"),
        ("mib", "{:.0f} MiB"),
        ("err", "error {:.1e}"),
        ("err_grad", "of gradients {:.1e}"),
    ):
        if row.get(key) is not None:
            parts.append(text.format(row[key]))
    return ", ".join(parts)


def packages() -> dict[str, str]:
    """Versions of the peers whose packages say one."""
    found = {name: version(name) for name in PACKAGES}
    return {name: v for name, v in found.items() if v is not None}


class Bench:
    """Measures, and saves after every row."""

    def __init__(self, options: argparse.Namespace, device: torch.device):
        self.options, self.device, self.watch = options, device, Stopwatch(device)
        self.name = run_name()
        self.info = made_on(ops=["linear_logp"], seconds=options.seconds, backend=backend(device))
        self.info["versions"] |= packages()
        self.old = read(options.json)
        self.rows: list[dict] = []
        self.errors: list[dict] = []
        self.absent: set[str] = set()

    def save(self) -> None:
        write(self.options.json, contents(self.old, self.name, self.info, self.rows, self.errors))

    def _failed(self, error: dict, e: Exception) -> None:
        lines = str(e).strip().splitlines()
        self.errors.append(error | {"error": f"{type(e).__name__}: {lines[0][:300] if lines else ''}"})
        print(f"FAILED: {self.errors[-1]}", flush=True)

    def starts(self, name: str) -> bool:
        """Whether an implementation can be imported; the others go on without one that raises whatever it likes."""
        try:
            IMPLS[name].load()
        except Exception as e:
            self._failed({"impl": name}, e)
            return False
        return True

    def one(self, problem: Problem, name: str, which: str) -> None:
        n, d, v = problem.size
        try:
            row = measure(problem, name, which, self.watch, self.options.seconds)
        except Exception as e:  # as in starts()
            self._failed({"n": n, "d": d, "v": v, "impl": name, "pass": which}, e)
        else:
            self.rows.append(row)
            print(described(row), flush=True)
        self.save()
        gc.collect()
        self.watch.synchronize()  # raises if the GPU itself was left unusable
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def run(self, wanted: list[tuple[Shape, tuple[str, ...]]], names: list[str]) -> None:
        began = time.monotonic()
        names = [name for name in names if self.starts(name)]
        old = {"runs": self.old.get("meta", {}).get("runs", {}), "rows": self.old.get("rows", [])}
        had = keys(of_sources(old, self.info["sources"]), KEY) if self.options.resume else set()
        todo = [
            (
                size,
                [
                    (name, which)
                    for which in passes
                    for name in names
                    if which in IMPLS[name].passes and (*size, name, which) not in had
                ],
            )
            for size, passes in wanted
        ]
        count = sum(len(mine) for _, mine in todo)
        for size, mine in todo:
            problem = Problem(size, self.device) if mine else None
            for name, which in mine:
                if time_is_up(self.options, began):
                    print(f"out of time: {len(self.rows)} of {count} rows", flush=True)
                    return
                self.one(problem, name, which)
            del problem


def _warm(device: torch.device) -> None:
    """One product forward and back, so that what cuBLAS allocates for itself is in no row."""
    a = torch.ones(128, 128, dtype=torch.bfloat16, device=device, requires_grad=True)
    linear(a, a).sum().backward()


def main(arguments: list[str] | None = None) -> int:
    """Returns the exit status: 1 if an implementation of this project failed."""
    parser = options_parser(__doc__, H200 / "linear_logp.json", seconds=0.5, resume=True)
    parser.add_argument("--shapes", nargs="+", type=shape, help="n, d, v as 4096x2048x151936; default: see above")
    parser.add_argument("--sweep", action="store_true", help="n, d, v and shards of v as well: it may take an hour")
    parser.add_argument("--impl", nargs="+", choices=IMPLS, default=list(IMPLS))
    parser.add_argument("--passes", nargs="+", choices=PASSES, help="default: all; of --shapes, without decode")
    options = parser.parse_args(arguments)
    if options.shapes and options.sweep:
        parser.error("--sweep has shapes of its own")

    started = time.monotonic()
    torch.manual_seed(0)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    _warm(device)
    bench = Bench(options, device)
    bench.run(plan(options.shapes, options.sweep, options.passes), options.impl)
    bench.save()
    print(f"{len(bench.rows)} rows, {len(bench.errors)} failures, {time.monotonic() - started:.0f} s; {options.json}")
    return int(any(IMPLS[e["impl"]].own for e in bench.errors))


if __name__ == "__main__":
    sys.exit(main())
