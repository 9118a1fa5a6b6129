"""Process groups: `TP` (ranks that share a layer) and `CP` (ranks that share sequences).

agreement.py exchanges host-side messages between ranks; symmetric.py sums over ranks through symmetric memory.
Public: the names in `__all__` are documented in docs/api/dist.md, except `SINGLE`.
"""

from .cp import CP
from .tp import SINGLE, TP, check_same_across, check_same_values_across, strict

__all__ = ["CP", "SINGLE", "TP", "check_same_across", "check_same_values_across", "strict"]
