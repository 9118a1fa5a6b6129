"""Bandwidth of RMSNorm against its peers and a copy, on one GPU: ``make gpu-rms``; options in RMS_ARGS.

Implementations, in bf16, are alignkit's op with its CUDA and its Triton kernels, torch (eager and compiled), Liger and
QuACK. An implementation that is not installed or fails is reported and skipped. ``--widths`` instead measures
alignkit's op and a copy for row lengths from 2048 to 8192 in steps of 512. The result file is
benchmarks/results/h200/rms_norm.jsonl (``lib/results.py``). The fields of a row, which ``tables.py`` reads:

``case``, ``m``, ``n``, ``k``
    Case; number of rows, their length, and heads per token. k is 1, except in "q" cases: there x is the queries, a view
    of a QKV tensor with 1.5 k heads, which Liger and QuACK must copy first.
``impl``, ``pass``
    "forward"; "forward_residual", which rounds x + residual first and returns it; "backward", with the gradients of x
    and the weight; "backward_residual", the backward of "forward_residual", whose second output has a gradient too.
``ms``
    Median GPU time with a cold cache.
``x``
    Bandwidth relative to that of a large copy (``copy_tb_s`` of the run; bytes read plus written). It counts the bytes
    of two tensors like x, four with a residual, three in backward. "copy" moves as many bytes; it shows the limit for
    small tensors.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from lib.options import error_text, time_is_up
from lib.options import parser as options_parser
from lib.results import H200, backend, distinct, merge, read, run_info, run_name, stale, write
from lib.stopwatch import Stopwatch, copy_speed
from torch.nn.functional import rms_norm as torch_norm

from alignkit.ops import rms_norm
from alignkit.runtime import dispatch

MEASURED_OPS = ("rms_norm",)
KEY = ("case", "m", "n", "k", "impl", "pass")
MOVED = {"forward": 2, "forward_residual": 4, "backward": 3, "backward_residual": 4}
"""Tensors of x's size that a pass reads or writes."""
LENGTHS = (64, 1024, 2048, 4096, 5120, 8192, 16384)
WIDTHS = range(2048, 8192 + 1, 512)
HEADS, HEAD_DIM = 8, 128
EPS = 1e-6


@dataclass(frozen=True)
class Case:
    name: str
    m: int
    n: int
    k: int = 1

    def key(self) -> dict:
        return {"case": self.name, "m": self.m, "n": self.n, "k": self.k}


