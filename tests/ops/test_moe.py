"""MoE ops: values and gradients against float64, expert choice, row independence and rejected input.

Error bounds follow from the dtype. Runs on a CPU and on a GPU; test_moe_cuda.py and test_moe_sm90.py compare kernels.
"""

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given

from alignkit import ops
from alignkit.errors import InputError, UnsupportedError
from alignkit.ops import library
from alignkit.ops.moe_experts import each
from alignkit.ops.moe_experts.pairs import pairs
from alignkit.runtime import families
from alignkit.testing import assert_bitwise_equal

from .helpers import CPU, EXP, SMALLEST, U32, UNIT, assert_within, dtypes, gamma, randn, seeds

NAN, INF = float("nan"), float("inf")


def model(n, rows, k, h, f, dtype, seed):
    """Return x, ids, weights, gate_up and down."""
    x, weights = randn(rows, h, dtype=dtype, seed=seed), torch.rand(rows, k)
    ids = torch.rand(rows, n).argsort(1)[:, :k]
    gate_up, down = randn(n, 2 * f, h, dtype=dtype, scale=h**-0.5), randn(n, h, f, dtype=dtype, scale=f**-0.5)
    return x, ids, weights, gate_up, down


def silu(gate, up):
    return torch.nn.functional.silu(gate) * up


def dense(x, ids, weights, gate_up, down):
    """Compute all experts for all rows in float64, with weight 0 for experts that are not chosen."""
    w = torch.zeros(len(x), len(down), dtype=torch.float64).scatter(1, ids, weights)
    y = torch.einsum("rnf,nhf->rnh", silu(*torch.einsum("rh,nfh->rnf", x, gate_up).chunk(2, -1)), down)
    return torch.einsum("rn,rnh->rh", w, y)


def bounds(x, ids, weights, gate_up, down, g, u):
    """Return first-order error bounds of the output and the gradients; callers add a factor for higher orders."""
    rows, h, f = len(x), x.shape[1], down.shape[2]
    chosen = torch.zeros(rows, len(down), dtype=torch.float64).scatter(1, ids, 1.0)
    w = torch.zeros(rows, len(down), dtype=torch.float64).scatter(1, ids, weights)[..., None]
    z = torch.einsum("rh,nfh->rnf", x, gate_up)
    z_error = gamma(h) * torch.einsum("rh,nfh->rnf", x.abs(), gate_up.abs()) + u * z.abs()
    (gate, up), (gate_error, up_error) = z.chunk(2, -1), z_error.chunk(2, -1)
    s = gate.sigmoid()
    slope, elementwise = s * (1 + gate * (1 - s)), (2 * EXP + 8 * U32) * (1 + gate.abs())
    a = gate * s * up
    a_error = 1.1 * gate_error * up.abs() + (gate * s).abs() * up_error + (elementwise + u) * a.abs()
    y = torch.einsum("rnf,nhf->rnh", a, down)
    y_error = torch.einsum("rnf,nhf->rnh", a_error + gamma(f + 8) * a.abs(), down.abs()) + u * y.abs()
    out = (w * (y_error + gamma(8) * y.abs())).sum(1) + u * (w * y).sum(1).abs()
    big_g = torch.einsum("rh,nhf->rnf", g, down)
    g_error = gamma(h) * torch.einsum("rh,nhf->rnf", g.abs(), down.abs())
    dw = (g_error * a.abs() + big_g.abs() * a_error + gamma(f + 8) * (big_g * a).abs()).sum(-1).gather(1, ids)
    da, da_error = w * big_g, w * (g_error + u * big_g.abs())
    dgate, dup = da * up * slope, da * gate * s
    dgate_error = da_error * (up * slope).abs() + da.abs() * (up_error * 1.1 + up.abs() * 0.5 * gate_error)
    dgate_error += elementwise * (da * up).abs() + u * dgate.abs()
    dup_error = da_error * (gate * s).abs() + da.abs() * 1.1 * gate_error + (elementwise + u) * dup.abs()
    d, d_error = torch.cat([dgate, dup], -1), torch.cat([dgate_error, dup_error], -1) * chosen[..., None]
    dx_e = torch.einsum("rnf,nfh->rnh", d, gate_up)
    dx = torch.einsum("rnf,nfh->rnh", d_error + gamma(2 * f) * d.abs(), gate_up.abs()) + (u + gamma(8)) * dx_e.abs()
    d_gate_up = torch.einsum("rnf,rh->nfh", d_error + gamma(rows) * d.abs(), x.abs())
    wa_error = w * (a_error + (u + gamma(rows)) * a.abs())
    d_down = torch.einsum("rh,rnf->nhf", g.abs(), wa_error)
    return out, dx.sum(1) + u * dx_e.sum(1).abs(), dw, d_gate_up, d_down


