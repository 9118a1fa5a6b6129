"""Comparison of two recordings of the same tokens and weights: the first differing point and the later growth.

`recording` writes and reads the recordings, and `report` shows the result. Fields of `Values` and `PointDifference` are
keys of bisect.json: a renamed field must change in docs/bisect.md too.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, field

import numpy as np
import torch

from ..convert import Architecture
from ..errors import InputError
from .points import points
from .recording import Recording

GROWTH_TOKENS = 64
"""Tokens whose values are recorded at every point, if the budget allows."""
STOCK = "stock"
"""Contract of an unpatched engine's recording."""


@dataclass
class Values:
    """Differences of a point's recorded values over `tokens` tokens.

    max_ulps: maximum, in ulps of the narrower of the two dtypes. median_ulps: median over the values that differ.
    relative: RMS of the differences divided by the RMS of a's values. where: (sequence, position, column) of the
    largest difference. a, b: the two values at `where`.
    """

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
    """Differences at one point: `differing` of `compared` tokens.

    ranks: number of tokens whose tensor-parallel ranks disagree within one side. pieces: indices of the pieces of a row
    (one per KV head) that differ in any token.
    """

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
    """Result of comparing two recordings.

    points: in the order of computation. missing: points that a side did not record. first: index into `points` of the
    first differing point, None if nothing differs. rows: rows that differ at that point. tokens: the same rows as
    (sequence, position).
    """

    points: list[PointDifference]
    missing: list[str]
    first: int | None
    rows: list[int]
    tokens: list[tuple[int, int]]
    by_position: list[tuple[int, float, float]]
    """(position, fraction of its tokens whose logprob differs, max abs); empty if a side lacks logprob values."""

    @property
    def compared(self) -> int:
        """Number of compared (point, token) pairs."""
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


def check_comparable(a: Recording, b: Recording, names: tuple[str, str] = ("A", "B")) -> None:
    """Raise InputError if the recordings differ in model, weights, sequences or contract.

    names: names of the two recordings in the message.
    """

    def both(x: object, y: object) -> str:
        return f"{x!s:.40} ({names[0]}) and {y!s:.40} ({names[1]})"

    if a.architecture != b.architecture:
        fields = [
            (k, a.architecture.get(k), b.architecture.get(k)) for k in sorted({**a.architecture, **b.architecture})
        ]
        differing = [f"{k} = {both(repr(x), repr(y))}" for k, x, y in fields if x != y]
        raise InputError(f"architecture: must be equal on both sides, got {'; '.join(differing)}")
    if a.weights != b.weights:
        raise InputError(
            "weights: must be equal on both sides, got weights with the digests "
            + both(f"{a.weights:.16}", f"{b.weights:.16}")
        )
    if len(a.sequences) != len(b.sequences):
        raise InputError(
            "tokens: both sides must have the same sequences, got as many sequences: "
            + both(len(a.sequences), len(b.sequences))
        )
    for i, (x, y) in enumerate(zip(a.sequences, b.sequences, strict=True)):
        if x != y:
            raise InputError(f"tokens: both sides must have the same sequences, but sequence {i} differs")
    if STOCK not in (a.contract, b.contract) and a.contract != b.contract:
        raise InputError(
            f"contract: two aligned sides must have the same contract id, got {a.contract!r} ({names[0]}) and "
            f"{b.contract!r} ({names[1]})"
        )