def cases() -> list[Case]:
    found = []
    for mib in (512, 64):
        found += [Case(f"{mib} MiB", (mib << 19) // n, n) for n in LENGTHS]
        found.append(Case(f"q, {mib} MiB", (mib << 19) // HEAD_DIM, HEAD_DIM, HEADS))
    return [*found, *(Case("few", m, 4096) for m in (1, 64, 512))]


def widths() -> list[Case]:
    return [Case(f"{mib} MiB", (mib << 19) // n, n) for mib in (256, 512) for n in WIDTHS]


# Implementations: (x, weight, residual or None) -> y, or (y, x + residual).


def _ours(x, weight, residual):
    return rms_norm(x, weight, EPS, residual)


def _torch(x, weight, residual):
    if residual is None:
        return torch_norm(x, (x.shape[-1],), weight, EPS)
    total = x + residual
    return torch_norm(total, (x.shape[-1],), weight, EPS), total


def _compiled():
    torch.compiler.reset()  # forget earlier shapes, so that none counts toward the recompile limit
    torch._functorch.config.donated_buffer = False  # backward runs repeatedly after one forward
    return torch.compile(_torch, dynamic=False)


def _liger():
    from liger_kernel.ops.fused_add_rms_norm import LigerFusedAddRMSNormFunction
    from liger_kernel.ops.rms_norm import LigerRMSNormFunction

    def norm(x, weight, residual):
        if residual is None:
            return LigerRMSNormFunction.apply(x, weight, EPS, 0.0, "llama", False)
        return LigerFusedAddRMSNormFunction.apply(x, residual, weight, EPS, 0.0, "llama", False)

    return norm


def _quack():
    from quack.rmsnorm import rmsnorm

    def norm(x, weight, residual):
        if residual is None:
            return rmsnorm(x.reshape(-1, x.shape[-1]), weight, eps=EPS)
        return rmsnorm(
            x.reshape(-1, x.shape[-1]), weight, residual=residual.reshape(-1, x.shape[-1]), eps=EPS, prenorm=True
        )

    return norm


IMPLS: dict[str, Callable[[], Callable | None]] = {
    "alignkit": lambda: _ours,
    "alignkit-triton": lambda: _ours,
    "torch": lambda: _torch,
    "torch.compile": _compiled,
    "liger": _liger,
    "quack": _quack,
    "copy": lambda: None,
}
BACKENDS = {"alignkit-triton": "triton"}
"""Backend of an implementation, if not "auto"."""


def with_backend(backend: str, function: Callable) -> Callable:
    """Return `function`, called within ``dispatch.use(backend)``."""

    def run(*args):
        with dispatch.use(backend):
            return function(*args)

    return run


class Inputs:
    def __init__(self, case: Case, device: torch.device):
        torch.manual_seed(0)
        shape = (case.m, case.n) if case.k == 1 else (case.m // case.k, case.k * 3 // 2, case.n)

        def random() -> torch.Tensor:
            t = torch.randn(*shape, dtype=torch.bfloat16, device=device)
            return t if case.k == 1 else t[:, : case.k]

        self.x, self.residual = random(), random()
        self.dy, self.d_total = random().contiguous(), random().contiguous()
        self.weight = torch.rand(case.n, dtype=torch.bfloat16, device=device)

    def call(self, norm: Callable | None, pass_name: str) -> Callable:
        """Return the call to time, after a first run that compiles; without `norm`, a copy of as many bytes."""
        if norm is None:
            source = torch.empty(self.dy.nbytes * MOVED[pass_name] // 2, dtype=torch.int8, device=self.dy.device)
            run = partial(torch.empty_like(source).copy_, source)
        elif "backward" in pass_name:
            leaves = [self.x.detach().requires_grad_(), self.weight.detach().requires_grad_()]
            if "residual" in pass_name:
                leaves.append(self.residual.detach().requires_grad_())
            out = norm(*leaves[:2], leaves[2] if "residual" in pass_name else None)
            out = out if isinstance(out, tuple) else (out,)
            grads = [grad.view(out[0].shape) for grad in (self.dy, self.d_total)][: len(out)]
            run = partial(torch.autograd.grad, out, leaves, grads, retain_graph=True)
        else:
            run = torch.no_grad()(
                partial(norm, self.x, self.weight, self.residual if "residual" in pass_name else None)
            )
        run()
        return run


def measure(
    case: Case, impls: list[str], passes: list[str], watch: Stopwatch, seconds: float, speed: float
) -> list[dict]:
    inputs, rows = Inputs(case, watch.device), []
    for pass_name in passes:
        runs = {}
        for name in impls:
            try:
                backend_name = BACKENDS.get(name, "auto")
                runs[name] = with_backend(
                    backend_name, with_backend(backend_name, inputs.call)(IMPLS[name](), pass_name)
                )
            except Exception as e:  # a peer may raise anything
                print(f"{name} failed, {case}, {pass_name}: {error_text(e)}", flush=True)
        floor = MOVED[pass_name] * inputs.dy.nbytes / speed * 1e3
        for name, ms in zip(runs, watch.medians(list(runs.values()), seconds), strict=True):
            rows.append(case.key() | {"impl": name, "pass": pass_name, "ms": ms, "x": floor / ms})
        print(
            f"{case.name}, {case.m} x {case.n}, {pass_name}: "
            + ", ".join(f"{r['impl']} {r['x']:.3f}" for r in rows if r["pass"] == pass_name),
            flush=True,
        )
    return rows


def plan_of(rows: list[dict]) -> list[tuple[Case, list[str], list[str]]]:
    """Return the cases of these rows, each with its implementations and passes."""
    planned = []
    for key in distinct(rows, "case", "m", "n", "k"):
        case = Case(*key)
        mine = [row for row in rows if row.items() >= case.key().items()]
        impls, passes = ({row[field] for row in mine} for field in ("impl", "pass"))
        planned.append((case, [i for i in IMPLS if i in impls], [name for name in MOVED if name in passes]))
    return planned


def main(arguments: list[str] | None = None) -> int:
    parser = options_parser(__doc__, H200 / "rms_norm.jsonl", seconds=0.1)
    parser.add_argument("--widths", action="store_true", help="measure row lengths from 2048 to 8192 in steps of 512")
    parser.add_argument(
        "--impls", nargs="+", choices=IMPLS, help="implementations; default: all, with --widths alignkit and copy"
    )
    parser.add_argument(
        "--passes", nargs="+", choices=MOVED, default=list(MOVED), help="passes to measure; default: all"
    )
    options = parser.parse_args(arguments)
    impls = options.impls or (["alignkit", "copy"] if options.widths else [i for i in IMPLS if i != "copy"])

    started, device = time.monotonic(), torch.device("cuda")
    watch = Stopwatch(device)
    speed = copy_speed(watch)
    name = run_name()
    info = run_info(
        ops=MEASURED_OPS,
        packages=["liger-kernel", "quack-kernels"],
        seconds=options.seconds,
        copy_tb_s=speed / 1e12,
        backend=backend(device),
    )
    old = read(options.json)
    rows: list[dict] = []
    planned = [(case, impls, options.passes) for case in (widths() if options.widths else cases())]
    if options.only_stale:
        planned = plan_of(stale(old, info["sources"], KEY))
    for case, names, passes in planned:
        if time_is_up(options, started):
            print(f"not measured, --minutes have passed: {case}")
            continue
        rows += measure(case, names, passes, watch, options.seconds, speed)
        write(options.json, merge(old, name, info, rows, KEY))
    print(
        f"{len(rows)} rows, a copy runs at {speed / 1e12:.2f} TB/s, {time.monotonic() - started:.0f} s; {options.json}"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
