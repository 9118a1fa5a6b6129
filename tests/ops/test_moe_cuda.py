"""Triton's grouped MoE kernels on a GPU: the bits of one GEMM per expert, and of the family's formulas in torch.

test_moe_sm90.py compares the CUDA kernels with them.
"""

import pytest
import torch

from alignkit import UnsupportedError, ops
from alignkit.contract import k_leaves
from alignkit.testing import assert_bitwise_equal

from .helpers import CPU, randn, without

pytestmark = pytest.mark.skipif(CPU, reason="needs a GPU")
if not CPU:
    from alignkit.ops._triton import exp_of, sum_of_products
    from alignkit.ops.moe_experts import cuda_backend, each, few, grouped, pairs, ranked, reference
    from alignkit.ops.moe_experts import triton_backend as rows_of
    from alignkit.ops.moe_experts.problem import Matrices
    from alignkit.ops.moe_router import reference as routed
    from alignkit.ops.moe_router import triton_backend as router
    from alignkit.ops.moe_router.problem import Routing
    from alignkit.ops.silu_mul import triton_backend as silu_mul

    BY_CUDA = (*((cuda_backend, f"{name}_rejects") for name in ("gated", "products", "gradients")), (few, "rejects"))

BF16, FP32 = torch.bfloat16, torch.float32
WIDTHS = {"few": (4, 2, 96, 256), "odd": (6, 3, 72, 40), "qwen": (128, 8, 2048, 768)}
"""Experts, top k, hidden size, intermediate size."""
OWN = ({},)
OTHERS = ({"BLOCK_M": 16, "BLOCK_N": 32}, {"BLOCK_M": 64, "BLOCK_N": 64, "BLOCK_K": 32, "num_warps": 4})
"""Schedules: the default choice (OWN), and two other ones."""
PRODUCTS = [  # width, rows, dtype, matrices as a list, schedules
    ("few", 1, BF16, True, OWN),
    ("few", 7, BF16, False, OWN),
    ("few", 100, BF16, True, OWN),
    ("few", 5000, BF16, False, OWN),
    ("odd", 1, BF16, False, OWN),
    ("odd", 7, BF16, True, OWN),
    ("odd", 300, BF16, False, (*OWN, *OTHERS)),
    ("odd", 5000, BF16, True, OWN),
    ("qwen", 1, BF16, True, OWN),
    ("qwen", 300, BF16, False, OWN),
    ("few", 300, FP32, True, OWN),
    ("odd", 1, FP32, True, OWN),
    ("odd", 300, FP32, False, OWN),
]
"""Every width, dtype, matrix layout, and small and large row counts, but not all combinations: compilation is slow."""


def random_ids(rows, n, k, *, skew=False, absent=0.1, dtype=torch.int64):
    """Return ids [rows, k] in random order, some of them -1; some experts have no rows, and `skew` favors a few."""
    z = torch.rand(rows, n)
    if skew:
        z[:, : 2 * k] += 0.6
    if n > k + 1:
        z[:, -1] = -1.0
    ids = z.topk(k).indices
    ids[torch.rand(rows, k) < absent] = -1
    return ids.to(dtype)


def matrices(n, out, k, dtype, listed, by_k=True):
    w = randn(n, out, k, dtype=dtype, scale=k**-0.5) if by_k else randn(n, k, out, dtype=dtype, scale=k**-0.5).mT
    return Matrices([t.clone(memory_format=torch.preserve_format) for t in w] if listed else w)


@pytest.mark.parametrize("rows", [0, 1, 3, 64, 1000, 3000, 200_000])
@pytest.mark.parametrize("n,k,first,own", [(4, 2, 0, 4), (128, 8, 0, 128), (60, 4, 15, 15), (1, 1, 0, 1)])
@pytest.mark.parametrize("dtype", [torch.int64, torch.int32])
def test_all_implementations_of_pairs_agree(rows, n, k, first, own, dtype):
    """Compare the single launch, torch and the CUDA kernel, and check the pairs."""
    ids = random_ids(rows, n, k, dtype=dtype)
    got = (ranked if ids.numel() <= ranked.MAX_IDS else pairs).pairs(ids, first, own)
    others = [pairs.pairs(ids, first, own), *([cuda_backend.pairs(ids, first, own)] if rows else [])]
    for other in others:
        for a, b in zip(got, other, strict=True):
            assert torch.equal(a, b)
    count = int(got.offsets[-1])
    here = (ids >= first) & (ids < first + own)
    assert count == int(here.sum()) and torch.equal(got.place >= 0, here)
    expert = ids.view(-1)[got.choice[:count]].long() - first
    order = expert * (ids.numel() + 1) + got.choice[:count]
    assert bool((order.diff() > 0).all())
    assert torch.equal(torch.bincount(expert, minlength=own).cumsum(0), got.offsets[1:])
    assert torch.equal(got.place.view(-1)[got.choice[:count]], torch.arange(count))


