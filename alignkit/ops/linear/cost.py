"""How long the ways to compute a k-tree take, by a model, in microseconds: the least of them runs. No bit depends on it.

A launch, then the larger of two times: to read the weight, and what the busiest multiprocessor does, in steps of 64 of k, in
leaves, which it joins, and in tasks, which it begins and ends. Tasks are dealt out in rounds, of which the last may have few.
Then the sums of parts, which go through memory to those who join them. A product is described by its rows m, its outputs n,
k and its leaves.

The constants were fitted to an H200's times of drawn products (``benchmarks/matmul.py --draw SEED --candidates FILE``).
"""

from __future__ import annotations

from typing import NamedTuple

STEP = 64
"""Of k."""
TILE = 128
"""Rows and columns of a tile of many rows; outputs of a block of few."""


class Cost(NamedTuple):
    start: float
    """Of a launch."""
    rate: float
    """MB of the weight in a microsecond."""
    step: float
    leaf: float = 0.0
    task: float = 0.0
    sums: float = 0.0
    """Of a MB of parts' sums."""
    join: float = 0.0
    """Of the launch that joins parts."""

    def of(self, n: int, k: int, rounds: int, leaves: int, steps: int, sums: int = 0) -> float:
        """leaves: those of a task; steps: those of a leaf; sums: the parts' elements."""
        busiest = rounds * (leaves * (steps * self.step + self.leaf) + self.task)
        reading = 2e-6 * n * k / self.rate
        return (
            self.start + (reading**3 + busiest**3) ** (1 / 3) + (self.join + 4e-6 * sums * self.sums if sums else 0.0)
        )


QUARTERS = Cost(4.0, 3.6, 0.36)
PARTS = {
    (64, False): Cost(4.0, 3.6, 0.30, 0.3, 0.5, 0.3),
    (96, False): Cost(4.0, 3.6, 0.32, 0.3, 0.5, 0.3),
    (128, False): Cost(4.0, 3.6, 0.36, 0.3, 0.5, 0.3),
    (96, True): Cost(4.0, 3.6, 0.30, 0.3, 0.5, 0.3),
    (128, True): Cost(4.0, 3.6, 0.34, 0.3, 0.5, 0.3),
}
"""By rows of a block, and whether a cluster's blocks have the same outputs."""
MANY = Cost(4.0, 3.6, 0.325, 0.35, 1.0, 0.3, 3.0)


def up(a: int, b: int) -> int:
    """a / b, rounded up."""
    return -(-a // b)


def quarters(n: int, k: int, leaves: int, clusters: int) -> float:
    """A cluster has 64 outputs, each of its groups of warps a quarter of their leaves."""
    return QUARTERS.of(n, k, up(up(n, 64), clusters), leaves // 4, up(k // leaves, STEP))


def parts(m: int, n: int, k: int, leaves: int, number: int, width: int, same_outputs: bool, clusters: int) -> float:
    """Leaves dealt out to `number` blocks of `width` rows, of which a cluster has two."""
    down, across = (up(m, 2 * width), up(n, TILE)) if same_outputs else (up(m, width), up(n, 2 * TILE))
    rounds = up(down * across * number, clusters)
    return PARTS[width, same_outputs].of(n, k, rounds, leaves // number, up(k // leaves, STEP), number * m * n)


class Shares(NamedTuple):
    """Of hopper.py's tiles."""

    whole: int
    """The first so many have a block that computes all leaves."""
    parts: int = 1
    """Of the others, the leaves are dealt out to so many."""


def shares(m: int, n: int, leaves: int, multiprocessors: int) -> list[Shares]:
    """Those to choose from: all tiles whole, none, or those that fill rounds."""
    tiles = up(m, TILE) * up(n, TILE)
    full = tiles // multiprocessors * multiprocessors
    dealt = [Shares(whole, parts) for whole in {0, full} - {tiles} for parts in (2, 4, 8) if parts <= leaves]
    return [Shares(tiles), *dealt]


def many(m: int, n: int, k: int, leaves: int, how: Shares, multiprocessors: int) -> float:
    """hopper.py's tiles."""
    tiles, steps = up(m, TILE) * up(n, TILE), up(k // leaves, STEP)
    first = MANY.of(n, k, up(how.whole, multiprocessors), leaves, steps) if how.whole else 0.0
    if how.whole == tiles:
        return first
    rest = tiles - how.whole
    rounds, sums = up(rest * how.parts, multiprocessors), rest * how.parts * TILE * TILE
    return first + MANY.of(n, k if not first else 0, rounds, leaves // how.parts, steps, sums)


def best_of_many(m: int, n: int, k: int, leaves: int, multiprocessors: int) -> tuple[float, Shares]:
    """The least that hopper.py's tiles take, and how they are dealt out."""
    return min((many(m, n, k, leaves, how, multiprocessors), how) for how in shares(m, n, leaves, multiprocessors))
