"""How long the ways to compute a k-tree take, by a model, in microseconds: the least of them runs. No bit depends on it.

A launch, then the larger of two times: to read the weight, and what the busiest multiprocessor does, in steps of 64 of k, in
leaves, which it joins, and in tasks, which it begins and ends. Tasks are dealt out in rounds, of which the last may have few.
Then the sums of parts, which go through memory to those who join them. A product is described by its rows m, its outputs n,
k and its leaves.

What is chosen for as many rows as `ladder` has is chosen for all between them too, so that no kernel is compiled at a number
of rows that nobody foresaw.

The constants were fitted (``benchmarks/fit_linear.py``) to an H200's times of drawn products (``benchmarks/matmul.py --draw
SEED --trees --candidates FILE``).
"""

from __future__ import annotations

import functools
from typing import NamedTuple

from ...runtime.operands import MOST
from .cublaslt import rounded

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
    wait: float = 0.0
    """Of a step, however many blocks there are."""

    def of(self, n: int, k: int, rounds: int, leaves: int, steps: int, sums: int = 0) -> float:
        """leaves: those of a task; steps: those of a leaf; sums: the parts' elements."""
        return self.in_all(n, k, rounds * (leaves * (steps * self.step + self.leaf) + self.task), sums)

    def in_all(self, n: int, k: int, busiest: float, sums: int) -> float:
        parts = self.join + 4e-6 * sums * self.sums if sums else 0.0
        return self.start + _larger(2e-6 * n * k / self.rate, busiest) + parts


def _larger(a: float, b: float) -> float:
    """Of two times; somewhat more where they are close."""
    return (a**3 + b**3) ** (1 / 3)


QUARTERS = Cost(3.41, 3.11, 0.344)
PARTS = {
    (64, False): Cost(4.07, 3.4, 0.191, 0.111, 0.331, 0.219),
    (96, False): Cost(3.74, 3.58, 0.265, 0.297, 0.245, 0.547),
    (128, False): Cost(3.55, 3.96, 0.394, 0.0994, 0.696, 0.406),
    (160, False): Cost(3.6, 3.5, 0.48, 0.2, 0.7, 0.4),
    (192, False): Cost(3.6, 3.5, 0.56, 0.2, 0.7, 0.4),
    (96, True): Cost(2.75, 2.52, 0.263, 0.476, 1.52, 0.203),
    (128, True): Cost(2.72, 2.1, 0.375, 0.181, 1.69, 0.242),
}
"""By rows of a block, and whether a cluster's blocks have the same outputs."""
MANY = Cost(1.63, 2.99, 0.367, 0.226, 1.6, 0.273, 2.32)
HALVED = Cost(1.63, 2.99, 0.22, 0.2, 1.2)
PAIRS = Cost(2.0, 3.0, 0.35, 0.15, 1.2)
"""Not measured yet."""
TILES = {
    (16, 32): Cost(2.82, 5.54, 0.135, sums=0.56, join=1.48, wait=0.161),
    (16, 64): Cost(3.33, 3.82, 0.149, sums=0.412, join=1.15, wait=0.184),
    (64, 32): Cost(3.08, 3.33, 0.143, sums=0.699, join=1.27, wait=0.21),
}
"""Of triton.py, whose leaves are multiples of 128: by rows and columns of a tile."""
FEW = 256
"""Rows that they are for."""


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


def pairs(m: int, n: int, k: int, leaves: int, clusters: int) -> float:
    """Clusters of two blocks, whose tile is 128 rows by 256 columns (csrc/sm90/gemm/many_rows_tree.cu)."""
    return PAIRS.of(n, k, up(up(m, TILE) * up(n, 2 * TILE), clusters), leaves, up(k // leaves, STEP))


class Shares(NamedTuple):
    """Of hopper.py's tiles."""

    whole: int
    """The first so many have a block that computes all leaves."""
    parts: int = 1
    """Of the others, the leaves are dealt out to so many; 1: they are halved."""


def shares(m: int, n: int, leaves: int, multiprocessors: int) -> list[Shares]:
    """Those to choose from: all tiles whole, none, or those that fill rounds."""
    tiles = up(m, TILE) * up(n, TILE)
    full = tiles // multiprocessors * multiprocessors
    others = [Shares(whole, parts) for whole in {0, full} - {tiles} for parts in (1, 2, 4, 8) if parts <= leaves]
    return [Shares(tiles), *others]


def many(m: int, n: int, k: int, leaves: int, how: Shares, multiprocessors: int) -> float:
    """hopper.py's tiles."""
    steps, rest = up(k // leaves, STEP), up(m, TILE) * up(n, TILE) - how.whole
    first = MANY.of(n, k, up(how.whole, multiprocessors), leaves, steps) if how.whole else 0.0
    if not rest:
        return first
    if how.parts == 1:
        second = HALVED.of(n, k, up(2 * rest, multiprocessors), leaves, steps)
    else:
        sums = rest * how.parts * TILE * TILE
        second = MANY.of(n, k, up(rest * how.parts, multiprocessors), leaves // how.parts, steps, sums)
    return first + second


@functools.lru_cache(MOST)
def best_of_many(m: int, n: int, k: int, leaves: int, multiprocessors: int) -> tuple[float, Shares]:
    """The least that hopper.py's tiles take, and how they are dealt out."""
    return min((many(m, n, k, leaves, how, multiprocessors), how) for how in shares(m, n, leaves, multiprocessors))


def tiles(m: int, n: int, k: int, height: int, width: int, number: int, multiprocessors: int) -> float:
    """triton.py's tiles, their leaves dealt out to `number` blocks, several of which share a multiprocessor."""
    cost, blocks, steps = TILES[height, width], up(m, height) * up(n, width) * number, k / number / STEP
    busiest = _larger(blocks / multiprocessors * steps * cost.step, steps * cost.wait)
    return cost.in_all(n, k, busiest, number * m * n if number > 1 else 0)


@functools.lru_cache(MOST)
def best_of_tiles(
    m: int, n: int, k: int, leaves: int, multiprocessors: int
) -> tuple[float, tuple[int, int, int]] | None:
    """The least that triton.py's tiles take, their rows, columns and parts; None: the model is not for such a product."""
    if m > FEW or k // leaves % 128:
        return None
    m = rounded(m)
    several = [number for number in (1, 2, 4, 8) if number <= leaves]
    ways = ((height, width, number) for height, width in TILES for number in several)
    return min((tiles(m, n, k, *way, multiprocessors), way) for way in ways)
