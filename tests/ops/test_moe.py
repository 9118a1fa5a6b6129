"""Mixture of experts: values and gradients against float64 within bounds that follow from the type; which experts are
chosen; what a row's bytes do not depend on; what is refused."""

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
    """x, ids, weights, gate_up and down."""
    x, weights = randn(rows, h, dtype=dtype, seed=seed), torch.rand(rows, k)
    ids = torch.rand(rows, n).argsort(1)[:, :k]
    gate_up, down = randn(n, 2 * f, h, dtype=dtype, scale=h**-0.5), randn(n, h, f, dtype=dtype, scale=f**-0.5)
    return x, ids, weights, gate_up, down


def silu(gate, up):
    return torch.nn.functional.silu(gate) * up


def dense(x, ids, weights, gate_up, down):
    """In float64: all experts for all rows; weights of those that were not chosen are 0."""
    w = torch.zeros(len(x), len(down), dtype=torch.float64).scatter(1, ids, weights)
    y = torch.einsum("rnf,nhf->rnh", silu(*torch.einsum("rh,nfh->rnf", x, gate_up).chunk(2, -1)), down)
    return torch.einsum("rn,rnh->rh", w, y)


def bounds(x, ids, weights, gate_up, down, g, u):
    """Of the output and the gradients, each rounding followed through what is computed from it, to first order; the half
    more is for the rest."""
    rows, h, f = len(x), x.shape[1], down.shape[2]
    chosen = torch.zeros(rows, len(down), dtype=torch.float64).scatter(1, ids, 1.0)
    w = torch.zeros(rows, len(down), dtype=torch.float64).scatter(1, ids, weights)[..., None]
    z = torch.einsum("rh,nfh->rnf", x, gate_up)
    of_z = gamma(h) * torch.einsum("rh,nfh->rnf", x.abs(), gate_up.abs()) + u * z.abs()
    (gate, up), (of_gate, of_up) = z.chunk(2, -1), of_z.chunk(2, -1)
    s = gate.sigmoid()
    slope, elementwise = s * (1 + gate * (1 - s)), (2 * EXP + 8 * U32) * (1 + gate.abs())
    a = gate * s * up
    of_a = 1.1 * of_gate * up.abs() + (gate * s).abs() * of_up + (elementwise + u) * a.abs()
    y = torch.einsum("rnf,nhf->rnh", a, down)
    of_y = torch.einsum("rnf,nhf->rnh", of_a + gamma(f + 8) * a.abs(), down.abs()) + u * y.abs()
    out = (w * (of_y + gamma(8) * y.abs())).sum(1) + u * (w * y).sum(1).abs()
    big_g = torch.einsum("rh,nhf->rnf", g, down)
    of_g = gamma(h) * torch.einsum("rh,nhf->rnf", g.abs(), down.abs())
    dw = (of_g * a.abs() + big_g.abs() * of_a + gamma(f + 8) * (big_g * a).abs()).sum(-1).gather(1, ids)
    da, of_da = w * big_g, w * (of_g + u * big_g.abs())
    dgate, dup = da * up * slope, da * gate * s
    of_dgate = of_da * (up * slope).abs() + da.abs() * (of_up * 1.1 + up.abs() * 0.5 * of_gate)
    of_dgate += elementwise * (da * up).abs() + u * dgate.abs()
    of_dup = of_da * (gate * s).abs() + da.abs() * 1.1 * of_gate + (elementwise + u) * dup.abs()
    d, of_d = torch.cat([dgate, dup], -1), torch.cat([of_dgate, of_dup], -1) * chosen[..., None]
    dx_e = torch.einsum("rnf,nfh->rnh", d, gate_up)
    dx = torch.einsum("rnf,nfh->rnh", of_d + gamma(2 * f) * d.abs(), gate_up.abs()) + (u + gamma(8)) * dx_e.abs()
    d_gate_up = torch.einsum("rnf,rh->nfh", of_d + gamma(rows) * d.abs(), x.abs())
    of_wa = w * (of_a + (u + gamma(rows)) * a.abs())
    d_down = torch.einsum("rh,rnf->nhf", g.abs(), of_wa)
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
def test_experts_against_float64(n, rows, k, h, f, dtype, seed):
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
    seen, want = graded(ops.moe_experts, None), graded(dense, torch.float64)
    limits = bounds(*exact, g.double(), UNIT[dtype])
    names = ("out", "dx", "dweights", "dgate_up", "ddown")
    for name, a, e, limit in zip(names, seen, want, limits, strict=True):
        rounding = (UNIT[dtype] if name != "dweights" else U32) * e.abs() + SMALLEST[dtype] / 2
        assert_within(a, e, 1.5 * limit + 1.001 * rounding + 1e-36, name)


@given(
    n=st.sampled_from([2, 7, 60]),
    k=st.integers(1, 6),
    score=st.sampled_from(["softmax", "sigmoid"]),
    normalize=st.booleans(),
    seed=seeds,
)
def test_router_against_float64(n, k, score, normalize, seed):
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
    # The argument of exp is rounded once; exp, sums of positive terms and a quotient follow.
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


