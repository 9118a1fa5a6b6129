"""State of the page, read from a monitor's files in memory that is independent of the run's length.

Every record is read once and discarded. Per rank the state holds totals, the worst tokens, the latest metrics and one
curve. When a curve exceeds `MAX_POINTS`, neighboring points are merged in pairs, and the larger difference is kept.
The keys of `summary` are read by the templates, by `plot` and by programs that fetch `/data.json`.
"""

from __future__ import annotations

import math
import os
import threading
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

from ..drift.monitor.records import RECORDS, REPLAY, Lines, opened, parse
from ..errors import InputError

T = TypeVar("T")

MAX_RANKS = 1024
"""Maximum number of ranks whose files are read; the page names the first file that is not read."""
MAX_POINTS = 512
"""Maximum number of points in a rank's curve."""
MAX_WORST = 20
"""Maximum number of worst tokens per rank and on the page."""
MAX_METRICS = 200
"""Maximum number of metrics taken from a record."""
MAX_CAUSES = 8
"""Maximum number of causes taken from a record."""
MAX_REPLAYS = 100
"""Maximum number of listed replays."""
READ_LIMIT = 2**25
"""Maximum number of bytes read by one refresh; if more remain, the page shows the progress."""
_TEXT = 200
"""Maximum length of a string from a file, in characters; longer ones are truncated."""


@dataclass
class Point:
    """Merged records of one rank for steps first to last; max_abs is NaN if no logprob was finite."""

    first: int
    last: int
    tokens: int
    unequal: int
    max_abs: float

    def merge(self, later: Point) -> Point:
        return Point(
            min(self.first, later.first),
            max(self.last, later.last),
            self.tokens + later.tokens,
            self.unequal + later.unequal,
            _larger(self.max_abs, later.max_abs),
        )


@dataclass
class Worst:
    """A token that is not bit-equal, with the fields of its record."""

    rank: int
    step: int
    token: dict

    @property
    def distance(self) -> float:
        """The absolute difference; infinite if a value is not finite."""
        rollout, training = self.token["rollout"], self.token["training"]
        return math.inf if rollout is None or training is None else abs(training - rollout)


@dataclass
class Rank:
    """State of one rank's file."""

    rank: int
    records: int = 0
    damaged: int = 0
    tokens: int = 0
    unequal: int = 0
    max_abs: float = math.nan
    last_step: int | None = None
    last_time: float | None = None
    contract: str | None = None
    latest: dict = field(default_factory=dict)
    """Metrics of the latest record by name."""
    first_difference: Worst | None = None
    causes: list[str] = field(default_factory=list)
    """Causes of the record with the first difference."""
    worst: list[Worst] = field(default_factory=list)
    points: list[Point] = field(default_factory=list)
    """Curve in record order."""
    size: int = 0
    lines: Lines = field(default_factory=Lines)
    identity: tuple[int, int] | None = None
    _width: int = 1
    """Number of records per point."""
    _in_last: int = 0
    """Number of records in the last point."""

    def read(self, file, limit: int) -> None:
        for line in self.lines.read(file, limit):
            record = parse(line)
            if record is None:
                self.damaged += 1
            else:
                self.add(record)

    def add(self, record: dict) -> None:
        step, drift = record["step"], record["drift"]
        unequal = drift["tokens"] - drift["bit_equal"]
        largest = drift.get("max_abs")
        largest = math.nan if largest is None else float(largest)
        self.records += 1
        self.tokens += drift["tokens"]
        self.unequal += unequal
        self.max_abs = _larger(self.max_abs, largest)
        self.last_step, self.last_time = step, record["time"]
        self.contract = record["contract"][:_TEXT]
        self.latest = {name[:_TEXT]: value for name, value in list(record["metrics"].items())[:MAX_METRICS]}
        first = record["first_difference"]
        if self.first_difference is None and first is not None:
            self.first_difference = Worst(self.rank, step, _truncated(first))
            self.causes = [cause[:_TEXT] for cause in record.get("causes", [])[:MAX_CAUSES]]
        worst = [Worst(self.rank, step, _truncated(token)) for token in record["worst"][:MAX_WORST]]
        if worst:
            self.worst = worst_of(self.worst + worst)
        self._add_point(Point(step, step, drift["tokens"], unequal, largest))

    def _add_point(self, point: Point) -> None:
        if self.points and self._in_last < self._width:
            self.points[-1] = self.points[-1].merge(point)
            self._in_last += 1
        else:
            self.points.append(point)
            self._in_last = 1
        if len(self.points) > MAX_POINTS:  # an odd number: the last point stays unmerged and is half full
            pairs = [a.merge(b) for a, b in zip(self.points[:-1:2], self.points[1::2], strict=True)]
            self.points = [*pairs, self.points[-1]]
            self._width *= 2


