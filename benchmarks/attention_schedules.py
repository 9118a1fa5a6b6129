"""Comparison of attention schedules with the current one: bytes, and times relative to FlashAttention 3.

No Makefile target runs this tool, and it writes no file. It measures decode, or with --builds the forward pass.

Decode, with the kernels of other checkouts and with other launch options (arguments of `decode` as JSON):

python benchmarks/attention_schedules.py --checkouts CHECKOUT ...
  --choices '{"num_warps": 2}' '{"num_warps": 8, "num_stages": 3}' [--cases 1x1024 16x8192] [--heads 32/8 28/4]

The forward pass, with Triton and with builds of csrc/sm90/attention/forward.cu. A build is a shared library, compiled
with setup.py's options (nvcc ... -shared -cudart static -o a.so forward.cu):

python benchmarks/attention_schedules.py --builds a.so b.so

The output has a line per case: microseconds, and in parentheses the ratio to FlashAttention 3. Geometric means follow.
The candidates run in turn. The exit status is 1 if a byte differs.
"""

from __future__ import annotations

import argparse
import ctypes
import importlib.util
import json
import re
import statistics
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import ModuleType
from unittest import mock

import torch
from attention import Case, Decode, Packed, cases
from lib.options import error_text
from lib.stopwatch import Stopwatch

from alignkit.ops.attention import _rows_view, cuda_backend
from alignkit.ops.attention import triton_backend as kernels
from alignkit.runtime import built

DECODE = [(1, 1024), (1, 8192), (1, 32768), (4, 8192), (16, 8192), (64, 1024), (64, 8192), (256, 1024), (256, 4096)]
ODD = [Case(40, 30000, drawn=True), Case(40, 30000, 28, 4, 64, drawn=True)]
"""Sequences whose lengths are no multiples of a tile."""
RUNS = 3
"""Runs of each candidate whose bytes are compared; a race shows as a difference between two runs."""
Candidates = dict[str, Callable[[], tuple[torch.Tensor, ...]]]
"""Calls on one problem, by name, that return their results; the first is the reference."""


def kernels_of_checkout(path: Path) -> ModuleType:
    """Import the kernels of another checkout's alignkit under a name of its own."""
    folder, name = path / "alignkit", f"alignkit_{path.name}"
    spec = importlib.util.spec_from_file_location(
        name, folder / "__init__.py", submodule_search_locations=[str(folder)]
    )
    assert spec and spec.loader
    sys.modules[name] = module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return importlib.import_module(f"{name}.ops.attention.triton_backend")


def decode_candidates(p: Decode, others: dict[str, ModuleType], choices: list[dict]) -> Candidates:
    def candidate(module: ModuleType, options: dict):
        def call(k, v):
            k_rows, v_rows = (_rows_view("cache", c) for c in (k, v))
            integers, scale = (p.table, p.starts, p.lengths), p.case.head_dim**-0.5
            module.decode(p.q, k_rows, v_rows, *integers, k.shape[1], scale, p.out, decode_all=True, **options)

        replay = p.replayed(call)

        def run():
            replay()
            return (p.out,)

        return run

    found = {name: candidate(module, {}) for name, module in ({"now": kernels} | others).items()}
    for options in choices:
        try:
            found[json.dumps(options)] = candidate(kernels, options)
        except Exception as e:  # mostly too much shared memory
            print(f"skipped {options}: {error_text(e, 80)}", flush=True)
    return found


def forward_of_build(path: Path) -> Callable:
    """Return `cuda_backend.forward` with the kernel of another library."""
    library = built.Library(path.resolve())

    def call(function: str, device: torch.device, *arguments) -> None:
        stream = ctypes.c_void_p(torch.cuda.current_stream(device).cuda_stream)
        if error := getattr(library, function)(*arguments, stream):
            raise RuntimeError(f"{path}: {function}: failed with cudaError_t {error}")

    def forward(*inputs):
        with mock.patch.object(cuda_backend.cuda, "call", call):
            return cuda_backend.forward(*inputs)

    return forward


def forward_candidates(p: Packed, builds: dict[str, Callable]) -> Candidates:
    inputs = p.q, p.k, p.v, p.starts, p.case.head_dim**-0.5
    return {name: partial(call, *inputs) for name, call in ({"triton": kernels.forward} | builds).items()}


