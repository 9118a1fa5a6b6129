"""Launch options of attention in Triton, each timed on cases of benchmarks/attention.py beside FlashAttention 3: decoding, or with
--tiles the forward pass. Prints a table, best first, and for each case the best; it leaves no file.

python benchmarks/attention_schedules.py [--heads 32/8 64/8 28/4] [--warps 2 4 8] [--stages 2 3 4 5] [--rows 16 64] [--share 1 2 3 4]
python benchmarks/attention_schedules.py --builds a.so b.so

--builds: of csrc/sm90/attention/forward.cu, each a library of its own, made as setup.py makes the kernels
(nvcc ... -shared -cudart static -o a.so forward.cu). Their bytes are compared with Triton's, and the forward pass is timed, all
of them and FlashAttention 3 by turns. Status 1 if a byte differs.

With --before, decoding as it is beside the kernels of another checkout, all bytes compared with theirs; --choices: and with these
options. A line for each case: times of FlashAttention 3 and of both in microseconds, and in brackets over FlashAttention 3's.

python benchmarks/attention_schedules.py --before CHECKOUT [--cases 1x1024 16x8192] [--choices '{"num_stages": 5, "a_multiprocessor": 1}']
"""

from __future__ import annotations

import argparse
import ctypes
import importlib.util
import itertools
import json
import math
import sys
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

DECODE = ((1, 1024), (1, 8192), (1, 32768), (4, 8192), (16, 8192), (64, 1024), (64, 8192), (256, 1024), (256, 4096))
TILES = ((8, 1024), (4, 4096), (1, 16384))


def decoded(p: Decode, options: dict, kernels: ModuleType = kernels):
    def call(k, v):
        k_rows, v_rows = (_rows_view("cache", c) for c in (k, v))
        integers, scale = (p.table, p.starts, p.lengths), p.case.head_dim**-0.5
        kernels.few(p.q, k_rows, v_rows, *integers, k.shape[1], scale, p.out, all_of_them=True, **options)

    return p.replayed(call)


def by_build(path: Path):
    """The forward pass by the kernel of another library: a function of q, k, v, starts and scale."""
    library = ctypes.CDLL(str(path.resolve()))

    def call(function: str, device: torch.device, arguments) -> None:
        stream = ctypes.c_void_p(torch.cuda.current_stream(device).cuda_stream)
        if error := getattr(library, function)(arguments, stream):
            raise RuntimeError(f"{path}: {function}: CUDA error {error}")

    def forward(*inputs):
        with mock.patch.object(cuda.cuda, "call", call):
            return cuda.forward(*inputs)

    return forward


def compare_builds(paths: list[Path], watch: Stopwatch, seconds: float) -> int:
    builds, status = {path.stem: by_build(path) for path in paths}, 0
    odd = Case(40, 30000, drawn=True)  # lengths that no block divides
    for case in [odd, Case(40, 30000, 28, 4, 64, drawn=True), *cases("forward", quick=False)]:
        problem = Packed(case, watch.device)
        inputs = problem.q, problem.k, problem.v, problem.starts, case.head_dim**-0.5
        want = [t.view(torch.uint8) for t in kernels.forward(*inputs)]
        for name, forward in builds.items():
            for _ in range(3):  # a race shows as a difference of two runs
                got = [t.view(torch.uint8) for t in forward(*inputs)]
                if not all(map(torch.equal, got, want)):
                    status = 1
                    print(f"{case}: {name} has other bytes than Triton", flush=True)
                    break
        calls = {name: partial(forward, *inputs) for name, forward in builds.items()}
        try:
            calls = {"fa3": problem.fa3()} | calls
        except Exception as e:  # it may not be there
            print(f"without fa3: {told(e)}", flush=True)
        us = [1e3 * ms for ms in watch.medians([*calls.values()], seconds)]
        told_of = (f"{name} {t:.1f} us {t / us[0]:.3f}" for name, t in zip(calls, us, strict=True))
        print(f"{case}: " + "; ".join(told_of), flush=True)
        del problem, inputs, want, got, calls
        torch.cuda.empty_cache()
    return status


def of_checkout(path: Path) -> ModuleType:
    """The kernels of another checkout's alignkit, beside this one's."""
    folder, name = path / "alignkit", "alignkit_before"
    spec = importlib.util.spec_from_file_location(
        name, folder / "__init__.py", submodule_search_locations=[str(folder)]
    )
    assert spec and spec.loader
    sys.modules[name] = module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return importlib.import_module(f"{name}.ops.attention.triton")


