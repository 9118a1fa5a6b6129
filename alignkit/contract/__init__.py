"""The numerics contract of docs/contract.md as code: constants, rotary frequencies, the expert tree.

Kernels live in `alignkit.ops` and csrc. Every file here determines bits, so a change of a value or formula needs a new
contract version (`runtime.families`).
"""

from .constants import K_LEAVES, K_STEP, SUM_LANES, VOCAB_TILE, k_leaves

__all__ = ["K_LEAVES", "K_STEP", "SUM_LANES", "VOCAB_TILE", "k_leaves"]
