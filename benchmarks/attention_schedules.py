"""Attention computed in other ways, beside what it is now and FlashAttention 3: bytes are compared, times are taken by turns.

Decoding, by the kernels of other checkouts too, and with other launch options (arguments of `few` in JSON):

python benchmarks/attention_schedules.py --checkouts CHECKOUT ... --choices '{"num_warps": 2}' '{"num_warps": 8, "num_stages": 3}'
  [--cases 1x1024 16x8192] [--heads 32/8 28/4]

The forward pass, by builds of csrc/sm90/attention/forward.cu, each a library of its own, made as setup.py makes the kernels (nvcc ...
-shared -cudart static -o a.so forward.cu), and by Triton:

python benchmarks/attention_schedules.py --builds a.so b.so

A line for each case: microseconds, and in brackets over FlashAttention 3's; then geometric means. Status 1 if a byte differs. It
leaves no file.
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
from lib.options import told
from lib.stopwatch import Stopwatch

from alignkit.ops.attention import _rows_view, cuda
from alignkit.ops.attention import triton as kernels

DECODE = [(1, 1024), (1, 8192), (1, 32768), (4, 8192), (16, 8192), (64, 1024), (64, 8192), (256, 1024), (256, 4096)]
ODD = [Case(40, 30000, drawn=True), Case(40, 30000, 28, 4, 64, drawn=True)]
"""Of lengths that no block divides."""
RUNS = 3
"""Of each way, whose bytes are compared: a race shows as a difference of two."""
Ways = dict[str, Callable[[], tuple[torch.Tensor, ...]]]
"""Calls on one problem, by name, with their results. The bytes of the first one's are right."""


def of_checkout(path: Path) -> ModuleType:
    """The kernels of another checkout's alignkit, beside this one's."""
    folder, name = path / "alignkit", f"alignkit_{path.name}"
    spec = importlib.util.spec_from_file_location(
        name, folder / "__init__.py", submodule_search_locations=[str(folder)]
    )
    assert spec and spec.loader
    sys.modules[name] = module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return importlib.import_module(f"{name}.ops.attention.triton")


def decoding(p: Decode, others: dict[str, ModuleType], choices: list[dict]) -> Ways:
    def way(of: ModuleType, options: dict):
        def call(k, v):
            k_rows, v_rows = (_rows_view("cache", c) for c in (k, v))
            integers, scale = (p.table, p.starts, p.lengths), p.case.head_dim**-0.5
            of.few(p.q, k_rows, v_rows, *integers, k.shape[1], scale, p.out, all_of_them=True, **options)

        replay = p.replayed(call)

        def run():
            replay()
            return (p.out,)

        return run

    ways = {name: way(of, {}) for name, of in ({"now": kernels} | others).items()}
    for options in choices:
        try:
            ways[json.dumps(options)] = way(kernels, options)
        except Exception as e:  # too much shared memory, most likely
            print(f"without {options}: {told(e, 80)}", flush=True)
    return ways


def by_build(path: Path) -> Callable:
    """`cuda.forward` by the kernel of another library."""
    library = ctypes.CDLL(str(path.resolve()))

    def call(function: str, device: torch.device, arguments) -> None:
        stream = ctypes.c_void_p(torch.cuda.current_stream(device).cuda_stream)
        if error := getattr(library, function)(arguments, stream):
            raise RuntimeError(f"{path}: {function}: CUDA error {error}")

    def forward(*inputs):
        with mock.patch.object(cuda.cuda, "call", call):
            return cuda.forward(*inputs)

    return forward


def forward(p: Packed, builds: dict[str, Callable]) -> Ways:
    inputs = p.q, p.k, p.v, p.starts, p.case.head_dim**-0.5
    return {name: partial(call, *inputs) for name, call in ({"triton": kernels.forward} | builds).items()}


def differ(p: Decode | Packed, ways: Ways) -> list[str]:
    """Names of those that leave other bytes than the first."""
    want, others = None, []
    for name, way in ways.items():
        for _ in range(RUNS):
            if isinstance(p, Decode):
                p.out.fill_(float("nan"))
            got = [t.contiguous().view(torch.uint8).clone() for t in way()]
            want = want or got
            if not all(map(torch.equal, got, want)):
                others.append(name)
                break
    return others


def times(p: Decode | Packed, ways: Ways, watch: Stopwatch, seconds: float) -> dict[str, float]:
    """Microseconds of each, and of FlashAttention 3 where that is there."""
    calls: dict[str, Callable] = dict(ways)
    try:
        calls["fa3"] = p.fa3()
    except Exception as e:
        print(f"without fa3: {told(e)}", flush=True)
    each = len(p.caches) if isinstance(p, Decode) else 1
    return {n: 1e3 * ms / each for n, ms in zip(calls, watch.medians([*calls.values()], seconds), strict=True)}


def numbers(text: str) -> tuple[int, ...]:
    return tuple(map(int, re.split("[x/]", text)))


def chosen(options: argparse.Namespace) -> list[Case]:
    if options.builds and not options.cases:
        return [*ODD, *cases("forward", quick=False)]
    sizes = options.cases or DECODE
    return [Case(*size, *heads, options.head_dim) for heads in options.heads for size in sizes]


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--checkouts", nargs="+", type=Path, default=[], help="others, each named after its folder")
    parser.add_argument("--choices", nargs="+", type=json.loads, default=[], help="launch options")
    parser.add_argument("--builds", nargs="+", type=Path, default=[], help="libraries")
    parser.add_argument("--cases", nargs="+", type=numbers, help="requests x context, or sequences x length")
    parser.add_argument("--heads", nargs="+", type=numbers, default=[(32, 8)], help="of queries/of keys")
    parser.add_argument("--head-dim", type=int, default=128)
    parser.add_argument("--seconds", type=float, default=0.02, help="of each measurement")
    options = parser.parse_args(arguments)
    if options.builds and (options.checkouts or options.choices):
        parser.error("--builds is of the forward pass, --checkouts and --choices are of decoding")

    watch, status = Stopwatch(torch.device("cuda")), 0
    builds = {path.stem: by_build(path) for path in options.builds}
    others = {path.name: of_checkout(path) for path in options.checkouts}
    ratios: dict[str, list[float]] = {}
    for case in chosen(options):
        if builds:
            problem = Packed(case, watch.device)
            ways = forward(problem, builds)
        else:
            problem = Decode(case, watch.device)
            ways = decoding(problem, others, options.choices)
        for name in differ(problem, ways):
            status = 1
            print(f"{case}: {name} has OTHER BYTES than {next(iter(ways))}", flush=True)
        us = times(problem, ways, watch, options.seconds)
        fa3 = us.pop("fa3", float("nan"))
        print(f"{case}: fa3 {fa3:.1f}; " + "; ".join(f"{n} {t:.1f} ({t / fa3:.3f})" for n, t in us.items()), flush=True)
        for name, t in us.items():
            ratios.setdefault(name, []).append(t / fa3)
        del problem, ways
        torch.cuda.empty_cache()
    for name, xs in ratios.items():
        print(f"{name}: over fa3 {statistics.geometric_mean(xs):.3f} in {len(xs)} cases")
    return status


if __name__ == "__main__":
    sys.exit(main())
