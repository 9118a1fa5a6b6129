"""Cost models of the k-tree kernels, in microseconds; the kernel with the lowest cost runs. No bit depends on them.

A GEMM has m rows, n outputs, reduction length k and a number of k-tree leaves.

Skinny GEMMs: launch time, plus the maximum of weight-read time and CTA time, plus the reduction of partial sums through
memory. CTA time is steps of k plus a start-up and tail time per tile.

Large GEMMs (`Many`): launch time, plus waves of tiles, one tile per SM, plus the last wave if its tiles are split
(stream-K).

``benchmarks/fit_linear.py`` reads the constants by name and fits them to the times of random GEMMs on an H200
(``benchmarks/matmul.py --draw SEED --candidates FILE``).
"""

from __future__ import annotations

import math
from typing import NamedTuple

from ...runtime.families import SM90
from ...runtime.shared import KERNELS

SM_COUNT = SM90.sm_count  # hardware: SMs of the GPU to which the costs were fitted
CLUSTERS = SM_COUNT // 2
"""hardware: clusters of two CTAs that run at once."""
STEP = KERNELS["kStep"]
"""k extent of a pipeline step of the CUDA kernels and of hopper.py."""
SHORT = 48
"""schedule: k extent of a Triton step below which its copy gets no faster."""


class Cost(NamedTuple):
    """Fitted constants of one skinny-GEMM kernel (schedule: they affect speed alone)."""

    start: float
    """Launch time, us."""
    rate: float
    """Weight-read bandwidth, MB/us."""
    step: float
    """Time per step of k, us, regardless of its size."""
    element: float = 0.0
    """Additional time per step: per row of a CTA (CUDA), or per element of k (Triton)."""
    copy: float = 0.0
    """Time per operand element; the CTAs of an SM share its copy bandwidth."""
    task: float = 0.0
    """Start-up and tail time per tile."""
    sums: float = 0.0
    """Time per MB of partial sums."""
    join: float = 0.0
    """Launch time of the reduction kernel; hidden in CUDA (PDL)."""

    def of(self, n: int, k: int, *busy: float, sums: int = 0) -> float:
        """Return the time of a GEMM.

        `busy` are times that overlap with reading the weight; a soft maximum (L3 norm) combines them. `sums` is the
        number of partial sums.
        """
        longest = sum(us**3 for us in (2e-6 * n * k / self.rate, *busy)) ** (1 / 3)
        return self.start + longest + (self.join + 4e-6 * sums * self.sums if sums else 0.0)


# schedule: fitted by benchmarks/fit_linear.py
CLUSTER = Cost(start=3.32, rate=3.0, step=0.309)
# schedule: fitted by benchmarks/fit_linear.py
PARTS = Cost(start=3.52, rate=3.32, step=0.0554, element=0.002, task=1.16, sums=0.335)
# schedule: fitted by benchmarks/fit_linear.py
TILES = Cost(start=3.0, rate=3.85, step=0.218, element=0.000805, copy=2.21e-5, task=0.385, sums=0.393, join=1.13)


class Tile(NamedTuple):
    """A tile of triton_backend.py: rows, outputs, k extent of a step, and CTAs that share its leaves (split-K)."""

    rows: int
    outputs: int
    step: int
    parts: int


