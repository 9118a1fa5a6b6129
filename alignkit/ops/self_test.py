"""Comparisons of the self-test (`alignkit doctor`): equal bits, and rows that do not depend on the batch."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import torch

from ..runtime.families import on_host


def row_invariance(op: Callable, rows: list[torch.Tensor]) -> str | None:
    """Return the first difference of a row's result between batches, row orders or thread counts."""
    whole = _tuple(op(*rows))
    n = len(rows[0])
    shuffled = torch.randperm(n, generator=torch.Generator().manual_seed(7), device="cpu").tolist()
    arrangements = {
        "alone": [[i] for i in range(n)],
        "reordered": [shuffled],
        "in chunks": [list(range(a, min(a + 7, n))) for a in range(0, n, 7)],
    }
    for label, groups in arrangements.items():
        for group in groups:
            got = _tuple(op(*(x[group] for x in rows)))
            problem = difference(label, got, tuple(y[group] for y in whole))
            if problem:
                return problem
    if not on_host(rows[0].device):
        return None
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        return difference("with one thread", _tuple(op(*rows)), whole)
    finally:
        torch.set_num_threads(threads)


def sequence_invariance(
    rows: list[torch.Tensor], lengths: tuple[int, ...], packed: Callable, cached: Callable, chunk: int
) -> str | None:
    """Return the first difference of a sequence between packed, alone, token by token and in chunks.

    Args:
        rows: Tensors whose first dimension is that of the rows of all sequences.
        lengths: Rows of each sequence.
        packed: Function of rows and cu_seqlens that returns a tensor.
        cached: Function of new rows, slots, query_start_loc and seq_lens that returns a tensor and updates a cache.
        chunk: Rows per chunk of the last comparison.
    """
    device, starts = rows[0].device, [0, *itertools.accumulate(lengths)]

    def ints(*values: int) -> torch.Tensor:
        return torch.tensor(values, device=device)

    whole = packed(*rows, ints(*starts))
    for i, n in enumerate(lengths):
        low = starts[i]
        own = [t[low : low + n] for t in rows]
        done = {"alone": packed(*own, ints(0, n))}
        for name, size in (("token by token", 1), ("in chunks", chunk)):
            parts = []
            for at in range(0, n, size):
                new = min(size, n - at)
                integers = ints(i), ints(0, new), ints(at + new)
                parts.append(cached(*(t[at : at + new] for t in own), *integers))
            done[name] = torch.cat(parts)
        for name, y in done.items():
            if problem := difference(f"a sequence {name}", (y,), (whole[low : low + n],)):
                return problem
    return None


def _tuple(x) -> tuple[torch.Tensor, ...]:
    return x if isinstance(x, tuple) else (x,)


def difference(label: str, got: tuple[torch.Tensor, ...], want: tuple[torch.Tensor, ...]) -> str | None:
    """Return None if all bits are equal, else a description of the first difference."""
    for a, b in zip(got, want, strict=True):
        if a.shape != b.shape or a.dtype != b.dtype:
            return f"{label}: expected {b.dtype} {list(b.shape)}, got {a.dtype} {list(a.shape)}"
        bits = {2: torch.int16, 4: torch.int32, 8: torch.int64}[a.element_size()]
        wrong = (a.contiguous().view(bits) != b.contiguous().view(bits)).nonzero()
        if len(wrong):
            index = tuple(wrong[0].tolist())
            return (
                f"{label}: {len(wrong)} of {a.numel()} values differ, the first at {list(index)}: "
                f"expected {b[index].item()!r}, got {a[index].item()!r}"
            )
    return None
