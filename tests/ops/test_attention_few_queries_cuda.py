"""Attention of few queries in CUDA gives the bits of training, among however many programs the leaves are shared."""

import random

import pytest
import torch

from alignkit.runtime import dispatch
from alignkit.testing import assert_bitwise_equal

from .helpers import CPU, randn
from .test_attention_cuda import caches, capture, last, packed
from .test_attention_forward_cuda import BORDERS, DIMS, PAGED

pytestmark = pytest.mark.skipif(CPU, reason="kernels for a GPU")

BF16 = torch.bfloat16


@pytest.fixture(scope="module")
def cuda():
    if dispatch.name("cuda") != "cuda":
        pytest.skip("the CUDA kernels are not built")
    from alignkit.ops.attention import cuda

    return cuda


def shares(dim):
    """Programs on a multiprocessor, and how many in all; 0: as many as that gives."""
    return [
        (a_multiprocessor, programs)
        for a_multiprocessor in ((1,) if dim == 256 else (1, 2))
        for programs in (0, 1, 5, 1021)
    ]


def run(kernel, queries, flat, arguments, dim, page, **options):
    out = torch.full_like(queries, 7.0)
    kernel.few(queries, *flat, *arguments, page, dim**-0.5, out, **options)
    return out


@pytest.mark.parametrize("dim,heads,kv,page", PAGED)
def test_decoding(cuda, dim, heads, kv, page):
    """One query each, and padding, which is zero; and sequences that do not fit, which are NaN."""
    draw = random.Random(f"{dim} {heads} {page}")
    lens = [draw.choice(BORDERS) for _ in range(40)] + [9000, 2500]
    draw.shuffle(lens)
    q, k, v, _, cu = packed(lens, heads, kv, dim)
    for spread in (1.0, 12.0):  # what scores are measured by changes in few blocks, in most
        want, _ = cuda.forward(q * spread, k, v, cu, dim**-0.5)
        k_cache, v_cache, table = caches(k, v, lens, page)
        flat = [c.flatten(0, 1) for c in (k_cache, v_cache)]
        rows, starts = last(lens, [1] * len(lens))
        queries = torch.cat([q[rows] * spread, torch.full((5, heads, dim), 3.0, dtype=BF16)])
        for ints in (torch.int32, torch.int64):
            arguments = table.to(ints), starts.to(ints), torch.tensor(lens, dtype=ints)
            for a_multiprocessor, programs in shares(dim):
                options = {"a_multiprocessor": a_multiprocessor, "programs": programs, "all_of_them": programs != 5}
                out = run(cuda, queries, flat, arguments, dim, page, **options)
                assert_bitwise_equal(out[: len(rows)], want[rows], f"{options}")
                assert not out[len(rows) :].any()
        wrong = torch.tensor(lens).int()
        wrong[7], wrong[11] = table.shape[1] * page + 1, 0
        out = run(cuda, queries, flat, (table, starts.int(), wrong), dim, page)
        others = [i for i in range(len(lens)) if i not in (7, 11)]
        assert out[[7, 11]].isnan().all()
        assert_bitwise_equal(out[others], want[rows][others], "beside those")


