"""Comparisons of the self-test (`alignkit doctor`): equal bits, and rows that do not depend on the batch."""

from __future__ import annotations

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
