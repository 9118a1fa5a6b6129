"""Contract constants shared by all device families; `runtime.families` holds the family-specific ones.

A change of one changes docs/contract.md, the contract version of each family and the golden bits. csrc mirrors some.
"""

from __future__ import annotations

VOCAB_TILE = 128
"""contract: width of a log-softmax tile, in global vocabulary ids."""
K_LEAVES = 8
"""contract: maximum number of k-tree leaves in a row-parallel GEMM; `k_leaves` returns the number for a given k."""
K_STEP = 16
"""contract: granularity of a k-tree leaf; its k extent is a multiple of this."""
SUM_LANES = 16
"""contract: lanes of the sum of squares in rms_norm (CPU family)."""


def k_leaves(k: int) -> int:
    """Return the number of k-tree leaves of a row-parallel GEMM.

    Args:
        k: Global reduction length, over all tensor-parallel ranks.

    Returns:
        The largest power of two up to `K_LEAVES` that divides k into multiples of `K_STEP`; 1 if none does.
    """
    leaves = K_LEAVES
    while leaves > 1 and k % (leaves * K_STEP):
        leaves //= 2
    return leaves