@given(
    n=st.sampled_from([2, 6, 16]),
    rows=st.integers(1, 20),
    k=st.integers(1, 4),
    h=st.integers(1, 80),
    f=st.integers(1, 80),
    dtype=dtypes,
    seed=seeds,
)
def test_experts_error_is_within_bounds(n, rows, k, h, f, dtype, seed):
    given = model(n, rows, min(n, k), h, f, dtype, seed)
    g = randn(rows, h, dtype=dtype)
    ids = given[1]

    def graded(function, kind):
        x, weights, gate_up, down = leaves = [
            t.detach().clone().to(kind or t.dtype).requires_grad_() for t in (given[0], *given[2:])
        ]
        out = function(x, ids, weights, gate_up, down)
        out.backward(g.to(out.dtype))
        return out.detach(), *(t.grad for t in leaves)

    exact = [t if t is ids else t.double() for t in given]
    got, want = graded(ops.moe_experts, None), graded(dense, torch.float64)
    limits = bounds(*exact, g.double(), UNIT[dtype])
    names = ("out", "dx", "dweights", "dgate_up", "ddown")
    for name, a, e, limit in zip(names, got, want, limits, strict=True):
        rounding = (UNIT[dtype] if name != "dweights" else U32) * e.abs() + SMALLEST[dtype] / 2
        assert_within(a, e, 1.5 * limit + 1.001 * rounding + 1e-36, name)


@given(
    n=st.sampled_from([2, 7, 60]),
    k=st.integers(1, 6),
    score=st.sampled_from(["softmax", "sigmoid"]),
    normalize=st.booleans(),
    seed=seeds,
)
def test_router_error_is_within_bounds(n, k, score, normalize, seed):
    k = min(k, n)
    z = randn(20, n, scale=3, seed=seed).requires_grad_()
    weights, ids = ops.moe_router(z, k, score=score, normalize=normalize, scale=1.5)
    exact = z.detach().double().requires_grad_()
    scores = exact.softmax(1) if score == "softmax" else exact.sigmoid()
    want = scores.gather(1, ids)
    want = (want / (want.sum(1, keepdim=True) + (1e-20 if score == "sigmoid" else 0)) if normalize else want) * 1.5
    assert_bitwise_equal(ids, z.detach().topk(k).indices.sort().values)
    g = randn(20, k)
    weights.backward(g)
    want.backward(g.double())
    # Rounding the argument of exp once, exp, sums of positive terms, and a quotient contribute.
    rel = 2 * EXP + gamma(n + 8) + 4 * U32 * (z.detach().max() - z.detach().min()).item()
    assert_within(weights.detach(), want.detach(), 2 * rel * want.detach(), "weights")
    w = (
        scores.detach()
        if score == "softmax" or not normalize
        else scores.detach() / scores.detach().gather(1, ids).sum(1, keepdim=True)
    )
    if score == "softmax" and normalize:
        w = w / w.gather(1, ids).sum(1, keepdim=True)
    all_g = torch.zeros(20, n, dtype=torch.float64).scatter(1, ids, 1.5 * g.double().abs())
    terms = w * (all_g + (w * all_g).sum(1, keepdim=True))
    assert_within(z.grad, exact.grad, 4 * rel * terms + 1e-36, "dlogits")


def test_equal_logits_choose_the_lower_ids():
    z = torch.tensor([[1.0, 3.0, 3.0, 1.0, 3.0, -0.0, 0.0, -5.0], [0.0] * 8, [-0.0, 0.0] * 4])
    for k, want in (
        (1, ([1], [0], [0])),
        (2, ([1, 2], [0, 1], [0, 1])),
        (4, ([0, 1, 2, 4], [0, 1, 2, 3], [0, 1, 2, 3])),
    ):
        for score in ("softmax", "sigmoid"):
            weights, ids = ops.moe_router(z, k, score=score)
            assert ids.tolist() == list(want)
            assert_bitwise_equal(weights[1], torch.full((k,), 1 / k))
    assert ops.moe_router(z[:1], 6)[1].tolist() == [[0, 1, 2, 3, 4, 5]]


