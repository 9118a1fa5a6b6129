"""The balanced tree over experts: the order of summation of docs/contract.md, "Mixture of experts".

A change of the mapping changes bits, so it needs a new contract version (`runtime.families`).
"""

from __future__ import annotations

from typing import NamedTuple


class ExpertTree(NamedTuple):
    """The mapping from expert ids to leaves of the balanced tree.

    The number of experts is `run` * `groups`, run odd and groups a power of two. Expert ids form `groups` runs of
    `run` consecutive ids, each padded with absent leaves to `width`, the next power of two. If the number of
    expert-parallel ranks divides `groups`, each rank owns a subtree.
    """

    run: int
    groups: int
    width: int

    @staticmethod
    def of(experts: int) -> ExpertTree:
        """Return the tree over `experts` experts."""
        groups = experts & -experts
        run = experts // groups
        return ExpertTree(run, groups, 1 << (run - 1).bit_length())

    def leaf(self, expert):
        """Return the leaf index of an expert id (an int or an integer tensor)."""
        return expert // self.run * self.width + expert % self.run
