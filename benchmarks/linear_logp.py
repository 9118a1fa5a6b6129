"""Time, memory and error of `linear_logp` against its peers on one GPU: ``make gpu-logp``; options in LOGP_ARGS.

The benchmark computes logprobs of target tokens from bf16 hidden states [n, d] and a bf16 LM head [v, d]. Peers are
torch (eager and compiled), Liger's Triton and CuTe kernels, CCE, verl's kernel and QuACK, all in one process. The
default is three training shapes, and decode. A peer that is not installed or fails gets a row with ``error``.

The result file is benchmarks/results/h200/linear_logp.jsonl (``lib/results.py``). The fields of a row, which
``tables.py`` reads:

``n``, ``d``, ``v``, ``impl``, ``pass``
    "forward"; "forward_backward", with the gradients of both inputs; "decode", the logits of n requests and their
    logprobs ("gemm" and "alignkit, logits": logits alone).
``ms``
    Median GPU time with a cold cache.
``x``
    ``ms`` relative to cuBLAS's bf16 GEMM of the logits ("gemm"), from interleaved runs.
``mib``
    Peak allocator memory in addition to the inputs and their gradients. Memory that an implementation caches between
    calls counts in the row that first allocates it. None on the CPU.
``err``
    Largest absolute error of a logprob against fp32 logits; None if an implementation returns a sum alone.
``err_grad``
    Largest error of both gradients against fp32, relative to the gradient's largest magnitude; None if the fp32
    reference would take too long.
``x_copy``
    Decode alone: ``ms`` relative to the time to read the head at the bandwidth of a copy, from interleaved runs. The
    row of the implementation "copy" has this time.

Each token has a random output gradient. Liger's Triton kernel and QuACK compute a sum with gradient 1 instead, Liger
because it is fastest this way. "+entropy" implementations return the entropy too, with a gradient; verl's kernel
always computes it.
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
from lib.results import H200, backend, distinct, merge, read, row_keys, run_info, run_name, stale, with_sources, write
from lib.stopwatch import Stopwatch
from torch.nn.functional import cross_entropy, linear

from alignkit.ops import head_logits, linear_logp, token_logp
from alignkit.runtime.machine import version

Shape = tuple[int, int, int]
"""n, d, v."""
PASSES = ("forward", "forward_backward", "decode")
TRAINING = PASSES[:2]
SHAPES: tuple[Shape, ...] = ((4096, 4096, 128256), (4096, 2048, 151936), (8192, 5120, 151936))
DECODE: tuple[Shape, ...] = tuple((2**i, 4096, 151936) for i in range(7))
DIMENSIONS = (1024, 2048, 4096, 5120, 8192)
VOCABULARIES = (32000, 128256, 151936, 262144)
SHARDS = (1, 2, 4, 8)
"""Tensor-parallel sizes, by which the vocabulary is divided."""
MEASURED_OPS = ("linear_logp",)
KEY = ("n", "d", "v", "impl", "pass")
PACKAGES = ("liger-kernel", "cut-cross-entropy", "quack-kernels", "nvidia-cutlass-dsl", "verl")
CHUNK = 1 << 28
"""Logits of a chunk of the fp32 reference."""
GRADIENT_FLOP = 1e14
"""FLOP above which the fp32 reference of the gradients is skipped."""


# Implementations: (hidden, weight, target) -> logp [n], (logp, entropy), or the scalar sum of -logp.


def _torch(hidden, weight, target):
    return -cross_entropy(linear(hidden, weight).float(), target, reduction="none")


def _compiled():
    torch.compiler.reset()  # forget earlier shapes, so that none counts toward the recompile limit
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
    os.environ.setdefault("LIGER_SCALED_CE_SM90_VALIDATE_TARGETS", "0")  # Liger's check of the targets synchronizes
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
    """An implementation; `load` imports it and returns the function for one shape."""

    load: Callable[[], Callable]
    passes: tuple[str, ...] = TRAINING
    decode: Callable | None = None
    """Function for decode, if it differs."""
    total: bool = False
    """True if forward_backward uses the sum of -logp instead of an output gradient per token."""
    entropy: bool = False
    """True if the function returns (logp, entropy)."""
    own: bool = False
    """True for alignkit's implementations."""


