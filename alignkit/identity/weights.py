"""Fingerprints of weights: for each HF tensor, a 64-bit sum over its elements, in any layout.

The sum of a tensor is ``sum of bits(i, j) * row_factor(i) * column_factor(j)`` modulo 2^64 over its elements, where i
and j are the element's row and column in the HF tensor and both factors are pseudorandom odd numbers. So the sums of
disjoint blocks add up, on any rank and in any order. A flipped bit always changes the sum, because odd factors are
invertible; other accidents go unnoticed with a probability of about 2^-64. It is no protection against an attacker.

A tensor of one dimension counts as one column. docs/identity.md states the formula.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from ..errors import InputError
from ..models.checkpoint import Checkpoint
from ..models.config import read_architecture
from ..ops import bit_sums

DIGITS = 24
"""Hexadecimal digits of a digest."""
ROWS_AT_ONCE = 1 << 21
"""Limit of the memory for the sums of rows: 2^21 rows need about 100 MB."""
_ROWS, _COLUMNS = 0x243F6A8885A308D3, 0x13198A2E03707344
"""contract: seeds of the two factors, digits of pi."""


class Block(NamedTuple):
    """A block of an HF tensor and the sum of its elements."""

    row: int
    rows: int
    column: int
    columns: int
    sum: int


class Part(NamedTuple):
    """A rank's share of an HF tensor. Plain data, so that ranks can exchange it."""

    dtype: str
    blocks: list[Block]


class Run(NamedTuple):
    """Consecutive rows of an HF tensor.

    which: index of the HF tensor among those of a `Shard`. row: the first row in it. rows: number of rows.
    """

    which: int
    row: int
    rows: int


class Shard(NamedTuple):
    """A tensor of a rank, and where its elements are in HF tensors.

    tensor: [R], [R, C] or [E, R, C], whose rows are those of all E matrices. names: HF tensors that its rows come from.
    runs: where its rows are in them, in order; further rows are padding. column: first column.
    """

    tensor: torch.Tensor
    names: Sequence[str]
    runs: Sequence[Run]
    column: int = 0

    @property
    def held(self) -> int:
        """Number of rows that are no padding."""
        return sum(run.rows for run in self.runs)


@dataclass(frozen=True)
class Fingerprint:
    """Fingerprint of a model's weights.

    tensors: HF name -> dtype, shape and 64-bit sum. Fingerprints are equal if all of these are.
    """

    tensors: Mapping[str, tuple[str, tuple[int, ...], int]]

    @property
    def digest(self) -> str:
        """Hash of all tensors, as text."""
        lines = [
            f"{name} {dtype} {list(shape)} {total:016x}\n"
            for name, (dtype, shape, total) in sorted(self.tensors.items())
        ]
        return hashlib.sha256("".join(lines).encode()).hexdigest()[:DIGITS]

    def difference(self, other: Fingerprint) -> str | None:
        """Return how `other` differs in the first tensor by name, or None if the weights are equal."""
        for name in sorted({*self.tensors, *other.tensors}):
            mine, theirs = self.tensors.get(name), other.tensors.get(name)
            if mine is None or theirs is None:
                return f"{name}: only one of the models has it"
            for what, a, b in zip(("dtype", "shape"), mine, theirs, strict=False):
                if a != b:
                    return f"{name}: {what} {a} and {b}"
            if mine != theirs:
                return f"{name}: the weights differ (sums {mine[2]:016x} and {theirs[2]:016x})"
        return None

    def __str__(self) -> str:
        return self.digest


def parts(shards: Iterable[Shard]) -> dict[str, Part]:
    """Return the sums of a rank's tensors by HF name. All tensors are on one device, which is read once."""
    held = list(shards)
    return Sums(held).parts([shard.tensor for shard in held])


class _Group(NamedTuple):
    """Tensors of one layout, which one call sums.

    members: their indices. held: rows that are no padding. columns: first column and the one after the last.
    """

    members: list[int]
    held: int
    columns: tuple[int, int]


