"""RMSNorm beside its peers, on one GPU: ``make gpu-rms``; options in RMS_ARGS. ``--widths``: instead, this project's op and a
copy alone, for every length of 2048 to 8192 in steps of 512.

bf16: this project's op by CUDA and by Triton, torch (eager and compiled), Liger, QuACK. A peer that is not installed or fails
is named, and the others go on. The file (benchmarks/results/h200/rms_norm.json) is ``{"runs": {...}, "rows": [...]}``;
``runs``: by the rows' ``run``, what they were made on. A row:

``case``, ``m``, ``n``, ``k``
    What x is: rows, their length, and heads of a token: 1, or in "q" cases those of the queries within a joint tensor of half
    as many more, which Liger and QuACK must copy first.
``impl``, ``pass``
    "forward"; "forward_residual", x + residual rounded first, and returned; "backward", to the gradients of x and the weight;
    "backward_residual", of "forward_residual", whose returned residual has a gradient too.
``ms``
    Median time on the device, cold cache.
``x``
    The share of a copy's speed ("copy_tb_s" of the run; bytes read plus bytes written), for the bytes that must be moved:
    of tensors like x two, four with a residual, three backward. Of "copy" too, which moves as many: at a size that is small
    for the GPU it is no faster.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from lib.options import parser as options_parser
from lib.options import time_is_up, told
from lib.results import H200, backend, made_on, merge, read, run_name, write
from lib.stopwatch import Stopwatch, copy_speed
from torch.nn.functional import rms_norm as torch_norm

from alignkit.ops import rms_norm
from alignkit.runtime import dispatch

KEY = ("case", "m", "n", "k", "impl", "pass")
MOVED = {"forward": 2, "forward_residual": 4, "backward": 3, "backward_residual": 4}
"""Tensors like x, of a pass."""
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


# Implementations: (x, weight, residual or None) -> y, or y and x + residual.


def _ours(x, weight, residual):
    return rms_norm(x, weight, EPS, residual)


def _torch(x, weight, residual):
    if residual is None:
        return torch_norm(x, (x.shape[-1],), weight, EPS)
    total = x + residual
    return torch_norm(total, (x.shape[-1],), weight, EPS), total


def _compiled():
    torch.compiler.reset()  # each shape is compiled for itself, however many there are
    torch._functorch.config.donated_buffer = False  # gradients are taken many times of one forward pass
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
"""Where it is not "auto"."""


def within(backend: str, function: Callable) -> Callable:
    """`function`, called within ``dispatch.use(backend)``."""

    def run(*args):
        with dispatch.use(backend):
            return function(*args)

    return run


class Inputs:
    def __init__(self, case: Case, device: torch.device):
        torch.manual_seed(0)
        shape = (case.m, case.n) if case.k == 1 else (case.m // case.k, case.k * 3 // 2, case.n)

        def drawn() -> torch.Tensor:
            t = torch.randn(*shape, dtype=torch.bfloat16, device=device)
            return t if case.k == 1 else t[:, : case.k]

        self.x, self.residual = drawn(), drawn()
        self.dy, self.d_total = drawn().contiguous(), drawn().contiguous()
        self.weight = torch.rand(case.n, dtype=torch.bfloat16, device=device)

    def call(self, norm: Callable | None, which: str) -> Callable:
        """What is timed, without a norm a copy. It has run once, so that it is compiled and whatever fails has failed."""
        if norm is None:
            source = torch.empty(self.dy.nbytes * MOVED[which] // 2, dtype=torch.int8, device=self.dy.device)
            run = partial(torch.empty_like(source).copy_, source)
        elif "backward" in which:
            leaves = [self.x.detach().requires_grad_(), self.weight.detach().requires_grad_()]
            if "residual" in which:
                leaves.append(self.residual.detach().requires_grad_())
            out = norm(*leaves[:2], leaves[2] if "residual" in which else None)
            out = out if isinstance(out, tuple) else (out,)
            grads = [grad.view(out[0].shape) for grad in (self.dy, self.d_total)][: len(out)]
            run = partial(torch.autograd.grad, out, leaves, grads, retain_graph=True)
        else:
            run = torch.no_grad()(partial(norm, self.x, self.weight, self.residual if "residual" in which else None))
        run()
        return run


def measure(
    case: Case, impls: list[str], passes: list[str], watch: Stopwatch, seconds: float, speed: float
) -> list[dict]:
    inputs, rows = Inputs(case, watch.device), []
    for which in passes:
        runs = {}
        for name in impls:
            try:
                chosen = BACKENDS.get(name, "auto")
                runs[name] = within(chosen, within(chosen, inputs.call)(IMPLS[name](), which))
            except Exception as e:  # a peer may raise whatever it likes
                print(f"{name} failed, {case}, {which}: {told(e)}", flush=True)
        floor = MOVED[which] * inputs.dy.nbytes / speed * 1e3
        for name, ms in zip(runs, watch.medians(list(runs.values()), seconds), strict=True):
            rows.append(case.key() | {"impl": name, "pass": which, "ms": ms, "x": floor / ms})
        print(
            f"{case.name}, {case.m} x {case.n}, {which}: "
            + ", ".join(f"{r['impl']} {r['x']:.3f}" for r in rows if r["pass"] == which),
            flush=True,
        )
    return rows


def main(arguments: list[str] | None = None) -> int:
    parser = options_parser(__doc__, H200 / "rms_norm.json", seconds=0.1)
    parser.add_argument("--widths", action="store_true", help="every length of 2048 to 8192 in steps of 512")
    parser.add_argument("--impls", nargs="+", choices=IMPLS, help="default: all; with --widths alignkit and copy")
    parser.add_argument("--passes", nargs="+", choices=MOVED, default=list(MOVED))
    options = parser.parse_args(arguments)
    impls = options.impls or (["alignkit", "copy"] if options.widths else [i for i in IMPLS if i != "copy"])

    started, device = time.monotonic(), torch.device("cuda")
    watch = Stopwatch(device)
    speed = copy_speed(watch)
    name = run_name()
    info = made_on(
        ops=["rms_norm"],
        packages=["liger-kernel", "quack-kernels"],
        seconds=options.seconds,
        copy_tb_s=speed / 1e12,
        backend=backend(device),
    )
    old = read(options.json)
    rows: list[dict] = []
    for case in widths() if options.widths else cases():
        if time_is_up(options, started):
            print(f"no time for {case}")
            continue
        rows += measure(case, impls, options.passes, watch, options.seconds, speed)
        write(options.json, merge(old, name, info, rows, KEY))
    print(f"{len(rows)} rows, a copy {speed / 1e12:.2f} TB/s, {time.monotonic() - started:.0f} s; {options.json}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
