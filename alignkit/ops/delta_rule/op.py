"""The record of the gated delta rule, forward: kernels, golden cases, self-test (../record.py)."""

from __future__ import annotations

import torch

from ...runtime.dispatch import one_per_backend
from ..inputs import Inputs, Normal
from ..record import Check, Golden, Op, Trial
from ..self_test import sequence_invariance
from . import cpu, delta_page_words, delta_rule, paged_delta_rule, reference
from .layout import CHUNK


def _triton():
    from . import triton_backend

    return triton_backend


def _unit(t: torch.Tensor) -> torch.Tensor:
    """Return t divided by a power of two, so that its last dimension has a norm of about 1."""
    return t / 2.0 ** round(t.shape[-1] ** 0.5).bit_length()


def _rows(given: Inputs, rows: int, key_heads: int, heads: int, k: int, v: int) -> list[torch.Tensor]:
    """Return q, k, v, g and beta; g is 0 to -80, often near 0."""
    keys = [_unit(given.rough(rows, key_heads, k, seed=seed, low=-3)) for seed in (1, 2)]
    values = given.rough(rows, heads, v, seed=3)
    g = -given.rough(rows, heads, seed=4, low=-20, high=6, dtype=torch.float32).abs()
    beta = given.rough(rows, heads, seed=5, low=-4, high=-1, dtype=torch.float32).abs()
    return [*keys, values, g, beta]


def _cached(given: Inputs, k: int, v: int) -> list[torch.Tensor]:
    """Compute new tokens of sequences that begin, continue, complete a chunk or have none."""
    queries, lens, heads = [1, 20, 0, 5, 1, 3], [1, 47, 3, 16, 30, 17], 2
    starts = given.starts(queries)
    pages = torch.zeros(7, heads, delta_page_words(k, v, given.dtype), dtype=torch.float32, device=given.device)
    slots = given.tensor([4, 0, 2, 5, 1, 3])
    before = [n - new for n, new in zip(lens, queries, strict=True)]
    old = given.starts(before)
    first = _rows(given, sum(before), 1, heads, k, v)
    paged_delta_rule(*first, pages, slots, old, given.tensor(before))
    rows = [t.flip(0)[: sum(queries) + 2] for t in _rows(given, sum(queries) + 9, 1, heads, k, v)]
    return [paged_delta_rule(*rows, pages, slots, starts, given.tensor(lens)), pages[..., : k * v].contiguous()]


def _run(given: Inputs, lengths: list[int], k: int, v: int) -> list[torch.Tensor]:
    starts = given.starts(lengths)
    return [delta_rule(*_rows(given, sum(lengths), 2, 4, k, v), starts, 0.25), *_cached(given, k, v)]


def rounding_delta_rule(given: Inputs) -> list[torch.Tensor]:
    """Compute packed sequences, one of them empty, and cached ones; K and V are no multiples of 32."""
    return _run(given, [3, 70, 0, 1, 33, 16], 48, 40)


def _sequences(normal: Normal) -> str | None:
    """Return the first difference of a sequence between packed, alone, in chunks and token by token."""
    lengths, k, v = (5, 1, 3 * CHUNK + 7), 32, 48
    n = sum(lengths)
    keys = [torch.nn.functional.normalize(normal(seed, n, 1, k).float(), dim=-1).to(normal.dtype) for seed in (0, 1)]
    gates = [normal(seed, n, 2, dtype=torch.float32) for seed in (3, 4)]
    rows = [*keys, normal(2, n, 2, v), -gates[0].exp(), gates[1].sigmoid()]
    words = delta_page_words(k, v, normal.dtype)
    pages = torch.zeros(len(lengths), 2, words, dtype=torch.float32, device=normal.device)

    def cached(*given: torch.Tensor) -> torch.Tensor:
        return paged_delta_rule(*given[:5], pages, *given[5:])

    return sequence_invariance(rows, lengths, delta_rule, cached, chunk=11)


def _self_test(normal):
    yield Check("delta_rule", "sequences alone, packed, cached in chunks", lambda: _sequences(normal))


def _samples():
    from .samples import SAMPLES

    return SAMPLES


_EACH = one_per_backend(_triton, cpu, reference)
OP = Op(
    "delta_rule",
    kernels={"delta_rule": _EACH, "paged_delta_rule": _EACH},
    golden=(Golden(rounding_delta_rule),),
    self_test=_self_test,
    samples=_samples,
    trials={
        "delta_rule": Trial(lambda given, _: _run(given, [3, 0, 20], 32, 24)),
        "paged_delta_rule": Trial(lambda given, _: _cached(given, 24, 32)),
    },
)
