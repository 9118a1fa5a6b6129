"""Prefill and decoding of whole engines, by requests and length of the prompts: ``make gpu-long``; options in LONG_ARGS.

A cell is so many requests with prompts of so many tokens, in vLLM's default mode (torch.compile, CUDA graphs), all of
them there when it begins. Each engine is started once for each number of tensor-parallel ranks and measures all cells.
Where a GPU has room for two, an engine and the next are side by side, measured by turns; else one ends before the next
one starts. Weights are made up by vLLM; engines and sizes are those of ``cost.py``.

Prefill is the time of the prompts with one token sampled for each. Then the same prompts come again: they are in the
prefix cache but for their last block, so what is timed is `out` tokens for each and, again, the first eighth of them. The
difference is of decoding steps alone: not of two long prefills, nor of a call without a step of decoding, whose one step
waits for the host as others do not. Medians of three repeats, and of more where the tokens are few: such steps wait for the
host, whose speed changes.

benchmarks/results/h200/long.json gets ``rows``: ``{"size", "engine", "tp", "requests", "prompt", "out", "prefill_s",
"decode_tok_s", "x_prefill", "x_decode", "prefill_seconds", "decode_seconds"}``: seconds of prefill, and tokens decoded
a second, null where that difference is lost in noise; both over stock's of the same run; then each repeat's seconds.
``runs``: by the rows' ``run``, what they were made on, and what an engine's start took. Mixtures of experts go to
moe.json, with ``tok_s`` and ``x``, the same as ``decode_tok_s`` and ``x_decode``.
"""

from __future__ import annotations

import statistics
import sys
import time
from pathlib import Path
from typing import NamedTuple

import torch
from cost import SIZES, Bench
from lib.models import MIXTURES, held_bytes
from lib.options import parser as options_parser
from lib.results import H200, merge, read, write

from alignkit.check.machine import gpus, no_room
from alignkit.check.terminal import interrupted_by_sigterm

ENGINES = ("stock", "aligned", "batch_invariant")
KEY = ("size", "engine", "tp", "requests", "prompt")
WARM_UP = {"prompt": 16, "max_tokens": 8}
"""Of a cell, before anything is timed: one prompt as long as it has, the others so short, and so many tokens for each."""
LARGEST_GRAPH = 512
"""Rows of vLLM's largest CUDA graph, by default."""
BESIDE = 8 << 30
"""Bytes of an engine on each GPU beside weights and cache: activations, graphs, what the driver takes."""
REPEATED = 240_000, 5
"""Tokens that are measured of each cell at least, unless that takes so many times as many repeats."""


