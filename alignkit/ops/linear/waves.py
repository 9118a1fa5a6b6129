"""Cost model of cuBLASLt's tiles for large GEMMs; it affects speed alone.

cuBLASLt orders its heuristics for GEMMs that may split k. Without a split, its first suggestion often leaves most SMs
idle in the last wave of tiles.

The time is a number of waves, one tile per SM, times a tile's MMA or copy time plus start-up and tail. The constants
were fitted to the times of all algorithms for 51 random GEMMs on an H200 (docs/notes/linear.md).
"""

from __future__ import annotations

import functools

from ...runtime.families import SM90

PRODUCT = 3.07e-7
"""schedule: MMA time per element of a tile and element of k, us."""
OPERAND = 1.24e-5
"""schedule: copy time per row or column of a tile and element of k, us."""
TILE = 1.4
"""schedule: start-up and tail time per tile, us."""
NARROW, SLOWER = 96, 1.5
"""schedule: tile side below which the model is too fast (by 1.2 to 2 times), and the correction factor."""
NAMED = (  # hardware: first values of cublasLtMatmulTile_t
    "8x8 8x16 16x8 8x32 16x16 32x8 8x64 16x32 32x16 64x8 32x32 32x64 64x32 32x128 64x64 128x32 64x128 128x64 "
    "64x256 128x128 256x64 64x512 128x256 256x128 512x64 64x96 96x64 96x128 128x160 160x128 192x128 128x192 "
    "128x96 32x256 256x32"
)


@functools.cache
def tiles() -> list[tuple[int, int]]:
    """Return the tile shapes of cublasLtMatmulTile_t from value 1 on, as (outputs, rows).

    The enum lists the shapes of `NAMED`, then those with multiples of 64 columns, then those with multiples of 64 rows,
    without duplicates.
    """
    found = dict.fromkeys(tuple(map(int, name.split("x"))) for name in NAMED.split())
    found |= dict.fromkeys((8 * i, 64 * j) for i in range(1, 97) for j in range(1, 13) if 8 * i * 64 * j <= 3 << 14)
    found |= dict.fromkeys((64 * i, 8 * j) for i in range(1, 13) for j in range(1, 97) if 64 * i * 8 * j <= 1 << 16)
    return list(found)  # pyright: ignore[reportReturnType] - pairs


def microseconds(m: int, n: int, k: int, tile: int) -> float | None:
    """Return the time of a GEMM with a tile, without launch time; None for an unknown tile."""
    if not 1 <= tile <= len(tiles()):
        return None
    outputs, rows = tiles()[tile - 1]
    rounds = -(-(-(-n // outputs) * -(-m // rows)) // SM90.sm_count)
    multiplied, copied = PRODUCT * outputs * rows * k, OPERAND * (outputs + rows) * k
    us = rounds * ((multiplied**3 + copied**3) ** (1 / 3) + TILE)
    return us * SLOWER if min(outputs, rows) < NARROW else us
