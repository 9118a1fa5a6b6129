"""Triton's attention on a GPU: a query's bits depend only on its sequence, not on tile, page, chunk, batch or graph.

test_attention_forward_cuda.py and test_attention_backward_cuda.py compare the CUDA kernels, and import the input
functions.
"""

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
"""Lengths around multiples of a leaf."""
HEADS = [(64, 8, 4), (128, 16, 8), (128, 7, 1), (80, 6, 6)]
"""head_dim, query heads, KV heads."""
# Launch options, which change no bit. A tile: BLOCK_M, num_warps, num_stages.
TILES = [(64, 4, 2), (64, 4, 3), (128, 8, 2), (128, 8, 1)]
# A decode tile: BLOCK_M, num_warps, num_stages, programs that share leaves.
SHORT = [(16, 8, 2, 0), (16, 4, 3, 1), (16, 2, 3, 3), (32, 4, 2, 40), (64, 4, 2, 1000)]
# Tiles of the backward kernels: two block sizes, num_warps, num_stages.
GRAD_Q = [(64, 64, 4, 2), (128, 32, 8, 3), (128, 64, 8, 3), (64, 32, 4, 2)]
GRAD_KV = [(64, 64, 4, 2), (128, 32, 8, 3), (64, 32, 4, 3), (128, 64, 8, 2)]


def packed(lens, heads, kv, dim, dtype=BF16, seed=0):
    """Return q, k, v, the gradient of the result, and cu_seqlens."""
    total = sum(lens)
    q, k, v, g = (randn(total, h, dim, dtype=dtype, seed=seed + i) for i, h in enumerate((heads, kv, kv, heads)))
    return q, k, v, g, torch.tensor([0, *lens]).cumsum(0).int()


