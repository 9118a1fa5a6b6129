"""Data of the experts' kernels: (row, expert) pairs, the experts' matrices, and problem descriptions for selection.

The kernels' rules read the fields of the descriptions; alignkit/explain.py fills them from words.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import NamedTuple

import torch

from ...errors import UnsupportedError
from ...runtime import families
from ...runtime.operands import MAX_CACHED, Operand, operand

UNEQUAL_MATRICES = "scattered: must be no (all experts' matrices with equal strides and 16-byte alignment), got yes"
"""Reason of the rules that require one operand descriptor for all matrices (`Matrices.operand`)."""


class Pairs(NamedTuple):
    """The (row, expert) pairs of this rank's experts, sorted by expert, then by row.

    The number of pairs is known on the device alone. Tensors with an entry per pair may be longer; results do not
    depend on the entries after the last pair.
    """

    row: torch.Tensor
    """int64 [pairs or more]: the row of each pair; valid rows after the last pair too."""
    choice: torch.Tensor
    """int64 [pairs or more]: index of each pair's id in the flattened ids."""
    place: torch.Tensor
    """int64 [rows, k]: the pair of each id; -1 for experts of other ranks."""
    offsets: torch.Tensor
    """int64 [experts + 1]: the first pair of each expert; the last entry is the number of pairs."""

    def cut(self, count: int) -> Pairs:
        """Return the first `count` pairs."""
        return self._replace(row=self.row[:count], choice=self.choice[:count])


class Matrices:
    """One matrix [N, K] per expert, of one shape and dtype: a stacked tensor [E, N, K], or a sequence."""

    def __init__(self, given: torch.Tensor | Sequence[torch.Tensor]):
        self.given = given

    @property
    def stacked(self) -> bool:
        return isinstance(self.given, torch.Tensor)

    def __len__(self) -> int:
        return len(self.given)

    @property
    def shape(self) -> torch.Size:
        """The shape [N, K] of each matrix."""
        return self.given[0].shape

    def __getitem__(self, expert: int) -> torch.Tensor:
        return self.given[expert]

    def t(self) -> Matrices:
        """Return the transposed matrices (views)."""
        return Matrices(self.given.mT if isinstance(self.given, torch.Tensor) else [w.mT for w in self.given])

    def memory(self) -> tuple[torch.Tensor, int]:
        """Return (stacked tensor, stride between experts), or (int64 [experts] address table on the GPU, 0)."""
        if isinstance(self.given, torch.Tensor):
            return self.given, self.given.stride(0)
        addresses = tuple(w.data_ptr() for w in self.given)
        return on_device(self.given[0].device, addresses, lambda: torch.tensor(addresses, dtype=torch.int64)), 0

    def operand(self) -> Operand | None:
        """Return the common operand descriptor of all matrices, or None if they differ in strides or alignment."""
        if isinstance(self.given, torch.Tensor):
            first = operand(self.given[0])
            misaligned = self.given.stride(0) * self.given.itemsize % 16 and len(self) > 1
            return None if first is None else (*first[:3], first[3] and not misaligned)
        found = {operand(w) for w in self.given}
        return found.pop() if len(found) == 1 else None


_tables: dict[tuple, torch.Tensor] = {}
_captured: list[torch.Tensor] = []
"""Tables used in CUDA graphs, kept alive because replays read them."""


def on_device(device: torch.device, key: Hashable, make: Callable[[], torch.Tensor]) -> torch.Tensor:
    """Return the tensor that `make` builds on the host, copied to `device` and cached under `key`."""
    capturing = not families.on_host(device) and torch.cuda.is_current_stream_capturing()
    found = _tables.get((device, key))
    if found is None:
        if capturing:
            raise UnsupportedError(
                "moe_experts: gate_up and down sequences must be used once before a CUDA graph capture, which copies "
                "their addresses to the GPU. Call moe_experts with them before the capture"
            )
        if len(_tables) >= MAX_CACHED:
            _tables.clear()
        found = _tables[device, key] = make().to(device)
    if capturing:
        _captured.append(found)
    return found


class Ids(NamedTuple):
    """The problem of sorting ids by expert."""

    backend: str
    """Fastest backend to consider."""
    count: int
    experts: int


class Rows(NamedTuple):
    """The problem of summing over each row's experts: out [rows, H] from y [pairs, H]."""

    backend: str
    """Fastest backend to consider."""
    y: Operand
    out: Operand
    top_k: int


class Grouped(NamedTuple):
    """A grouped GEMM.

    Either out [pairs, N]: rows of a [.., K] times the matrix [N, K] of each pair's expert. Or weight gradients, out
    [experts, N, K]: two operands multiplied over the rows of each expert.
    """

    backend: str
    """Fastest backend to consider."""
    device: int
    a: Operand
    b: Operand | None
    """Descriptor of each matrix, None if they differ in strides or alignment; for gradients, the second operand."""
    out: Operand | None
    """Descriptor of the result; None if it is not requested."""
    experts: int
    leaves: int
    pairs: int
    """Maximum number of pairs."""
    gathered: bool
    """True if the rows of a are gathered by index; False if they are in the order of pairs."""