def test_group_choice():
    """The two best experts of a group rank it, the first of equal groups wins, and the bias affects only the choice."""
    z = torch.tensor([[4.0, -9.0, 3.0, 3.0, 2.0, 2.5, 3.0, 3.0]])
    s = z.sigmoid()
    choose = {"score": "sigmoid", "groups": 4, "normalize": False}
    assert ops.moe_router(z, 2, **choose, top_groups=1)[1].tolist() == [[2, 3]]
    assert ops.moe_router(z, 2, **choose, top_groups=2)[1].tolist() == [[2, 3]]
    assert ops.moe_router(z, 3, **choose, top_groups=2)[1].tolist() == [[2, 3, 6]]
    bias = torch.tensor([0.0, 5.0, 0, 0, 0, 0, 0, 0])
    weights, ids = ops.moe_router(z, 2, **choose, top_groups=1, bias=bias)
    assert ids.tolist() == [[0, 1]]
    assert_within(weights, s[:, :2].double(), 1e-6)
    single = ops.moe_router(z, 2, score="sigmoid", groups=8, top_groups=2, scale=2.0)
    assert single[1].tolist() == [[0, 2]]
    assert abs(float(single[0].sum()) - 2.0) < 1e-6


@pytest.mark.parametrize(
    "options", [{}, {"normalize": False}, {"score": "sigmoid"}, {"score": "sigmoid", "normalize": False}]
)
@pytest.mark.parametrize("value", [NAN, INF, -INF])
def test_non_finite_logits(options, value):
    """NaN ranks first and makes its row's weights NaN; an expert with -inf has weight 0."""
    z = randn(4, 12, seed=3)
    want = ops.moe_router(z, 3, **options)
    z[1, 5] = value
    weights, ids = ops.moe_router(z, 3, **options)
    for a, b in zip((weights, ids), want, strict=True):
        assert_bitwise_equal(a[[0, 2, 3]], b[[0, 2, 3]])
    assert (5 in ids[1].tolist()) == (value != -INF)
    assert bool(weights[1].isnan().any()) == (value != value or (value > 0 and "score" not in options))
    assert ids[1].min() >= 0 and ids[1].max() < 12 and len(ids[1].unique()) == 3


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("value", [NAN, INF])
def test_non_finite_values_stay_in_their_row(value, dtype):
    x, ids, weights, gate_up, down = model(12, 9, 3, 32, 48, dtype, 5)
    want = ops.moe_experts(x, ids, weights, gate_up, down)
    x[4, 7] = value
    got = ops.moe_experts(x, ids, weights, gate_up, down)
    others = torch.arange(9) != 4
    assert_bitwise_equal(got[others], want[others])
    assert bool(got[4].isnan().all())