def ceil_div(a: int, b: int) -> int:
    """Return a / b, rounded up."""
    return -(-a // b)


def cluster(n: int, k: int, leaves: int) -> float:
    """Return the time of clusters that compute 64 outputs and all leaves, a quarter of the leaves per warpgroup."""
    rounds, steps = ceil_div(ceil_div(n, 64), CLUSTERS), ceil_div(k // leaves, STEP)
    return CLUSTER.of(n, k, rounds * (leaves // 4) * steps * CLUSTER.step)


def parts(m: int, n: int, k: int, leaves: int, number: int, width: int, same_outputs: bool) -> float:
    """Return the time with leaves split over `number` CTAs of 128 outputs x `width` rows.

    The two CTAs of a cluster share their outputs (`same_outputs`) or their rows.
    """
    clusters_n, clusters_m = (
        (ceil_div(n, 128), ceil_div(m, 2 * width)) if same_outputs else (ceil_div(n, 256), ceil_div(m, width))
    )
    rounds, steps = ceil_div(clusters_n * clusters_m * number, CLUSTERS), leaves // number * ceil_div(k // leaves, STEP)
    busiest = rounds * (steps * (PARTS.step + PARTS.element * width) + PARTS.task)
    return PARTS.of(n, k, busiest, sums=number * m * n)


def tiles(m: int, n: int, k: int, leaves: int, tile: Tile) -> float:
    """Return the time of triton_backend.py's kernel; odd leaf lengths need more, shorter steps."""
    step = math.gcd(tile.step, k // leaves)
    steps = k // tile.parts // step
    blocks = ceil_div(ceil_div(m, tile.rows) * ceil_div(n, tile.outputs) * tile.parts, SM_COUNT)  # per SM, at most
    copied = blocks * (steps * max(step, SHORT) * (tile.rows + tile.outputs) * TILES.copy + TILES.task)
    waited = steps * (TILES.step + TILES.element * step)
    return TILES.of(n, k, copied, waited, sums=tile.parts * m * n if tile.parts > 1 else 0)


def all_tiles(m: int, leaves: int) -> list[Tile]:
    """Return the candidate tiles of triton_backend.py."""
    shapes = ((16, 32, 128), (64, 32, 128)) if m <= 64 else ((64, 32, 128), (64, 64, 64))
    return [Tile(*shape, number) for shape in shapes for number in (1, 2, 4, 8) if number <= leaves]


def best_of_tiles(m: int, n: int, k: int, leaves: int) -> tuple[float, Tile]:
    """Return the lowest time of triton_backend.py's tiles, and its tile."""
    return min((tiles(m, n, k, leaves, tile), tile) for tile in all_tiles(m, leaves))


MANY_ROWS, MANY_OUTPUTS = 128, 128
"""schedule: tile shape of hopper.py, whose layouts fix MANY_ROWS to 128."""
KEPT = {1: (), 2: (1,), 4: (2, 3), 8: (2, 4, 6)}
"""schedule: leaves that the owner of a split tile may compute, by number of leaves; a limit of hopper.py:_own.

Entries may be removed; a new one needs a change of `_own`. The other leaves are pieces: subtrees of one size, computed
by helpers.
"""


class Cut(NamedTuple):
    """A stream-K split of the tiles of hopper.py's last, partial wave."""

    tiles: int
    """Number of split tiles; 0 if all tiles are whole."""
    kept: int
    """Leaves of each split tile that its owner CTA computes."""
    helpers: int
    """CTAs that own no split tile."""
    pieces: int
    """Pieces of each split tile that helpers compute."""


def piece(kept: int) -> int:
    """Return the leaves of a piece: the largest subtree size that starts right after `kept` leaves."""
    return kept & -kept


class Many(NamedTuple):
    """Fitted constants of hopper.py, in microseconds (schedule: they affect speed alone)."""

    start: float
    """Launch time."""
    step: float
    """Time per step of k."""
    join: float
    """Time per leaf to add its sums."""
    given: float
    """Time for a helper to write the sums of a piece."""
    taken: float
    """Time for an owner to wait for and read the sums of a piece."""

    def of(self, m: int, n: int, k: int, leaves: int, blocks: int, cut: Cut) -> float:
        """Return the time until the last CTA is done. Helpers start with their pieces; owners end with their tile."""
        leaf = ceil_div(k // leaves, STEP) * self.step + self.join
        us = self.start + ceil_div(tiles_of(m, n) - cut.tiles, blocks) * leaves * leaf
        if not cut.tiles:
            return us
        helped = ceil_div(cut.tiles * cut.pieces, cut.helpers) * (piece(cut.kept) * leaf + self.given)
        return us + max(cut.kept * leaf, helped) + cut.pieces * self.taken


# schedule: fitted by benchmarks/fit_linear.py
MANY = Many(start=6.29, step=0.338, join=0.154, given=1.6, taken=1.72)


def tiles_of(m: int, n: int) -> int:
    """Return the number of tiles of hopper.py."""
    return ceil_div(m, MANY_ROWS) * ceil_div(n, MANY_OUTPUTS)


def cuts(m: int, n: int, leaves: int, blocks: int) -> list[Cut]:
    """Return the possible splits; the first has whole tiles alone."""
    tiles = tiles_of(m, n)
    found, rest = [Cut(0, leaves, min(tiles, blocks), 0)], tiles % blocks
    for kept in KEPT[leaves] if rest else ():
        pieces, idle = (leaves - kept) // piece(kept), blocks - rest
        found.append(Cut(rest, kept, idle if tiles > blocks else min(idle, rest * pieces), pieces))
    return found


def cut(m: int, n: int, k: int, leaves: int, blocks: int) -> Cut:
    """Return the fastest split."""
    return min(cuts(m, n, leaves, blocks), key=lambda each: MANY.of(m, n, k, leaves, blocks, each))


def many(m: int, n: int, k: int, leaves: int) -> float:
    """Return the time of hopper.py's fastest split for a k-tree; inf if m is less than a tile."""
    if m <= MANY_ROWS:
        return math.inf
    return MANY.of(m, n, k, leaves, SM_COUNT, cut(m, n, k, leaves, SM_COUNT))
