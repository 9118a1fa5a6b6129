"""Fit of the constants of alignkit/ops/linear/cost.py to times of ``matmul.py --draw SEED --candidates FILE``.

``python benchmarks/fit_linear.py FILE...`` cross-validates by leaving one k-tree out at a time. For each, it prints the
algorithm chosen by the constants fitted to the others, and the ratio of its time to the fastest measured algorithm's.
The mean and the largest ratio follow, then the constants fitted to all k-trees. A time's weight is the fastest
algorithm's time over this time.

Copy the printed constants to cost.py, then update tests/ops/test_linear_cost.py. `model` parses the algorithm names of
lib/linear_algorithms.py; stored result files hold them.
"""

from __future__ import annotations

import argparse
import itertools
import math
import re
import sys
from collections.abc import Callable
from pathlib import Path

from lib.linear_algorithms import cut_name
from lib.results import read
from lib.spread import geometric_mean

from alignkit.ops.linear import cost, cuda_backend

BEGIN = {
    "CLUSTER": cost.Cost(3.0, 3.0, 0.3),
    "PARTS": cost.Cost(3.0, 3.0, 0.1, element=0.002, task=1.0, sums=0.3),
    "TILES": cost.Cost(3.0, 3.0, 0.1, element=0.002, copy=2e-5, task=0.3, sums=0.3, join=1.0),
    "MANY": cost.Many(start=5.0, step=0.3, join=0.3, given=1.0, taken=1.0),
}
"""Starting points of the search.

They are rough, so they hold no information about the left-out k-tree. A constant of 0 is not fitted.
"""
STEPS = (0.4, 0.2, 0.1, 0.05, 0.02)
"""Steps of the search, in logarithms. A move changes one constant, or two at once because two may compensate."""

Model = tuple[str, Callable[[], float]]
"""The name of the constants, and the time that their current values predict, in microseconds."""


def model(row: dict, name: str) -> Model | None:
    """Return the model of an algorithm's time in a row of --candidates; None if cost.py has none."""
    m, n, k, leaves = (row[key] for key in ("m", "n", "k", "leaves"))
    if m > cost.MANY_ROWS:
        sm_count = cost.SM_COUNT
        cuts = {cut_name(cut): cut for cut in cost.cuts(m, n, leaves, sm_count)}
        if (cut := cuts.get(name)) is not None:
            return "MANY", lambda: cost.MANY.of(m, n, k, leaves, sm_count, cut)
    if m > cuda_backend.TREE_ROWS:
        return None
    if match := re.fullmatch(r"tree parts=(\d)(?: (\d+)( below)?)?", name):
        split = cuda_backend.Split(int(match[1]), int(match[2] or 64), bool(match[3]))
        if split in cuda_backend.candidate_splits(m, leaves):
            return "CLUSTER" if split.parts == 1 else "PARTS", lambda: cuda_backend.cost_of(m, n, k, leaves, split)
    if match := re.fullmatch(r"tiles (\d+)x(\d+)x(\d+) parts=(\d)", name):
        tile = cost.Tile(*map(int, match.groups()))
        if tile in cost.all_tiles(m, leaves):
            return "TILES", lambda: cost.tiles(m, n, k, leaves, tile)
    return None


def fit(rows: list[dict]) -> dict[str, float]:
    """Fit and set the constants; return the weighted mean of |log(predicted / measured)| by name."""
    data: dict[str, list[tuple[Callable[[], float], float, float]]] = {}
    for row in rows:
        fastest = min(row["ways"].values())
        for name, ms in row["ways"].items():
            if (modeled := model(row, name)) is not None:
                data.setdefault(modeled[0], []).append((modeled[1], 1e3 * ms, fastest / ms))
    errors = {}
    for name, times in data.items():
        total = sum(weight for _, _, weight in times)

        def error(value: cost.Cost | cost.Many, name=name, times=times, total=total) -> float:
            setattr(cost, name, value)
            return sum(weight * abs(math.log(predicted() / us)) for predicted, us, weight in times) / total

        best = BEGIN[name]
        least = error(best)
        fields = [field for field in best._fields if getattr(best, field)]
        for step in STEPS:
            up, down = math.exp(step), math.exp(-step)
            moves = [{field: by} for field in fields for by in (up, down)]
            moves += [
                {one: first, other: second}
                for one, other in itertools.combinations(fields, 2)
                for first, second in itertools.product((up, down), repeat=2)
            ]
            improved = True
            while improved:
                improved = False
                for move in moves:
                    tried = best._replace(**{field: getattr(best, field) * by for field, by in move.items()})
                    if (error_now := error(tried)) < least - 1e-6:
                        best, least, improved = tried, error_now, True
        setattr(cost, name, best)
        errors[name] = least
    return errors


def chosen(row: dict) -> tuple[float, str]:
    """Return the smallest predicted time, in microseconds, and the algorithm's name."""
    models = ((name, model(row, name)) for name in row["ways"])
    return min((modeled[1](), name) for name, modeled in models if modeled is not None)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("files", nargs="+", type=Path, help="result files of matmul.py --candidates")
    options = parser.parse_args(arguments)
    rows = [row for path in options.files for row in read(path)["rows"]]
    rows = [r for r in rows if r["leaves"] > 1 and r["pass"] == "forward" and r["ways"]]
    print(
        "| m | n | k | leaves | chosen | us | predicted | fastest | us | ratio |\n"
        "|---|---|---|---|---|---|---|---|---|---|"
    )
    ratios = []
    for i, row in enumerate(rows):
        fit(rows[:i] + rows[i + 1 :])
        predicted, name = chosen(row)
        fastest = min(row["ways"], key=row["ways"].__getitem__)
        us, fastest_us = 1e3 * row["ways"][name], 1e3 * row["ways"][fastest]
        ratios.append(us / fastest_us)
        sizes = " | ".join(str(row[key]) for key in ("m", "n", "k", "leaves"))
        print(
            f"| {sizes} | {name} | {us:.1f} | {predicted:.1f} | {fastest} | {fastest_us:.1f} | {us / fastest_us:.3f} |"
        )
    print(f"leave-one-out, {len(rows)} k-trees: mean {geometric_mean(ratios):.3f}, largest {max(ratios):.2f}")
    for name, error in fit(rows).items():
        values = ", ".join(f"{field}={value:.3g}" for field, value in getattr(cost, name)._asdict().items() if value)
        print(f"{name} = {type(getattr(cost, name)).__name__}({values})  # error {error:.3f}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