@given(n=st.sampled_from([1, 5, 12, 60]), rows=st.integers(1, 40), k=st.integers(1, 5), dtype=dtypes, seed=seeds)
def test_rows_are_independent(n, rows, k, dtype, seed):
    """Position, padding and the order of ids do not matter either, also for dx and dweights."""
    x, ids, weights, gate_up, down = model(n, rows, min(n, k), 40, 32, dtype, seed)
    g = randn(rows, 40, dtype=dtype)

    def run(x, ids, weights, g):
        x, weights = x.clone().requires_grad_(), weights.clone().requires_grad_()
        out = ops.moe_experts(x, ids, weights, gate_up, down)
        out.backward(g)
        return out.detach(), x.grad, weights.grad

    whole = run(x, ids, weights, g)
    order, cut = torch.randperm(rows), int(torch.randint(0, rows + 1, ()))
    mixed = torch.rand(ids.shape).argsort(1)
    parts = zip(*(run(x[s], ids[s], weights[s], g[s]) for s in (slice(0, cut), slice(cut, None))), strict=True)
    shuffled = run(x[order], ids[order], weights[order], g[order])
    reordered = run(x, ids.gather(1, mixed), weights.gather(1, mixed), g)
    where = torch.arange(rows) + torch.randint(0, 2, (rows,)).cumsum(0)
    size = int(where[-1]) + 3
    padded = run(
        torch.full((size, 40), 3.0, dtype=dtype).index_copy(0, where, x),
        torch.full((size, ids.shape[1]), -1).index_copy(0, where, ids),
        torch.full((size, ids.shape[1]), 0.5).index_copy(0, where, weights),
        torch.full((size, 40), 7.0, dtype=dtype).index_copy(0, where, g),
    )
    pads = torch.ones(size, dtype=torch.bool).index_fill(0, where, False)
    wider = run(x, torch.cat([ids, torch.full((rows, 2), -1)], 1), torch.cat([weights, torch.ones(rows, 2)], 1), g)
    for i, (name, a, part) in enumerate(zip(("out", "dx", "dweights"), whole, parts, strict=True)):
        assert_bitwise_equal(torch.cat(part), a, f"{name}, cut at {cut}")
        assert_bitwise_equal(shuffled[i], a[order], f"{name}, another order")
        assert_bitwise_equal(reordered[i], a.gather(1, mixed) if i == 2 else a, f"{name}, another order of ids")
        assert_bitwise_equal(padded[i][where], a, f"{name}, padded")
        assert_bitwise_equal(padded[i][pads], torch.zeros_like(padded[i][pads]), f"{name} of padding")
        assert_bitwise_equal(wider[i][:, : a.shape[1]], a, f"{name}, ids of -1")


@given(rows=st.integers(1, 40), dtype=dtypes, seed=seeds)
def test_expert_gradients_equal_those_of_its_mlp(rows, dtype, seed):
    """The MLP's batch holds the expert's rows in order; without rows the gradients are 0."""
    n, h, f = 6, 24, 32
    x, ids, weights, gate_up, down = model(n, rows, 2, h, f, dtype, seed)
    ids[ids == 4] = -1
    g = randn(rows, h, dtype=dtype)
    leaves = [gate_up.clone().requires_grad_(), down.clone().requires_grad_()]
    ops.moe_experts(x, ids, weights, *leaves).backward(g)
    for e in range(n):
        row, nth = (ids == e).nonzero(as_tuple=True)
        alone = [t[e : e + 1].clone().requires_grad_() for t in (gate_up, down)]
        ops.moe_experts(x[row], torch.zeros(len(row), 1, dtype=torch.int64), weights[row, nth, None], *alone).backward(
            g[row]
        )
        for name, a, b in zip(("gate_up", "down"), alone, leaves, strict=True):
            assert_bitwise_equal(a.grad[0], b.grad[e], f"{name} of expert {e}")
    assert_bitwise_equal(leaves[0].grad[4], torch.zeros(2 * f, h, dtype=dtype))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("cast", [torch.float16, torch.bfloat16])
def test_autocast_changes_no_bit(dtype, cast):
    """The other half type is included, for which some torch concatenations raise under autocast."""
    x, ids, weights, *matrices = model(4, 5, 2, 16, 24, dtype, 3)

    def run():
        leaves = [t.clone().requires_grad_() for t in (x, weights, *matrices)]
        out = ops.moe_experts(leaves[0], ids, *leaves[1:])
        out.backward(torch.ones_like(out))
        return out.detach(), *(t.grad for t in leaves)

    plain = run()
    with torch.autocast(x.device.type, cast):
        for a, b in zip(run(), plain, strict=True):
            assert_bitwise_equal(a, b)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rows", [1, 40])
def test_single_expert_equals_a_dense_mlp(rows, dtype):
    """All rows go to one of several experts, with weight 1."""
    x, _, _, gate_up, down = model(8, rows, 1, 64, 96, dtype, 2)
    ids, one = torch.full((rows, 1), 5), torch.ones(rows, 1)
    g = randn(rows, 64, dtype=dtype)

    def run(function):
        leaves = [t.clone().requires_grad_() for t in (x, gate_up[5], down[5])]
        out = function(*leaves)
        out.backward(g)
        return out.detach(), *(t.grad for t in leaves)

    def mlp(x, w1, w2):
        return ops.row_parallel_linear(ops.silu_mul(*ops.linear(x, w1).chunk(2, 1)), w2)

    def experts(x, w1, w2):
        matrices = [[w if e == 5 else other for e, other in enumerate(t)] for w, t in ((w1, gate_up), (w2, down))]
        return ops.moe_experts(x, ids, one, *matrices)

    for name, a, b in zip(("out", "dx", "dgate_up", "ddown"), run(experts), run(mlp), strict=True):
        assert_bitwise_equal(a + 0.0, b + 0.0, name)


