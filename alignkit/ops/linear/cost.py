"""How long the ways to compute a k-tree take, in microseconds, by models: the least of them runs. No bit depends on it.

Of few rows:

A launch; then the longest of what goes on at once: the weight is read, and blocks multiply, step by step of k, one task after
another, of which each takes some time to begin and end; then the sums of parts, which go through memory to those who join them.
A product is described by its rows m, its outputs n, k and its leaves.

Of many rows (`Many`): a launch, then rounds of tiles, one for each multiprocessor, and what remains of the last round where
its tiles are cut.

The constants were fitted (``benchmarks/fit_linear.py``) to an H200's times of drawn products (``benchmarks/matmul.py --draw
SEED --candidates FILE``).
"""

from __future__ import annotations

import math
from typing import NamedTuple

from ...runtime.families import SM90

MULTIPROCESSORS = SM90.multiprocessors
CLUSTERS = MULTIPROCESSORS // 2
"""Of two blocks."""
STEP = 64
"""Of k, in CUDA."""
SHORT = 48
"""Of k: fewer elements of a row are not copied sooner."""


class Cost(NamedTuple):
    start: float
    """Of a launch."""
    rate: float
    """MB of the weight in a microsecond."""
    step: float
    """Of a step of k, however large."""
    element: float = 0.0
    """Of a step, for each row of a block of CUDA's, and each element of k of one of Triton's."""
    copy: float = 0.0
    """For each element of a step's operands, which blocks on a multiprocessor copy in turn."""
    task: float = 0.0
    sums: float = 0.0
    """Of a MB of parts' sums."""
    join: float = 0.0
    """Of the launch that joins parts; in CUDA it is hidden."""

    def of(self, n: int, k: int, *busy: float, sums: int = 0) -> float:
        """busy: times that pass while the weight is read; sums: how many there are of parts. Times that are close add a little
        to each other."""
        longest = sum(us**3 for us in (2e-6 * n * k / self.rate, *busy)) ** (1 / 3)
        return self.start + longest + (self.join + 4e-6 * sums * self.sums if sums else 0.0)


CLUSTER = Cost(start=3.32, rate=3.0, step=0.309)
PARTS = Cost(start=3.52, rate=3.32, step=0.0554, element=0.002, task=1.16, sums=0.335)
TILES = Cost(start=3.0, rate=3.85, step=0.218, element=0.000805, copy=2.21e-5, task=0.385, sums=0.393, join=1.13)


class Tile(NamedTuple):
    """Of triton.py: rows, outputs and k of a step, and the blocks to which its leaves are dealt out."""

    rows: int
    outputs: int
    step: int
    parts: int


