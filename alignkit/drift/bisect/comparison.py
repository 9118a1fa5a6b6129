"""Two recordings of the same tokens and weights: the first point that differs, and how the difference grows."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, field

import numpy as np
import torch

from ...convert import Architecture
from ...errors import InputError
from .points import points
from .recording import Recording

GROWTH_TOKENS = 64
"""Of how many tokens the values of all points are asked for, if the budget allows."""
STOCK = "stock"


@dataclass
class Values:
    """How far the recorded values of a point lie apart: of `tokens` of its tokens. max_ulps: in the narrower of the two
    types; median_ulps: of the values that differ. relative: the root of the mean square of the differences, over that of
    a's values. where: (sequence, position, column) of the largest difference, and a and b there."""

    tokens: int
    max_abs: float
    mean_abs: float
    max_ulps: int
    median_ulps: int
    relative: float
    where: tuple[int, int, int]
    a: float
    b: float


@dataclass
class PointDifference:
    """One point: in how many of the compared tokens it differs. ranks: of how many tokens one side's tensor-parallel
    ranks do not agree among themselves. pieces: which pieces of a row (KV heads' shares) differ in any token."""

    point: str
    op: str
    compared: int
    differing: int
    dtypes: tuple[str, str]
    ranks: int = 0
    pieces: list[int] = field(default_factory=list)
    values: Values | None = None


@dataclass
class Comparison:
    """points: in the order of computation. missing: points that one side did not record. first: index into `points`,
    None if nothing differs. rows: the rows that differ at the first point; tokens: those as (sequence, position)."""

    points: list[PointDifference]
    missing: list[str]
    first: int | None
    rows: list[int]
    tokens: list[tuple[int, int]]
    by_position: list[tuple[int, float, float]]
    """(position, share of its tokens whose logprob differs, max abs), where logprobs' values were recorded."""

    @property
    def compared(self) -> int:
        """Pairs of (point, token)."""
        return sum(p.compared for p in self.points)

    @property
    def suspect(self) -> PointDifference | None:
        return None if self.first is None else self.points[self.first]

    def to_json(self) -> dict:
        suspect = self.suspect
        return {
            "compared": self.compared,
            "points_compared": len(self.points),
            "points_differing": sum(p.differing > 0 for p in self.points),
            "missing": self.missing,
            "first": None if suspect is None else asdict(suspect) | {"tokens": self.tokens},
            "points": [asdict(p) for p in self.points],
            "by_position": [{"position": p, "share": share, "max_abs": m} for p, share, m in self.by_position],
        }


def check_comparable(a: Recording, b: Recording) -> None:
    """InputError naming what makes a comparison of the two say nothing."""
    if a.architecture != b.architecture:
        names = sorted(
            k for k in a.architecture.keys() | b.architecture.keys() if a.architecture.get(k) != b.architecture.get(k)
        )
        raise InputError(f"architecture: the recordings are of different models ({', '.join(names)})")
    if a.weights != b.weights:
        raise InputError(f"weights: the recordings are of different ones, digests {a.weights:.16} and {b.weights:.16}")
    if a.sequences != b.sequences:
        raise InputError("tokens: the recordings are of different sequences")
    if STOCK not in (a.contract, b.contract) and a.contract != b.contract:
        raise InputError(
            f"contract: {a.contract!r} and {b.contract!r}; both sides say they are aligned, but not to each other"
        )


def compare(a: Recording, b: Recording) -> Comparison:
    """By digests, without values. Raises as `check_comparable`, and InputError if there is nothing to compare."""
    check_comparable(a, b)
    found, missing, rows_of = [], [], []
    for point in points(Architecture(**a.architecture)):
        if point.name not in a.digests or point.name not in b.digests:
            missing.append(point.name)
            continue
        seen = (a.seen[point.name] & b.seen[point.name]).astype(bool)
        pieces = (a.digests[point.name] != b.digests[point.name]) & seen[:, None]
        ranks = np.zeros_like(seen)
        for side in (a, b):
            if point.name in side.ranks_differ:
                ranks |= side.ranks_differ[point.name].astype(bool) & seen
        differs = pieces.any(1) | ranks
        found.append(
            PointDifference(
                point.name,
                point.op,
                int(seen.sum()),
                int(differs.sum()),
                (a.dtypes[point.name], b.dtypes[point.name]),
                int(ranks.sum()),
                np.flatnonzero(pieces.any(0)).tolist() if point.pieces > 1 else [],
            )
        )
        rows_of.append(np.flatnonzero(differs))
    if not any(p.compared for p in found):
        raise InputError("recordings: no token of any point is in both")
    first = next((i for i, p in enumerate(found) if p.differing), None)
    rows = [] if first is None else rows_of[first].tolist()
    comparison = Comparison(found, missing, first, rows, [a.token(r) for r in rows], [])
    add_values(comparison, a, b)
    comparison.by_position = _by_position(a, b)
    return comparison