class Sums:
    """The sums of a rank's tensors, prepared for tensors of the shapes of `shards`. It keeps no tensor."""

    def __init__(self, shards: Iterable[Shard]) -> None:
        shards = list(shards)
        self._expected = [_layout(shard.tensor) for shard in shards]
        self._chunks: list[tuple[list[_Group], torch.Tensor]] = []
        """The groups of each chunk, and the first row and number of rows of its runs."""
        self._places: list[tuple[str, str, tuple[int, int, int, int]]] = []
        """HF name, dtype and place of each run: first row, rows, first column, columns."""
        for chunk in _chunks(enumerate(shards)):
            alike: dict[tuple, list[tuple[int, Shard]]] = {}
            for i, shard in chunk:
                alike.setdefault((*self._expected[i], shard.held, shard.column), []).append((i, shard))
            groups, runs = [], []
            for (shape, _, dtype, held, column), members in alike.items():
                columns, name_of_dtype = shape[-1] if len(shape) > 1 else 1, str(dtype).removeprefix("torch.")
                groups.append(_Group([i for i, _ in members], held, (column, column + columns)))
                for _, shard in members:
                    for which, row, count in shard.runs:
                        runs.append((row, count))
                        self._places.append((shard.names[which], name_of_dtype, (row, count, column, columns)))
            if runs:
                self._chunks.append((groups, torch.tensor(runs, device="cpu")))

    def fit(self, tensors: Sequence[torch.Tensor]) -> bool:
        """Return whether the tensors have the shapes, strides and dtypes of the shards'."""
        return [_layout(tensor) for tensor in tensors] == self._expected

    def parts(self, tensors: Sequence[torch.Tensor]) -> dict[str, Part]:
        """Return the sums by HF name of tensors that `fit`, in the order of the shards."""
        factors: dict[tuple[int, int], torch.Tensor] = {}  # column factors, equal for all layers of a model
        totals: list[torch.Tensor] = []
        for groups, runs in self._chunks:
            sums = []
            for members, held, columns in groups:
                x = [_matrix(tensors[i])[:held] for i in members]
                if columns not in factors:
                    factors[columns] = _factors(_COLUMNS, torch.arange(*columns, device=x[0].device))
                sums.append(bit_sums(x, factors[columns]).flatten())
            totals.append(_totals(sums, runs))
        values = torch.cat(totals).tolist() if totals else []
        found: dict[str, Part] = {}
        for (name, dtype, place), value in zip(self._places, values, strict=True):
            found.setdefault(name, Part(dtype, [])).blocks.append(Block(*place, value % 2**64))
        return found


def _layout(tensor: torch.Tensor) -> tuple[torch.Size, tuple[int, ...], torch.dtype]:
    return tensor.shape, tensor.stride(), tensor.dtype


