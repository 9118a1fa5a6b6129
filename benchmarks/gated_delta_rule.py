"""Time of the gated delta rule's state backward against flash-linear-attention: ``make gpu-gdn``; options in GDN_ARGS.

The peer is flash-linear-attention's Triton kernel, on one GPU, in bf16 with K = V = 128, base-2 gates and states [K,
V]. The result file is benchmarks/results/h200/gdn_bwd_dhu.jsonl (``lib/results.py``). A run has the geometric mean and
the minimum of its rows' ``x``. The fields of a row, which ``tables.py`` reads:

``b``, ``t``, ``h``, ``mode``, ``layout``
    Batch size, tokens, heads; the inputs present: g, gk, or dht with dh0; "dense", or "packed" with the number of
    sequences, which have random lengths.
``ms``, ``fla_ms``, ``x``
    Median GPU times of interleaved runs with a cold cache; their time over ours. None if theirs failed.
``floor_x``
    Our time relative to the memory floor: reading all inputs and writing all outputs once at the bandwidth of a copy
    (``copy_tb_s`` of the run; bytes read plus written). Only the last row of each chunk of gk is read.
"""

from __future__ import annotations

import argparse
import importlib.util
import itertools
import math
import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import torch
from lib.options import error_text, time_is_up
from lib.options import parser as options_parser
from lib.results import H200, backend, merge, read, row_keys, run_info, run_name, stale, with_sources, write
from lib.stopwatch import Stopwatch, copy_speed

from alignkit.ops.gated_delta_rule import CHUNK, chunk_gated_delta_rule_bwd_dhu

MEASURED_OPS = ("gated_delta_rule",)
KEY = ("b", "t", "h", "mode", "layout")
MODES = ("none", "dht+dh0", "g", "gk", "g+gk")
DIM = 128


@dataclass(frozen=True)
class Case:
    b: int
    t: int
    h: int
    mode: str
    sequences: int = 0
    """Number of packed sequences; 0: dense."""

    def key(self) -> dict:
        layout = f"packed {self.sequences}" if self.sequences else "dense"
        return {"b": self.b, "t": self.t, "h": self.h, "mode": self.mode, "layout": layout}

    @classmethod
    def of(cls, row: dict) -> Case:
        """Return the case of a row."""
        sequences = row["layout"].partition("packed ")[2]
        return cls(row["b"], row["t"], row["h"], row["mode"], int(sequences or 0))


def cases(heads: list[int]) -> list[Case]:
    dense = itertools.product(heads, MODES, (1, 2, 4, 8), (2048, 4096, 8192, 16384))
    packed = itertools.product(heads, MODES, ((8192, 20), (8192, 25), (32768, 20), (32768, 25)))
    return [
        *(Case(b, t, h, mode) for h, mode, b, t in dense),
        *(Case(1, t, h, mode, count) for h, mode, (t, count) in packed),
    ]