IMPLS = {
    "copy": Impl(lambda: None, ("decode",)),  # measured in `measure`
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


# Shapes.


def shape(text: str) -> Shape:
    """Parse n, d, v, such as ``4096x2048x151936``."""
    try:
        n, d, v = (int(part) for part in text.split("x"))
    except ValueError:
        raise argparse.ArgumentTypeError(f"must be NxDxV, such as 4096x2048x151936, got {text!r}") from None
    if min(n, d, v) < 1:
        raise argparse.ArgumentTypeError(f"sizes must be at least 1, got {text!r}")
    return n, d, v


def sweep() -> list[Shape]:
    """Return shapes along n, along v and its shards, and all combinations of d and v."""
    along_n = [(2**i, 4096, 151936) for i in range(16)]
    along_v = [(4096, 4096, v // ranks) for ranks in SHARDS for v in VOCABULARIES]
    return list(dict.fromkeys(along_n + along_v + [(4096, d, v) for d in DIMENSIONS for v in VOCABULARIES]))


def plan(shapes: list[Shape] | None, swept: bool, passes: list[str] | None) -> list[tuple[Shape, tuple[str, ...]]]:
    """Return the shapes to measure, in order, each with its passes."""
    if shapes:
        wanted = [(s, tuple(passes or TRAINING)) for s in shapes]
    else:
        training = dict.fromkeys([*SHAPES, *(sweep() if swept else [])])
        wanted = [*((s, PASSES[2:]) for s in DECODE), *((s, TRAINING) for s in training)]
    selected = [(s, tuple(p for p in each if p in (passes or PASSES))) for s, each in wanted]
    return [(s, each) for s, each in selected if each]


# Measurement.


class Problem:
    """Random inputs of a shape, and their fp32 reference."""

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
        """Return the destination of copies of the head."""
        return torch.empty_like(self.weight)

    def _chunks(self):
        """Yield chunks of tokens: indices, hidden states, log-softmax, and the whole head, in fp32."""
        torch.backends.cuda.matmul.allow_tf32 = False
        weight = self.weight.float()
        for rows in torch.arange(self.size[0], device=self.device).split(max(CHUNK // self.size[2], 1)):
            hidden = self.hidden[rows].float()
            yield rows, hidden, (hidden @ weight.t()).log_softmax(-1), weight

    @cached_property
    def logp(self) -> torch.Tensor:
        return torch.cat([logp.gather(1, self.target[rows, None])[:, 0] for rows, _, logp, _ in self._chunks()])

    def gradients(self, impl: Impl) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Return the fp32 gradients of hidden and weight for `impl`'s output gradients; None if too slow to compute."""
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


def calls(problem: Problem, impl: Impl, pass_name: str) -> tuple[Callable[[], torch.Tensor], tuple[torch.Tensor, ...]]:
    """Return the call to time, which returns the first output, and the leaf tensors that receive gradients."""
    function = impl.decode if pass_name == "decode" and impl.decode else impl.load()
    if pass_name != "forward_backward":

        def forward():
            with torch.no_grad():
                return _outputs(function(*problem.inputs))[0]

        return forward, ()
    leaves = tuple(t.detach().requires_grad_() for t in (problem.hidden, problem.weight))

    def forward_backward():
        for leaf in leaves:
            leaf.grad = None
        outs = _outputs(function(*leaves, problem.target))
        gradients = (problem.gradient.new_ones(()) if impl.total else problem.gradient, problem.entropy_gradient)
        outs = outs[: 2 if impl.entropy else 1]  # zip drops the entropy's gradient if there is no entropy
        torch.autograd.backward(outs, [g.to(out.dtype) for out, g in zip(outs, gradients, strict=False)])
        return outs[0].detach()

    return forward_backward, leaves


def measure(problem: Problem, name: str, pass_name: str, watch: Stopwatch, seconds: float) -> dict:
    """Return a row without its ``run``."""
    impl, device = IMPLS[name], problem.device
    (n, d, v), copy = problem.size, partial(problem.spare.copy_, problem.weight) if pass_name == "decode" else None
    gemm, _ = calls(problem, IMPLS["gemm"], "forward")
    row = {"n": n, "d": d, "v": v, "impl": name, "pass": pass_name}
    if name == "copy":
        copied, product = watch.medians([copy, gemm], seconds)
        return row | {"ms": copied / 2, "x": copied / 2 / product, "mib": None, "err": None, "x_copy": 1.0}
    gemm()
    before = _allocated(device)
    run, leaves = calls(problem, impl, pass_name)
    run()  # compiles, and allocates cached buffers
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


# Result file.


def contents(old: dict, name: str, info: dict, rows: list[dict], errors: list[dict]) -> dict:
    """Return the contents of the result file after run `name`.

    New rows and errors replace those of equal key. The error of an import goes once the implementation has a row.
    """
    started = {row["impl"] for row in rows}
    kept = [row for row in old.get("rows", []) if "n" in row or row["impl"] not in started]
    return merge(old | {"rows": kept}, name, info, rows + errors, KEY)


def line(row: dict) -> str:
    """Return a line of output for a row."""
    parts = [
        f"{row['n']} x {row['d']} x {row['v']} {row['pass']}, {row['impl']}: {row['ms']:.3f} ms",
        f"{row['x']:.2f} of gemm",
    ]
    for key, text in (
        ("x_copy", "{:.2f} of copy"),
        ("mib", "{:.0f} MiB"),
        ("err", "error {:.1e}"),
        ("err_grad", "gradient error {:.1e}"),
    ):
        if row.get(key) is not None:
            parts.append(text.format(row[key]))
    return ", ".join(parts)


def packages() -> dict[str, str]:
    """Return the versions of the installed peers."""
    found = {name: version(name) for name in PACKAGES}
    return {name: v for name, v in found.items() if v is not None}


class Bench:
    """One command, which saves after each row."""

    def __init__(self, options: argparse.Namespace, device: torch.device):
        self.options, self.device, self.watch = options, device, Stopwatch(device)
        self.name = run_name()
        self.info = run_info(ops=MEASURED_OPS, seconds=options.seconds, backend=backend(device))
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

    def can_import(self, name: str) -> bool:
        """Return whether an implementation can be imported; record the error otherwise."""
        try:
            IMPLS[name].load()
        except Exception as e:
            self._failed({"impl": name}, e)
            return False
        return True

    def measure(self, problem: Problem, name: str, pass_name: str) -> None:
        n, d, v = problem.size
        try:
            row = measure(problem, name, pass_name, self.watch, self.options.seconds)
        except Exception as e:  # a peer may raise anything
            self._failed({"n": n, "d": d, "v": v, "impl": name, "pass": pass_name}, e)
        else:
            self.rows.append(row)
            print(line(row), flush=True)
        self.save()
        gc.collect()
        self.watch.synchronize()  # raises if the CUDA context is broken
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def run(self, wanted: list[tuple[Shape, tuple[str, ...]]], names: list[str]) -> None:
        began = time.monotonic()
        rows = stale(self.old, self.info["sources"], KEY)
        if self.options.only_stale:
            names = [name for name in names if name in {row["impl"] for row in rows}]
        names = [name for name in names if self.can_import(name)]
        fresh = [row for row in with_sources(self.old, self.info["sources"])["rows"] if "error" not in row]
        measured = row_keys({"rows": fresh}, KEY) if self.options.resume else set()
        remaining = [
            (
                size,
                [
                    (name, pass_name)
                    for pass_name in passes
                    for name in names
                    if pass_name in IMPLS[name].passes and (*size, name, pass_name) not in measured
                ],
            )
            for size, passes in wanted
        ]
        if self.options.only_stale:
            rows = [row for row in rows if row["impl"] in names]
            remaining = [
                (size, [(row["impl"], row["pass"]) for row in rows if (row["n"], row["d"], row["v"]) == size])
                for size in distinct(rows, "n", "d", "v")
            ]
        count = sum(len(mine) for _, mine in remaining)
        for size, mine in remaining:
            problem = Problem(size, self.device) if mine else None
            for name, pass_name in mine:
                if time_is_up(self.options, began):
                    print(f"--minutes have passed: {len(self.rows)} of {count} rows measured", flush=True)
                    return
                self.measure(problem, name, pass_name)
            del problem


def _warm(device: torch.device) -> None:
    """Run a GEMM forward and backward, so that no row includes cuBLAS's workspace."""
    a = torch.ones(128, 128, dtype=torch.bfloat16, device=device, requires_grad=True)
    linear(a, a).sum().backward()


def main(arguments: list[str] | None = None) -> int:
    """Return the exit status: 1 if one of alignkit's implementations failed."""
    parser = options_parser(__doc__, H200 / "linear_logp.jsonl", seconds=0.5, resume=True)
    parser.add_argument(
        "--shapes", nargs="+", type=shape, help="rows n, hidden size d, vocabulary v, such as 4096x2048x151936"
    )
    parser.add_argument("--sweep", action="store_true", help="also sweep n, d, v and shards of v; may take an hour")
    parser.add_argument(
        "--impl", nargs="+", choices=IMPLS, default=list(IMPLS), help="implementations to measure; default: all"
    )
    parser.add_argument(
        "--passes", nargs="+", choices=PASSES, help="passes to measure; default: all, with --shapes all but decode"
    )
    options = parser.parse_args(arguments)
    if options.shapes and options.sweep:
        parser.error("--sweep: cannot be combined with --shapes")

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
