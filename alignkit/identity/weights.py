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
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch

from ..errors import InputError
from ..models.checkpoint import Checkpoint
from ..models.config import read_architecture
from ..ops import bit_sums

DIGITS = 24
"""Hexadecimal digits of a digest."""
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


class Shard(NamedTuple):
    """A tensor of a rank, and where its elements are in HF tensors.

    tensor: [R] or [R, C]. names: HF tensors that its rows come from. rows: int64 [R] on the CPU; row i of names[n] has
    the number i plus the sum of ``sizes[m] + 1`` over m < n, a padding row has a negative number. sizes: rows of each
    HF tensor. column: first column.
    """

    tensor: torch.Tensor
    names: tuple[str, ...]
    rows: torch.Tensor
    sizes: tuple[int, ...]
    column: int = 0


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
    """Return the sums of a rank's tensors by HF name. Synchronizes with the device once, at the end."""
    sums, places = [], []
    factors: dict[tuple, torch.Tensor] = {}  # column factors, equal for all experts of a model
    for shard in shards:
        valid = int((shard.rows >= 0).sum())
        numbers, x = shard.rows[:valid], shard.tensor.detach()[:valid]
        assert bool((numbers >= 0).all()), "padding rows must be the last ones"
        x = x[:, None] if x.ndim == 1 else x
        starts = (numbers.diff(prepend=numbers[:1] - 2) != 1).nonzero().flatten()  # each run has consecutive rows
        runs = torch.bucketize(torch.arange(valid), starts, right=True) - 1
        offsets = torch.tensor(shard.sizes).add(1).cumsum(0) - torch.tensor(shard.sizes) - 1
        which = torch.bucketize(numbers, offsets, right=True) - 1
        index = numbers - offsets[which]
        columns = shard.column, shard.column + x.shape[1], x.device
        if columns not in factors:
            factors[columns] = _factors(_COLUMNS, torch.arange(*columns[:2]), x.device)
        weighted = bit_sums(x, factors[columns]) * _factors(_ROWS, index, x.device)
        total = torch.zeros(len(starts), dtype=torch.int64, device=x.device)
        sums.append(total.index_add_(0, runs.to(x.device), weighted))
        lengths = torch.diff(starts, append=torch.tensor([valid]))
        dtype = str(x.dtype).removeprefix("torch.")
        for first, count in zip(starts.tolist(), lengths.tolist(), strict=True):
            name = shard.names[int(which[first])]
            places.append((name, dtype, (int(index[first]), count, shard.column, x.shape[1])))
    found: dict[str, Part] = {}
    values = torch.cat([each.to(sums[0].device) for each in sums]).tolist()
    for (name, dtype, (row, rows, column, columns)), value in zip(places, values, strict=True):
        found.setdefault(name, Part(dtype, [])).blocks.append(Block(row, rows, column, columns, value % 2**64))
    return found


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

    def shards() -> Iterator[Shard]:
        for weight, shapes, _ in arch.weights():  # lazily: config.json may claim any number of layers
            for name, shape in shapes.items():
                if name not in weights:
                    raise InputError(f"model: the checkpoint has no tensor {name!r}, which config.json requires")
                tensor, found[name] = weights[name], shape
                wanted = torch.float32 if weight.fp32 else dtype
                yield Shard(tensor.to(wanted or tensor.dtype), (name,), torch.arange(shape[0]), (shape[0],))

    return whole([parts(shards())], found)


def _factors(seed: int, index: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Return an odd pseudorandom int64 for each index: splitmix64's output of seed + index, with bit 0 set."""
    x = index.to(device) + _signed(seed)
    x = (x ^ _shift(x, 30)) * _signed(0xBF58476D1CE4E5B9)
    x = (x ^ _shift(x, 27)) * _signed(0x94D049BB133111EB)
    return (x ^ _shift(x, 31)) | 1


def _shift(x: torch.Tensor, n: int) -> torch.Tensor:
    """Shift right without the sign."""
    return (x >> n) & ((1 << (64 - n)) - 1)


def _signed(value: int) -> int:
    """Return the int64 with the bits of an unsigned number."""
    return value - (1 << 64) if value >> 63 else value