class Inputs:
    def __init__(self, case: Case, device: torch.device):
        torch.manual_seed(0)
        shape = (case.b, case.t, case.h)

        def rows(scale: float) -> torch.Tensor:
            return torch.randn(*shape, DIM, dtype=torch.bfloat16, device=device).mul_(scale)

        self.rows = [rows(DIM**-0.5), rows(DIM**-0.5), rows(DIM**-0.5 / 2), rows(1.0), rows(1.0)]
        self.gates, self.gk_bytes, self.starts = {}, 0, None
        position = torch.arange(case.t, device=device) % CHUNK
        count, chunks = case.b, case.b * -(-case.t // CHUNK)
        if case.sequences:
            cuts = torch.randperm(case.t - 1)[: case.sequences - 1].sort().values + 1
            edges = [0, *cuts.tolist(), case.t]
            position = torch.cat([torch.arange(b - a, device=device) % CHUNK for a, b in itertools.pairwise(edges)])
            self.starts = torch.tensor(edges, device=device)
            count, chunks = case.sequences, sum(-(-(b - a) // CHUNK) for a, b in itertools.pairwise(edges))
        decay = (position + 1).float() / -100
        if "g" in case.mode.split("+"):
            self.gates["g"] = decay[:, None] * torch.rand(shape, device=device)
        if "gk" in case.mode:
            self.gates["gk"] = torch.rand(*shape, DIM, device=device).mul_(decay[:, None, None])
            self.gk_bytes = 4 * chunks * case.h * DIM
        self.dht = torch.randn(count, case.h, DIM, DIM, device=device) if "dht" in case.mode else None
        self.chunks = chunks if case.sequences else None

    def ours(self):
        return chunk_gated_delta_rule_bwd_dhu(
            *self.rows,
            **self.gates,
            dht=self.dht,
            need_dh0=self.dht is not None,
            cu_seqlens=self.starts,
            num_chunks=self.chunks,
            base2=True,
        )

    def bytes(self) -> int:
        moved = [*self.rows, self.gates.get("g"), self.dht, *self.ours()]
        return sum(t.nbytes for t in moved if t is not None) + self.gk_bytes

    def theirs(self):
        """Return a call of flash-linear-attention's kernel; raise ImportError if it is not installed."""
        from fla.ops.common.chunk_delta_h import chunk_gated_delta_rule_bwd_dhu as function
        from fla.ops.utils import prepare_chunk_indices, prepare_chunk_offsets

        packed = {}
        if self.starts is not None:
            packed = {
                "cu_seqlens": self.starts,
                "chunk_indices": prepare_chunk_indices(self.starts, CHUNK),
                "chunk_offsets": prepare_chunk_offsets(self.starts, CHUNK),
            }
        return lambda: function(*self.rows, **self.gates, h0=self.dht, dht=self.dht, scale=DIM**-0.5, **packed)


def compile_peer(remaining: list[Case]) -> None:
    """Compile flash-linear-attention's kernels, one variant per number of heads and mode, in concurrent processes.

    The processes' autotuning results are discarded, because concurrent timings are unreliable.
    """
    if importlib.util.find_spec("fla") is None:
        return
    variants = sorted({(case.h, case.mode, 3 if case.sequences else 0) for case in remaining})
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        list(
            pool.map(
                lambda variant: subprocess.run(
                    [sys.executable, __file__, "--compile", *map(str, variant)], check=False
                ),
                variants,
            )
        )


def measure(case: Case, watch: Stopwatch, seconds: float, speed: float) -> dict:
    inputs = Inputs(case, watch.device)
    floor = inputs.bytes() / speed * 1e3
    runs = [inputs.ours]
    try:
        theirs = inputs.theirs()
        theirs()
        runs.append(theirs)
    except Exception as e:  # a peer may raise anything
        print(f"flash-linear-attention failed, {case.key()}: {error_text(e)}", flush=True)
    ms, *fla = watch.medians(runs, seconds)
    return case.key() | {
        "ms": ms,
        "fla_ms": fla[0] if fla else None,
        "x": fla[0] / ms if fla else None,
        "floor_x": ms / floor,
    }


def summary(rows: list[dict]) -> dict:
    ratios = [row["x"] for row in rows if row["x"] is not None]
    if not ratios:
        return {}
    return {"x_mean": math.exp(sum(map(math.log, ratios)) / len(ratios)), "x_least": min(ratios)}


def main(arguments: list[str] | None = None) -> int:
    parser = options_parser(__doc__, H200 / "gdn_bwd_dhu.jsonl", seconds=0.2, resume=True)
    parser.add_argument("--heads", nargs="+", type=int, default=[16, 32, 64], help="numbers of heads")
    parser.add_argument(
        "--compile", nargs=3, help=argparse.SUPPRESS
    )  # heads, mode, sequences of one call of the peer's kernel
    options = parser.parse_args(arguments)

    started, device = time.monotonic(), torch.device("cuda")
    if options.compile:
        heads, mode, sequences = options.compile
        Inputs(Case(1, 8 * CHUNK, int(heads), mode, int(sequences)), device).theirs()()
        return 0
    watch = Stopwatch(device)
    speed = copy_speed(watch)
    name = run_name()
    info = run_info(
        ops=MEASURED_OPS,
        packages=["fla-core"],
        seconds=options.seconds,
        copy_tb_s=speed / 1e12,
        backend=backend(device),
    )
    old = read(options.json)
    measured = row_keys(with_sources(old, info["sources"]), KEY) if options.resume else set()
    remaining = [case for case in cases(options.heads) if tuple(case.key().values()) not in measured]
    if options.only_stale:
        remaining = [Case.of(row) for row in stale(old, info["sources"], KEY)]
    compile_peer(remaining)
    rows: list[dict] = []
    for case in remaining:
        if time_is_up(options, started):
            break
        rows.append(measure(case, watch, options.seconds, speed))
        print({k: round(v, 4) if isinstance(v, float) else v for k, v in rows[-1].items()}, flush=True)
        write(options.json, merge(old, name, info | summary(rows), rows, KEY))
    print(f"{len(rows)} of {len(remaining)} rows, {summary(rows)}; {options.json}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