@pytest.mark.parametrize("width,rows,dtype,listed,schedules", PRODUCTS)
def test_grouped_products_equal_products_per_expert(width, rows, dtype, listed, schedules):
    """All schedules give the same bits; rows behind the last pair are not written."""
    n, k, h, f = WIDTHS[width]
    ids = random_ids(rows, n, k, skew=True)
    p = pairs.pairs(ids, 0, n)
    count, rows_of_pairs = int(p.offsets[-1]), ids.numel()
    x, a = randn(rows, h, dtype=dtype), randn(rows_of_pairs, f, dtype=dtype)
    a[count:] = float("nan")
    gate_up, down = matrices(n, 2 * f, h, dtype, listed), matrices(n, h, f, dtype, listed, by_k=False)
    cases = [(x, p.row, gate_up, 1, dtype), (a, None, down, k_leaves(f), dtype), (x, p.row, down.t(), 1, FP32)]
    for i, (left, row, right, leaves, out_dtype) in enumerate(cases):
        got, want = (torch.full((rows_of_pairs, right.shape[0]), float("nan"), dtype=out_dtype) for _ in range(2))
        each.products(left, row, right, p.offsets, leaves, want)
        for schedule in schedules:
            got.fill_(float("nan"))
            grouped.products(left, row, right, p.offsets, leaves, got, **schedule)
            assert_bitwise_equal(got[:count], want[:count], f"product {i}, {schedule}")
            assert bool(got[count:].isnan().all())
    h_got, h_want = (torch.empty(rows_of_pairs, 2 * f, dtype=dtype) for _ in range(2))
    want = each.gated(x, p.row, gate_up, p.offsets, h_want)
    for schedule in schedules:
        got = grouped.gated(x, p.row, gate_up, p.offsets, h_got.fill_(float("nan")), **schedule)
        assert_bitwise_equal(h_got[:count], h_want[:count], f"gate and up, {schedule}")
        assert_bitwise_equal(got[:count], want[:count], f"activation, {schedule}")
        got = grouped.gated(x, p.row, gate_up, p.offsets, None, **schedule)
        assert_bitwise_equal(got[:count], want[:count], f"activation alone, {schedule}")
    for left, left_row, right, right_row in ((a, None, x, p.row), (x, p.row, a, None)):
        got, want = (torch.full((n, left.shape[1], right.shape[1]), float("nan"), dtype=dtype) for _ in range(2))
        each.gradients(left, left_row, right, right_row, p.offsets, want)
        for schedule in schedules:
            grouped.gradients(left, left_row, right, right_row, p.offsets, got.fill_(float("nan")), **schedule)
            assert_bitwise_equal(got, want, f"gradients, {schedule}")


RANKS = [(1, 1, 0, 1), (4, 2, 0, 4), (60, 4, 15, 15), (128, 8, 0, 128), (512, 10, 0, 512)]
"""Experts, top k, a rank's first expert, and its number of experts."""
TYPES = [(BF16, FP32), (FP32, FP32)]


@pytest.mark.parametrize(
    "ranks,types,weighted",
    [(r, (BF16, BF16), True) for r in RANKS] + [(r, t, w) for r in RANKS[2:4] for t in TYPES for w in (True, False)],
)
def test_combine_has_the_bits_of_the_reference(ranks, types, weighted):
    (n, k, first, own), (dtype, out_dtype) = ranks, types
    ids = random_ids(50, n, k)
    p = pairs.pairs(ids, first, own)
    y = randn(ids.numel(), 1032, dtype=dtype)
    y[torch.rand(y.shape) < 0.1] = -0.0
    y[int(p.offsets[-1]) :] = float("nan")
    weights = randn(50, k) if weighted else None
    got, want = (torch.full((50, 1032), float("nan"), dtype=out_dtype) for _ in range(2))
    rows_of.combine(y, p.place, ids, weights, n, got)
    reference.combined(y, p.place, ids, weights, n, want)
    assert_bitwise_equal(got, want)


@pytest.mark.parametrize("f", [1, 40, 768, 14336])
@pytest.mark.parametrize("dtype", [BF16, FP32])
def test_weigh_has_the_bits_of_the_reference(f, dtype):
    g, h, w = randn(33, f), randn(33, 2 * f, dtype=dtype), randn(33)
    expected = reference.weighed_back(g, h, w, sum_of_products, silu_mul)
    for got, want in zip(rows_of.weigh(g, h, w), expected, strict=True):
        assert_bitwise_equal(got, want)


