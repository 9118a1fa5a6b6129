"""Packed and cached sequences: checks of integers, first rows and slots of a cache; the rows of each sequence."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import torch

from ..errors import InputError
from ..runtime import families
from ._common import check_same_device, check_starts, check_tensor, checks_values, require, unit

INTS = (torch.int32, torch.int64)


def check_ints(name: str, t, ndim: int, like_name: str, like: torch.Tensor) -> torch.Tensor:
    """Check an integer tensor and return it with unit stride in the last dimension, on the CPU as int64."""
    check_tensor(name, t, ndim, INTS)
    check_same_device(name, t, like_name, like)
    return unit(t.to(torch.int64) if families.on_host(t.device) else t)


def check_first_rows(name: str, starts, like_name: str, like: torch.Tensor, padded: bool) -> torch.Tensor:
    """Check the first rows of sequences whose rows are those of `like`, and return them as `check_ints` does.

    Args:
        name: Name of the argument `starts`.
        starts: Integers [B + 1].
        like_name: Name of the argument `like`.
        like: Tensor whose first dimension is that of the rows.
        padded: Whether rows after the last sequence are allowed.
    """
    starts = check_ints(name, starts, 1, like_name, like)
    require(starts.numel() >= 1, f"{name}: must have at least 1 entry, got 0")
    if checks_values(starts.device):
        last, rows = int(starts[-1]), like.shape[0]
        check_starts(name, starts)
        require(
            last == rows or (padded and last < rows),
            f"{name}: last entry must {'not exceed' if padded else 'equal'} {like_name}'s {rows} rows, got {last}",
        )
    return starts


def check_lengths(lens: torch.Tensor, queries: torch.Tensor) -> None:
    """Raise InputError for a sequence length below its number of queries."""
    if len(short := (lens < queries).nonzero()):
        i = int(short[0])
        raise InputError(
            f"seq_lens: must be at least the number of queries, got {int(lens[i])} for {int(queries[i])} queries "
            f"of sequence {i}"
        )


def check_cached(
    slots, query_start_loc, seq_lens, count: int, like_name: str, like: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Check the arguments of new rows of sequences with a slot each, of `count` slots.

    Returns slots, query_start_loc and seq_lens as `check_ints` does.
    """
    starts = check_first_rows("query_start_loc", query_start_loc, like_name, like, padded=True)
    slots, lens = (check_ints(name, t, 1, like_name, like) for name, t in (("slots", slots), ("seq_lens", seq_lens)))
    batch = starts.numel() - 1
    for name, t in (("slots", slots), ("seq_lens", lens)):
        require(t.numel() == batch, f"{name}: shape must be ({batch},) to match query_start_loc, got {tuple(t.shape)}")
    if checks_values(like.device):
        if len(outside := ((slots < 0) | (slots >= count)).nonzero()):
            i = int(outside[0])
            raise InputError(f"slots: must be in [0, {count}), got {int(slots[i])} at index {i}")
        queries = starts.diff()
        used = slots[queries > 0]
        require(used.unique().numel() == used.numel(), f"slots: must be distinct, got {slots.tolist()}")
        check_lengths(lens, queries)
    return slots, starts, lens


def sequences(starts: torch.Tensor) -> Iterator[tuple[int, slice]]:
    """Yield the index and the rows of each sequence that has rows; reads the values of `starts` [B + 1]."""
    for i, (low, high) in enumerate(itertools.pairwise(starts.tolist())):
        if low < high:
            yield i, slice(low, high)