@given(rows=st.integers(1, 30), h=st.integers(1, 70), dtype=dtypes, seed=seeds)
def test_gate_against_float64(rows, h, dtype, seed):
    gate, x, g = (
        randn(rows, 1, scale=5, seed=seed).requires_grad_(),
        randn(rows, h, dtype=dtype).requires_grad_(),
        randn(rows, h, dtype=dtype),
    )
    out = ops.sigmoid_mul(gate, x)
    out.backward(g)
    s, xd, gd = gate.detach().double().sigmoid(), x.detach().double(), g.double()
    u = UNIT[dtype] * 1.001
    assert_within(out.detach(), s * xd, (EXP + 4 * U32 + u) * (s * xd).abs() + 1e-36)
    assert_within(x.grad, s * gd, (EXP + 4 * U32 + u) * (s * gd).abs() + 1e-36, "dx")
    # 1 - s loses what s is off by.
    terms = (gd * xd).abs().sum(1, keepdim=True) * s
    limit = (gamma(h) + EXP + 8 * U32) * terms * (1 - s) + (EXP + 4 * U32) * terms
    assert_within(gate.grad, (gd * xd).sum(1, keepdim=True) * s * (1 - s), limit + 1e-36, "dgate")


def test_of_equal_logits_the_lower_ids():
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


def test_groups():
    """The best two of a group decide; the bias for the choice alone; of equal groups the first."""
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
    "how", [{}, {"normalize": False}, {"score": "sigmoid"}, {"score": "sigmoid", "normalize": False}]
)
@pytest.mark.parametrize("value", [NAN, INF, -INF])
def test_odd_logits(how, value):
    """A NaN is above all and makes its row's weights NaN; an expert of -inf has weight 0."""
    z = randn(4, 12, seed=3)
    want = ops.moe_router(z, 3, **how)
    z[1, 5] = value
    weights, ids = ops.moe_router(z, 3, **how)
    for a, b in zip((weights, ids), want, strict=True):
        assert_bitwise_equal(a[[0, 2, 3]], b[[0, 2, 3]])
    assert (5 in ids[1].tolist()) == (value != -INF)
    assert bool(weights[1].isnan().any()) == (value != value or (value > 0 and "score" not in how))
    assert ids[1].min() >= 0 and ids[1].max() < 12 and len(ids[1].unique()) == 3


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("value", [NAN, INF])
def test_odd_values_stay_in_their_row(value, dtype):
    x, ids, weights, gate_up, down = model(12, 9, 3, 32, 48, dtype, 5)
    want = ops.moe_experts(x, ids, weights, gate_up, down)
    x[4, 7] = value
    got = ops.moe_experts(x, ids, weights, gate_up, down)
    others = torch.arange(9) != 4
    assert_bitwise_equal(got[others], want[others])
    assert bool(got[4].isnan().all())


@given(n=st.sampled_from([1, 5, 12, 60]), rows=st.integers(1, 40), k=st.integers(1, 5), dtype=dtypes, seed=seeds)
def test_rows_do_not_know_of_each_other(n, rows, k, dtype, seed):
    """Nor of their place, of padding among them, or of the order of their ids. dx and dweights neither."""
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
    turned = run(x, ids.gather(1, mixed), weights.gather(1, mixed), g)
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
        assert_bitwise_equal(turned[i], a.gather(1, mixed) if i == 2 else a, f"{name}, another order of ids")
        assert_bitwise_equal(padded[i][where], a, f"{name}, padded")
        assert_bitwise_equal(padded[i][pads], torch.zeros_like(padded[i][pads]), f"{name} of padding")
        assert_bitwise_equal(wider[i][:, : a.shape[1]], a, f"{name}, ids of -1")


@given(rows=st.integers(1, 40), dtype=dtypes, seed=seeds)
def test_gradients_of_experts_are_of_their_rows_in_order(rows, dtype, seed):
    """Each expert's is that of its MLP alone, of a batch of its rows; 0 without rows."""
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
def test_autocast_changes_nothing(dtype, cast):
    """Of the other half type too, of which torch's own joins of tensors refuse one under autocast."""
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
def test_one_expert_is_a_dense_mlp(rows, dtype):
    """All rows to one of many, weight 1: the bits of the layers."""
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
def test_library(n, k, rows, dtype, seed):
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


def of_two(value):
    return torch.tensor([[0, value]] * 4)


