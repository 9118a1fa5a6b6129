"""What is asked of those who compute experts: the pairs of a row and an expert, and products of them by each expert's matrix."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from ...errors import UnsupportedError
from ...runtime import families
from ...runtime.operands import Operand, operand


class Pairs(NamedTuple):
    """The pairs of a row and one of its experts, of the experts of this rank: those of an expert after those of the expert
    before, and these in the order of rows."""

    row: torch.Tensor
    """int64 [pairs]."""
    choice: torch.Tensor
    """int64 [pairs]: which of the ids, all of them counted through."""
    place: torch.Tensor
    """int64 [rows, k]: the pair of each id; -1: none of this rank."""
    counts: list[int]
    """Pairs of each expert."""

    @staticmethod
    def of(ids: torch.Tensor, first: int, experts: int) -> Pairs:
        """Of ids [rows, k]. The host waits for the counts."""
        if not families.on_host(ids.device) and torch.cuda.is_current_stream_capturing():
            raise UnsupportedError(
                "moe_experts: not while a CUDA graph is captured, as the host must know the counts of rows"
            )
        local = ids.reshape(-1).to(torch.int64) - first
        local = torch.where((local >= 0) & (local < experts), local, experts)
        counts = torch.bincount(local, minlength=experts + 1)[:experts].tolist()
        choice = local.sort(stable=True).indices[: sum(counts)]
        place = torch.full_like(local, -1).index_copy_(0, choice, torch.arange(len(choice), device=ids.device))
        return Pairs(choice // ids.shape[1], choice, place.view(ids.shape), counts)


class Matrices:
    """One matrix [N, K] for each expert, of one shape and type: a tensor of three dimensions, or a sequence."""

    def __init__(self, given: torch.Tensor | Sequence[torch.Tensor]):
        self.given = given

    @property
    def stacked(self) -> bool:
        return isinstance(self.given, torch.Tensor)

    def __len__(self) -> int:
        return len(self.given)

    def __getitem__(self, expert: int) -> torch.Tensor:
        return self.given[expert]

    def t(self) -> Matrices:
        """Each transposed."""
        return Matrices(self.given.mT if isinstance(self.given, torch.Tensor) else [w.mT for w in self.given])

    def like(self) -> Matrices:
        """New memory for as many."""
        given = self.given
        return Matrices(
            torch.empty(given.shape, dtype=given.dtype, device=given.device)
            if isinstance(given, torch.Tensor)
            else [torch.empty(w.shape, dtype=w.dtype, device=w.device) for w in given]
        )

    def operand(self) -> Operand | None:
        """Of all of them, if they lie in memory alike: what a table of their addresses leaves open. Else None."""
        seen = {operand(w) for w in self.given}
        return seen.pop() if len(seen) == 1 else None


class Grouped(NamedTuple):
    """Products out [pairs, N] of the rows of a [pairs, K], those of an expert by its matrix [N, K]; or, for the gradients of
    matrices [N, K], products over each expert's rows of two such operands."""

    backend: str
    """The fastest that may compute it."""
    device: int
    a: Operand
    b: Operand | None
    """Of each matrix; None: they differ in strides or alignment. For gradients, the second operand."""
    out: Operand | None
    """For gradients, of each matrix."""
    experts: int
    leaves: int
