"""Random valid calls of the gated delta rule (../samples.py).

Values are finite, and those of k have a norm of at most 1: the rule is not defined otherwise.
"""

from __future__ import annotations

from typing import Any

import torch

from ..samples import INTS, Sample, Scalar, Source, Tensor, cached, replaced, wrong_starts
from . import delta_page_words, delta_rule, paged_delta_rule


def _sizes(s: Source) -> tuple[int, int, int, int]:
    """Return the k heads, v heads, K and V."""
    key_heads = s.size(2)
    return key_heads, key_heads * s.size(2), s.size(20), s.size(20)


def _rows(s: Source, rows: int, dtype: torch.dtype, key_heads: int, heads: int, k: int, v: int) -> dict[str, Tensor]:
    """Return q, k, v, g and beta of `rows` rows."""

    def key() -> Tensor:
        t = torch.nn.functional.normalize(s.floats(rows, key_heads, k, finite=True), dim=-1)
        return Tensor(t.to(dtype), (0, 1, 2), ndim=True, finite=True)

    def gate(name: str, t: torch.Tensor) -> Tensor:
        return Tensor(t, (0, 1), (torch.float32,), name, ndim=True, finite=True)

    return {
        "q": key(),
        "k": key(),
        "v": Tensor(s.floats(rows, heads, v, dtype=dtype, finite=True), (0, 1), ndim=True, finite=True),
        "g": gate("g", -s.floats(rows, heads, finite=True).abs().clamp(max=80)),
        "beta": gate("beta", s.floats(rows, heads, finite=True).sigmoid()),
    }


def _scale(s: Source) -> Scalar:
    return Scalar(s.rng.choice((None, s.rng.uniform(0.01, 3))), "positive", optional=True)


def _delta_rule(s: Source) -> Sample:
    dtype, t = s.dtype(), s.rng.choice((s.size(12, 0), s.size(60)))
    starts = torch.tensor(s.starts(t, s.size(4)), dtype=s.dtype(INTS), device="cpu")
    given: dict[str, Any] = {
        **_rows(s, t, dtype, *_sizes(s)),
        "cu_seqlens": Tensor(starts, (), INTS, "starts", ndim=True),
        "scale": _scale(s),
    }
    faults = [
        *wrong_starts(s, "cu_seqlens", t),
        ("cu_seqlens ends early", replaced("cu_seqlens", lambda c: torch.tensor([0, t - 1])), ("cu_seqlens",)),
        ("no heads", lambda a: a.update({n: a[n][:, :0] for n in "qk"}), ("q",)),
    ]
    return Sample("delta_rule", delta_rule, given, faults, forward_only=True)


def _paged_delta_rule(s: Source) -> Sample:
    dtype, new, sizes = s.dtype(), cached(s, 40), _sizes(s)
    pages = torch.zeros(
        new.slot_count, sizes[1], delta_page_words(*sizes[2:], dtype), dtype=torch.float32, device="cpu"
    )
    for slot, n, queries in zip(new.slots, new.lens, new.queries, strict=True):
        if before := n - queries:
            rows = _rows(Source(s.rng, "normal"), before, dtype, *sizes)
            integers = torch.tensor([slot]), torch.tensor([0, before]), torch.tensor([before])
            paged_delta_rule(*(t.value for t in rows.values()), pages, *integers)
    given: dict[str, Any] = {
        **_rows(s, new.rows, dtype, *sizes),
        "pages": Tensor(pages, (1, 2), (torch.float32,), "pages", ndim=True, written=True),
        **new.given,
        "scale": _scale(s),
    }
    return Sample("paged_delta_rule", paged_delta_rule, given, new.faults, forward_only=True)


SAMPLES = {_delta_rule: 4, _paged_delta_rule: 4}
"""Weight of each generator."""