BAD = [
    ("logits: dtype", lambda: ops.moe_router(X.bfloat16(), 2)),
    ("logits: expected a tensor", lambda: ops.moe_router([1.0], 1)),
    ("top_k: 17 of 16 experts", lambda: ops.moe_router(X, 17)),
    ("top_k: 0 is not positive", lambda: ops.moe_router(X, 0)),
    ("top_k: expected an integer", lambda: ops.moe_router(X, 2.0)),
    ("score: 'relu' is none of", lambda: ops.moe_router(X, 2, score="relu")),
    ("normalize: expected True or False", lambda: ops.moe_router(X, 2, normalize=1)),
    ("scale: 0 is not positive", lambda: ops.moe_router(X, 2, scale=0)),
    ("bias: is for sigmoid", lambda: ops.moe_router(X, 2, bias=torch.zeros(16))),
    ("bias: expected shape (16,)", lambda: ops.moe_router(X, 2, score="sigmoid", bias=torch.zeros(4))),
    ("bias: dtype", lambda: ops.moe_router(X, 2, score="sigmoid", bias=torch.zeros(16).bfloat16())),
    ("bias: has NaN", lambda: ops.moe_router(X, 2, score="sigmoid", bias=torch.full((16,), NAN))),
    ("groups: are for sigmoid", lambda: ops.moe_router(X, 2, groups=4)),
    ("groups: 3 do not divide 16", lambda: ops.moe_router(X, 2, score="sigmoid", groups=3)),
    ("top_groups: 5 of 4", lambda: ops.moe_router(X, 2, score="sigmoid", groups=4, top_groups=5)),
    ("top_k: 6 of 4 experts in the best", lambda: ops.moe_router(X, 6, score="sigmoid", groups=4)),
    ("x: dtype", lambda: experts(x=X.half())),
    ("ids: dtype", lambda: experts(ids=IDS.float())),
    ("ids: shape", lambda: experts(ids=IDS[:2])),
    ("ids: shape", lambda: experts(ids=IDS[:, :0])),
    ("ids: 0 to 6", lambda: experts(ids=of_two(6))),
    ("ids: -2 to", lambda: experts(ids=of_two(-2))),
    ("ids: a row names", lambda: experts(ids=of_two(0))),
    ("weights: dtype", lambda: experts(weights=WEIGHTS.bfloat16())),
    ("weights: shape", lambda: experts(weights=WEIGHTS[:, :1])),
    ("gate_up: dtype", lambda: experts(gate_up=GATE_UP.bfloat16())),
    ("gate_up: expected 3 dimensions", lambda: experts(gate_up=GATE_UP[0])),
    ("gate_up: 15 columns", lambda: experts(gate_up=GATE_UP[..., :15])),
    ("gate_up: 15 rows", lambda: experts(gate_up=GATE_UP[:, :15])),
    ("gate_up[3]: shape", lambda: experts(gate_up=[w[: 15 if e == 3 else 16] for e, w in enumerate(GATE_UP)])),
    ("gate_up: no experts", lambda: experts(gate_up=[])),
    ("gate_up: expected a tensor or a sequence", lambda: experts(gate_up="w")),
    ("down: (6, 16, 7) does not fit", lambda: experts(down=DOWN[..., :7])),
    ("down: (5, 16, 8) does not fit", lambda: experts(down=list(DOWN[:5]))),
    ("num_experts: 7 is not 6", lambda: experts(num_experts=7)),
    ("first_expert: 1 is not 0", lambda: experts(first_expert=1)),
    ("tp: expected", lambda: experts(tp=2)),
    ("ep: expected", lambda: experts(ep=2)),
    ("gather: expected", lambda: experts(gather=None)),
    ("gate: shape", lambda: ops.sigmoid_mul(X[:, :2], X)),
    ("gate: dtype", lambda: ops.sigmoid_mul(X[:, :1].bfloat16(), X)),
]


OF_VALUES = ("ids: 0 to 6", "ids: -2 to", "ids: a row names", "bias: has NaN")
"""Refused where values are looked at."""


@pytest.mark.parametrize("message,call", BAD, ids=[f"{i}-{m.split(':')[0]}" for i, (m, _) in enumerate(BAD)])
def test_refused(message, call):
    if not CPU and message in OF_VALUES:
        pytest.skip("values on a GPU are not looked at")
    with pytest.raises(InputError) as e:
        call()
    assert str(e.value).startswith(message), str(e.value)


def test_not_while_a_graph_is_captured(monkeypatch):
    """Where the host would have to wait."""
    monkeypatch.setattr(families, "on_host", lambda device: False)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    with pytest.raises(UnsupportedError, match="^moe_experts: not while a CUDA graph"):
        each.gradients(IDS, None, IDS, None, pairs(IDS, 0, 6).offsets, IDS)


def test_an_id_that_nobody_looked_at_is_none():
    """As on a GPU: whatever it is, no row of it is computed."""
    found = pairs(torch.tensor([[9, 4], [-7, 3], [2, 2**40]]), 2, 3)
    assert found.offsets.tolist() == [0, 1, 2, 3] and found.row[:3].tolist() == [2, 1, 0]
    assert found.place.tolist() == [[-1, 2], [-1, 1], [0, -1]] and found.choice[:3].tolist() == [4, 3, 1]