def caches(k, v, lens, page, spare=3):
    """Return K cache, V cache and block table, with k and v in shuffled blocks of one buffer and NaN elsewhere."""
    need = [-(-n // page) for n in lens]
    blocks, width = sum(need) + spare, max(need) + 1
    cache = torch.full((blocks, page, k.shape[1], 2 * k.shape[2]), float("nan"), dtype=k.dtype)
    order = torch.randperm(blocks)[: sum(need)].split(need)
    table = torch.full((len(lens), width), -1, dtype=torch.int32)
    for row, blocks_of, ks, vs in zip(table, order, k.split(lens), v.split(lens), strict=True):
        row[: len(blocks_of)] = blocks_of.int()
        positions = torch.arange(len(ks))
        cache[blocks_of[positions // page], positions % page] = torch.cat([ks, vs], -1)
    return *cache.chunk(2, dim=-1), table


def last(lens, take):
    """Return the rows of the last `take` tokens of each sequence in a packed batch, and their starts."""
    ends = torch.tensor(lens).cumsum(0).tolist()
    rows = torch.cat([torch.arange(e - t, e) for e, t in zip(ends, take, strict=True)])
    return rows, torch.tensor([0, *take]).cumsum(0).int()


def capture(run):
    """Return a CUDA graph of ``run()``, and the captured result."""
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
def test_all_tiles_give_the_same_bits(dim, heads, kv, lens):
    from alignkit.ops.attention import triton_backend as backend

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
def test_rollout_equals_training(dim, heads, kv, page, lengths):
    """Check prefill, chunks and decode for all tiles, sequences without queries, and zeros for padding."""
    from alignkit.ops.attention import triton_backend as backend

    q, k, v, _, cu = packed(lengths, heads, kv, dim)
    want = ops.attention(q, k, v, cu)
    k_cache, v_cache, table = caches(k, v, lengths, page)
    lens = torch.tensor(lengths).int()
    some = [[1] * 7, lengths, [0] * 7]
    if lengths is LENS:
        some += [[1, 8, 0, 9, 129, 130, 0], [0, 0, 1, 0, 0, 0, 3], [0, 63, 1, 1, 1, 1, 1]]
    else:  # queries that start within a leaf, at its start, and at the position before
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
            assert flat[0].data_ptr() == k_cache.data_ptr(), "the flattened cache must be a view"
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
                    decode_options={"BLOCK_M": m, "num_warps": warps, "num_stages": stages, "programs": programs},
                    BLOCK_M=64,
                    num_warps=4,
                )
                assert_bitwise_equal(out, want[rows], f"queries {take}, decode {m, warps, stages, programs}")


@pytest.mark.parametrize(
    "dim,heads,kv,dtype", [(128, 32, 8, BF16), (128, 28, 4, BF16), (64, 16, 1, BF16), (64, 2, 1, FP32)]
)
def test_long_contexts(dim, heads, kv, dtype):
    """Decode, short chunks and chunks that end within a leaf equal training.

    Neither the number of programs that share leaves nor the other sequences change a bit.
    """
    from alignkit.ops.attention import triton_backend as backend

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
                options = {"programs": programs, "decode_all": programs == 5, "pdl": programs != 132}
                if programs == 1021:
                    options |= {"SEQS": 2, "MORE": True}  # sequences searched at a time
                backend.paged(q[rows], *flat, table, starts, length, 16, dim**-0.5, out, decode_options=options)
                assert_bitwise_equal(out, got, f"queries {take}, {programs} programs")
    for s, longest in enumerate(lens):  # each alone, at an earlier position
        for n in (longest, longest // 2, min(longest, LEAF + 1)):
            row = int(cu[s]) + n - 1
            integers = torch.tensor([0, 1]).int(), torch.tensor([n]).int()
            got = ops.paged_attention(q[row : row + 1], k_cache, v_cache, table[s : s + 1], *integers)
            assert_bitwise_equal(got, want[row : row + 1], f"position {n} of sequence {s}")


@pytest.mark.parametrize("dtype", [BF16, FP32])
def test_batch_equals_each_sequence_alone(dtype):
    """Results and gradients do not change in a batch, in another order, with padding or with strided inputs."""
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
        by_sequence = dict(zip(order, a.split([LENS[i] for i in order]), strict=True))
        for i, part in enumerate(all_.split(LENS)):
            assert_bitwise_equal(by_sequence[i], part, f"{name} of sequence {i} in another order")
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
def test_accuracy_against_float64(n, dim, heads, kv, dtype):
    """Each bound is the first-order error of the contract's roundings."""
    q, k, v, g, cu = packed([n], heads, kv, dim, dtype)
    leaves = [t.clone().requires_grad_() for t in (q, k, v)]
    out = ops.attention(*leaves, cu)
    got = torch.autograd.grad(out, leaves, g)
    scale, u = dim**-0.5, UNIT[dtype] * 1.001
    rounded = u if dtype != FP32 else 0.0  # P and dS rounded for the tensor core
    qd, gd = q.double(), g.double()
    kd, vd = (t.double().repeat_interleave(heads // kv, 1) for t in (k, v))
    hidden = torch.ones(n, n).triu(1).bool()
    p = (torch.einsum("ihd,jhd->hij", qd, kd) * scale).masked_fill(hidden, float("-inf")).softmax(-1)
    want = torch.einsum("hij,jhd->ihd", p, vd)
    # The tensor core truncates: two units per step. `score` is the error of a score, `p_error` that of a probability.
    size = torch.einsum("ihd,jhd->hij", qd.abs(), kd.abs()).masked_fill(hidden, 0.0).amax(-1, keepdim=True) * scale
    score = gamma(2 * dim + 8) * size + 2 * U32 * (2 * size + SM90.reserve)
    p_error = (
        2 * score + 2 * EXP + gamma(2 * n + 8) + 2 * rounded
    )  # rounding errors of P in the numerator and in the sum
    spread = torch.einsum("hij,jhd->ihd", p * p_error, vd.abs())
    assert_within(out, want, spread + u * want.abs(), "out")
    dp, dp_size = (torch.einsum("ihd,jhd->hij", a, b) for a, b in ((gd, vd), (gd.abs(), vd.abs())))
    delta, delta_size = ((gd * want).sum(-1), (gd.abs() * want.abs()).sum(-1))
    delta_error = gamma(dim + 4) * delta_size + (gd.abs() * (spread + u * want.abs())).sum(-1)
    delta, delta_error = (t.t()[..., None] for t in (delta, delta_error))
    ds = p * (dp - delta)
    q_error = p_error + (score + 8 * U32) * 2  # error of the probability recomputed from the row's statistics
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
    """A captured call reads lengths, starts and blocks from the device."""
    lens = [300, 17, 64, 1]
    q, k, v, _, cu = packed(lens, 16, 8, 128)
    want = ops.attention(q, k, v, cu)
    k_cache, v_cache, table = caches(k, v, lens, 16)
    rows = 8
    queries, out = torch.zeros(rows, 16, 128, dtype=BF16), torch.zeros(rows, 16, 128, dtype=BF16)
    for batch in (4, rows):  # a mixed batch, whose tiles are searched, and a batch of single queries
        starts, length = torch.zeros(batch + 1).int(), torch.zeros(batch).int()
        blocks = torch.zeros(batch, table.shape[1]).int()
        graph, _ = capture(partial(ops.paged_attention, queries, k_cache, v_cache, blocks, starts, length, out=out))
        for take, lengths in (
            ([1, 1, 1, 1], lens),
            ([5, 0, 1, 0], lens),
            ([0, 0, 0, 1], [7, 0, 0, 1]),
            ([1, 1, 1, 0], [255, 3, 64, 0]),
        ):
            ends = [int(cu[i]) + n for i, n in enumerate(lengths)]
            index = torch.cat([torch.arange(e - t, e) for e, t in zip(ends, take, strict=True)])
            queries.fill_(float("nan"))
            queries[: len(index)] = q[index]
            starts.fill_(len(index))
            starts[:5] = torch.tensor([0, *take]).cumsum(0).int()
            length.zero_()
            length[:4] = torch.tensor(lengths).int()
            blocks[:4] = table
            out.fill_(float("nan"))
            graph.replay()
            assert_bitwise_equal(out[: len(index)], want[index], f"{take} queries of {lengths}")
            assert not out[len(index) :].any()


@pytest.mark.parametrize(
    "choice,dim,heads,kv",
    [("auto", 128, 8, 2), ("auto", 256, 4, 2), ("triton", 64, 6, 1)],
    ids=["128", "256", "triton"],
)
@pytest.mark.parametrize("take", [[1, 1, 1], [300, 1, 0]], ids=["decoding", "mixed"])
@pytest.mark.parametrize("in_graph", [False, True], ids=["eager", "graph"])
def test_layers_of_a_step_equal_separate_calls(choice, dim, heads, kv, take, in_graph):
    """Each layer of a step equals its own `paged_attention` call, eager and in a graph.

    Some layers differ from the first: strided queries, another alignment modulo 16 bytes, or more heads.
    """
    lens = [700, 513, 40]
    table, length = torch.randperm(96).view(3, -1).int(), torch.tensor(lens).int()
    starts = torch.tensor([0, *take]).cumsum(0).int()
    rows = int(starts[-1]) + (
        3 if max(take) > 1 else 0
    )  # more rows than sequences, or equally many, which selects other kernels
    layers = []
    for seed, more in enumerate((1, 1, 1, 2)):
        q = randn(rows, heads * more, dim, dtype=BF16, seed=seed)
        cache = randn(96, 32, kv * more, 2 * dim, dtype=BF16, seed=seed + 100)
        layers.append((q, *cache.chunk(2, dim=-1)))
    (q, k, v), (other, *other_cache) = layers[:2]
    layers.insert(1, (torch.cat([q, q], -1)[..., dim:], k, v))
    odd = torch.empty(q.numel() + 4, dtype=BF16)[4:].view(q.shape)
    layers.insert(2, (odd.copy_(other), *other_cache))
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
    with pytest.raises(InputError, match="out: (shape must equal q's|must be contiguous)"):
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
    """Later scores exceed the shift, which is then recomputed.

    This happens in one, both or neither of the two batches in which the leaves of a decode query are merged.
    """
    heads, kv, dim = 8, 2, 128
    n = 37 * LEAF + 5
    q, k, v, _, cu = packed([n], heads, kv, dim)
    for leaf, steps in ((10, 1), (20, 2), (36, 3)):
        k[leaf * LEAF] += steps * 10 * q[-1, :: heads // kv]
    k[12 * LEAF] += 10 * q[-1, 1]
    v[5 * LEAF, :, 3] += value
    want = ops.attention(q, k, v, cu)[-1:]
    assert want[..., :3].isfinite().all() and (want[..., 3].isfinite() == (value == 0)).all()
    for page in (16, 64):
        integers = torch.tensor([0, 1]), torch.tensor([n]).int()
        got = ops.paged_attention(q[-1:], *caches(k, v, [n], page), *integers)
        assert_bitwise_equal(got, want, f"pages of {page}")


def test_cache_offsets_beyond_2_31_elements():
    page, kv, dim, n = 16, 8, 128, 200
    q, k, v, _, cu = packed([n], 16, kv, dim)
    blocks = 2**31 // (page * kv * 2 * dim) + 20
    cache = torch.empty(blocks, page, kv, 2 * dim, dtype=BF16)
    table = torch.arange(blocks - 13, blocks).int()[None]
    positions = torch.arange(n)
    cache[table[0, positions // page].long(), positions % page] = torch.cat([k, v], -1)
    for take in (1, n):
        got = ops.paged_attention(q[-take:], *cache.chunk(2, dim=-1), table, torch.tensor([0, take]), torch.tensor([n]))
        assert_bitwise_equal(got, ops.attention(q, k, v, cu)[-take:], f"last {take}")


def test_wrong_values_give_nan_in_their_sequence_only():
    """The host does not wait for the device, so wrong values give NaN instead of an error."""
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


def test_strict_validates_values_first(monkeypatch):
    monkeypatch.setenv("ALIGNKIT_STRICT", "1")
    q, k, v, _, _ = packed([20, 30], 4, 2, 64)
    k_cache, v_cache, table = caches(k, v, [20, 30], 16)
    for message, wrong in (
        ("must begin with 0", [1, 20, 50]),
        ("must not decrease", [0, 51, 50]),
        ("last entry must equal q's 50 rows, got 49", [0, 20, 49]),
    ):
        with pytest.raises(InputError, match=f"cu_seqlens: {message}"):
            ops.attention(q, k, v, torch.tensor(wrong))
    starts, lens = torch.tensor([0, 20, 50]), torch.tensor([20, 30])
    outside = table.clone()
    outside[1, 0] = k_cache.shape[0]
    for message, args in (
        ("query_start_loc: last entry must not exceed q's 50 rows, got 51", (table, torch.tensor([0, 20, 51]), lens)),
        ("seq_lens: must be at least the number of queries", (table, starts, lens - 1)),
        (
            r"seq_lens: must be at most 48 \(block_table's 3 columns of 16 positions\), got 1000",
            (table, starts, lens + 970),
        ),
        ("block_table: entries in use must be in", (outside, starts, lens)),
    ):
        with pytest.raises(InputError, match=message):
            ops.paged_attention(q, k_cache, v_cache, *args)
    assert ops.paged_attention(q, k_cache, v_cache, table, starts, lens).isfinite().all()


def test_empty_batches():
    none, cache = torch.zeros(0, 4, 64, dtype=BF16), torch.zeros(2, 16, 2, 64, dtype=BF16)
    zero = torch.zeros(1).int()
    assert ops.attention(none, none, none, zero).shape == none.shape
    no_table, no_lens = torch.zeros(0, 3).int(), torch.zeros(0).int()
    assert ops.paged_attention(none, cache, cache, no_table, zero, no_lens).shape == (0, 4, 64)
    padding = torch.ones(3, 4, 64, dtype=BF16)
    assert not ops.paged_attention(padding, cache, cache, no_table, zero, no_lens).any()
