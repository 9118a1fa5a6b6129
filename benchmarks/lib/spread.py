"""How times over another's are spread, of rows drawn by ``matmul.py --draw``."""

from __future__ import annotations

import re
from statistics import geometric_mean

FEW = 256
"""Rows of decoding."""
TARGETS = {"few rows": 1.08, "chains": 1.03, "k-trees": 1.10, "gradients": 1.03}
"""At or below which 95% of the ratios of a group should be."""
BUCKETS = (16, 64, 256, 1024, 4096, 16384)
WORST = 12


def leaves(row: dict) -> int:
    """Of a row's case: ``model.layer/8``."""
    found = re.search(r"/(\d+)$", row["case"])
    return int(found[1]) if found else 1


def group(row: dict) -> str:
    if row["pass"] != "forward":
        return "gradients"
    if row["m"] <= FEW:
        return "few rows"
    return "k-trees" if leaves(row) > 1 else "chains"


def bucket(rows: int) -> str:
    last = 0
    for most in BUCKETS:
        if rows <= most:
            return f"{last + 1} to {most}"
        last = most
    return f"above {last}"


def kind(row: dict) -> str:
    return row["pass"] if row["pass"] != "forward" else "k-tree" if leaves(row) > 1 else "chain"


def quantile(values: list[float], share: float) -> float:
    """The least of the values that so large a share of them is at or below."""
    return sorted(values)[max(-int(-share * len(values) // 1) - 1, 0)]


def _table(head: list[str], body: list[list[str]]) -> list[str]:
    return [f"| {' | '.join(head)} |", "|---" * len(head) + "|", *(f"| {' | '.join(cells)} |" for cells in body)]


def tables(rows: list[dict]) -> str:
    """Of alignkit's rows with an `x`: by group the mean and what lies within the target; by kind and number of rows; the
    worst."""
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
    lines = [*_table(["drawn", "products", "geometric mean", "95% at most", "largest", "within"], body), ""]
    cells: dict[tuple[str, str], list[float]] = {}
    for r in rows:
        cells.setdefault((kind(r), bucket(r["m"])), []).append(r["x"])
    heads = [b for b in dict.fromkeys(bucket(most) for most in BUCKETS) if any(key[1] == b for key in cells)]
    body = []
    for name in sorted({key[0] for key in cells}):
        found = (cells.get((name, head)) for head in heads)
        body.append([name, *("" if xs is None else f"{geometric_mean(xs):.2f} ({max(xs):.2f})" for xs in found)])
    lines += [*_table(["mean (largest), rows", *heads], body), ""]
    worst = sorted(rows, key=lambda r: -r["x"] / TARGETS[group(r)])[:WORST]
    body = [
        [r["case"], r["pass"], str(r["m"]), f"{r['n']} x {r['k']}", f"{r['x']:.2f}", f"{1e3 * r['ms']:.1f}", r["by"]]
        for r in worst
    ]
    lines += _table(["worst", "pass", "rows", "weight", "x", "us", "by"], body)
    return "\n".join(lines)