@pytest.mark.parametrize("dim,heads,kv,page", PAGED)
def test_some_queries(cuda, dim, heads, kv, page):
    """Sequences of few queries beside others, which are left alone; tiles of several queries, of which some see fewer leaves."""
    draw = random.Random(f"{dim} {heads} {page} some")
    lens = [draw.choice(BORDERS) for _ in range(6)] + [2500, 4100, 2049 + 16]
    q, k, v, _, cu = packed(lens, heads, kv, dim)
    want, _ = cuda.forward(q, k, v, cu, dim**-0.5)
    k_cache, v_cache, table = caches(k, v, lens, page)
    flat = [c.flatten(0, 1) for c in (k_cache, v_cache)]
    of_tile = 16 // (heads // kv)
    for _ in range(4):
        take = [draw.choice([0, 1, min(n, 2), min(n, 9), min(n, 16), min(n, 17), n]) for n in lens]
        rows, starts = last(lens, take)
        arguments = table, starts, torch.tensor(lens).int()
        few = [n <= of_tile or (n <= 16 and length - n >= 2048) for n, length in zip(take, lens, strict=True)]
        others = torch.cat([torch.full((n,), not its) for n, its in zip(take, few, strict=True)])
        expected = want[rows].masked_fill(others[:, None, None], 7.0)
        for a_multiprocessor, programs in shares(dim):
            out = run(cuda, q[rows], flat, arguments, dim, page, a_multiprocessor=a_multiprocessor, programs=programs)
            assert_bitwise_equal(out, expected, f"{take} of {lens}, {programs} programs")
        whole = run(cuda, q[rows], flat, arguments, dim, page, all_of_them=True)
        assert_bitwise_equal(whole, want[rows], f"all of {take}, a query at a time")


@pytest.mark.parametrize(
    "dim,heads,kv", [(128, 32, 8), (128, 64, 8), (128, 28, 4), (64, 16, 1), (96, 16, 4), (256, 8, 2)]
)
def test_long_contexts(cuda, dim, heads, kv):
    lens = [40000, 3, 17000, 512, 30001]
    q, k, v, _, cu = packed(lens, heads, kv, dim)
    k_cache, v_cache, table = caches(k, v, lens, 16)
    flat = [c.flatten(0, 1) for c in (k_cache, v_cache)]
    rows, starts = last(lens, [1] * len(lens))
    length = torch.tensor(lens).int()
    want = cuda.forward(q, k, v, cu, dim**-0.5)[0][rows]
    for a_multiprocessor, programs in shares(dim):
        for _ in range(3):  # a race shows as a difference of two runs
            options = {"a_multiprocessor": a_multiprocessor, "programs": programs, "all_of_them": True}
            out = run(cuda, q[rows], flat, (table, starts, length), dim, 16, **options)
            assert_bitwise_equal(out, want, f"{options}")
    for s in range(len(lens)):
        arguments = table[s : s + 1], torch.tensor([0, 1]).int(), length[s : s + 1]
        out = run(cuda, q[rows][s : s + 1], flat, arguments, dim, 16, all_of_them=True)
        assert_bitwise_equal(out[0], want[s], f"sequence {s} alone")


@pytest.mark.parametrize("dim", DIMS)
def test_many_sequences(cuda, dim):
    """More than a warp has lanes, many times; and more than there are programs."""
    draw = random.Random(dim)
    lens = [draw.choice([1, 5, 64, 100, 129, 200, 600]) for _ in range(1500)] + [5000]
    draw.shuffle(lens)
    q, k, v, _, cu = packed(lens, 8, 2, dim)
    want, _ = cuda.forward(q, k, v, cu, dim**-0.5)
    k_cache, v_cache, table = caches(k, v, lens, 16)
    flat = [c.flatten(0, 1) for c in (k_cache, v_cache)]
    rows, starts = last(lens, [1] * len(lens))
    arguments = table, starts, torch.tensor(lens).int()
    for a_multiprocessor, programs in shares(dim):
        options = {"a_multiprocessor": a_multiprocessor, "programs": programs, "all_of_them": True}
        out = run(cuda, q[rows], flat, arguments, dim, 16, **options)
        assert_bitwise_equal(out, want[rows], f"{options}")


