"""Distribution of time ratios over the random GEMMs of ``matmul.py --draw``.

``matmul.py`` prints the tables; ``tables.py`` writes them to a page. Result files do not hold the targets and buckets,
so both may change; run ``make tables`` then.
"""

from __future__ import annotations

import re
from statistics import geometric_mean

SMALL_M = 256
"""Largest M of a skinny GEMM, as in decode."""
TARGETS = {"skinny": 1.08, "chains": 1.03, "k-trees": 1.10, "gradients": 1.03}
"""Target of each group's 95th percentile of the ratio."""
BUCKETS = (16, 64, 256, 1024, 4096, 16384)
WORST = 12


def leaves(row: dict) -> int:
    """Return the leaves named by a row's case, such as ``model.layer/8``."""
    found = re.search(r"/(\d+)$", row["case"])
    return int(found[1]) if found else 1


def group(row: dict) -> str:
    if row["pass"] != "forward":
        return "gradients"
    if row["m"] <= SMALL_M:
        return "skinny"
    return "k-trees" if leaves(row) > 1 else "chains"


def bucket(rows: int) -> str:
    below = 0
    for largest in BUCKETS:
        if rows <= largest:
            return f"{below + 1} to {largest}"
        below = largest
    return f"above {below}"


def kind(row: dict) -> str:
    return row["pass"] if row["pass"] != "forward" else "k-tree" if leaves(row) > 1 else "chain"


def quantile(values: list[float], share: float) -> float:
    """Return the smallest value that at least this share of the values does not exceed."""
    return sorted(values)[max(-int(-share * len(values) // 1) - 1, 0)]


def _table(head: list[str], body: list[list[str]]) -> list[str]:
    return [f"| {' | '.join(head)} |", "|---" * len(head) + "|", *(f"| {' | '.join(cells)} |" for cells in body)]


def tables(rows: list[dict]) -> str:
    """Return three tables of alignkit's rows with an `x`.

    They show the distribution by group, with the share within the target; the mean by kind and M; and the worst GEMMs.
    """
    groups = {name: [r["x"] for r in rows if group(r) == name] for name in TARGETS}
    body = [
        [
            name,
            str(len(xs)),
            f"{geometric_mean(xs):.3f}",
            f"{quantile(xs, 0.95):.2f}",
            f"{max(xs):.2f}",
            f"{sum(x <= TARGETS[name] for x in xs) / len(xs):.0%} at most {TARGETS[name]:.2f}",
        ]
        for name, xs in groups.items()
        if xs
    ]
    lines = [*_table(["group", "GEMMs", "geometric mean", "95th percentile", "largest", "within target"], body), ""]
    cells: dict[tuple[str, str], list[float]] = {}
    for r in rows:
        cells.setdefault((kind(r), bucket(r["m"])), []).append(r["x"])
    heads = [b for b in dict.fromkeys(bucket(largest) for largest in BUCKETS) if any(key[1] == b for key in cells)]
    body = []
    for name in sorted({key[0] for key in cells}):
        found = (cells.get((name, head)) for head in heads)
        body.append([name, *("" if xs is None else f"{geometric_mean(xs):.2f} ({max(xs):.2f})" for xs in found)])
    lines += [*_table(["mean (largest); M", *heads], body), ""]
    worst = sorted(rows, key=lambda r: -r["x"] / TARGETS[group(r)])[:WORST]
    body = [
        [r["case"], r["pass"], str(r["m"]), f"{r['n']} x {r['k']}", f"{r['x']:.2f}", f"{1e3 * r['ms']:.1f}", r["by"]]
        for r in worst
    ]
    lines += _table(["worst", "pass", "M", "weight", "x", "us", "kernel"], body)
    return "\n".join(lines)
