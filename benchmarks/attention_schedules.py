"""Launch options of attention in Triton, each timed on cases of benchmarks/attention.py beside FlashAttention 3: decoding, or with
--tiles the forward pass. With --backward the workspaces of the backward pass in CUDA, beside Triton's and cuDNN's. Prints a table,
best first, and for each case the best; it leaves no file.

python benchmarks/attention_schedules.py [--heads 32/8 64/8 28/4] [--warps 2 4 8] [--stages 2 3 4 5] [--rows 16 64] [--share 1 2 3 4]
"""

from __future__ import annotations

import argparse
import itertools
import math
import sys
from dataclasses import replace
from functools import partial

import torch
from attention import Case, Decode, Packed, cases
from lib.options import told
from lib.stopwatch import Stopwatch

from alignkit.ops.attention import _rows_view
from alignkit.ops.attention import triton as kernels

DECODE = ((1, 1024), (1, 8192), (1, 32768), (4, 8192), (16, 8192), (64, 1024), (64, 8192), (256, 1024), (256, 4096))
TILES = ((8, 1024), (4, 4096), (1, 16384))


def decoded(p: Decode, options: dict):
    def call(k, v):
        k_rows, v_rows = (_rows_view("cache", c) for c in (k, v))
        integers, scale = (p.table, p.starts, p.lengths), p.case.head_dim**-0.5
        kernels.few(p.q, k_rows, v_rows, *integers, k.shape[1], scale, p.out, all_of_them=True, **options)

    return p.replayed(call)


def backward(options, watch: Stopwatch, device: torch.device) -> None:
    """Times of the backward pass in µs: cuDNN's, Triton's, and that in CUDA by its workspace; and what is not that pass's
    products, the sums that come before."""
    from alignkit.ops.attention import cuda

    for heads, kv_heads in (map(int, h.split("/")) for h in options.heads):
        for case in cases("backward", quick=False):
            if case.head_dim != options.head_dim:
                continue
            case = replace(case, heads=heads, kv_heads=kv_heads)
            p = Packed(case, device, "backward")
            q, k, v = (t.detach() for t in (p.q, p.k, p.v))
            scale = case.head_dim**-0.5
            out, shift = cuda.forward(q, k, v, p.starts, scale)
            arguments = q, k, v, p.starts, out, shift, p.g, scale
            calls = {} if case.drawn else {"cudnn": p.cudnn()}
            calls["triton"] = partial(kernels.backward, *arguments)
            calls["sums"] = partial(kernels.sums, out, p.g, p.starts)
            calls |= {f"{w} MiB": partial(cuda.backward, *arguments, w << 20) for w in options.workspaces}
            medians = watch.medians([*calls.values()], options.seconds)
            print(
                f"{case}: " + "; ".join(f"{n} {1e3 * t:.1f}" for n, t in zip(calls, medians, strict=True)), flush=True
            )
            del p, q, k, v, out, shift, arguments, calls
            torch.cuda.empty_cache()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--heads", nargs="+", default=["32/8"])
    parser.add_argument("--warps", nargs="+", type=int, default=[2, 4, 8])
    parser.add_argument("--stages", nargs="+", type=int, default=[2, 3, 4, 5])
    parser.add_argument("--rows", nargs="+", type=int, default=[16, 64])
    parser.add_argument("--share", nargs="+", type=int, default=[1, 2, 3, 4], help="programs on a multiprocessor")
    parser.add_argument("--registers", nargs="+", type=int, default=[0], help="of a thread, at most; 0: no bound")
    parser.add_argument("--tiles", action="store_true")
    parser.add_argument("--backward", action="store_true")
    parser.add_argument("--workspaces", nargs="+", type=int, default=[0, 512, 1024, 2304, 9216], help="MiB")
    parser.add_argument("--head-dim", type=int, default=128)
    parser.add_argument("--seconds", type=float, default=0.02)
    options = parser.parse_args()

    watch, device = Stopwatch(torch.device("cuda")), torch.device("cuda")
    if options.backward:
        backward(options, watch, device)
        return 0
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
