"""The record of attention and paged_attention: kernels, custom ops, golden cases, self-test (../record.py)."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable

import numpy as np
import torch

from ...errors import InputError
from ...runtime.dispatch import Kernel, one_per_backend
from ...runtime.families import CUDA, of_type, on_host
from ..inputs import Inputs, Normal
from ..record import Check, Golden, Op, Trial
from ..self_test import difference
from ..words import Words, dense
from . import attention as packed_attention
from . import cpu, paged_attention, reference
from .problem import Attention


def _triton():
    from . import triton_backend

    return triton_backend


def _cuda():
    from . import cuda_backend

    return cuda_backend


def _described(paged: bool) -> Callable[[str, Words], Attention]:
    def described(backend: str, given: Words) -> Attention:
        rows, heads, dim = (given.size(name) for name in ("rows", "heads", "head_dim"))
        kv_heads, dtype = given.size("kv_heads", heads), given.dtype("dtype")
        if not kv_heads or heads % kv_heads:
            raise InputError(f"kv_heads: must divide heads = {heads}, got {kv_heads}")
        seqs, aligned = given.size("seqs", 1), given.flag("aligned", "yes")
        q = dense(dtype, rows, heads, dim, aligned=aligned)
        page, pages = (given.size("page", 16), given.size("pages")) if paged else (0, 0)
        k = dense(dtype, seqs * page * pages if paged else rows, kv_heads, dim)
        return Attention(backend, q, k, k, seqs, page, pages)

    return described


def attention(given: Inputs) -> list[torch.Tensor]:
    lens = (1, 31, 64, 150)
    starts = given.tensor([0, *np.cumsum(lens).tolist()])
    q, k, v = (given.values(sum(lens), h, 64, seed=h + i) for i, h in enumerate((4, 2, 2)))
    cache = given.values(20, 16, 2, 64, seed=5), given.values(20, 16, 2, 64, seed=6)
    paged = paged_attention(
        q[:7],
        *cache,
        given.integers(2, 9, seed=7, below=20).int(),
        given.tensor([0, 3, 7], torch.int32),
        given.tensor([130, 77], torch.int32),
    )
    return [*given.run(lambda q, k, v: packed_attention(q, k, v, starts), q, k, v), paged]


def long_attention(given: Inputs) -> list[torch.Tensor]:
    """Compute attention of sequences that end at a leaf border, after it, and after two; paged too."""
    family = of_type(given.device)
    assert family is not None
    leaf, heads = family.kv_leaf, 2
    lens = (leaf, leaf + 1, 2 * leaf + 70)
    starts = given.tensor([0, *np.cumsum(lens).tolist()])
    q, k, v = (given.values(sum(lens), h, 32, seed=h + i, scale=2.0**-5) for i, h in enumerate((heads, 1, 1)))
    pages = -(-lens[-1] // 16)
    blocks = given.tensor([(11 * i + 3) % pages for i in range(pages)])  # a permutation: 11 does not divide pages
    cache = [given.values(pages, 16, 1, 32, seed=seed, scale=2.0**-5) for seed in (5, 6)]
    chunk, decode = (
        paged_attention(
            q[:n], *cache, blocks[None].int(), given.tensor([0, n], torch.int32), given.tensor([lens[-1]], torch.int32)
        )
        for n in (90, 1)
    )
    return [*given.run(lambda q, k, v: packed_attention(q, k, v, starts), q, k, v), chunk, decode]


def rounding_attention(given: Inputs) -> list[torch.Tensor]:
    """Compute attention whose sums round, over several leaves; some values are subnormal, some levels rise."""
    family = of_type(given.device)
    assert family is not None
    lens = (33, 2 * family.kv_leaf + 70)
    starts = given.tensor([0, *np.cumsum(lens).tolist()])
    q, k, v = (given.rough(sum(lens), heads, 64, seed=seed, low=-5) for seed, heads in enumerate((2, 1, 1), 1))
    q[100:110] = given.rough(10, 2, 64, seed=4, low=2, high=5)
    v[..., :3] = given.rough(sum(lens), 1, 3, seed=5, low=-140, high=-120)
    pages = -(-lens[-1] // 16)
    cache = [given.rough(pages, 16, 1, 64, seed=seed, low=-5) for seed in (6, 7)]
    paged = paged_attention(
        q[-7:],
        *cache,
        given.tensor(list(range(pages)))[None].int(),
        given.tensor([0, 7], torch.int32),
        given.tensor([lens[-1]], torch.int32),
    )
    return [*given.run(lambda q, k, v: packed_attention(q, k, v, starts), q, k, v, rough=True), paged]


def rounding_levels(given: Inputs) -> list[torch.Tensor]:
    """Compute attention whose levels rise late in a block: just enough in the first sequence, often in the second."""
    family = of_type(given.device)
    assert family is not None
    block = family.kv_block
    starts = [0, block - 1, 4 * block + 4]
    q = given.rough(starts[-1], 2, 64, seed=11, low=-5)
    k = given.rough(starts[-1], 1, 64, seed=12, low=-9, high=-4)
    v = given.rough(starts[-1], 1, 64, seed=13, low=-5)
    q[..., 0], k[..., 0] = 16.0, 10.0  # times the scale 1/8: scores are k[..., 0] times 2, and noise
    rise = family.reserve * (1.0 if on_host(given.device) else math.log(2)) + 1.0  # makes a probability of e
    steps = [(5, round(4 * rise) / 8)], [(5, 12.0), (8, 22.0), (13, 24.0)]
    for (first, end), values in zip(itertools.pairwise(starts), steps, strict=True):
        k[first, :, 0] = 0.0
        for eighths, value in values:
            k[first + eighths * block // 8 : end, :, 0] = value
    return given.run(lambda q, k, v: packed_attention(q, k, v, given.tensor(starts)), q, k, v, rough=True)


def _sequences(normal: Normal) -> str | None:
    """Return the first difference of a sequence between batches, orders, padding and paging."""
    device = normal.device
    family = of_type(torch.device(device))
    assert family is not None  # the device has a backend
    lengths, heads, kv_heads, dim = (5, family.kv_leaf + 6, 33), 4, 2, 64
    starts = torch.tensor([0, *lengths]).cumsum(0)
    total = sum(lengths)
    q = normal(8, total, heads, dim)
    k, v = (normal(seed, total, kv_heads, dim) for seed in (9, 10))
    whole = packed_attention(q, k, v, starts.to(device))
    sequences = [slice(int(a), int(b)) for a, b in itertools.pairwise(starts)]

    for order, label in (([0], "alone"), ([1], "alone"), ([2], "alone"), ([2, 0, 1], "reordered")):
        rows = torch.cat([torch.arange(total)[sequences[i]] for i in order])
        packed = torch.tensor([0, *(lengths[i] for i in order)], device=device).cumsum(0)
        problem = difference(label, (packed_attention(q[rows], k[rows], v[rows], packed),), (whole[rows],))
        if problem:
            return problem

    longest = max(lengths)
    padded = [x.new_zeros(len(lengths) * longest, *x.shape[1:]) for x in (q, k, v)]
    rows = torch.cat([torch.arange(n) + i * longest for i, n in enumerate(lengths)])
    for x, full in zip((q, k, v), padded, strict=True):
        full[rows] = x
    got = packed_attention(*padded, torch.arange(len(lengths) + 1, device=device) * longest)[rows]
    return difference("padded", (got,), (whole,)) or _paged(q, k, v, lengths, sequences, whole)


def _paged(q, k, v, lengths, sequences, whole) -> str | None:
    """Compare paged attention over scattered blocks, with queries in chunks of 7 and one by one, to `whole`."""
    block = 16
    blocks = [-(-n // block) for n in lengths]
    free = torch.randperm(sum(blocks), generator=torch.Generator().manual_seed(11), device="cpu").split(blocks)
    table = torch.zeros(len(lengths), max(blocks), dtype=torch.int32)
    caches = [x.new_zeros(sum(blocks), block, *x.shape[1:]) for x in (k, v)]
    for i, s in enumerate(sequences):
        table[i, : blocks[i]] = free[i]
        position = torch.arange(lengths[i])
        for x, cache in zip((k, v), caches, strict=True):
            cache[free[i][position // block], position % block] = x[s]
    for size, label in ((7, "paged in chunks"), (1, "paged one by one")):
        got = torch.empty_like(whole)
        for done in range(0, max(lengths), size):
            live = [i for i, n in enumerate(lengths) if n > done]
            rows = [
                slice(sequences[i].start + done, min(sequences[i].start + done + size, sequences[i].stop)) for i in live
            ]
            counts = [r.stop - r.start for r in rows]
            out = paged_attention(
                torch.cat([q[r] for r in rows]),
                *caches,
                table[live].to(q.device),
                torch.tensor([0, *counts], device=q.device).cumsum(0),
                torch.tensor([done + n for n in counts], device=q.device),
            )
            for r, part in zip(rows, out.split(counts), strict=True):
                got[r] = part
        problem = difference(label, (got,), (whole,))
        if problem:
            return problem
    return None


def _samples():
    from .samples import SAMPLES

    return SAMPLES


def _trial(given: Inputs, p: Attention) -> list[torch.Tensor]:
    (rows, heads, dim), kv_heads = p.q[0], p.k[0][1]
    q = given.rough(rows, heads, dim, seed=1, low=-5)
    starts = given.tensor([rows * i // p.seqs for i in range(p.seqs + 1)], torch.int32)
    if not p.page:
        k, v = (given.rough(rows, kv_heads, dim, seed=seed, low=-5) for seed in (2, 3))
        return given.run(lambda q, k, v: packed_attention(q, k, v, starts), q, k, v, rough=True)
    cache = [given.rough(p.seqs * p.pages, p.page, kv_heads, dim, seed=seed, low=-5) for seed in (2, 3)]
    table = given.tensor(list(range(p.seqs * p.pages))).reshape(p.seqs, p.pages).flip(1).int()
    lengths = given.tensor([p.page * p.pages - 3 - i for i in range(p.seqs)], torch.int32)
    return [paged_attention(q, *cache, table, starts, lengths)]


def _self_test(normal):
    yield Check(
        "attention", "sequences alone, reordered, padded, paged in chunks, paged one by one", lambda: _sequences(normal)
    )


_EACH = one_per_backend(_triton, cpu, reference)
_CUDA = Kernel("cuda", CUDA, _cuda, rule=lambda p: _cuda().rejects(p))
OP = Op(
    "attention",
    kernels={
        "attention": (_CUDA, *_EACH),
        "attention_backward": (_CUDA, *_EACH),
        "paged_attention": (Kernel("cuda", CUDA, _cuda, rule=lambda p: _cuda().paged_rejects(p)), *_EACH),
    },
    described={
        "attention": _described(paged=False),
        "attention_backward": _described(paged=False),
        "paged_attention": _described(paged=True),
    },
    golden=(
        Golden(attention),
        Golden(long_attention, slow=True),
        Golden(rounding_attention, slow=True),
        Golden(rounding_levels),
    ),
    self_test=_self_test,
    samples=_samples,
    trials={
        **dict.fromkeys(
            ("attention", "attention_backward"),
            Trial(
                _trial,
                {
                    "": tuple(f"rows=14 heads=2 kv_heads=1 head_dim=8 seqs=2 dtype={t}" for t in ("bf16", "fp32")),
                    "cuda": (
                        "rows=700 heads=4 kv_heads=2 head_dim=64 seqs=2",
                        "rows=12000 heads=8 kv_heads=2 head_dim=64 seqs=150",
                        "rows=300 heads=2 kv_heads=1 head_dim=256 seqs=2",
                    ),
                },
            ),
        ),
        "paged_attention": Trial(
            _trial,
            {
                "": ("rows=6 heads=2 kv_heads=1 head_dim=8 seqs=2 page=8 pages=3",),
                "cuda": ("rows=60 heads=4 kv_heads=2 head_dim=64 seqs=2 page=16 pages=40",),
            },
        ),
    },
)