@given(n=st.sampled_from([1, 4, 12, 60]), k=st.integers(1, 4), rows=st.integers(0, 9), dtype=dtypes, seed=seeds)
def test_custom_ops_equal_the_ops(n, k, rows, dtype, seed):
    k = min(k, n)
    x, _, _, gate_up, down = model(n, rows, k, 24, 16, dtype, seed)
    gate = randn(n, 24, dtype=dtype)
    logits = ops.linear(x, gate, out_dtype=torch.float32)
    assert_bitwise_equal(library.linear_fp32(x, gate, None), logits)
    weights, ids = ops.moe_router(logits, k)
    for a, b in zip(library.moe_router(logits, k, "softmax", True, None, 1, 1, 1.0), (weights, ids), strict=True):
        assert_bitwise_equal(a, b)
    out = ops.moe_experts(x, ids, weights, gate_up, down)
    assert_bitwise_equal(library.moe_experts(x, ids, weights, gate_up, down, n, 0, "", "", ""), out)
    assert_bitwise_equal(ops.moe_experts(x, ids.int(), weights, list(gate_up), tuple(down)), out, "sequences")
    strided = gate_up.mT.contiguous().mT, down.mT.contiguous().mT
    assert_bitwise_equal(ops.moe_experts(x, ids, weights, *strided), out, "other strides")
    shaped = (t.unflatten(0, (1, rows, 1)) for t in (x, ids, weights))
    assert_bitwise_equal(ops.moe_experts(*shaped, gate_up, down)[0, :, 0], out, "more dimensions")
    assert_bitwise_equal(library.sigmoid_mul(logits[:, :1], x), ops.sigmoid_mul(logits[:, :1], x))


X, IDS, WEIGHTS, GATE_UP, DOWN = model(6, 4, 2, 16, 8, torch.float32, 0)


def experts(x=X, ids=IDS, weights=WEIGHTS, gate_up=GATE_UP, down=DOWN, **kw):
    return ops.moe_experts(x, ids, weights, gate_up, down, **kw)


def with_second_id(value):
    return torch.tensor([[0, value]] * 4)


