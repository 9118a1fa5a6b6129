"""Fits the constants of alignkit/ops/linear/cost.py to times of ``matmul.py --draw SEED --trees --candidates FILE``.

``python benchmarks/fit_linear.py FILE...`` fits them to 70% of the products, prints how the choice by them does on the others,
and then the constants that fit all. "regret" is the time of the way that the model chooses over the least of all ways'; "x",
over stock's.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import re
import sys
from collections.abc import Callable
from pathlib import Path

from lib.spread import bucket, geometric_mean, quantile

from alignkit.ops.linear import cost
from alignkit.runtime.families import SM90

MULTIPROCESSORS = SM90.multiprocessors
HELD_OUT = 0.3
STEPS = (0.4, 0.2, 0.1, 0.05, 0.02)
"""Of the search, in logarithms."""

Constant = tuple[str, tuple | None]
"""A name in cost.py and, if it has several, a key."""
Way = tuple[Constant, Callable[[], float]]
"""The constant that is fitted to it; and the prediction by the constants as they are."""


def way(row: dict, name: str) -> Way | None:
    """Of a row of --candidates the way of that name; None: the model has none."""
    m, n, k, leaves = (row[key] for key in ("m", "n", "k", "leaves"))
    clusters = MULTIPROCESSORS // 2
    if name == "tree parts=1":
        return ("QUARTERS", None), lambda: cost.quarters(n, k, leaves, clusters)
    if name == "pairs":
        return ("PAIRS", None), lambda: cost.pairs(m, n, k, leaves, clusters)
    if found := re.fullmatch(r"tree parts=(\d) (\d+)( below)?", name):
        parts, width, below = int(found[1]), int(found[2]), bool(found[3])
        return ("PARTS", (width, below)), lambda: cost.parts(m, n, k, leaves, parts, width, below, clusters)
    if found := re.fullmatch(r"tiles (\d+)x(\d+)x128 parts=(\d)", name):
        height, width, parts = map(int, found.groups())
        if (height, width) in cost.TILES and m <= cost.FEW and k // leaves % 128 == 0:
            tile = height, width
            return ("TILES", tile), lambda: cost.tiles(m, n, k, *tile, parts, MULTIPROCESSORS)
    if found := re.fullmatch(r"hopper whole=(\d+) parts=(\d)", name):
        how = cost.Shares(*map(int, found.groups()))
        halved = how.parts == 1 and how.whole < cost.up(m, cost.TILE) * cost.up(n, cost.TILE)
        return ("HALVED" if halved else "MANY", None), lambda: cost.many(m, n, k, leaves, how, MULTIPROCESSORS)
    return None


def get(constant: Constant) -> cost.Cost:
    value = getattr(cost, constant[0])
    return value if isinstance(value, cost.Cost) else value[constant[1]]


def put(constant: Constant, value: cost.Cost) -> None:
    if isinstance(getattr(cost, constant[0]), cost.Cost):
        setattr(cost, constant[0], value)
    else:
        getattr(cost, constant[0])[constant[1]] = value


def fit(rows: list[dict]) -> dict[Constant, tuple[int, float]]:
    """Sets the constants. How many times each is fitted to, and the mean of the errors' logarithms."""
    data: dict[Constant, list[tuple[Callable[[], float], float]]] = {}
    for row in rows:
        for name, ms in row["ways"].items():
            if (found := way(row, name)) is not None:
                data.setdefault(found[0], []).append((found[1], 1e3 * ms))
    done = {}
    for constant in sorted(data, key=lambda c: (c[0] == "HALVED", str(c))):  # some of its times depend on MANY
        times = data[constant]

        def error(value: cost.Cost, constant=constant, times=times) -> float:
            put(constant, value)
            return sum(abs(math.log(predicted() / us)) for predicted, us in times) / len(times)

        best = get(constant)
        least = error(best)
        for step in STEPS:
            improved = True
            while improved:
                improved = False
                for field in cost.Cost._fields:
                    for factor in (math.exp(step), math.exp(-step)):
                        tried = best._replace(**{field: getattr(best, field) * factor})
                        if (found := error(tried)) < least - 1e-6:
                            best, least, improved = tried, found, True
        put(constant, best)
        done[constant] = len(times), least
    return done


def judged(rows: list[dict]) -> list[str]:
    """How the choice does, by number of rows."""
    groups: dict[str, list[tuple[float, float, float]]] = {}
    for row in rows:
        predicted = {name: found[1]() for name in row["ways"] if (found := way(row, name)) is not None}
        if not predicted:
            continue
        ms, least = row["ways"][min(predicted, key=predicted.__getitem__)], min(row["ways"].values())
        groups.setdefault(bucket(row["m"]), []).append((ms / least, ms / row["cublas"], least / row["cublas"]))
    lines = []
    for name, found in sorted(groups.items(), key=lambda item: int(item[0].split()[0])):
        titles = ("regret", "x", "x of the fastest way")
        columns = ([ratios[i] for ratios in found] for i in range(len(titles)))
        texts = (
            f"{title} {geometric_mean(xs):.3f}, 95% at most {quantile(xs, 0.95):.2f}"
            for title, xs in zip(titles, columns, strict=True)
        )
        lines.append(f"{name:>14} rows, {len(found):>3} products: {'; '.join(texts)}")
    return lines


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("files", nargs="+", type=Path)
    options = parser.parse_args(arguments)
    rows = [row for path in options.files for row in json.loads(path.read_text())["rows"]]
    rows = [row for row in rows if row["leaves"] > 1 and row["pass"] == "forward" and row["ways"]]
    print("as it is:", *judged(rows), sep="\n")
    random.Random(0).shuffle(rows)
    held_out = rows[: int(HELD_OUT * len(rows))]
    fit(rows[len(held_out) :])
    print(f"held out, {len(held_out)} of {len(rows)}:", *judged(held_out), sep="\n")
    done = fit(rows)
    print("fitted to all:", *judged(rows), sep="\n")
    for (name, key), (count, error) in done.items():
        value = get((name, key))
        told = ", ".join(f"{field}={number:.3g}" for field, number in value._asdict().items() if number)
        print(f"{name}{'' if key is None else list(key)} = Cost({told})  # {count} times, error {error:.3f}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
