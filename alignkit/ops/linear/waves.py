"""Which of cuBLASLt's tiles is the fastest for a product of many rows, by a model. Its own order of suggestions is meant for
when it may cut k; without, it is often one whose last round of tiles leaves most multiprocessors idle.

Each multiprocessor takes a tile at a time, so the time is that of the rounds: for each a tile's products, or to copy its
operands if that takes longer, and its beginning and end. The constants were fitted to an H200's times of all of its algorithms
for 51 drawn products (docs/linear.md).
"""

from __future__ import annotations

import functools

from ...runtime.families import SM90

PRODUCT = 3.07e-7
"""Microseconds, of an element of a tile and of k."""
OPERAND = 1.24e-5
"""Of a row or column of a tile and an element of k."""
TILE = 1.4
NARROW, SLOWER = 96, 1.5
"""A side below which tiles were found to take 1.2 to 2 times as long as the model says, and what they are said to take."""
NAMED = (
    "8x8 8x16 16x8 8x32 16x16 32x8 8x64 16x32 32x16 64x8 32x32 32x64 64x32 32x128 64x64 128x32 64x128 128x64 64x256 128x128 "
    "256x64 64x512 128x256 256x128 512x64 64x96 96x64 96x128 128x160 160x128 192x128 128x192 128x96 32x256 256x32"
)


@functools.cache
def tiles() -> list[tuple[int, int]]:
    """cublasLtMatmulTile_t from 1 on: rows, which are our outputs, and columns, our rows. The first are named one by one; then
    those of multiples of 64 columns, then those of multiples of 64 rows, each once."""
    found = dict.fromkeys(tuple(map(int, name.split("x"))) for name in NAMED.split())
    found |= dict.fromkeys((8 * i, 64 * j) for i in range(1, 97) for j in range(1, 13) if 8 * i * 64 * j <= 3 << 14)
    found |= dict.fromkeys((64 * i, 8 * j) for i in range(1, 13) for j in range(1, 97) if 64 * i * 8 * j <= 1 << 16)
    return list(found)  # pyright: ignore[reportReturnType] - pairs


def microseconds(m: int, n: int, k: int, tile: int) -> float | None:
    """Of a product by a tile, without the launch. None: the tile is not known."""
    if not 1 <= tile <= len(tiles()):
        return None
    outputs, rows = tiles()[tile - 1]
    rounds = -(-(-(-n // outputs) * -(-m // rows)) // SM90.multiprocessors)
    multiplied, copied = PRODUCT * outputs * rows * k, OPERAND * (outputs + rows) * k
    us = rounds * ((multiplied**3 + copied**3) ** (1 / 3) + TILE)
    return us * SLOWER if min(outputs, rows) < NARROW else us
