"""What is asked of those who compute experts: the pairs of a row and an expert, and products of them by each expert's matrix."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import NamedTuple

import torch

from ...errors import UnsupportedError
from ...runtime import families
from ...runtime.operands import MOST, Operand, operand


class Pairs(NamedTuple):
    """The pairs of a row and one of its experts, of the experts of this rank: those of an expert after those of the expert
    before, and these in the order of rows.

    How many there are is known on the device, so nothing waits for it: what has a row for each pair may have more of them,
    behind the last one's. Nothing is said of what these hold, and nothing that is asked for depends on it.
    """

    row: torch.Tensor
    """int64 [pairs or more]; a row that there is, behind the last too."""
    choice: torch.Tensor
    """int64 [as many]: which of the ids, all of them counted through."""
    place: torch.Tensor
    """int64 [rows, k]: the pair of each id; -1: none of this rank."""
    offsets: torch.Tensor
    """int64 [experts + 1]: an expert's first pair; at last, how many there are."""

    def cut(self, count: int) -> Pairs:
        """Without what lies behind the first `count`."""
        return self._replace(row=self.row[:count], choice=self.choice[:count])


class Matrices:
    """One matrix [N, K] for each expert, of one shape and type: a tensor of three dimensions, or a sequence."""

    def __init__(self, given: torch.Tensor | Sequence[torch.Tensor]):
        self.given = given

    @property
    def stacked(self) -> bool:
        return isinstance(self.given, torch.Tensor)

    def __len__(self) -> int:
        return len(self.given)

    @property
    def shape(self) -> torch.Size:
        """Of each."""
        return self.given[0].shape

    def __getitem__(self, expert: int) -> torch.Tensor:
        return self.given[expert]

    def t(self) -> Matrices:
        """Each transposed."""
        return Matrices(self.given.mT if isinstance(self.given, torch.Tensor) else [w.mT for w in self.given])

    def memory(self) -> tuple[torch.Tensor, int]:
        """On a GPU: the first, and how many elements lie from one to the next; or of a sequence int64 [experts], their
        addresses, and 0."""
        if isinstance(self.given, torch.Tensor):
            return self.given, self.given.stride(0)
        addresses = tuple(w.data_ptr() for w in self.given)
        return on_device(self.given[0].device, addresses, lambda: torch.tensor(addresses, dtype=torch.int64)), 0

    def operand(self) -> Operand | None:
        """Of all of them, if they lie in memory alike: what a table of their addresses leaves open. Else None."""
        if isinstance(self.given, torch.Tensor):
            first = operand(self.given[0])
            apart = self.given.stride(0) * self.given.itemsize % 16 and len(self) > 1
            return None if first is None else (*first[:3], first[3] and not apart)
        seen = {operand(w) for w in self.given}
        return seen.pop() if len(seen) == 1 else None


_tables: dict[tuple, torch.Tensor] = {}
_captured: list[torch.Tensor] = []
"""Tables that a graph reads whenever it is replayed."""


def on_device(device: torch.device, key: Hashable, make: Callable[[], torch.Tensor]) -> torch.Tensor:
    """What `make` gives on the host, which `key` determines, on `device`; copied there once."""
    capturing = not families.on_host(device) and torch.cuda.is_current_stream_capturing()
    found = _tables.get((device, key))
    if found is None:
        if capturing:
            raise UnsupportedError(
                "moe_experts: a sequence of matrices is first seen while a CUDA graph is captured; call it once before"
            )
        if len(_tables) >= MOST:
            _tables.clear()
        found = _tables[device, key] = make().to(device)
    if capturing:
        _captured.append(found)
    return found


class Ids(NamedTuple):
    """Ids of which the pairs are to be put in the order of experts."""

    backend: str
    """The fastest that may do it."""
    count: int
    experts: int


class Rows(NamedTuple):
    """What rows get of their experts: out [rows, H] of y [pairs, H]."""

    backend: str
    """The fastest that may compute it."""
    y: Operand
    out: Operand
    top_k: int


class Grouped(NamedTuple):
    """Products out [pairs, N] of rows of a [.., K], those of an expert by its matrix [N, K]; or, for the gradients of matrices
    [N, K], products over each expert's rows of two such operands."""

    backend: str
    """The fastest that may compute it."""
    device: int
    a: Operand
    b: Operand | None
    """Of each matrix; None: they differ in strides or alignment. For gradients, the second operand."""
    out: Operand | None
    """For gradients [experts, N, K]. None: it is not asked for."""
    experts: int
    leaves: int
    pairs: int
    """As many rows as there may be."""
    gathered: bool
    """Whether it is said of each pair which of a's rows is its own; else they lie in the order of pairs."""