def up(a: int, b: int) -> int:
    """a / b, rounded up."""
    return -(-a // b)


def cluster(n: int, k: int, leaves: int) -> float:
    """Of clusters that have 64 outputs and all leaves, a quarter of them for each group of warps."""
    rounds, steps = up(up(n, 64), CLUSTERS), up(k // leaves, STEP)
    return CLUSTER.of(n, k, rounds * (leaves // 4) * steps * CLUSTER.step)


def parts(m: int, n: int, k: int, leaves: int, number: int, width: int, same_outputs: bool) -> float:
    """Of leaves dealt out to `number` blocks of 128 outputs and `width` rows; the two of a cluster have the same outputs, or
    the same rows."""
    across, down = (up(n, 128), up(m, 2 * width)) if same_outputs else (up(n, 256), up(m, width))
    rounds, steps = up(across * down * number, CLUSTERS), leaves // number * up(k // leaves, STEP)
    busiest = rounds * (steps * (PARTS.step + PARTS.element * width) + PARTS.task)
    return PARTS.of(n, k, busiest, sums=number * m * n)


def tiles(m: int, n: int, k: int, leaves: int, how: Tile) -> float:
    """Of triton.py's. A step does not go beyond a leaf: where 128 does not divide it, steps are shorter, and more."""
    step = math.gcd(how.step, k // leaves)
    steps = k // how.parts // step
    blocks = up(up(m, how.rows) * up(n, how.outputs) * how.parts, MULTIPROCESSORS)  # of the busiest
    copied = blocks * (steps * max(step, SHORT) * (how.rows + how.outputs) * TILES.copy + TILES.task)
    waited = steps * (TILES.step + TILES.element * step)
    return TILES.of(n, k, copied, waited, sums=how.parts * m * n if how.parts > 1 else 0)


def all_tiles(m: int, leaves: int) -> list[Tile]:
    """Those to choose from."""
    shapes = ((16, 32, 128), (64, 32, 128)) if m <= 64 else ((64, 32, 128), (64, 64, 64))
    return [Tile(*shape, number) for shape in shapes for number in (1, 2, 4, 8) if number <= leaves]


def best_of_tiles(m: int, n: int, k: int, leaves: int) -> tuple[float, Tile]:
    """The least that triton.py's tiles take, and which do."""
    return min((tiles(m, n, k, leaves, how), how) for how in all_tiles(m, leaves))


MANY_ROWS, MANY_OUTPUTS = 128, 128
"""Of a tile of hopper.py's."""
KEPT = {1: (), 2: (1,), 4: (2, 3), 8: (2, 4, 6)}
"""By a tree's leaves, how many an owner of a tile may keep. Whatever else there is, is given away in subtrees of one size."""


class Cut(NamedTuple):
    """How hopper.py cuts the tiles that do not fill a last round."""

    tiles: int
    """So many; 0: all are whole."""
    kept: int
    """Leaves of each that its owner, a block, computes itself."""
    helpers: int
    """Blocks that own none of them."""
    pieces: int
    """Subtrees of each that are given to helpers."""


def piece(kept: int) -> int:
    """Leaves of a piece: as many as the tree has together behind those kept."""
    return kept & -kept


class Many(NamedTuple):
    """Microseconds of hopper.py's."""

    start: float
    """Of a launch."""
    step: float
    """Of a step of k."""
    join: float
    """Of a leaf's end."""
    given: float
    """To write the sums of a piece."""
    taken: float
    """To wait for them and read them."""

    def of(self, m: int, n: int, k: int, leaves: int, blocks: int, cut: Cut) -> float:
        """Until the last block is done. A helper's pieces come first, an owner's tile last."""
        leaf = up(k // leaves, STEP) * self.step + self.join
        us = self.start + up(tiles_of(m, n) - cut.tiles, blocks) * leaves * leaf
        if not cut.tiles:
            return us
        helped = up(cut.tiles * cut.pieces, cut.helpers) * (piece(cut.kept) * leaf + self.given)
        return us + max(cut.kept * leaf, helped) + cut.pieces * self.taken


MANY = Many(start=6.29, step=0.338, join=0.154, given=1.6, taken=1.72)


def tiles_of(m: int, n: int) -> int:
    """Of hopper.py's."""
    return up(m, MANY_ROWS) * up(n, MANY_OUTPUTS)


def cuts(m: int, n: int, leaves: int, blocks: int) -> list[Cut]:
    """All that are possible."""
    tiles = tiles_of(m, n)
    found, rest = [Cut(0, leaves, min(tiles, blocks), 0)], tiles % blocks
    for kept in KEPT[leaves] if rest else ():
        pieces, idle = (leaves - kept) // piece(kept), blocks - rest
        found.append(Cut(rest, kept, idle if tiles > blocks else min(idle, rest * pieces), pieces))
    return found


def cut(m: int, n: int, k: int, leaves: int, blocks: int) -> Cut:
    """The fastest."""
    return min(cuts(m, n, leaves, blocks), key=lambda how: MANY.of(m, n, k, leaves, blocks, how))


def many(m: int, n: int, k: int, leaves: int) -> float:
    """The least that hopper.py takes for a k-tree, if there are rows for its tiles."""
    if m <= MANY_ROWS:
        return math.inf
    return MANY.of(m, n, k, leaves, MULTIPROCESSORS, cut(m, n, k, leaves, MULTIPROCESSORS))