def compare(a: Recording, b: Recording) -> Comparison:
    """Compare two recordings by their digests, and by values where both recorded them.

    Raises InputError as `check_comparable` does, and if no token of any point is in both recordings.
    """
    check_comparable(a, b)
    differences, missing, rows_of = [], [], []
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
        differences.append(
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
    if not any(p.compared for p in differences):
        raise InputError("recordings: A and B must have at least one token at a point that both recorded, got none")
    first = next((i for i, p in enumerate(differences) if p.differing), None)
    rows = [] if first is None else rows_of[first].tolist()
    comparison = Comparison(differences, missing, first, rows, [a.token(r) for r in rows], [])
    add_values(comparison, a, b)
    comparison.by_position = _by_position(a, b)
    return comparison


def choose(comparison: Comparison, a: Recording, budget: int) -> dict[str, list[int]]:
    """Choose the rows of each point whose values are recorded, within `budget` bytes of fp32 per side.

    Half of the budget goes to differing tokens at the first differing point. The rest goes to up to `GROWTH_TOKENS` of
    these tokens at the other differing points: logits, final_norm, the layers' residuals, then the rest.
    """
    by_name = {p.name: p for p in points(Architecture(**a.architecture))}
    differing = [p for p in comparison.points if p.differing]
    if comparison.suspect is None:
        return {}
    suspect = by_name[comparison.suspect.point]
    chosen = {suspect.name: _sample(comparison.rows, max(1, budget // 2 // (4 * suspect.width)))}
    left = budget - 4 * suspect.width * len(chosen[suspect.name])
    later = _sample(comparison.rows, GROWTH_TOKENS)
    for name in sorted((p.point for p in differing), key=_priority):
        size = 4 * by_name[name].width * len(later)
        if name not in chosen and size <= left:
            chosen[name] = later
            left -= size
    return chosen


def _priority(name: str) -> int:
    return 0 if name == "logits" else 1 if name == "final_norm" else 2 if name.endswith(".residual") else 3


def _sample(rows: list[int], count: int) -> list[int]:
    """Return at most `count` evenly spaced rows, including the first."""
    step = -(-len(rows) // count)
    return rows[::step]


def add_values(comparison: Comparison, a: Recording, b: Recording) -> None:
    """Fill in `PointDifference.values` at points where both sides recorded values of common rows."""
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
        d[same_bits(x, y)] = 0  # including equal infinities and NaNs
        worst = int(d.argmax())
        row, column = divmod(worst, d.shape[1])
        finite = d.isfinite() & x.isfinite()
        distance = ulps(x, y)
        nonzero = distance[distance > 0]
        size = float(x[finite].double().square().sum())
        point.values = Values(
            tokens=len(common),
            max_abs=float(d.max()),
            mean_abs=float(d[finite].mean()) if finite.any() else 0.0,
            max_ulps=int(distance.max()),
            median_ulps=int(nonzero.median()) if len(nonzero) else 0,
            relative=math.sqrt(float(d[finite].square().sum()) / size) if size else 0.0,
            where=(*a.token(int(common[row])), column),
            a=float(x[row, column]),
            b=float(y[row, column]),
        )


def same_bits(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return x.float().contiguous().view(torch.int32) == y.float().contiguous().view(torch.int32)


def ulps(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Return the int64 distance in ulps, after rounding both to the narrower of the two dtypes."""
    dtype = min((x.dtype, y.dtype), key=lambda t: (t.itemsize, t is torch.float16))
    signed, sign = (torch.int16, 2**15) if dtype.itemsize == 2 else (torch.int32, 2**31)

    def ordinal(t: torch.Tensor) -> torch.Tensor:
        bits = t.to(dtype).contiguous().view(signed).long()
        return torch.where(bits < 0, -(bits + sign), bits)  # -0 and 0 map to 0

    return (ordinal(x) - ordinal(y)).abs()


def _by_position(a: Recording, b: Recording) -> list[tuple[int, float, float]]:
    name = "logprob"
    if any(name not in side.values or len(side.kept[name]) != side.rows for side in (a, b)):
        return []
    seen = a.seen[name].astype(bool) & b.seen[name].astype(bool)
    d = (a.values[name].double() - b.values[name].double()).abs().reshape(-1).numpy()
    positions = np.concatenate([np.arange(len(s)) for s in a.sequences])
    return [
        (int(p), float((values > 0).mean()), float(values.max()))
        for p in np.unique(positions[seen])
        for values in [d[seen & (positions == p)]]
    ]
