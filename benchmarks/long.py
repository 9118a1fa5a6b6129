"""Prefill and decode speed of engines by requests and prompt length: ``make gpu-long``; options in LONG_ARGS.

A cell is a number of requests and their prompt length; all requests start together, in vLLM's default mode
(torch.compile, CUDA graphs). Each engine starts once per tensor-parallel size and measures all cells. If a GPU has room
for two engines, two run concurrently with interleaved repeats. vLLM generates dummy weights. Sizes and engine
names are defined in ``cost.py``.

Prefill is the time of the prompts with one sampled token each. Decode repeats the same prompts, which hit the prefix
cache except for their last block. The decode time is the time of `out` tokens minus the time of an eighth of them, so
it contains decode steps alone. Values are medians of three repeats, and of more for cells with few tokens, whose steps
are CPU-bound and vary more.

The result file is benchmarks/results/h200/long.jsonl, or moe.jsonl for MoE models (``lib/results.py``). A run has the
engines' startup times. The fields of a row, which ``tables.py`` reads:

``size``, ``engine``, ``tp``, ``requests``, ``prompt``, ``out``
    Model, engine, tensor-parallel size, and the cell.
``prefill_s``, ``decode_tok_s``
    Seconds of prefill; decoded tokens per second, null if the difference is lost in noise.
``x_prefill``, ``x_decode``
    Both relative to stock's in the same run.
``prefill_seconds``, ``decode_seconds``
    Seconds of each repeat.
``tok_s``, ``x``
    MoE models alone: copies of ``decode_tok_s`` and ``x_decode``.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import torch
from cost import SIZES, Bench
from lib.models import MOE_SIZES, model_bytes
from lib.options import parser as options_parser
from lib.results import H200, distinct, merge, read, sources, stale, write

from alignkit.jobs.terminal import interrupted_by_sigterm
from alignkit.runtime.machine import gpus, no_room

ENGINES = ("stock", "aligned", "batch_invariant")
KEY = ("size", "engine", "tp", "requests", "prompt")
"""Fields that identify a stored row; a new measurement replaces the row with equal fields."""
WARM_UP = {"prompt": 16, "max_tokens": 8}
"""Warm-up of a cell: one prompt of full length, the others of this length, and tokens to sample per prompt."""
LARGEST_GRAPH = 512
"""vLLM's default largest CUDA graph capture size."""
OVERHEAD = 8 << 30
"""GPU memory of an engine in addition to weights and cache, in bytes: activations, CUDA graphs, CUDA context."""
REPEAT_LIMITS = 240_000, 5
"""Prompt tokens that a cell's repeats should have in total, and the largest factor by which --repeats is raised."""