def _matrix(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor [.., R, C] as [.. * R, C], and [R] as [R, 1]."""
    tensor = tensor.detach()
    return tensor.flatten(0, -2) if tensor.ndim > 1 else tensor[:, None]


def _chunks(shards: Iterable[tuple[int, Shard]]) -> Iterator[list[tuple[int, Shard]]]:
    """Yield the shards and their indices in lists of about ROWS_AT_ONCE rows."""
    chunk: list[tuple[int, Shard]] = []
    rows = 0
    for i, shard in shards:
        if chunk and rows + shard.held > ROWS_AT_ONCE:
            yield chunk
            chunk, rows = [], 0
        chunk.append((i, shard))
        rows += shard.held
    yield chunk


def _totals(sums: list[torch.Tensor], runs: torch.Tensor) -> torch.Tensor:
    """Return the sum of each run, int64, of the sums of its rows. runs: first row and number of rows of each."""
    by_row = torch.cat(sums)
    first, count = runs.to(by_row.device).unbind(1)
    ends = count.cumsum(0)
    row = torch.arange(len(by_row), device=by_row.device)
    row += torch.repeat_interleave(first - ends + count, count, output_size=len(by_row))
    before = torch.zeros(len(by_row) + 1, dtype=torch.int64, device=by_row.device)
    torch.cumsum(by_row * _factors(_ROWS, row), 0, out=before[1:])
    return before[ends] - before[ends - count]


def whole(ranks: Iterable[Mapping[str, Part]], shapes: Mapping[str, tuple[int, ...]]) -> Fingerprint:
    """Return the fingerprint of a model from the parts of all its ranks; replicas must have equal sums.

    Args:
        ranks: the parts of each rank.
        shapes: shape of each HF tensor.

    Raises:
        InputError: replicas of a block differ, blocks overlap or are missing, or ranks have different dtypes.
    """
    blocks: dict[str, dict[tuple, int]] = {name: {} for name in shapes}
    dtypes: dict[str, str] = {}
    for held in ranks:
        for name, part in held.items():
            if name not in blocks:
                raise InputError(f"{name}: is no weight of this architecture")
            if dtypes.setdefault(name, part[0]) != part[0]:
                raise InputError(f"{name}: must have one dtype on all ranks, got {dtypes[name]} and {part[0]}")
            for *place, total in part[1]:
                if blocks[name].setdefault(tuple(place), total) != total:
                    raise InputError(
                        f"{name}: rows {place[0]} to {place[0] + place[1] - 1} must be equal on all ranks that hold "
                        "them, but differ"
                    )
    tensors = {}
    for name, shape in shapes.items():
        wanted = torch.Size(shape).numel()
        held = sum(rows * columns for _, rows, _, columns in blocks[name])
        if held != wanted:
            raise InputError(f"{name}: the ranks must hold {wanted} elements, got {held}")
        tensors[name] = dtypes[name], tuple(shape), sum(blocks[name].values()) % 2**64
    return Fingerprint(tensors)


def of_checkpoint(path: str | os.PathLike, dtype: torch.dtype | None = None) -> Fingerprint:
    """Return the fingerprint of the weights in an HF directory.

    Args:
        path: HF directory with config.json and safetensors files.
        dtype: dtype that an engine casts the weights to; None: that of the files. Weights that are fp32 in every model
            are not cast.

    Raises:
        InputError, UnsupportedError: the directory is no checkpoint of a supported architecture.
    """
    arch, weights = read_architecture(path), Checkpoint(path)
    found: dict[str, tuple[int, ...]] = {}
    held: dict[str, Part] = {}
    for weight, shapes, _ in arch.weights():  # lazily: config.json may claim any number of layers
        for name, shape in shapes.items():
            if name not in weights:
                raise InputError(f"model: the checkpoint has no tensor {name!r}, which config.json requires")
            tensor, found[name] = weights[name], shape
            wanted = torch.float32 if weight.fp32 else dtype
            held |= parts([Shard(tensor.to(wanted or tensor.dtype), (name,), (Run(0, 0, shape[0]),))])
    return whole([held], found)


def _factors(seed: int, index: torch.Tensor) -> torch.Tensor:
    """Return an odd pseudorandom int64 for each index: splitmix64's output of seed + index, with bit 0 set."""
    x = index + _signed(seed)
    x = (x ^ _shift(x, 30)) * _signed(0xBF58476D1CE4E5B9)
    x = (x ^ _shift(x, 27)) * _signed(0x94D049BB133111EB)
    return (x ^ _shift(x, 31)) | 1


def _shift(x: torch.Tensor, n: int) -> torch.Tensor:
    """Shift right without the sign."""
    return (x >> n) & ((1 << (64 - n)) - 1)


def _signed(value: int) -> int:
    """Return the int64 with the bits of an unsigned number."""
    return value - (1 << 64) if value >> 63 else value
