"""Attention on a GPU: a query's bits are its sequence's own, whatever tile, page, chunk, batch or graph it runs in."""

from functools import partial

import pytest
import torch

from alignkit import ops
from alignkit.errors import InputError
from alignkit.ops.attention import PagedAttention
from alignkit.runtime import dispatch
from alignkit.runtime.families import SM90
from alignkit.testing import assert_bitwise_equal

from .helpers import CPU, EXP, U32, UNIT, assert_within, gamma, randn, times

pytestmark = pytest.mark.skipif(CPU, reason="the Triton backend needs a GPU")

BF16, FP32 = torch.bfloat16, torch.float32
LEAF = SM90.kv_leaf
LENS = [1, 63, 64, 65, 129, 700, 5]
BORDERS = [LEAF - 1, LEAF, LEAF + 1, 2 * LEAF, 2 * LEAF + 1, 3 * LEAF + 70, 7]
"""Lengths around those of whole leaves."""
HEADS = [(64, 8, 4), (128, 16, 8), (128, 7, 1), (80, 6, 6)]
# Launch options: tiles of queries, of few queries and among how many programs these share leaves, and both kernels of the
# backward pass.
TILES = [(64, 4, 2), (64, 4, 3), (128, 8, 2), (128, 8, 1)]
SHORT = [(16, 8, 2, 0), (16, 4, 3, 1), (16, 2, 3, 3), (32, 4, 2, 40), (64, 4, 2, 1000)]
GRAD_Q = [(64, 64, 4, 2), (128, 32, 8, 3), (128, 64, 8, 3), (64, 32, 4, 2)]
GRAD_KV = [(64, 64, 4, 2), (128, 32, 8, 3), (64, 32, 4, 3), (128, 64, 8, 2)]


def packed(lens, heads, kv, dim, dtype=BF16, seed=0):
    """q, k, v, the gradient of the result, cu_seqlens."""
    total = sum(lens)
    q, k, v, g = (randn(total, h, dim, dtype=dtype, seed=seed + i) for i, h in enumerate((heads, kv, kv, heads)))
    return q, k, v, g, torch.tensor([0, *lens]).cumsum(0).int()


