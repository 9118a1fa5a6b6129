"""Contract constants of more than one op. `runtime.families` holds the constants that differ between device families.

All families use these constants, except `SUM_LANES`, which only `cpu` uses. The contract id contains `VOCAB_TILE` and
`K_LEAVES`; the others are covered by its version. Changing one also changes docs/contract.md, the contract version of
each affected family (`runtime.families`), the golden bits, and the mirrors in csrc and ops.
tests/test_constants.py compares the mirrors.
"""

from __future__ import annotations

VOCAB_TILE = 128
"""contract: width of a log-softmax tile, in global vocabulary ids; `v` in the contract id."""
K_LEAVES = 8
"""contract: maximum number of k-tree leaves in a row-parallel GEMM; `k` in the contract id."""
K_STEP = 16
"""contract: granularity of a k-tree leaf; the k extent of a leaf is a multiple of this number."""
SUM_LANES = 16
"""contract: lanes of the sum of squares in rms_norm, on the `cpu` family alone."""


def k_leaves(k: int) -> int:
    """Return the number of k-tree leaves of a row-parallel GEMM (docs/contract.md, "Linear").

    Args:
        k: Global reduction length, over all tensor-parallel ranks.

    Returns:
        The largest power of two up to `K_LEAVES` that divides k into multiples of `K_STEP`; 1 if none does.
    """
    leaves = K_LEAVES
    while leaves > 1 and k % (leaves * K_STEP):
        leaves //= 2
    return leaves
