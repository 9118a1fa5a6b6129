"""Time two checkouts of alignkit against each other: ``python benchmarks/before_after.py --before DIR [--after DIR]``.

Three processes take turns on one machine: one of the old checkout, one of the new, and a second one of the old, whose
ratio to the first is the noise of the measurement. Each round times a case once in each process, in random order. A
case is a random problem of a public op (seeded, equal in all processes), forward alone or forward and backward, a
training step of Megatron-core, or a rollout of vLLM; both are of a small model, whose time is the host's.

The result file is benchmarks/results/h200/before_after.jsonl, on a machine without a GPU .../cpu/.... Fields of a row:

``case``, ``of``
    Name of the case (``OP forward INDEX``), and "host", the time in which a call returns, "device", the time on the
    GPU with a warm cache, or "step", the time of a training step or rollout.
``before_us``
    Median time of the old checkout, in microseconds.
``ratio``, ``control``, ``spread``
    Median over the rounds of new/old and of old/old, and the measured spread of ``ratio``: the larger of
    |control - 1| and 1.58 interquartile ranges over the square root of the number of rounds.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
from lib.options import time_is_up
from lib.results import RESULTS, merge, read, run_info, run_name, write

from alignkit.jobs.model import make_checkpoint

KEY = ("case", "of")
WORKER = Path(__file__).parent / "lib/paired.py"
ROOT = Path(__file__).parents[1]
SLACK = 1.02
"""Largest ratio of a case, before its spread is added."""
ENGINES = ("training", "rollout")


class Worker:
    """A process that times cases with one checkout."""

    def __init__(self, checkout: Path):
        library = checkout / "alignkit"
        assert library.is_dir(), f"checkout: must have the folder alignkit, got {checkout}"
        path = os.pathsep.join(filter(None, [str(checkout), os.environ.get("PYTHONPATH", "")]))
        self.process = subprocess.Popen(
            [sys.executable, str(WORKER)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
        )

    def ask(self, request: dict) -> None:
        assert self.process.stdin
        self.process.stdin.write(json.dumps(request) + "\n")
        self.process.stdin.flush()

    def reply(self) -> dict:
        assert self.process.stdout
        line = self.process.stdout.readline()
        return json.loads(line) if line else {"error": f"the worker ended with status {self.process.wait()}"}

    def stop(self) -> None:
        assert self.process.stdin
        self.process.stdin.close()
        try:
            self.process.wait(60)
        except subprocess.TimeoutExpired:
            self.process.kill()


def notch(values: list[float]) -> float:
    """Return 1.58 interquartile ranges over the square root of the count: the half-width of a median's notch."""
    low, _, high = statistics.quantiles(values, n=4)
    return 1.58 * (high - low) / len(values) ** 0.5


def measure(workers: list[Worker], request: dict, rounds: int, rng: random.Random) -> list[dict]:
    """Return a row per kind of time; none if a checkout cannot run the case."""
    for worker in workers:  # builds and compiles, side by side
        worker.ask(request)
    first = [worker.reply() for worker in workers]
    if errors := [reply["error"] for reply in first if "error" in reply]:
        print(f"{request['case']}: not measured: {errors[0]}", flush=True)
        return []
    times = [[] for _ in workers]
    for _ in range(rounds):
        for i in rng.sample(range(len(workers)), len(workers)):
            workers[i].ask(request)
            times[i].append(workers[i].reply())
    rows = []
    for field in first[0]:
        before, after, again = ([reply[field] for reply in mine] for mine in times)
        ratios = [b / a for a, b in zip(before, after, strict=True)]
        control = statistics.median(b / a for a, b in zip(before, again, strict=True))
        row = {
            "case": request["case"],
            "of": "step" if "model" in request else field.removesuffix("_us"),
            "before_us": statistics.median(before),
            "ratio": statistics.median(ratios),
            "control": control,
            "spread": max(abs(control - 1), notch(ratios)),
        }
        print("{case}, {of}: {before_us:.1f} us, {ratio:.3f} (control {control:.3f})".format(**row), flush=True)
        rows.append(row)
    return rows


def summary(rows: list[dict]) -> str:
    """Return the distribution of the ratios by kind of time, and the cases above the slack plus their spread."""
    lines = []
    for kind in dict.fromkeys(row["of"] for row in rows):
        mine = [row for row in rows if row["of"] == kind]
        ratios = [row["ratio"] for row in mine]
        slower = [row for row in mine if row["ratio"] > SLACK + row["spread"]]
        lines.append(
            f"{kind}: {len(mine)} cases, geometric mean {statistics.geometric_mean(ratios):.3f} (control "
            f"{statistics.geometric_mean([row['control'] for row in mine]):.3f}), {min(ratios):.3f} to "
            f"{max(ratios):.3f}, {len(slower)} above {SLACK} plus their spread"
        )
        lines += [f"  slower: {row['case']}: {row['ratio']:.3f}, spread {row['spread']:.3f}" for row in slower]
    return "\n".join(lines)


def main(arguments: list[str] | None = None) -> int:
    gpu = torch.cuda.is_available()
    default = RESULTS / ("h200" if gpu else "cpu") / "before_after.jsonl"
    parser = argparse.ArgumentParser(description=str(__doc__).partition("\n")[0])
    parser.add_argument("--json", type=Path, default=default, help="result file")
    parser.add_argument("--minutes", type=float, help="time limit in minutes, after which no measurement starts")
    parser.add_argument("--before", type=Path, required=True, help="folder of the old checkout, with built kernels")
    parser.add_argument("--after", type=Path, default=ROOT, help="folder of the new checkout; default: this one")
    parser.add_argument("--ops", nargs="*", help="ops to time; default: all")
    parser.add_argument("--cases", type=int, default=3, help="random problems per op and kind")
    parser.add_argument("--seed", type=int, default=0, help="seed of the problems")
    parser.add_argument("--longest", type=int, default=4096 if gpu else 64, help="largest number of rows")
    parser.add_argument("--rounds", type=int, default=15, help="turns of each process per case")
    parser.add_argument("--calls", type=int, default=20, help="calls per turn")
    parser.add_argument("--engines", nargs="*", choices=ENGINES, default=[], help="engines to time too")
    options = parser.parse_args(arguments)

    sys.path.insert(0, str(WORKER.parent))
    import paired

    started, rng = time.monotonic(), random.Random(options.seed)
    kinds = [(op, kind) for op in paired.FORWARD for kind in ("forward", "training")]
    names = [
        f"{op} {kind} {options.seed}.{index}"
        for index in range(options.cases)
        for op, kind in kinds
        if (kind == "forward" or op in paired.BACKWARD) and (options.ops is None or op in options.ops)
    ]
    size = {"longest": options.longest, "calls": options.calls}
    requests = [{"case": name} | size for name in names]
    info = run_info(calls=options.calls, rounds=options.rounds, before=str(options.before.name))
    name, old, rows = run_name(), read(options.json), []
    workers = [Worker(folder) for folder in (options.before, options.after, options.before)]
    with tempfile.TemporaryDirectory() as folder:
        if options.engines:
            model = str(make_checkpoint(Path(folder) / "model", layers=2, hidden=256, heads=4, head_dim=64))
            requests = [{"case": e, "model": model, "calls": 3} for e in options.engines] + requests
        for request in requests:
            if time_is_up(options, started):
                print(f"not measured, --minutes have passed: {request['case']}")
                continue
            rows += measure(workers, request, options.rounds, rng)
            write(options.json, merge(old, name, info, rows, KEY))
        for worker in workers:
            worker.stop()
    print(summary(rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