def caches(k, v, lens, page, spare=3):
    """k and v in shuffled blocks, all else NaN; K and V are views of one buffer. Returns both and the block table."""
    need = [-(-n // page) for n in lens]
    blocks, width = sum(need) + spare, max(need) + 1
    cache = torch.full((blocks, page, k.shape[1], 2 * k.shape[2]), float("nan"), dtype=k.dtype)
    order = torch.randperm(blocks)[: sum(need)].split(need)
    table = torch.full((len(lens), width), -1, dtype=torch.int32)
    for row, blocks_of, ks, vs in zip(table, order, k.split(lens), v.split(lens), strict=True):
        row[: len(blocks_of)] = blocks_of.int()
        at = torch.arange(len(ks))
        cache[blocks_of[at // page], at % page] = torch.cat([ks, vs], -1)
    return *cache.chunk(2, dim=-1), table


def last(lens, take):
    """Rows of a packed batch that are the last `take` of each sequence, and their starts."""
    ends = torch.tensor(lens).cumsum(0).tolist()
    rows = torch.cat([torch.arange(e - t, e) for e, t in zip(ends, take, strict=True)])
    return rows, torch.tensor([0, *take]).cumsum(0).int()


def capture(run):
    """A CUDA graph of ``run()`` and what it returned."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        run()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = run()
    return graph, result


@pytest.mark.parametrize("dim,heads,kv", HEADS)
@pytest.mark.parametrize("lens", [LENS, BORDERS], ids=["short", "leaves"])
def test_tiles(dim, heads, kv, lens):
    from alignkit.ops.attention import triton as backend

    q, k, v, g, cu = packed(lens, heads, kv, dim)
    scale = dim**-0.5
    want = backend.forward(q, k, v, cu, scale)
    for rows, warps, stages in TILES:
        got = backend.forward(q, k, v, cu, scale, BLOCK_M=rows, num_warps=warps, num_stages=stages)
        for name, a, b in zip(("out", "shift"), got, want, strict=True):
            assert_bitwise_equal(a, b, f"{name}, tile {rows, warps, stages}")
    grads = backend.backward(q, k, v, cu, *want, g, scale)
    options = [{"BLOCK_M": m, "BLOCK_N": n, "num_warps": w, "num_stages": s} for m, n, w, s in GRAD_Q]
    options += [{"grad_kv": {"BLOCK_N": n, "BLOCK_I": i, "num_warps": w, "num_stages": s}} for n, i, w, s in GRAD_KV]
    for option in options:
        got = backend.backward(q, k, v, cu, *want, g, scale, **option)
        for name, a, b in zip(("dq", "dk", "dv"), got, grads, strict=True):
            assert_bitwise_equal(a, b, f"{name}, {option}")


@pytest.mark.parametrize("dim,heads,kv", HEADS)
@pytest.mark.parametrize("page,lengths", [(1, LENS), (16, LENS), (48, LENS), (16, BORDERS), (48, BORDERS)])
def test_rollout_is_training(dim, heads, kv, page, lengths):
    """Prefill, chunks and decode, in any tile; sequences without a query; padding, which is zero."""
    from alignkit.ops.attention import triton as backend

    q, k, v, _, cu = packed(lengths, heads, kv, dim)
    want = ops.attention(q, k, v, cu)
    k_cache, v_cache, table = caches(k, v, lengths, page)
    lens = torch.tensor(lengths).int()
    some = [[1] * 7, lengths, [0] * 7]
    if lengths is LENS:
        some += [[1, 8, 0, 9, 129, 130, 0], [0, 0, 1, 0, 0, 0, 3], [0, 63, 1, 1, 1, 1, 1]]
    else:  # queries from the middle of a leaf on, from its border on, from the last position before it on
        some += [[200, 5, 1, LEAF, LEAF + 1, LEAF + 71, 0], [0, 0, 2, 0, 1, 8, 3], [17, 0, 64, 65, 1, 33, 7]]
    for take in some:
        rows, starts = last(lengths, take)
        for pad in (0, 5):
            queries = torch.cat([q[rows], torch.full((pad, heads, dim), 3.0, dtype=BF16)])
            out = torch.full_like(queries, float("nan"))
            got = ops.paged_attention(queries, k_cache, v_cache, table, starts, lens, out=out)
            assert got is out
            assert_bitwise_equal(got[: len(rows)], want[rows], f"queries {take}")
            assert not got[len(rows) :].any()
        if len(rows):
            flat = [c.flatten(0, 1) for c in (k_cache, v_cache)]
            assert flat[0].data_ptr() == k_cache.data_ptr(), "a view"
            for x in times(len(SHORT)):
                m, warps, stages, programs = SHORT[x]
                out = torch.full_like(q[rows], float("nan"))
                backend.paged(
                    q[rows],
                    *flat,
                    table,
                    starts,
                    lens,
                    page,
                    dim**-0.5,
                    out,
                    short={"BLOCK_M": m, "num_warps": warps, "num_stages": stages, "programs": programs},
                    BLOCK_M=64,
                    num_warps=4,
                )
                assert_bitwise_equal(out, want[rows], f"queries {take}, few {m, warps, stages, programs}")


@pytest.mark.parametrize(
    "dim,heads,kv,dtype", [(128, 32, 8, BF16), (128, 28, 4, BF16), (64, 16, 1, BF16), (64, 2, 1, FP32)]
)
def test_long_contexts(dim, heads, kv, dtype):
    """Decoded, in chunks that end within a leaf, and of few queries after a long prefix: what training gives, among however many
    programs leaves are shared, and whatever stands beside it."""
    from alignkit.ops.attention import triton as backend

    lens = [40000, 30000, 100, 4097] if dtype == BF16 else [5000, 3000, 100, 2049]
    q, k, v, _, cu = packed(lens, heads, kv, dim, dtype)
    want = ops.attention(q, k, v, cu)
    k_cache, v_cache, table = caches(k, v, lens, 16)
    length = torch.tensor(lens).int()
    for take in ([1, 1, 1, 1], [16, 0, 1, 64], [1, 33, 100, 3], [777, 1, 20, 2000]):
        rows, starts = last(lens, take)
        got = ops.paged_attention(q[rows], k_cache, v_cache, table, starts, length)
        assert_bitwise_equal(got, want[rows], f"queries {take}")
        for programs in (1, 5, 132, 1021):
            if max(take) == 1 or programs == 132:
                out = torch.full_like(got, float("nan"))
                flat = (c.flatten(0, 1) for c in (k_cache, v_cache))
                options = {"programs": programs, "all_of_them": programs == 5, "overlap": programs != 132}
                if programs == 1021:
                    options |= {"SEQS": 2, "MORE": True}  # sequences that it looks at at a time
                backend.paged(q[rows], *flat, table, starts, length, 16, dim**-0.5, out, short=options)
                assert_bitwise_equal(out, got, f"queries {take}, {programs} programs")
    for s, longest in enumerate(lens):  # each alone, at an earlier time
        for n in (longest, longest // 2, min(longest, LEAF + 1)):
            at = int(cu[s]) + n - 1
            integers = torch.tensor([0, 1]).int(), torch.tensor([n]).int()
            got = ops.paged_attention(q[at : at + 1], k_cache, v_cache, table[s : s + 1], *integers)
            assert_bitwise_equal(got, want[at : at + 1], f"position {n} of sequence {s}")


@pytest.mark.parametrize("dtype", [BF16, FP32])
def test_a_sequence_alone(dtype):
    """Results and gradients of a sequence in a batch, in another order, padded and from strided inputs."""
    q, k, v, g, cu = packed(LENS, 4, 2, 64, dtype)

    def run(tensors, starts, g):
        leaves = [t.detach().requires_grad_() for t in tensors]
        out = ops.attention(*leaves, starts)
        return out.detach(), *torch.autograd.grad(out, leaves, g)

    whole = run((q, k, v), cu, g)
    wide = [torch.cat([t, t], -1)[..., :64] for t in (q, k, v)]
    for name, a, b in zip(("out", "dq", "dk", "dv"), run(wide, cu, g), whole, strict=True):
        assert_bitwise_equal(a, b, f"{name} of strided inputs")
    order = torch.randperm(len(LENS)).tolist()
    shuffled = [torch.cat([t.split(LENS)[i] for i in order]) for t in (q, k, v, g)]
    moved = run(shuffled[:3], torch.tensor([0] + [LENS[i] for i in order]).cumsum(0), shuffled[3])
    width = max(LENS) + 7
    full = [torch.full((len(LENS), width, *t.shape[1:]), 2.0, dtype=dtype) for t in (q, k, v)] + [
        torch.zeros(len(LENS), width, *g.shape[1:], dtype=dtype)
    ]
    for box, t in zip(full, (q, k, v, g), strict=True):
        for i, part in enumerate(t.split(LENS)):
            box[i, : len(part)] = part
    padded = run([t.flatten(0, 1) for t in full[:3]], torch.arange(len(LENS) + 1) * width, full[3].flatten(0, 1))
    for name, all_, a, b in zip(("out", "dq", "dk", "dv"), whole, moved, padded, strict=True):
        elsewhere = dict(zip(order, a.split([LENS[i] for i in order]), strict=True))
        for i, part in enumerate(all_.split(LENS)):
            assert_bitwise_equal(elsewhere[i], part, f"{name} of sequence {i} in another order")
            assert_bitwise_equal(b.unflatten(0, (-1, width))[i, : LENS[i]], part, f"{name} of sequence {i} padded")
    start = sum(LENS[:5])
    s = slice(start, start + LENS[5])
    alone = run((q[s], k[s], v[s]), torch.tensor([0, LENS[5]]), g[s])
    for name, a, b in zip(("out", "dq", "dk", "dv"), alone, whole, strict=True):
        assert_bitwise_equal(a, b[s], f"{name} of a sequence alone")


@pytest.mark.parametrize(
    "n,dim,heads,kv,dtype",
    [
        (1, 64, 2, 1, BF16),
        (700, 128, 4, 2, BF16),
        (2000, 64, 2, 1, BF16),
        (300, 80, 3, 1, BF16),
        (150, 256, 2, 1, BF16),
        (200, 128, 2, 1, FP32),
    ],
)
def test_accuracy(n, dim, heads, kv, dtype):
    """Against float64; each bound is the first-order error of the roundings that the contract names."""
    q, k, v, g, cu = packed([n], heads, kv, dim, dtype)
    leaves = [t.clone().requires_grad_() for t in (q, k, v)]
    out = ops.attention(*leaves, cu)
    got = torch.autograd.grad(out, leaves, g)
    scale, u = dim**-0.5, UNIT[dtype] * 1.001
    rounded = u if dtype != FP32 else 0.0  # of P and dS, for the tensor core
    qd, gd = q.double(), g.double()
    kd, vd = (t.double().repeat_interleave(heads // kv, 1) for t in (k, v))
    hidden = torch.ones(n, n).triu(1).bool()
    p = (torch.einsum("ihd,jhd->hij", qd, kd) * scale).masked_fill(hidden, float("-inf")).softmax(-1)
    want = torch.einsum("hij,jhd->ihd", p, vd)
    # A chain of the tensor core truncates: two units a step. A score is off by `score`, a probability by a factor.
    size = torch.einsum("ihd,jhd->hij", qd.abs(), kd.abs()).masked_fill(hidden, 0.0).amax(-1, keepdim=True) * scale
    score = gamma(2 * dim + 8) * size + 2 * U32 * (2 * size + SM90.reserve)
    p_error = 2 * score + 2 * EXP + gamma(2 * n + 8) + 2 * rounded  # in the sum of values, and in their own
    spread = torch.einsum("hij,jhd->ihd", p * p_error, vd.abs())
    assert_within(out, want, spread + u * want.abs(), "out")
    dp, dp_size = (torch.einsum("ihd,jhd->hij", a, b) for a, b in ((gd, vd), (gd.abs(), vd.abs())))
    delta, delta_size = ((gd * want).sum(-1), (gd.abs() * want.abs()).sum(-1))
    delta_error = gamma(dim + 4) * delta_size + (gd.abs() * (spread + u * want.abs())).sum(-1)
    delta, delta_error = (t.t()[..., None] for t in (delta, delta_error))
    ds = p * (dp - delta)
    q_error = p_error + (score + 8 * U32) * 2  # that of the probability made again from the row's statistics
    ds_error = p * ((dp.abs() + delta.abs()) * (q_error + rounded) + gamma(2 * dim + 8) * dp_size + delta_error)

    def group(t):
        return t.unflatten(1, (kv, -1)).sum(2)

    chain = gamma(2 * n * (heads // kv) + 8)
    expected, bound = [], []
    for a, b, equation in ((ds * scale, kd, "hij,jhd->ihd"), (ds * scale, qd, "hij,ihd->jhd"), (p, gd, "hij,ihd->jhd")):
        error = (p * q_error if a is p else ds_error * scale) + chain * a.abs()
        expected.append(torch.einsum(equation, a, b))
        bound.append(torch.einsum(equation, error, b.abs()))
    expected[1:], bound[1:] = map(group, expected[1:]), map(group, bound[1:])
    for name, a, e, limit in zip(("dq", "dk", "dv"), got, expected, bound, strict=True):
        assert_within(a, e, limit + u * e.abs(), name)


def test_graph_replays_with_other_lengths():
    """A captured call takes lengths, starts and blocks from the device; then one sequence is decoded alone."""
    lens = [300, 17, 64, 1]
    q, k, v, _, cu = packed(lens, 16, 8, 128)
    want = ops.attention(q, k, v, cu)
    k_cache, v_cache, table = caches(k, v, lens, 16)
    rows = 8
    queries, out = torch.zeros(rows, 16, 128, dtype=BF16), torch.zeros(rows, 16, 128, dtype=BF16)
    for batch in (4, rows):  # as a mixed batch, whose tiles are searched for, and as one of single queries
        starts, length = torch.zeros(batch + 1).int(), torch.zeros(batch).int()
        blocks = torch.zeros(batch, table.shape[1]).int()
        graph, _ = capture(partial(ops.paged_attention, queries, k_cache, v_cache, blocks, starts, length, out=out))
        for take, there in (
            ([1, 1, 1, 1], lens),
            ([5, 0, 1, 0], lens),
            ([0, 0, 0, 1], [7, 0, 0, 1]),
            ([1, 1, 1, 0], [255, 3, 64, 0]),
        ):
            ends = [int(cu[i]) + n for i, n in enumerate(there)]
            index = torch.cat([torch.arange(e - t, e) for e, t in zip(ends, take, strict=True)])
            queries.fill_(float("nan"))
            queries[: len(index)] = q[index]
            starts.fill_(len(index))
            starts[:5] = torch.tensor([0, *take]).cumsum(0).int()
            length.zero_()
            length[:4] = torch.tensor(there).int()
            blocks[:4] = table
            out.fill_(float("nan"))
            graph.replay()
            assert_bitwise_equal(out[: len(index)], want[index], f"{take} queries of {there}")
            assert not out[len(index) :].any()


@pytest.mark.parametrize(
    "choice,dim,heads,kv",
    [("auto", 128, 8, 2), ("auto", 256, 4, 2), ("triton", 64, 6, 1)],
    ids=["128", "256", "triton"],
)
@pytest.mark.parametrize("take", [[1, 1, 1], [300, 1, 0]], ids=["decoding", "mixed"])
@pytest.mark.parametrize("in_graph", [False, True], ids=["eager", "graph"])
def test_one_layer_after_the_other(choice, dim, heads, kv, take, in_graph):
    """Of a step: results of each are what `paged_attention` gives it, eager and in a graph. Some layers are unlike the first:
    queries are a part of a wider tensor, or begin at another address modulo 16, or have more heads."""
    lens = [700, 513, 40]
    table, length = torch.randperm(96).view(3, -1).int(), torch.tensor(lens).int()
    starts = torch.tensor([0, *take]).cumsum(0).int()
    rows = int(starts[-1]) + (3 if max(take) > 1 else 0)  # more than sequences; or as many, which takes other kernels
    layers = []
    for seed, more in enumerate((1, 1, 1, 2)):
        q = randn(rows, heads * more, dim, dtype=BF16, seed=seed)
        cache = randn(96, 32, kv * more, 2 * dim, dtype=BF16, seed=seed + 100)
        layers.append((q, *cache.chunk(2, dim=-1)))
    (q, k, v), (other, *of_other) = layers[:2]
    layers.insert(1, (torch.cat([q, q], -1)[..., dim:], k, v))
    odd = torch.empty(q.numel() + 4, dtype=BF16)[4:].view(q.shape)
    layers.insert(2, (odd.copy_(other), *of_other))
    scale = dim**-0.5

    def run():
        step, results = PagedAttention(table, starts, length), []
        for tensors in layers:
            results.append(torch.full((rows, *tensors[0].shape[1:]), float("nan"), dtype=BF16))
            step(*tensors, scale, results[-1])
        return results

    with dispatch.use(choice):
        want = [ops.paged_attention(*tensors, table, starts, length) for tensors in layers]
        if in_graph:
            graph, got = capture(run)
            graph.replay()
        else:
            got = run()
    for i, expected in enumerate(want):
        assert_bitwise_equal(got[i], expected, f"layer {i}")
    with pytest.raises(InputError, match="out: not contiguous"):
        PagedAttention(table, starts, length)(q, k, v, scale, torch.cat([q, q], -1)[..., :dim])


def test_gradients_in_a_graph():
    q, k, v, g, _ = packed([256], 4, 2, 64)
    cu, leaves = torch.tensor([0, 100, 256]).int(), [t.clone().requires_grad_() for t in (q, k, v)]

    def run():
        out = ops.attention(*leaves, cu)
        return out, *torch.autograd.grad(out, leaves, g)

    graph, got = capture(run)
    for middle in (100, 0, 64, 255):
        cu[1] = middle
        graph.replay()
        for name, a, b in zip(("out", "dq", "dk", "dv"), got, run(), strict=True):
            assert_bitwise_equal(a, b, f"{name}, sequences cut at {middle}")


@pytest.mark.parametrize("value", [0.0, float("inf")])
def test_scores_that_grow(value):
    """Later leaves are measured anew: in one of the two batches in which leaves of a decoding query are joined, in both, or in neither."""
    heads, kv, dim = 8, 2, 128
    n = 37 * LEAF + 5
    q, k, v, _, cu = packed([n], heads, kv, dim)
    for at, steps in ((10, 1), (20, 2), (36, 3)):
        k[at * LEAF] += steps * 10 * q[-1, :: heads // kv]
    k[12 * LEAF] += 10 * q[-1, 1]
    v[5 * LEAF, :, 3] += value
    want = ops.attention(q, k, v, cu)[-1:]
    assert want[..., :3].isfinite().all() and (want[..., 3].isfinite() == (value == 0)).all()
    for page in (16, 64):
        integers = torch.tensor([0, 1]), torch.tensor([n]).int()
        got = ops.paged_attention(q[-1:], *caches(k, v, [n], page), *integers)
        assert_bitwise_equal(got, want, f"pages of {page}")


def test_far_into_a_cache():
    """Blocks more than 2^31 elements from the cache's beginning."""
    page, kv, dim, n = 16, 8, 128, 200
    q, k, v, _, cu = packed([n], 16, kv, dim)
    blocks = 2**31 // (page * kv * 2 * dim) + 20
    cache = torch.empty(blocks, page, kv, 2 * dim, dtype=BF16)
    table = torch.arange(blocks - 13, blocks).int()[None]
    at = torch.arange(n)
    cache[table[0, at // page].long(), at % page] = torch.cat([k, v], -1)
    for take in (1, n):
        got = ops.paged_attention(q[-take:], *cache.chunk(2, dim=-1), table, torch.tensor([0, take]), torch.tensor([n]))
        assert_bitwise_equal(got, ops.attention(q, k, v, cu)[-take:], f"last {take}")


def test_wrong_values():
    """Without waiting for the device they turn into NaN where they would matter, and reach no other sequence."""
    q, k, v, g, cu = packed([20, 30], 4, 2, 64)
    for wrong in ([0, 20, 49], [1, 20, 50], [0, 20, 51], [0]):
        leaves = [t.clone().requires_grad_() for t in (q, k, v)]
        out = ops.attention(*leaves, torch.tensor(wrong))
        assert out.isnan().all()
        assert all(t.isnan().all() for t in torch.autograd.grad(out, leaves, g))
    k_cache, v_cache, table = caches(k, v, [20, 30], 16)
    for take in ([1, 1], [20, 30]):
        rows, starts = last([20, 30], take)
        want = ops.attention(q, k, v, cu)[rows]
        for lens in ([take[0] - 1, 30], [table.shape[1] * 16 + 1, 30]):
            got = ops.paged_attention(q[rows], k_cache, v_cache, table, starts, torch.tensor(lens).int())
            assert got[: take[0]].isnan().all()
            assert_bitwise_equal(got[take[0] :], want[take[0] :], "the other sequence")
        for wrong in (starts + 1, starts * 2):
            assert ops.paged_attention(q[rows], k_cache, v_cache, table, wrong, torch.tensor([20, 30])).isnan().all()
        outside = table.clone()
        outside[0, 0] = 2**31 - 1
        got = ops.paged_attention(q[rows], k_cache, v_cache, outside, starts, torch.tensor([20, 30]))
        assert_bitwise_equal(got[take[0] :], want[take[0] :], "the other sequence")


def test_strict_looks_first(monkeypatch):
    monkeypatch.setenv("ALIGNKIT_STRICT", "1")
    q, k, v, _, _ = packed([20, 30], 4, 2, 64)
    k_cache, v_cache, table = caches(k, v, [20, 30], 16)
    for message, wrong in (
        ("must begin with 0", [1, 20, 50]),
        ("must not decrease", [0, 51, 50]),
        ("ends at 49", [0, 20, 49]),
    ):
        with pytest.raises(InputError, match=f"cu_seqlens: {message}"):
            ops.attention(q, k, v, torch.tensor(wrong))
    starts, lens = torch.tensor([0, 20, 50]), torch.tensor([20, 30])
    outside = table.clone()
    outside[1, 0] = k_cache.shape[0]
    for message, args in (
        ("query_start_loc: ends at 51", (table, starts + torch.tensor([0, 0, 1]), lens)),
        ("seq_lens: shorter", (table, starts, lens - 1)),
        ("seq_lens: 1000 positions exceed", (table, starts, lens + 970)),
        ("block_table: a block is not in", (outside, starts, lens)),
    ):
        with pytest.raises(InputError, match=message):
            ops.paged_attention(q, k_cache, v_cache, *args)
    assert ops.paged_attention(q, k_cache, v_cache, table, starts, lens).isfinite().all()


def test_empty():
    none, cache = torch.zeros(0, 4, 64, dtype=BF16), torch.zeros(2, 16, 2, 64, dtype=BF16)
    zero = torch.zeros(1).int()
    assert ops.attention(none, none, none, zero).shape == none.shape
    no_table, no_lens = torch.zeros(0, 3).int(), torch.zeros(0).int()
    assert ops.paged_attention(none, cache, cache, no_table, zero, no_lens).shape == (0, 4, 64)
    padding = torch.ones(3, 4, 64, dtype=BF16)
    assert not ops.paged_attention(padding, cache, cache, no_table, zero, no_lens).any()