@pytest.mark.parametrize(
    "n,k,groups,top", [(1, 1, 1, 1), (60, 4, 1, 1), (128, 8, 1, 1), (256, 8, 8, 4), (12, 2, 12, 3)]
)
@pytest.mark.parametrize("score", ["softmax", "sigmoid"])
@pytest.mark.parametrize("normalize,scale", [(True, 1.0), (False, 2.5)])
def test_router_has_the_bits_of_the_reference(n, k, groups, top, score, normalize, scale):
    sigmoid = score == "sigmoid"
    routing = Routing(k, sigmoid, normalize, groups if sigmoid else 1, top if sigmoid else 1, scale)
    z = randn(500, n, scale=3)
    z[:100] = z[:100].round()  # some are equal
    z[100], z[101, 0], z[102, -1], z[103], z[104] = 0.0, float("nan"), float("inf"), float("-inf"), float("nan")
    z[105, : n // 2], z[105, n // 2 :] = -0.0, 0.0
    for bias in (None, randn(n)) if sigmoid else (None,):
        weights, ids = router.forward(z, bias, routing)
        want_weights, want_ids = routed.route(z, bias, routing, exp_of)
        assert torch.equal(ids, want_ids)
        assert_bitwise_equal(weights, want_weights)
        grad = randn(500, k)
        assert_bitwise_equal(router.backward(z, ids, grad, routing), routed.route_back(z, ids, grad, routing, exp_of))


@pytest.mark.parametrize(
    "width,dtype,listed",
    [(width, BF16, listed) for width in WIDTHS for listed in (False, True)]
    + [("few", FP32, False), ("odd", FP32, True)],
)
def test_grouped_kernels_equal_products_per_expert(width, dtype, listed):
    n, k, h, f = WIDTHS[width]
    ids_dtype = torch.int32 if listed else torch.int64
    x, ids, weights = randn(200, h, dtype=dtype), random_ids(200, n, k, skew=True, dtype=ids_dtype), torch.rand(200, k)
    gate_up, down = matrices(n, 2 * f, h, dtype, listed).given, matrices(n, h, f, dtype, listed).given
    dout = randn(200, h, dtype=dtype)

    def run():
        leaves = [x, weights, *(gate_up if listed else [gate_up]), *(down if listed else [down])]
        leaves = [t.detach().requires_grad_() for t in leaves]
        first, second = (leaves[2 : 2 + n], leaves[2 + n :]) if listed else leaves[2:]
        out = ops.moe_experts(leaves[0], ids, leaves[1], first, second)
        return [out.detach(), *torch.autograd.grad(out, leaves, dout)]

    with without(*BY_CUDA):
        found = run()
        with torch.no_grad():
            alone = ops.moe_experts(x, ids, weights, gate_up, down)
    with without(*BY_CUDA, (grouped, "rejects")):
        expected = run()
    for i, (got, want) in enumerate(zip(found, expected, strict=True)):
        assert_bitwise_equal(got, want, f"result {i}")
    assert_bitwise_equal(alone, found[0], "without a backward pass")
    with torch.no_grad():
        assert_bitwise_equal(ops.moe_experts(x, ids, weights, gate_up, down), alone, "by the default kernels")


@pytest.mark.parametrize(
    "rows,f,listed",
    [
        (1, 128, (False, False)),
        (16, 128, (True, True)),
        (256, 128, (False, False)),
        (3000, 128, (True, True)),
        (4000, 192, (True, False)),
    ],
)
def test_graph_replays_with_other_routing(rows, f, listed):
    n, k, h = 32, 4, 256
    gate_up, down = (
        matrices(n, *shape, BF16, each).given for shape, each in zip(((2 * f, h), (h, f)), listed, strict=True)
    )
    gate, x = randn(n, h, dtype=BF16), randn(rows, h, dtype=BF16)

    def run():
        weights, ids = ops.moe_router(ops.linear(x, gate, out_dtype=FP32), k)
        return ops.moe_experts(x, ids, weights, gate_up, down)

    with torch.no_grad():
        run()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = run()
        for i in range(4):
            x.copy_(
                randn(rows, h, dtype=BF16) if i else randn(1, h, dtype=BF16).expand(rows, h)
            )  # at first, all rows are equal
            graph.replay()
            assert_bitwise_equal(out, run(), f"replay {i}")


def test_new_matrices_during_graph_capture_are_rejected():
    gate_up, down = matrices(4, 64, 32, BF16, True).given, matrices(4, 32, 32, BF16, True).given
    x, ids, weights = randn(8, 32, dtype=BF16), random_ids(8, 4, 2), torch.rand(8, 2)
    with torch.no_grad():
        ops.moe_experts(x, ids, weights, torch.stack([*gate_up]), torch.stack([*down]))
        with (
            pytest.raises(UnsupportedError, match="must be used once before a CUDA graph capture"),
            torch.cuda.graph(torch.cuda.CUDAGraph()),
        ):
            ops.moe_experts(x, ids, weights, gate_up, down)


@pytest.mark.parametrize("rows", [100_000, 1_000_000])
def test_many_rows_equal_small_batches(rows):
    n, k, h, f = 64, 4, 128, 64
    gate_up, down = matrices(n, 2 * f, h, BF16, False).given, matrices(n, h, f, BF16, False).given
    x, ids, weights = randn(rows, h, dtype=BF16), random_ids(rows, n, k, skew=True), torch.rand(rows, k)
    with torch.no_grad():
        out = ops.moe_experts(x, ids, weights, gate_up, down)
        for start in (0, rows // 2, rows - 77):
            some = slice(start, start + 77)
            assert_bitwise_equal(out[some], ops.moe_experts(x[some], ids[some], weights[some], gate_up, down))