def compare(case: Case, before: ModuleType, choices: list[dict], watch: Stopwatch, seconds: float) -> bool:
    """Prints a line; whether all bytes are those of `before`."""
    problem = Decode(case, watch.device)
    calls = {"before": decoded(problem, {}, before), "now": decoded(problem, {})}
    for c in choices:
        try:
            calls[str(c)] = decoded(problem, c)
        except Exception as e:  # too much shared memory, most likely
            print(f"without {c}: {told(e, 80)}", flush=True)
    results = {}
    for name, call in calls.items():
        for _ in range(3):
            problem.out.fill_(float("nan"))
            call()
            bits = problem.out.view(torch.int16).clone()
            same = torch.equal(bits, results.setdefault(name, bits)) and torch.equal(bits, results["before"])
            if not same:
                print(f"{case}: {name}: OTHER BYTES", flush=True)
                return False
    fa3, *times = watch.medians([problem.fa3(), *calls.values()], seconds)
    each = 1e3 / len(problem.caches)
    told_of = (f"{name} {t * each:.1f} ({t / fa3:.3f})" for name, t in zip(calls, times, strict=True))
    print(f"{case}: fa3 {fa3 * each:.1f}; {'; '.join(told_of)}", flush=True)
    return True


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--heads", nargs="+", default=["32/8"])
    parser.add_argument("--warps", nargs="+", type=int, default=[2, 4, 8])
    parser.add_argument("--stages", nargs="+", type=int, default=[2, 3, 4, 5])
    parser.add_argument("--rows", nargs="+", type=int, default=[16, 64])
    parser.add_argument("--share", nargs="+", type=int, default=[1, 2, 3, 4], help="programs on a multiprocessor")
    parser.add_argument("--registers", nargs="+", type=int, default=[0], help="of a thread, at most; 0: no bound")
    parser.add_argument("--tiles", action="store_true")
    parser.add_argument("--head-dim", type=int, default=128)
    parser.add_argument("--seconds", type=float, default=0.02)
    parser.add_argument("--builds", nargs="+", type=Path, metavar="LIBRARY")
    parser.add_argument("--before", type=Path, help="another checkout")
    parser.add_argument("--cases", nargs="+", default=[f"{b}x{n}" for b, n in DECODE], help="requests x context")
    parser.add_argument("--choices", nargs="+", type=json.loads, default=[], help="launch options in JSON")
    options = parser.parse_args()

    watch, device = Stopwatch(torch.device("cuda")), torch.device("cuda")
    if options.builds:
        return compare_builds(options.builds, watch, options.seconds)
    if options.before:
        before, same = of_checkout(options.before), True
        for heads, size in itertools.product(options.heads, options.cases):
            numbers = (int(n) for n in (*size.split("x"), *heads.split("/"), options.head_dim))
            same &= compare(Case(*numbers), before, options.choices, watch, options.seconds)
            torch.cuda.empty_cache()
        return not same
    for heads, kv_heads in (map(int, h.split("/")) for h in options.heads):
        choices = [
            {"BLOCK_M": m, "num_warps": w, "num_stages": s}
            | ({} if options.tiles else {"a_multiprocessor": a})
            | ({"maxnreg": r} if r else {})
            for m, w, s, a, r in itertools.product(
                options.rows, options.warps, options.stages, [0] if options.tiles else options.share, options.registers
            )
        ]
        seen: dict[int, list[float]] = {i: [] for i in range(len(choices))}
        for batch, context in TILES if options.tiles else DECODE:
            case = Case(batch, context, heads, kv_heads, options.head_dim)
            if options.tiles:
                problem = Packed(case, device)
                inputs = problem.q, problem.k, problem.v, problem.starts, case.head_dim**-0.5
                calls = {i: partial(kernels.forward, *inputs, **c) for i, c in enumerate(choices)}
            else:
                problem = Decode(case, device)
                calls = {}
                for i, c in enumerate(choices):
                    try:
                        calls[i] = decoded(problem, c)
                    except Exception as e:  # too much shared memory, most likely
                        print(f"without {c}: {told(e, 80)}", flush=True)
            peer = problem.fa3()
            copies = len(problem.caches) if isinstance(problem, Decode) else 1
            xs = {}
            for i, call in calls.items():
                try:
                    mine, fa3 = watch.medians([call, peer], options.seconds)
                except Exception as e:
                    print(f"without {choices[i]}: {told(e, 80)}", flush=True)
                    continue
                xs[i] = mine / fa3
                seen[i].append(xs[i])
            best = sorted(xs, key=lambda i: xs[i])[:3]
            print(f"{case}: fa3 {1e3 * fa3 / copies:.1f} us; " + "; ".join(f"{xs[i]:.3f} {choices[i]}" for i in best))
            del problem, calls, peer
            torch.cuda.empty_cache()
        most = max(map(len, seen.values()))
        means = {i: math.exp(sum(map(math.log, x)) / len(x)) for i, x in seen.items() if len(x) == most}
        for i in sorted(means, key=lambda i: means[i])[:12]:
            print(
                f"{heads}/{kv_heads} {means[i]:.3f} {choices[i]} " + " ".join(f"{x:.2f}" for x in seen[i]), flush=True
            )
    return 0


if __name__ == "__main__":
    sys.exit(main())