class Watched:
    """Reader of a monitor's directory; reads only the monitor's regular files and does not follow links."""

    def __init__(self, directory: Path) -> None:
        """Raise InputError if `directory` is not a directory."""
        if not directory.is_dir():
            raise InputError(f"DIR: must be an existing directory, got {directory}")
        self.directory = directory
        self._ranks: dict[int, Rank] = {}
        self._lock = threading.Lock()

    def refresh(self) -> dict:
        """Read new records and return the summary, which is the content of `/data.json` and of the page."""
        with self._lock:
            try:
                folder = os.open(self.directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            except OSError as e:  # existed at startup and may reappear
                self._ranks = {}
                return summary({}, [], [f"{self.directory}: {e.strerror}"], False)
            try:
                names = sorted(os.listdir(folder))
                refused, behind = self._read(folder, names)
                replays = [name for name in names if REPLAY.fullmatch(name)]
                entries = [_replay(folder, name) for name in replays[:MAX_REPLAYS]]
            finally:
                os.close(folder)
            return summary(self._ranks, [entry for entry in entries if entry is not None], refused, behind)

    def _read(self, folder: int, names: list[str]) -> tuple[list[str], bool]:
        """Read new records of every rank; return the files not read with reasons, and True if data remains."""
        refused, remaining, present = [], READ_LIMIT, set()
        for name in names:
            match = RECORDS.fullmatch(name)
            if match is None:
                continue
            if len(present) == MAX_RANKS:
                refused.append(f"{name} and later: more than {MAX_RANKS} ranks")
                break
            number = int(match[1])
            try:
                with opened(folder, name) as file:
                    status = os.fstat(file.fileno())
                    rank = self._ranks.get(number)
                    # A replaced or truncated file: discard the state read from the old one.
                    if (
                        rank is None
                        or rank.identity != (status.st_dev, status.st_ino)
                        or status.st_size < rank.lines.offset
                    ):
                        rank = self._ranks[number] = Rank(number, identity=(status.st_dev, status.st_ino))
                    present.add(number)
                    rank.size = status.st_size
                    before = rank.lines.offset
                    rank.read(file, remaining)
                    remaining = max(0, remaining - (rank.lines.offset - before))
            except OSError as e:
                refused.append(f"{name}: {e.strerror}")
        self._ranks = {number: self._ranks[number] for number in sorted(present)}
        return refused, not remaining


def _known(value: T | None) -> T:
    """Return a value that every rank with records has."""
    assert value is not None
    return value


def summary(ranks: dict[int, Rank], replays: list[dict], refused: list[str], behind: bool) -> dict:
    """Return the state as JSON values; `behind` means that unread data remains."""
    ranks_read = [rank for rank in ranks.values() if rank.records]
    differences = [rank.first_difference for rank in ranks_read if rank.first_difference is not None]
    first = min(differences, key=lambda token: (token.step, token.rank), default=None)
    latest = max(ranks_read, key=lambda rank: _known(rank.last_time), default=None)
    return {
        "tokens": sum(rank.tokens for rank in ranks_read),
        "unequal": sum(rank.unequal for rank in ranks_read),
        "max_abs": _finite(_largest(rank.max_abs for rank in ranks_read)),
        "records": sum(rank.records for rank in ranks_read),
        "damaged": sum(rank.damaged for rank in ranks.values()),
        "last_step": max((_known(rank.last_step) for rank in ranks_read), default=None),
        "contracts": sorted({_known(rank.contract) for rank in ranks_read}),
        "behind": behind,
        "read_bytes": sum(rank.lines.offset for rank in ranks.values()),
        "all_bytes": sum(rank.size for rank in ranks.values()),
        "first_difference": None if first is None else {**_worst_json(first), "causes": ranks[first.rank].causes},
        "ranks": [
            {
                "rank": rank.rank,
                "records": rank.records,
                "last_step": rank.last_step,
                "last_time": rank.last_time,
                "tokens": rank.tokens,
                "unequal": rank.unequal,
                "max_abs": _finite(rank.max_abs),
                "damaged": rank.damaged,
                "contract": rank.contract,
            }
            for rank in ranks.values()
        ],
        "worst": [_worst_json(token) for token in worst_of([w for rank in ranks_read for w in rank.worst])],
        "latest": None if latest is None else {"rank": latest.rank, "step": latest.last_step, "metrics": latest.latest},
        "curves": [
            {
                "rank": rank.rank,
                "points": [[p.first, p.last, p.tokens, p.unequal, _finite(p.max_abs)] for p in rank.points],
            }
            for rank in ranks_read
        ],
        "replays": replays,
        "refused": refused,
    }


def worst_of(tokens: list[Worst]) -> list[Worst]:
    """Return the `MAX_WORST` tokens with the largest distance; ties by step, then rank."""
    return sorted(tokens, key=lambda w: (-w.distance, w.step, w.rank))[:MAX_WORST]


def _replay(folder: int, name: str) -> dict | None:
    """Return a replay's name and size; None if it is not a regular file."""
    try:
        with opened(folder, name) as file:
            return {"name": name, "bytes": os.fstat(file.fileno()).st_size}
    except OSError:
        return None


def _worst_json(worst: Worst) -> dict:
    return {"rank": worst.rank, "step": worst.step, **worst.token, "distance": _finite(worst.distance)}


def _truncated(token: dict) -> dict:
    return {
        **{key: token.get(key) for key in ("sequence", "position", "token", "rollout", "training")},
        **{key: token[key][:_TEXT] for key in ("rollout_bits", "training_bits")},
    }


def _larger(a: float, b: float) -> float:
    """Return the larger value; NaN only if both are NaN."""
    return b if math.isnan(a) else a if math.isnan(b) else max(a, b)


def _largest(values) -> float:
    largest = math.nan
    for value in values:
        largest = _larger(largest, value)
    return largest


def _finite(x: float) -> float | None:
    return x if math.isfinite(x) else None
