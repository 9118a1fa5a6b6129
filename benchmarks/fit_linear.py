"""Fits the constants of alignkit/ops/linear/cost.py to times of ``matmul.py --draw SEED --candidates FILE``.

``python benchmarks/fit_linear.py FILE...`` says of each k-tree which way the constants choose that were fitted to
the others (it is left out), and its time over the least of all ways' that were measured; then the mean and the largest of
these; then the constants that fit all. A way's times count by how near they are to the least.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import re
import sys
from collections.abc import Callable
from pathlib import Path

from lib.spread import geometric_mean
from lib.ways import cut_named

from alignkit.ops.linear import cost, cuda

BEGIN = {
    "CLUSTER": cost.Cost(3.0, 3.0, 0.3),
    "PARTS": cost.Cost(3.0, 3.0, 0.1, element=0.002, task=1.0, sums=0.3),
    "TILES": cost.Cost(3.0, 3.0, 0.1, element=0.002, copy=2e-5, task=0.3, sums=0.3, join=1.0),
    "MANY": cost.Many(start=5.0, step=0.3, join=0.3, given=1.0, taken=1.0),
}
"""Where the search begins: rough, so that the constants do not know what is left out. Those that are 0 stay so."""
STEPS = (0.4, 0.2, 0.1, 0.05, 0.02)
"""Of the search, in logarithms: of one constant, or of two, as one may stand for another."""

Way = tuple[str, Callable[[], float]]
"""The constants' name, and the prediction by them as they are."""


def way(row: dict, name: str) -> Way | None:
    """Of a row of --candidates the way of that name; None: it is none of those to choose from."""
    m, n, k, leaves = (row[key] for key in ("m", "n", "k", "leaves"))
    if m > cost.MANY_ROWS:
        blocks = cost.MULTIPROCESSORS
        cuts = {cut_named(cut): cut for cut in cost.cuts(m, n, leaves, blocks)}
        if (cut := cuts.get(name)) is not None:
            return "MANY", lambda: cost.MANY.of(m, n, k, leaves, blocks, cut)
    if m > cuda.FEW:
        return None
    if found := re.fullmatch(r"tree parts=(\d)(?: (\d+)( below)?)?", name):
        how = cuda.Deal(int(found[1]), int(found[2] or 64), bool(found[3]))
        if how in cuda.sensible(m, leaves):
            return "CLUSTER" if how.parts == 1 else "PARTS", lambda: cuda.cost_of(m, n, k, leaves, how)
    if found := re.fullmatch(r"tiles (\d+)x(\d+)x(\d+) parts=(\d)", name):
        tile = cost.Tile(*map(int, found.groups()))
        if tile in cost.all_tiles(m, leaves):
            return "TILES", lambda: cost.tiles(m, n, k, leaves, tile)
    return None


def fit(rows: list[dict]) -> dict[str, float]:
    """Sets the constants. By name the mean of the errors' logarithms."""
    data: dict[str, list[tuple[Callable[[], float], float, float]]] = {}
    for row in rows:
        least = min(row["ways"].values())
        for name, ms in row["ways"].items():
            if (found := way(row, name)) is not None:
                data.setdefault(found[0], []).append((found[1], 1e3 * ms, least / ms))
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
                    if (found := error(tried)) < least - 1e-6:
                        best, least, improved = tried, found, True
        setattr(cost, name, best)
        errors[name] = least
    return errors


def chosen(row: dict) -> tuple[float, str]:
    """The least prediction, in microseconds, and whose it is."""
    found = ((name, way(row, name)) for name in row["ways"])
    return min((of[1](), name) for name, of in found if of is not None)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("files", nargs="+", type=Path)
    options = parser.parse_args(arguments)
    rows = [row for path in options.files for row in json.loads(path.read_text())["rows"]]
    rows = [r for r in rows if r["leaves"] > 1 and r["pass"] == "forward" and r["ways"]]
    print(
        "| rows | outputs | k | leaves | chosen | us | predicted | fastest | us | ratio |\n|---|---|---|---|---|---|---|---|---|---|"
    )
    ratios = []
    for i, row in enumerate(rows):
        fit(rows[:i] + rows[i + 1 :])
        predicted, name = chosen(row)
        fastest = min(row["ways"], key=row["ways"].__getitem__)
        us, least = 1e3 * row["ways"][name], 1e3 * row["ways"][fastest]
        ratios.append(us / least)
        sizes = " | ".join(str(row[key]) for key in ("m", "n", "k", "leaves"))
        print(f"| {sizes} | {name} | {us:.1f} | {predicted:.1f} | {fastest} | {least:.1f} | {us / least:.3f} |")
    print(f"left out, {len(rows)} products: mean {geometric_mean(ratios):.3f}, largest {max(ratios):.2f}")
    for name, error in fit(rows).items():
        told = ", ".join(f"{field}={value:.3g}" for field, value in getattr(cost, name)._asdict().items() if value)
        print(f"{name} = {type(getattr(cost, name)).__name__}({told})  # error {error:.3f}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
