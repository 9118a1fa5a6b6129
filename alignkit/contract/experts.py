"""The balanced tree over experts. docs/contract.md, "Mixture of experts"."""

from __future__ import annotations

from typing import NamedTuple


class ExpertTree(NamedTuple):
    """Which leaf of the tree an expert has: n = `run` * `groups`, run odd and groups a power of two; the ids are cut into
    `groups` runs of `run` neighbours, each filled up to `width`, the next power of two. So ranks whose number divides
    `groups` own subtrees."""

    run: int
    groups: int
    width: int

    @staticmethod
    def of(experts: int) -> ExpertTree:
        groups = experts & -experts
        run = experts // groups
        return ExpertTree(run, groups, 1 << (run - 1).bit_length())

    def leaf(self, expert):
        """Of an id, or of a tensor of ids."""
        return expert // self.run * self.width + expert % self.run