@pytest.mark.parametrize("dim", DIMS)
def test_graph_replays_with_other_lengths(cuda, dim):
    lens = [3000, 900, 1, 2048, 600]
    q, k, v, _, cu = packed(lens, 8, 2, dim)
    want, _ = cuda.forward(q, k, v, cu, dim**-0.5)
    k_cache, v_cache, table = caches(k, v, lens, 16)
    flat = [c.flatten(0, 1) for c in (k_cache, v_cache)]
    starts, length, queries = torch.arange(6).int(), torch.tensor(lens).int(), torch.empty(5, 8, dim, dtype=BF16)
    out = torch.empty_like(queries)
    rows = torch.tensor([int(n) - 1 for n in cu[1:]])
    queries.copy_(q[rows])
    graph, _ = capture(lambda: cuda.few(queries, *flat, table, starts, length, 16, dim**-0.5, out, all_of_them=True))
    for cut in (0, 1, 511, 512, 513, 2000):
        now = [max(n - cut, 1) for n in lens]
        rows = torch.tensor([int(begin) + n - 1 for begin, n in zip(cu[:-1], now, strict=True)])
        queries.copy_(q[rows])
        length.copy_(torch.tensor(now))
        graph.replay()
        assert_bitwise_equal(out, want[rows], f"{now}")


@pytest.mark.parametrize("dim", DIMS)
def test_on_another_stream(cuda, dim):
    """It waits for the kernels before it, though it may begin earlier, and the next ones for it."""
    lens = [4000, 700, 20]
    q, k, v, _, cu = packed(lens, 8, 2, dim)
    k_cache, v_cache, table = caches(k, v, lens, 16)
    flat = [c.flatten(0, 1) for c in (k_cache, v_cache)]
    rows, starts = last(lens, [1] * len(lens))
    length, queries = torch.tensor(lens).int(), q[rows]
    want = cuda.forward(q, k, v, cu, dim**-0.5)[0][rows]
    for _ in range(20):
        moved = [torch.empty_like(t) for t in (queries, *flat)]
        for to, t in zip(moved, (queries, *flat), strict=True):
            to.copy_(randn(*t.shape, dtype=BF16))
            to.copy_(t)
        out = run(cuda, moved[0], moved[1:], (table, starts, length), dim, 16, all_of_them=True)
        copied = out.clone()
        out.zero_()
        assert_bitwise_equal(copied, want, "right after its inputs were written, right before its result is")


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_what_is_not_finite(cuda, value):
    """In q, k or v it reaches those that see it, and no other; so does what lies in pages behind the end."""
    lens, dim, at = [300, 1700, 90], 128, 300 + 700
    q, k, v, _, cu = packed(lens, 8, 2, dim)
    rows, starts = last(lens, [1, 1, 1])
    clean = cuda.forward(q, k, v, cu, dim**-0.5)[0][rows]
    for changed in (q, k, v):
        row = int(rows[1]) if changed is q else at
        kept = changed[row].clone()
        changed[row, 1, 3] = value
        k_cache, v_cache, table = caches(k, v, lens, 16)
        flat = [c.flatten(0, 1) for c in (k_cache, v_cache)]
        for rows_of_cache in flat:
            rows_of_cache[int(table[0, 300 // 16]) * 16 + 300 % 16] = value
        out = run(cuda, q[rows], flat, (table, starts, torch.tensor(lens).int()), dim, 16, all_of_them=True)
        assert_bitwise_equal(out, cuda.forward(q, k, v, cu, dim**-0.5)[0][rows], "training")
        assert_bitwise_equal(out[[0, 2]], clean[[0, 2]], "other sequences")
        assert not torch.equal(out[1].view(torch.int16), clean[1].view(torch.int16))
        changed[row] = kept


def test_wrong_starts(cuda):
    lens, dim = [20, 30], 64
    q, k, v, _, _ = packed(lens, 8, 2, dim)
    k_cache, v_cache, table = caches(k, v, lens, 16)
    flat = [c.flatten(0, 1) for c in (k_cache, v_cache)]
    for wrong in ([1, 2, 3], [0, 1, 51]):
        out = run(cuda, q, flat, (table, torch.tensor(wrong).int(), torch.tensor(lens).int()), dim, 16)
        assert out.isnan().all()
    for wrong in ([0, 3, 1], [0, -5, 2], [0, 60, 2]):  # rows hold anything; nothing is written elsewhere
        run(cuda, q, flat, (table, torch.tensor(wrong).int(), torch.tensor(lens).int()), dim, 16)