class Cell(NamedTuple):
    """So many requests of so many tokens; out: tokens that are sampled for each."""

    requests: int
    prompt: int
    out: int

    @property
    def first(self) -> int:
        """Tokens for each in the shorter of the two calls whose difference is decoding."""
        return 1 + self.out // 8

    def __str__(self) -> str:
        return f"{self.requests} x {self.prompt}"

    def cases(self, repeats: int) -> list[dict]:
        """Of a job of ``cost_rollout``. repeats: at least."""
        tokens, times = REPEATED
        repeats = max(repeats, min(times * repeats, tokens // (self.requests * self.prompt)))
        case = {"name": str(self), "lengths": [self.prompt] * self.requests, "profile": None, "repeats": repeats}
        timed = ((1, False), (self.first, True), (self.out, True))
        return [case | {"max_tokens": tokens, "cached": cached} for tokens, cached in timed]

    def warm_up(self) -> dict:
        lengths = [self.prompt, *[min(self.prompt, WARM_UP["prompt"])] * (self.requests - 1)]
        return {"lengths": lengths, "max_tokens": min(self.out, WARM_UP["max_tokens"])}


OUT = 129
DENSE = tuple(Cell(*cell, OUT) for cell in ((1, 30000), (8, 30000), (32, 8000), (64, 512), (1, 128)))
EXPERTS = tuple(Cell(requests, 512, OUT) for requests in (1, 16, 64, 256))


def side_by_side(size: dict, cells: list[Cell], tp: int) -> int:
    """How many engines of `tp` ranks a GPU has room for, up to two."""
    if not torch.cuda.is_available():
        return 1
    positions = max(cell.requests * (cell.prompt + cell.out) for cell in cells) * 5 // 4
    engine = held_bytes(size, positions) / tp + BESIDE
    return 2 if 2 * engine <= torch.cuda.get_device_properties(0).total_memory else 1


def captures(cells: list[Cell]) -> list[int]:
    """Rows of the steps that vLLM's own CUDA graphs hold: of decoding, and of short prompts. Its other sizes, which no step
    here has, are not captured: that takes long."""
    steps = {rows for cell in cells for rows in (cell.requests, cell.requests * cell.prompt)}
    return sorted(rows for rows in steps if rows <= LARGEST_GRAPH)


def rows(results: list[dict], cells: list[Cell], size: str) -> list[dict]:
    """Rows from the results of engines, with their `tp`; a cell that an engine has not come to has none."""
    made = []
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
                if (decoding := statistics.median(row["decode_seconds"])) > 0:
                    row["decode_tok_s"] = cell.requests * (cell.out - cell.first) / decoding
            made.append(row)
    stock = {(r["tp"], r["requests"], r["prompt"]): r for r in made if r["engine"] == "stock"}
    for row in made:
        base = stock.get((row["tp"], row["requests"], row["prompt"]), {})
        for field, x in (("prefill_s", "x_prefill"), ("decode_tok_s", "x_decode")):
            row[x] = row[field] / base[field] if row[field] and base.get(field) else None
        if size in MIXTURES:
            row |= {"tok_s": row["decode_tok_s"], "x": row["x_decode"]}
    return made


def line(row: dict) -> str:
    """For the screen."""
    prefill, decode = f"{row['prefill_s']:.3f} s", "lost in noise" if row["decode_seconds"] else "none"
    if row["decode_tok_s"]:
        decode = f"{row['decode_tok_s']:.1f} tokens/s"
    shares = [f" ({row[x]:.3f} of stock's)" if row[x] else "" for x in ("x_prefill", "x_decode")]
    return f"  {row['requests']:>3} x {row['prompt']:<6} prefill {prefill}{shares[0]}, decoding {decode}{shares[1]}"


def _cell(text: str) -> Cell:
    return Cell(*map(int, text.split("x")))


def main(arguments: list[str] | None = None) -> int:
    """Returns the exit status: 0, or 2 if an engine failed, after all others have run."""
    parser = options_parser(__doc__, None, json="the file of the results; default: long.json, of a mixture moe.json")
    parser.add_argument("--engines", nargs="+", choices=ENGINES, default=list(ENGINES))
    parser.add_argument("--size", choices=SIZES, default="qwen3-8b", help="of the model")
    parser.add_argument(
        "--tp", nargs="+", type=int, help="numbers of ranks; default: 1, and 2 where there are two GPUs"
    )
    parser.add_argument(
        "--cells", nargs="+", type=_cell, help="requests, prompt, tokens sampled for each, as 8x30000x65"
    )
    parser.add_argument("--repeats", type=int, default=3, help="of each measurement, at least; the median counts")
    parser.add_argument(
        "--side-by-side", type=int, choices=(1, 2), help="engines on a GPU at once; default: two if they fit"
    )
    parser.add_argument(
        "--eager",
        action="store_true",
        default=not torch.cuda.is_available(),
        help="vLLM without torch.compile and CUDA graphs",
    )
    parser.add_argument("--timeout", type=float, default=600.0, help="seconds that engines side by side may take")
    parser.add_argument("--out", type=Path, default=Path("check-results/long"), help="logs")
    options = parser.parse_args(arguments)
    mixture = options.size in MIXTURES
    cells = options.cells or list(EXPERTS if mixture else DENSE)
    path = options.json or H200 / ("moe.json" if mixture else "long.json")
    ranks = options.tp or [1, *([2] if len(gpus()) > 1 else [])]
    for tp in ranks:
        if problem := no_room(tp):
            parser.error(f"--tp: {problem}")

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
                made = rows(results, cells, options.size)
                if made:
                    write(path, merge(read(path), bench.name, bench.info, made, KEY))
                for result in found:
                    mine = [row for row in made if (row["engine"], row["tp"]) == (result["engine"], tp)]
                    print(f"{result['engine']}: the start took {result['start_seconds']} s", *map(line, mine), sep="\n")
                sys.stdout.flush()
    for name in bench.failures:
        print(f"failed: {name}")
    print(f"{time.monotonic() - started:.0f} s; {path}")
    return 2 if bench.failures else 0


if __name__ == "__main__":
    sys.exit(main())