def choose(comparison: Comparison, a: Recording, budget: int) -> dict[str, list[int]]:
    """Which rows of which points to record the values of, in at most `budget` bytes of fp32 a side: of the first point
    as many of the tokens that differ as half of it holds, then of others those tokens' `GROWTH_TOKENS` first, the
    output before the layers' ends before the rest."""
    by_name = {p.name: p for p in points(Architecture(**a.architecture))}
    differing = [p for p in comparison.points if p.differing]
    if comparison.suspect is None:
        return {}
    suspect = by_name[comparison.suspect.point]
    chosen = {suspect.name: _spread(comparison.rows, max(1, budget // 2 // (4 * suspect.width)))}
    left = budget - 4 * suspect.width * len(chosen[suspect.name])
    later = _spread(comparison.rows, GROWTH_TOKENS)
    for name in sorted((p.point for p in differing), key=_priority):
        size = 4 * by_name[name].width * len(later)
        if name not in chosen and size <= left:
            chosen[name] = later
            left -= size
    return chosen


def _priority(name: str) -> int:
    return 0 if name == "logits" else 1 if name == "final_norm" else 2 if name.endswith(".residual") else 3


def _spread(rows: list[int], most: int) -> list[int]:
    """At most so many of them, evenly, the first among them."""
    step = -(-len(rows) // most)
    return rows[::step]


def add_values(comparison: Comparison, a: Recording, b: Recording) -> None:
    """How far apart the values lie, of the points whose values both sides have recorded of common rows."""
    for point in comparison.points:
        if point.point not in a.values or point.point not in b.values:
            continue
        common, in_a, in_b = np.intersect1d(a.kept[point.point], b.kept[point.point], return_indices=True)
        seen = a.seen[point.point][common].astype(bool) & b.seen[point.point][common].astype(bool)
        common, in_a, in_b = common[seen], in_a[seen], in_b[seen]
        if not len(common):
            continue
        x, y = a.values[point.point][in_a], b.values[point.point][in_b]
        d = (x.double() - y.double()).abs()
        d[~d.isfinite()] = torch.inf
        d[same_bits(x, y)] = 0  # equal infinities and NaNs too
        worst = int(d.argmax())
        row, column = divmod(worst, d.shape[1])
        finite = d.isfinite() & x.isfinite()
        apart = ulps(x, y)
        different = apart[apart > 0]
        size = float(x[finite].double().square().sum())
        point.values = Values(
            tokens=len(common),
            max_abs=float(d.max()),
            mean_abs=float(d[finite].mean()) if finite.any() else 0.0,
            max_ulps=int(apart.max()),
            median_ulps=int(different.median()) if len(different) else 0,
            relative=math.sqrt(float(d[finite].square().sum()) / size) if size else 0.0,
            where=(*a.token(int(common[row])), column),
            a=float(x[row, column]),
            b=float(y[row, column]),
        )


def same_bits(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return x.float().contiguous().view(torch.int32) == y.float().contiguous().view(torch.int32)


def ulps(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """int64: how many values of the narrower of the two types lie between, plus one; both are rounded to it."""
    dtype = min((x.dtype, y.dtype), key=lambda t: (t.itemsize, t is torch.float16))
    signed, sign = (torch.int16, 2**15) if dtype.itemsize == 2 else (torch.int32, 2**31)

    def place(t: torch.Tensor) -> torch.Tensor:
        bits = t.to(dtype).contiguous().view(signed).long()
        return torch.where(bits < 0, -(bits + sign), bits)  # -0 and 0 fall together

    return (place(x) - place(y)).abs()


def _by_position(a: Recording, b: Recording) -> list[tuple[int, float, float]]:
    name = "logprob"
    if any(name not in side.values or len(side.kept[name]) != side.rows for side in (a, b)):
        return []
    seen = a.seen[name].astype(bool) & b.seen[name].astype(bool)
    d = (a.values[name].double() - b.values[name].double()).abs().reshape(-1).numpy()
    positions = np.concatenate([np.arange(len(s)) for s in a.sequences])
    return [
        (int(p), float((here > 0).mean()), float(here.max()))
        for p in np.unique(positions[seen])
        for here in [d[seen & (positions == p)]]
    ]