class Cell(NamedTuple):
    """Concurrent requests of one prompt length."""

    requests: int
    prompt: int
    """Tokens of a prompt."""
    out: int
    """Tokens to sample per prompt."""

    @property
    def first(self) -> int:
        """Tokens per prompt of the shorter decode call; decode speed is the difference to the call of `out` tokens."""
        return 1 + self.out // 8

    def __str__(self) -> str:
        return f"{self.requests} x {self.prompt}"

    def cases(self, repeats: int) -> list[dict]:
        """Return the cases of a ``cost_rollout`` job, with at least `repeats` repeats."""
        prompt_tokens, factor = REPEAT_LIMITS
        repeats = max(repeats, min(factor * repeats, prompt_tokens // (self.requests * self.prompt)))
        case = {"name": str(self), "lengths": [self.prompt] * self.requests, "profile": None, "repeats": repeats}
        timed = ((1, False), (self.first, True), (self.out, True))
        return [case | {"max_tokens": max_tokens, "cached": cached} for max_tokens, cached in timed]

    def warm_up(self) -> dict:
        lengths = [self.prompt, *[min(self.prompt, WARM_UP["prompt"])] * (self.requests - 1)]
        return {"lengths": lengths, "max_tokens": min(self.out, WARM_UP["max_tokens"])}


OUT = 129
"""Tokens to sample per prompt in the default cells."""
DENSE = tuple(Cell(*cell, OUT) for cell in ((1, 30000), (8, 30000), (32, 8000), (64, 512), (1, 128)))
EXPERTS = tuple(Cell(requests, 512, OUT) for requests in (1, 16, 64, 256))
"""Default cells of dense models (DENSE) and of MoE models (EXPERTS)."""


def side_by_side(size: dict, cells: list[Cell], tp: int) -> int:
    """Return the number of engines of `tp` ranks that fit on a GPU, at most two."""
    if not torch.cuda.is_available():
        return 1
    positions = max(cell.requests * (cell.prompt + cell.out) for cell in cells) * 5 // 4
    engine = model_bytes(size, positions) / tp + OVERHEAD
    return 2 if 2 * engine <= torch.cuda.get_device_properties(0).total_memory else 1


def captures(cells: list[Cell]) -> list[int]:
    """Return the CUDA graph capture sizes that the cells use, in decode and in prefill of short prompts.

    vLLM's other default sizes are omitted, because their capture would take long.
    """
    steps = {rows for cell in cells for rows in (cell.requests, cell.requests * cell.prompt)}
    return sorted(rows for rows in steps if rows <= LARGEST_GRAPH)


def rows(results: list[dict], cells: list[Cell], size: str) -> list[dict]:
    """Return rows from engines' results, which include `tp`; a cell that an engine did not reach has no row."""
    found = []
    for result in results:
        for cell in cells:
            seconds = {(c["cached"], c["max_tokens"]): c["seconds"] for c in result["cases"] if c["name"] == str(cell)}
            if (prefill := seconds.get((False, 1))) is None:
                continue
            row = {"size": size, "engine": result["engine"], "tp": result["tp"], **cell._asdict()}
            row |= {"prefill_s": statistics.median(prefill), "decode_tok_s": None, "x_prefill": None, "x_decode": None}
            row |= {"prefill_seconds": prefill, "decode_seconds": []}
            if (whole := seconds.get((True, cell.out))) is not None:
                first = statistics.median(seconds[True, cell.first])
                row["decode_seconds"] = [s - first for s in whole]
                if (decode := statistics.median(row["decode_seconds"])) > 0:
                    row["decode_tok_s"] = cell.requests * (cell.out - cell.first) / decode
            found.append(row)
    stock = {(r["tp"], r["requests"], r["prompt"]): r for r in found if r["engine"] == "stock"}
    for row in found:
        base = stock.get((row["tp"], row["requests"], row["prompt"]), {})
        for field, x in (("prefill_s", "x_prefill"), ("decode_tok_s", "x_decode")):
            row[x] = row[field] / base[field] if row[field] and base.get(field) else None
        if size in MOE_SIZES:
            row |= {"tok_s": row["decode_tok_s"], "x": row["x_decode"]}
    return found


def line(row: dict) -> str:
    """Return a line of output for a row."""
    prefill, decode = f"{row['prefill_s']:.3f} s", "lost in noise" if row["decode_seconds"] else "none"
    if row["decode_tok_s"]:
        decode = f"{row['decode_tok_s']:.1f} tokens/s"
    shares = [f" ({row[x]:.3f} of stock)" if row[x] else "" for x in ("x_prefill", "x_decode")]
    return f"  {row['requests']:>3} x {row['prompt']:<6} prefill {prefill}{shares[0]}, decode {decode}{shares[1]}"


def _cell(text: str) -> Cell:
    try:
        return Cell(*map(int, text.split("x")))
    except (TypeError, ValueError):
        raise argparse.ArgumentTypeError(f"must be REQUESTSxPROMPTxTOKENS, such as 8x30000x65, got {text!r}") from None


def main(arguments: list[str] | None = None) -> int:
    """Return the exit status: 2 if an engine failed, else 0."""
    parser = options_parser(__doc__, None, json="result file; default: long.jsonl, or moe.jsonl for an MoE model")
    parser.add_argument(
        "--engines", nargs="+", choices=ENGINES, default=list(ENGINES), help="engines to measure; default: all"
    )
    parser.add_argument("--size", choices=SIZES, default="qwen3-8b", help="model size")
    parser.add_argument(
        "--tp", nargs="+", type=int, help="tensor-parallel sizes; default: 1, and 2 if there are two GPUs"
    )
    parser.add_argument(
        "--cells",
        nargs="+",
        type=_cell,
        help="requests, prompt tokens, tokens to sample per prompt, such as 8x30000x65",
    )
    parser.add_argument("--repeats", type=int, default=3, help="smallest number of repeats; the median counts")
    parser.add_argument(
        "--side-by-side", type=int, choices=(1, 2), help="concurrent engines on a GPU; default: 2 if both fit"
    )
    parser.add_argument(
        "--eager",
        action="store_true",
        default=not torch.cuda.is_available(),
        help="run vLLM without torch.compile and CUDA graphs",
    )
    parser.add_argument("--timeout", type=float, default=600.0, help="time limit of concurrent engines, in seconds")
    parser.add_argument("--out", type=Path, default=Path("check-results/long"), help="folder for logs")
    options = parser.parse_args(arguments)
    if options.only_stale:
        return max((measure(each, keep) for each, keep in stale_commands(options)), default=0)
    ranks = options.tp or [1, *([2] if len(gpus()) > 1 else [])]
    for tp in ranks:
        if problem := no_room(tp):
            parser.error(f"--tp: {problem}")
    options.tp = ranks
    return measure(options)


def result_file(options: argparse.Namespace) -> Path:
    return options.json or H200 / ("moe.jsonl" if options.size in MOE_SIZES else "long.jsonl")


def stale_commands(options: argparse.Namespace) -> Iterator[tuple[argparse.Namespace, set[tuple]]]:
    """Yield the options of each model size and number of ranks that has stale rows, with the keys of these rows.

    Stock runs too, because ratios are relative to stock's in the same run.
    """
    for path in [options.json] if options.json else [H200 / "long.jsonl", H200 / "moe.jsonl"]:
        rows = stale(read(path), sources(), KEY)
        for size, tp in distinct(rows, "size", "tp"):
            mine = [row for row in rows if (row["size"], row["tp"]) == (size, tp)]
            engines = {"stock", *(row["engine"] for row in mine)}
            chosen = {
                "json": path,
                "size": size,
                "tp": [tp],
                "cells": [Cell(*cell) for cell in distinct(mine, "requests", "prompt", "out")],
                "engines": [engine for engine in ENGINES if engine in engines],
            }
            if no_room(tp):
                print(f"not measured, {no_room(tp)}: {size}, TP {tp}")
                continue
            yield argparse.Namespace(**vars(options) | chosen), set(distinct(mine, *KEY))


def measure(options: argparse.Namespace, keep: set[tuple] | None = None) -> int:
    """Run the engines and merge their rows, or those with the keys `keep`; return the exit status."""
    cells = options.cells or list(EXPERTS if options.size in MOE_SIZES else DENSE)
    path, ranks = result_file(options), options.tp

    started = time.monotonic()
    bench = Bench(options, cells=[list(cell) for cell in cells])
    spec = {
        "model": str(bench.prepare(weights=False)),
        "load_format": "dummy",
        "eager": options.eager,
        "cases": [case for cell in cells for case in cell.cases(options.repeats)],
        "warm_up": [cell.warm_up() for cell in cells],
        "repeats": options.repeats,
        "prefix_caching": True,
        "captures": captures(cells),
    }
    results = []
    with interrupted_by_sigterm():
        for tp in ranks:
            at_once = options.side_by_side or side_by_side(SIZES[options.size], cells, tp)
            specs = {f"{engine}-tp{tp}": spec | {"engine": engine, "tp": tp} for engine in options.engines}
            for found in bench.rollout_engines(specs, at_once, f"{{}} TP {tp}".format):
                results += [result | {"tp": tp} for result in found]
                all_rows = rows(results, cells, options.size)
                kept = [row for row in all_rows if keep is None or tuple(row[k] for k in KEY) in keep]
                if kept:
                    write(path, merge(read(path), bench.name, bench.info, kept, KEY))
                for result in found:
                    mine = [row for row in all_rows if (row["engine"], row["tp"]) == (result["engine"], tp)]
                    print(f"{result['engine']}: startup took {result['start_seconds']} s", *map(line, mine), sep="\n")
                sys.stdout.flush()
    for name in bench.failures:
        print(f"failed: {name}; log in {options.out / 'logs'}")
    print(f"{time.monotonic() - started:.0f} s; {path}")
    return 2 if bench.failures else 0


if __name__ == "__main__":
    sys.exit(main())