def different(p: Decode | Packed, candidates: Candidates) -> list[str]:
    """Return the names of candidates whose bytes differ from the first one's."""
    want, others = None, []
    for name, run in candidates.items():
        for _ in range(RUNS):
            if isinstance(p, Decode):
                p.out.fill_(float("nan"))
            got = [t.contiguous().view(torch.uint8).clone() for t in run()]
            want = want or got
            if not all(map(torch.equal, got, want)):
                others.append(name)
                break
    return others


def times(p: Decode | Packed, candidates: Candidates, watch: Stopwatch, seconds: float) -> dict[str, float]:
    """Return the microseconds of each candidate, and of FlashAttention 3 if installed."""
    calls: dict[str, Callable] = dict(candidates)
    try:
        calls["fa3"] = p.fa3()
    except Exception as e:
        print(f"skipped fa3: {error_text(e)}", flush=True)
    each = len(p.caches) if isinstance(p, Decode) else 1
    return {n: 1e3 * ms / each for n, ms in zip(calls, watch.medians([*calls.values()], seconds), strict=True)}


def numbers(text: str) -> tuple[int, ...]:
    """Parse sizes such as ``16x8192`` or ``32/8``."""
    try:
        return tuple(map(int, re.split("[x/]", text)))
    except ValueError:
        raise argparse.ArgumentTypeError(f"must be two numbers, such as 16x8192 or 32/8, got {text!r}") from None


def selected_cases(options: argparse.Namespace) -> list[Case]:
    if options.builds and not options.cases:
        return [*ODD, *cases("forward", quick=False)]
    sizes = options.cases or DECODE
    return [Case(*size, *heads, options.head_dim) for heads in options.heads for size in sizes]


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument(
        "--checkouts", nargs="+", type=Path, default=[], help="other checkouts, named after their folders"
    )
    parser.add_argument(
        "--choices", nargs="+", type=json.loads, default=[], help="launch options of decode, as JSON objects"
    )
    parser.add_argument("--builds", nargs="+", type=Path, default=[], help="shared libraries of the forward kernel")
    parser.add_argument(
        "--cases",
        nargs="+",
        type=numbers,
        help="requests x context, or with --builds sequences x length, such as 16x8192",
    )
    parser.add_argument(
        "--heads", nargs="+", type=numbers, default=[(32, 8)], help="query heads/KV heads, such as 32/8"
    )
    parser.add_argument("--head-dim", type=int, default=128, help="head dimension")
    parser.add_argument("--seconds", type=float, default=0.02, help="duration of each measurement, in seconds")
    options = parser.parse_args(arguments)
    if options.builds and (options.checkouts or options.choices):
        other = "--checkouts" if options.checkouts else "--choices"
        parser.error(f"--builds: cannot be combined with {other}, which measures decode; --builds measures the forward")

    watch, status = Stopwatch(torch.device("cuda")), 0
    builds = {path.stem: forward_of_build(path) for path in options.builds}
    others = {path.name: kernels_of_checkout(path) for path in options.checkouts}
    ratios: dict[str, list[float]] = {}
    for case in selected_cases(options):
        if builds:
            problem = Packed(case, watch.device)
            candidates = forward_candidates(problem, builds)
        else:
            problem = Decode(case, watch.device)
            candidates = decode_candidates(problem, others, options.choices)
        for name in different(problem, candidates):
            status = 1
            print(f"{case}: {name} DIFFERS from {next(iter(candidates))}", flush=True)
        us = times(problem, candidates, watch, options.seconds)
        fa3 = us.pop("fa3", float("nan"))
        print(f"{case}: fa3 {fa3:.1f}; " + "; ".join(f"{n} {t:.1f} ({t / fa3:.3f})" for n, t in us.items()), flush=True)
        for name, t in us.items():
            ratios.setdefault(name, []).append(t / fa3)
        del problem, candidates
        torch.cuda.empty_cache()
    for name, xs in ratios.items():
        print(f"{name}: {statistics.geometric_mean(xs):.3f} of fa3 (geometric mean), {len(xs)} cases")
    return status


if __name__ == "__main__":
    sys.exit(main())