BAD = [
    ("logits: dtype", lambda: ops.moe_router(X.bfloat16(), 2)),
    ("logits: expected a tensor", lambda: ops.moe_router([1.0], 1)),
    ("top_k: must be at most 16, the number of experts, got 17", lambda: ops.moe_router(X, 17)),
    ("top_k: must be at least 1, got 0", lambda: ops.moe_router(X, 0)),
    ("top_k: expected an integer", lambda: ops.moe_router(X, 2.0)),
    ("score: must be one of softmax, sigmoid, got 'relu'", lambda: ops.moe_router(X, 2, score="relu")),
    ("normalize: expected True or False", lambda: ops.moe_router(X, 2, normalize=1)),
    ("scale: must be positive, got 0", lambda: ops.moe_router(X, 2, scale=0)),
    ("bias: must be None unless score is 'sigmoid'", lambda: ops.moe_router(X, 2, bias=torch.zeros(16))),
    ("bias: expected shape (16,)", lambda: ops.moe_router(X, 2, score="sigmoid", bias=torch.zeros(4))),
    ("bias: dtype", lambda: ops.moe_router(X, 2, score="sigmoid", bias=torch.zeros(16).bfloat16())),
    ("bias: values must be finite", lambda: ops.moe_router(X, 2, score="sigmoid", bias=torch.full((16,), NAN))),
    ("groups: must be 1 unless score is 'sigmoid'", lambda: ops.moe_router(X, 2, groups=4)),
    ("groups: must divide the 16 experts, got 3", lambda: ops.moe_router(X, 2, score="sigmoid", groups=3)),
    (
        "top_groups: must be at most groups (4), got 5",
        lambda: ops.moe_router(X, 2, score="sigmoid", groups=4, top_groups=5),
    ),
    (
        "top_k: must be at most 4, the number of experts in top_groups = 1 groups, got 6",
        lambda: ops.moe_router(X, 6, score="sigmoid", groups=4),
    ),
    ("x: dtype", lambda: experts(x=X.half())),
    ("ids: dtype", lambda: experts(ids=IDS.float())),
    ("ids: shape", lambda: experts(ids=IDS[:2])),
    ("ids: shape", lambda: experts(ids=IDS[:, :0])),
    ("ids: must be expert ids in [0, 6), or -1 for no expert, got 6", lambda: experts(ids=with_second_id(6))),
    ("ids: must be expert ids in [0, 6), or -1 for no expert, got -2", lambda: experts(ids=with_second_id(-2))),
    ("ids: the expert ids of a token must be distinct", lambda: experts(ids=with_second_id(0))),
    ("weights: dtype", lambda: experts(weights=WEIGHTS.bfloat16())),
    ("weights: shape", lambda: experts(weights=WEIGHTS[:, :1])),
    ("gate_up: dtype", lambda: experts(gate_up=GATE_UP.bfloat16())),
    ("gate_up: expected 3 dimensions", lambda: experts(gate_up=GATE_UP[0])),
    ("gate_up: must have x's 16 columns, got 15", lambda: experts(gate_up=GATE_UP[..., :15])),
    ("gate_up: must have an even number of rows (gate, then up), got 15", lambda: experts(gate_up=GATE_UP[:, :15])),
    ("gate_up[3]: shape", lambda: experts(gate_up=[w[: 15 if e == 3 else 16] for e, w in enumerate(GATE_UP)])),
    ("gate_up: must hold at least one expert", lambda: experts(gate_up=[])),
    ("gate_up: expected a tensor, or a list or tuple of tensors, got str", lambda: experts(gate_up="w")),
    ("down: must have shape (6, 16, 8) to match gate_up, got (6, 16, 7)", lambda: experts(down=DOWN[..., :7])),
    ("down: must have shape (6, 16, 8) to match gate_up, got (5, 16, 8)", lambda: experts(down=list(DOWN[:5]))),
    ("num_experts: must be 6 (6 on each of the 1 ranks of ep), got 7", lambda: experts(num_experts=7)),
    ("first_expert: must be 0 (rank 0 of ep, 6 experts per rank), got 1", lambda: experts(first_expert=1)),
    ("tp: expected", lambda: experts(tp=2)),
    ("ep: expected", lambda: experts(ep=2)),
    ("gather: expected", lambda: experts(gather=None)),
    ("gate: shape", lambda: ops.sigmoid_mul(X[:, :2], X)),
    ("gate: dtype", lambda: ops.sigmoid_mul(X[:, :1].bfloat16(), X)),
]
"""Beginning of the error, and the call."""


VALUE_CHECKS = (
    "ids: must be expert ids in [0, 6), or -1 for no expert, got 6",
    "ids: must be expert ids in [0, 6), or -1 for no expert, got -2",
    "ids: the expert ids of a token must be distinct",
    "bias: values must be finite",
)
"""Messages of BAD about values, which a GPU does not validate by default."""


@pytest.mark.parametrize("message,call", BAD, ids=[f"{i}-{m.split(':')[0]}" for i, (m, _) in enumerate(BAD)])
def test_invalid_input_is_rejected_by_name(message, call):
    if not CPU and message in VALUE_CHECKS:
        pytest.skip("values on a GPU are not validated")
    with pytest.raises(InputError) as e:
        call()
    assert str(e.value).startswith(message), str(e.value)


def test_gradients_during_graph_capture_raise(monkeypatch):
    """The host would have to wait for the device."""
    monkeypatch.setattr(families, "on_host", lambda device: False)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    with pytest.raises(UnsupportedError, match="^moe_experts: unsupported during CUDA graph"):
        each.gradients(IDS, None, IDS, None, pairs(IDS, 0, 6).offsets, IDS)


def test_unvalidated_invalid_ids_are_ignored():
    """A GPU does not validate ids, so no row of an invalid id is computed."""
    found = pairs(torch.tensor([[9, 4], [-7, 3], [2, 2**40]]), 2, 3)
    assert found.offsets.tolist() == [0, 1, 2, 3] and found.row[:3].tolist() == [2, 1, 0]
    assert found.place.tolist() == [[-1, 2], [-1, 1], [0, -1]] and found.choice[:3].tolist() == [4, 3, 1]
