"""``python -m tests.fuzz``: run random calls of the ops, and random faults on one of two tensor-parallel ranks.

A call must return the right bits or raise one clear error, and a fault must raise on both ranks. The exit status is 1
otherwise. `make fuzz` writes benchmarks/results/cpu/fuzz.jsonl; run.py defines its keys.
"""

from __future__ import annotations

import argparse
import datetime
import json
import sys
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from alignkit.runtime.machine import machine

from . import draw, faults, run
from .judge import GOOD, VERDICTS


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__.partition("``: ")[2])
    parser.add_argument("--calls", type=int, default=3000, help="number of random calls of the ops")
    parser.add_argument("--rank-faults", type=int, default=60, help="number of random faults on one of two ranks")
    parser.add_argument("--seed", type=int, default=0, help="seed of the random calls and faults")
    parser.add_argument("--workers", type=int, help="worker processes for the calls (default: one per core)")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="device of the two ranks")
    parser.add_argument("--only", type=_numbers, metavar="SEED:INDEX", help="repeat only this call")
    parser.add_argument("--only-fault", type=_numbers, metavar="SEED:INDEX", help="repeat only this fault")
    parser.add_argument("--out", type=Path, help="JSON Lines file for the counts and the failures")
    options = parser.parse_args(arguments)
    if options.rank_faults and not run.HAS_MEGATRON:
        parser.error("--rank-faults: Megatron-core is not installed")
    if options.device == "cuda" and not run.two_gpus():
        parser.error("--device cuda: needs two GPUs")

    tallies = {}
    if options.only:
        tallies["calls"] = run.calls(options.only[0], [options.only[1]], 1)
        print(draw.draw(*options.only).text())
    elif options.only_fault:
        tallies["rank faults"] = run.rank_faults(options.only_fault[0], [options.only_fault[1]], options.device)
        print(faults.draw(*options.only_fault).text())
    else:
        columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()
        with Progress(*columns, console=Console(stderr=True)) as bar:

            def step(name, total):
                task = bar.add_task(name, total=total)
                return lambda: bar.advance(task)

            if options.calls:
                tallies["calls"] = run.calls(
                    options.seed, range(options.calls), options.workers, step("calls", options.calls)
                )
            if options.rank_faults:
                tallies["rank faults"] = run.rank_faults(
                    options.seed, range(options.rank_faults), options.device, step("rank faults", options.rank_faults)
                )
    for name, tally in tallies.items():
        Console(width=None if sys.stdout.isatty() else 100).print(_table(name, tally))
        if tally.failures:
            print(tally.report())
    if options.out:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        info = machine() | {"seed": options.seed, "device": options.device}
        rows = [row for name, tally in tallies.items() for row in tally.rows(name)]
        run_name = datetime.datetime.now().isoformat(timespec="seconds")
        records = [{"run": run_name} | info, *(row | {"run": run_name} for row in rows)]
        options.out.write_text("".join(json.dumps(record) + "\n" for record in records))
    return int(any(tally.failures for tally in tallies.values()))


def _numbers(text: str) -> tuple[int, int]:
    seed, _, index = text.partition(":")
    return int(seed), int(index)


def _table(name: str, tally: run.Tally) -> Table:
    table = Table(name, *VERDICTS, title=f"{sum(tally.totals().values())} {name} in {tally.seconds:.0f} s")
    for column in table.columns[1:]:
        column.justify = "right"
    for group in sorted(tally.by):
        table.add_row(group, *(_count(v, tally.by[group][v]) for v in VERDICTS))
    table.add_section()
    table.add_row("all", *(_count(v, tally.totals()[v]) for v in VERDICTS))
    return table


def _count(verdict: str, n: int) -> str:
    return f"[bold red]{n}[/]" if n and verdict not in GOOD else str(n)


if __name__ == "__main__":
    sys.exit(main())
