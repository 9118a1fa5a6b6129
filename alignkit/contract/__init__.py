"""The numerics contract: its constants and its id. docs/contract.md defines them; a change of bits changes the id."""

from .constants import K_LEAVES, K_STEP, SUM_LANES, VOCAB_TILE, k_leaves
from .ids import contract_id

__all__ = ["K_LEAVES", "K_STEP", "SUM_LANES", "VOCAB_TILE", "contract_id", "k_leaves"]
