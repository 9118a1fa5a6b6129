"""The constants of the contract that all device families share. What differs between them is in `runtime.families`."""

from __future__ import annotations

VOCAB_TILE = 128
"""Width, in global vocabulary ids, of one leaf of the log-softmax."""
K_LEAVES = 8
"""Most leaves of a row-parallel product; `k_leaves` gives the number for a given k."""
K_STEP = 16
"""A leaf of a row-parallel product is a multiple of this many k."""
SUM_LANES = 16
"""Lanes of the sum of squares in rms_norm."""


def k_leaves(k: int) -> int:
    """Number of leaves of a row-parallel product over `k` (the global k): the largest power of two
    up to `K_LEAVES` that cuts k into equal multiples of `K_STEP`; 1 if there is none."""
    leaves = K_LEAVES
    while leaves > 1 and k % (leaves * K_STEP):
        leaves //= 2
    return leaves
