"""Values and gradients of the ops against float64, within error bounds that follow from the dtype.

The error of a chain of k fp32 operations is at most gamma(k) times the sum of absolute terms. Rounding to the model
dtype adds its unit roundoff. exp has a relative error of `EXP`. Fixed-point sums of a tile add 128 * 2^-24 relative to
its maximum. Equal bits are tested in test_contract_bits.py.
"""

import math

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given

from alignkit import ops
from alignkit.runtime import families
from tests.samples import GENERATORS, arguments, generate, leaves_of, random_gradient, results

from .helpers import CPU, EXP, SMALLEST, U32, UNIT, assert_within, dtypes, gamma, linear_dtypes, randn, seeds

TILE = 128 * 2.0**-24


def grads(function, *tensors):
    leaves = [t.detach().clone().requires_grad_() for t in tensors]
    out = function(*leaves)
    torch.manual_seed(11)
    g = torch.randn(out.shape).to(out.dtype)
    out.backward(g)
    return out.detach(), g, [t.grad for t in leaves]


def doubles(function, g, *tensors):
    leaves = [t.detach().double().requires_grad_() for t in tensors]
    out = function(*leaves)
    out.backward(g.double())
    return out.detach(), [t.grad for t in leaves]


@pytest.mark.parametrize("generator", [g for g in GENERATORS if generate(g, 0).exact], ids=lambda g: g.__name__)
@given(rows=st.integers(1, 4), seed=seeds)
def test_error_is_within_the_bound_of_the_condition_number(generator, rows, seed):
    """Compare ops whose samples have a formula, and their gradients, with float64.

    A backward stable computation in n roundings has an error of at most gamma(n) times |f| + sum |df/dx| |x|.
    """
    sample = generate(generator, seed, rows=rows)
    args, leaves, gradients = arguments(sample), leaves_of(sample), []

    def gradient(i, t):
        gradients.append(random_gradient(i, t))
        return gradients[-1]

    got = results(sample.call, args, leaves, gradient)
    names = list(sample.tensors())
    exact = [args[name].double() for name in names]

    def formula(*tensors):
        return sample.exact(**dict(zip(names, tensors, strict=True)))

    def gradients_of(*tensors):
        return torch.func.vjp(formula, *tensors[:-1])[1](tensors[-1])

    g = gradients[0].double()
    want = {"result 0": formula(*exact)}
    want |= {f"gradient of {n}": t for n, t in zip(names, gradients_of(*exact, g), strict=True) if n in leaves}
    slopes = {"result 0": torch.func.jacrev(formula, tuple(range(len(exact))))(*exact)}
    jacobians = torch.func.jacrev(gradients_of, tuple(range(len(exact) + 1)))(*exact, g)
    slopes |= {f"gradient of {n}": jacobian for n, jacobian in zip(names, jacobians, strict=True)}
    assert got.keys() == want.keys()
    for name, t in ((name, t) for name, t in want.items() if t.numel()):
        inputs = exact if name == "result 0" else [*exact, g]
        terms = sum((j.abs() * x.abs()).flatten(t.ndim).sum(-1) for j, x in zip(slopes[name], inputs, strict=True))
        rounding = UNIT[got[name].dtype] * 1.001 * t.abs() + SMALLEST[got[name].dtype]
        assert_within(got[name], t, (gamma(sample.terms) + 2 * EXP) * (t.abs() + terms) + rounding, name)


@given(m=st.integers(1, 50), n=st.integers(1, 60), k=st.integers(1, 500), dtype=linear_dtypes, seed=seeds)
def test_linear_error_is_within_bounds(m, n, k, dtype, seed):
    x, w, b = randn(m, k, dtype=dtype, seed=seed), randn(n, k, dtype=dtype), randn(n, dtype=dtype)
    for op in (ops.linear, ops.row_parallel_linear):
        out, g, got = grads(op, x, w, b)
        want, expected = doubles(lambda x, w, b: x @ w.t() + b, g, x, w, b)
        xa, wa, ga, u, tiny = x.double().abs(), w.double().abs(), g.double().abs(), UNIT[dtype], SMALLEST[dtype] / 2
        assert_within(out, want, gamma(k + 4) * (xa @ wa.t() + b.double().abs()) + u * want.abs() * 1.001 + tiny)
        sums = ga @ wa, ga.t() @ xa, ga.sum(0)
        for name, a, e, s, length in zip(("dx", "dw", "db"), got, expected, sums, (n, m, m), strict=True):
            assert_within(a, e, gamma(length) * s + u * e.abs() * 1.001 + tiny, name)


@given(m=st.integers(1, 30), h=st.integers(1, 600), dtype=dtypes, zero_centered=st.booleans(), seed=seeds)
def test_rms_norm_error_is_within_bounds(m, h, dtype, zero_centered, seed):
    x, w, eps = randn(m, h, dtype=dtype, seed=seed), randn(h, dtype=dtype), 1e-6
    out, g, (dx, dw) = grads(lambda x, w: ops.rms_norm(x, w, eps, zero_centered=zero_centered), x, w)

    def formula(x, w):
        return x * (x.square().mean(-1, keepdim=True) + eps).rsqrt() * (w + 1 if zero_centered else w)

    want, (ex, ew) = doubles(formula, g, x, w)
    u, xd, gw = UNIT[dtype], x.double(), g.double() * (w.double() + zero_centered)
    rstd = (xd.square().mean(-1, keepdim=True) + eps).rsqrt()
    rel = gamma(h + 8)
    assert_within(out, want, (rel + u * 1.001) * want.abs() + 1e-40)
    spread = rstd * (gw.abs() + xd.abs() * rstd**2 * (gw * xd).abs().mean(-1, keepdim=True))
    assert_within(dx, ex, 4 * rel * spread + u * ex.abs() * 1.001, "dx")
    assert_within(dw, ew, (rel + gamma(m + 2)) * (g.double() * xd * rstd).abs().sum(0) + u * ew.abs() * 1.001, "dw")


@given(m=st.integers(1, 30), h=st.integers(1, 600), dtype=dtypes, seed=seeds)
def test_l2_norm_error_is_within_bounds(m, h, dtype, seed):
    x, eps = randn(m, h, dtype=dtype, seed=seed), 1e-6
    out, g, (dx,) = grads(lambda x: ops.l2_norm(x, eps), x)
    want, (ex,) = doubles(lambda x: x * (x.square().sum(-1, keepdim=True) + eps).rsqrt(), g, x)
    u, xd, gd, rel = UNIT[dtype], x.double(), g.double(), gamma(h + 8)
    scale = (xd.square().sum(-1, keepdim=True) + eps).rsqrt()
    assert_within(out, want, (rel + u * 1.001) * want.abs() + 1e-40)
    spread = scale * (gd.abs() + xd.abs() * scale**2 * (gd * xd).abs().sum(-1, keepdim=True))
    assert_within(dx, ex, 4 * rel * spread + u * ex.abs() * 1.001, "dx")


@given(m=st.integers(1, 30), h=st.integers(1, 300), dtype=dtypes, seed=seeds)
def test_gated_rms_norm_error_is_within_bounds(m, h, dtype, seed):
    x, w, z, eps = randn(m, h, dtype=dtype, seed=seed), randn(h, dtype=dtype), randn(m, h, dtype=dtype), 1e-6
    out, g, (dx, dw, dz) = grads(lambda x, w, z: ops.gated_rms_norm(x, w, z, eps), x, w, z)

    def formula(x, w, z):
        return x * (x.square().mean(-1, keepdim=True) + eps).rsqrt() * w * torch.nn.functional.silu(z)

    want, (ex, ew, ez) = doubles(formula, g, x, w, z)
    u, xd, wd, zd, gd = UNIT[dtype], x.double(), w.double(), z.double(), g.double()
    rstd, rel = (xd.square().mean(-1, keepdim=True) + eps).rsqrt(), gamma(h + 16) + 2 * EXP
    assert_within(out, want, (rel + u * 1.001) * want.abs() + 1e-40)
    gw = gd * wd * torch.nn.functional.silu(zd)
    spread = rstd * (gw.abs() + xd.abs() * rstd**2 * (gw * xd).abs().mean(-1, keepdim=True))
    assert_within(dx, ex, 4 * rel * spread + u * ex.abs() * 1.001, "dx")
    n, s = xd * rstd, torch.sigmoid(zd)
    sums = (gd * n * zd * s).abs().sum(0)
    assert_within(dw, ew, (rel + gamma(m + 2)) * sums + u * ew.abs() * 1.001, "dweight")
    slope = s * (1 + zd.abs() * (1 - s))  # the sum of its terms' magnitudes
    assert_within(dz, ez, 2 * rel * (gd * n * wd).abs() * slope + u * ez.abs() * 1.001 + 1e-40, "dgate")


@given(rows=st.integers(1, 30), heads=st.integers(1, 40), dtype=dtypes, seed=seeds)
def test_delta_gates_error_is_within_bounds(rows, heads, dtype, seed):
    a, b = randn(rows, heads, dtype=dtype, seed=seed, scale=8.0), randn(rows, heads, dtype=dtype)
    a_log, bias = randn(heads, seed=seed + 1), randn(heads)
    leaves = [t.clone().requires_grad_() for t in (a, b, a_log, bias)]
    exact = [t.double().requires_grad_() for t in (a, b, a_log, bias)]
    got = ops.delta_gates(*leaves)
    want = -exact[2].exp() * torch.nn.functional.softplus(exact[0] + exact[3], threshold=200), exact[1].sigmoid()
    grad = [torch.randn(rows, heads) for _ in range(2)]
    torch.autograd.backward(got, grad)
    torch.autograd.backward(want, [t.double() for t in grad])
    rel, u = gamma(16) + 4 * EXP, UNIT[dtype]
    # An error of x = a + dt_bias changes softplus by at most as much; above 20, softplus(x) - x is at most exp(-20).
    x, factor = (exact[0] + exact[3]).detach(), exact[2].exp().detach()
    of_x = gamma(4) * x.abs()
    assert_within(
        got[0], want[0], rel * want[0].abs() + factor * (of_x * x.sigmoid() * 2 + (x > 20) * math.exp(-20)), "g"
    )
    assert_within(got[1], want[1], rel * want[1].abs(), "beta")
    dx = (
        grad[0].double().abs() * factor * x.sigmoid() * (rel + 2 * of_x)
        + grad[0].double().abs() * factor * (x > 20) * 3e-9
    )
    names = ("da", "db", "dA_log", "ddt_bias")
    db = 2 * rel * (grad[1].double() * want[1]).detach().abs()
    d_log = ((gamma(rows + 2) + rel) * want[0].abs() + factor * (of_x * 2 + 3e-9)) * grad[0].double().abs()
    d_bias = dx.sum(0) + gamma(rows + 2) * (grad[0].double().abs() * factor).sum(0)
    bounds = dx + u * exact[0].grad.abs() * 1.001, db + u * exact[1].grad.abs() * 1.001, d_log.sum(0).detach(), d_bias
    for name, leaf, e, bound in zip(names, leaves, exact, bounds, strict=True):
        assert_within(leaf.grad, e.grad, bound + SMALLEST[leaf.dtype], name)


@given(
    lengths=st.lists(st.integers(1, 20), min_size=1, max_size=3), channels=st.integers(1, 40), dtype=dtypes, seed=seeds
)
def test_short_conv_error_is_within_bounds(lengths, channels, dtype, seed):
    taps = 1 + seed % 8
    starts = torch.tensor([0, *lengths]).cumsum(0)
    x, w = randn(int(starts[-1]), channels, dtype=dtype, seed=seed), randn(channels, taps, dtype=dtype)
    out, g, (dx, dw) = grads(lambda x, w: ops.short_conv(x, w, starts), x, w)

    def conv(x, w):
        """Return the sums before SiLU, by torch's convolution."""
        parts = [torch.nn.functional.pad(p.T, (taps - 1, 0)) for p in x.split(lengths) if len(p)]
        return torch.cat([torch.nn.functional.conv1d(p, w[:, None], groups=channels).T for p in parts])

    def formula(x, w):
        return torch.nn.functional.silu(conv(x, w))

    want, (ex, ew) = doubles(formula, g, x, w)
    u, rel, gd = UNIT[dtype], gamma(taps + 12) + 2 * EXP, g.double().abs()
    magnitude = conv(x.double().abs(), w.double().abs())  # an error of c changes silu(c) by at most 1.1 times as much
    assert_within(out, want, 1.1 * rel * magnitude + (rel + u * 1.001) * want.abs() + 1e-40)
    # |silu'| is at most 1.1 and |silu''| at most 0.5
    _, (sx, sw) = doubles(lambda x, w: conv(x, w), gd * (1.1 + magnitude), x.abs(), w.abs())
    assert_within(dx, ex, 2 * rel * sx + u * ex.abs() * 1.001, "dx")
    assert_within(dw, ew, (2 * rel + gamma(len(x) + 2)) * sw + u * ew.abs() * 1.001, "dweight")


@given(t=st.integers(1, 20), half=st.integers(1, 32), dtype=dtypes, seed=seeds)
def test_rope_error_is_within_bounds(t, half, dtype, seed):
    x, positions = randn(t, 2, 2 * half, dtype=dtype, seed=seed), torch.randint(0, 4000, (t,))
    out, g, (dx,) = grads(lambda x: ops.rope(x, positions, ops.rope_table(2 * half, 4000, 1e4, x.device)), x)

    def formula(x):
        angle = positions[:, None, None] * 1e4 ** (-torch.arange(half, dtype=torch.float64) / half)
        a, b = x.chunk(2, -1)
        return torch.cat([a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin()], -1)

    want, (ex,) = doubles(formula, g, x)

    def bound(x, y):
        a, b = x.double().abs().chunk(2, -1)
        return (a + b).repeat(1, 1, 2) * 3 * U32 + y.abs() * UNIT[dtype] * 1.001

    assert_within(out, want, bound(x, want))
    assert_within(dx, ex, bound(g, ex), "dx")


def _softmax(q, k, v, lens, scale):
    """Return causal attention of packed sequences, computed in the inputs' dtype."""
    outs, start = [], 0
    for n in lens:
        s = slice(start, start + n)
        kk, vv = (t[s].repeat_interleave(q.shape[1] // k.shape[1], 1) for t in (k, v))
        score = torch.einsum("ihd,jhd->hij", q[s], kk) * scale
        p = score.masked_fill(torch.ones(n, n).triu(1).bool(), float("-inf")).softmax(-1)
        outs.append(torch.einsum("hij,jhd->ihd", p, vv))
        start += n
    return torch.cat(outs)


@given(
    lens=st.lists(st.integers(1, 80), min_size=1, max_size=3), dim=st.sampled_from([16, 64]), dtype=dtypes, seed=seeds
)
def test_attention_error_is_within_bounds(lens, dim, dtype, seed):
    cu, total = torch.tensor([0, *lens]).cumsum(0), sum(lens)
    q, k, v = (randn(total, h, dim, dtype=dtype, seed=seed + h) for h in (4, 2, 2))
    out, g, got = grads(lambda q, k, v: ops.attention(q, k, v, cu), q, k, v)
    scale = dim**-0.5
    want, expected = doubles(lambda q, k, v: _softmax(q, k, v, lens, scale), g, q, k, v)
    u, n = UNIT[dtype] * 1.001, max(lens)
    # A score error ds changes a probability by 1 + 2 ds. Rounding P adds u, in its sum too; out is a mean of v.
    norm = q.double().norm(dim=-1).max() * k.double().norm(dim=-1).max() * scale
    ds = gamma(dim + 1) * norm + 2 * U32 * (2 * norm + (families.CPU if CPU else families.SM90).reserve)
    p_error = 2 * ds + 2 * EXP + gamma(n + 4 * (n // 32 + 1)) + (2 * u if dtype != torch.float32 else 0)
    v_max, g_norm = v.double().abs().max(), g.double().norm(dim=-1).max()
    assert_within(out, want, p_error * v_max + u * want.abs())
    # Gradients: dP and delta are chains over D of g with v and with the rounded out. The sums have at most n rows and
    # 2 heads; each term is at most the product of its factors' largest values.
    dp = g_norm * v.double().norm(dim=-1).max()
    d_score = scale * (dp * 2 * p_error + dp * gamma(dim) * 2 + g_norm * dim**0.5 * (u * v_max + p_error * v_max))
    if not CPU:  # dS and P are rounded to the model dtype for the tensor core
        d_score += scale * 2 * dp * u
    longest = 2 * n
    for name, a, e, other in (("dq", got[0], expected[0], k), ("dk", got[1], expected[1], q)):
        limit = (d_score + scale * 2 * dp * gamma(longest)) * other.double().abs().max()
        assert_within(a, e, limit * (1 if name == "dq" else longest) + u * e.abs(), name)
    assert_within(
        got[2], expected[2], (p_error + gamma(longest)) * longest * g.double().abs().max() + u * expected[2].abs(), "dv"
    )


@given(
    n=st.integers(1, 140),
    d=st.integers(1, 64),
    v=st.integers(1, 500),
    dtype=dtypes,
    temperature=st.sampled_from([1.0, 0.7]),
    cap=st.sampled_from([None, 5.0]),
    scale=st.sampled_from([1.0, 0.25]),
    seed=seeds,
)
def test_linear_logp_error_is_within_bounds(n, d, v, dtype, temperature, cap, scale, seed):
    h, w, b = randn(n, d, dtype=dtype, seed=seed), randn(v, d, dtype=dtype, scale=0.3), randn(v, dtype=dtype)
    target = torch.randint(0, v, (n,))

    def run(h, w, b):
        return torch.stack(
            ops.linear_logp(
                h, w, target, bias=b, temperature=temperature, soft_cap=cap, logit_scale=scale, return_entropy=True
            )
        )

    def formula(h, w, b):
        z = h @ w.t() + b
        z = cap * torch.tanh(z / cap) if cap else z
        lp = (z * scale / temperature).log_softmax(-1)
        return torch.stack([lp.gather(1, target[:, None])[:, 0], -(lp.exp() * lp).sum(-1)])

    out, g, got = grads(run, h, w, b)
    want, expected = doubles(formula, g, h, w, b)
    ha, wa, ba = (t.double().abs() for t in (h, w, b))
    dz = ((gamma(d + 4) * (ha @ wa.t() + ba) + (4 * U32 * cap if cap else 0)) * scale / temperature).amax(1)
    lp = formula_logits(h, w, b, cap, scale / temperature)
    top = lp.abs().amax(1)
    error = 2 * dz + TILE + EXP + 4 * U32 * top
    assert_within(out[0], want[0], error + U32 * want[0].abs(), "logp")
    # Entropy is a mean of -log p: its terms have error `error`, its weights a relative error `error`.
    assert_within(out[1], want[1], error * (2 + 2 * top) + U32 * want[1].abs(), "entropy")
    # A probability has relative error `error`, so dlogits has error (|g_logp| p + |g_entropy| p (|log p| + H)).
    p = lp.exp()
    spread = g[0].double().abs()[:, None] * (p + torch.nn.functional.one_hot(target, v)) + g[1].double().abs()[
        :, None
    ] * p * (2 * lp.abs() + 2 * want[1][:, None] + 2)
    rounding = 0.0 if CPU else UNIT[dtype]  # dlogits rounded to the model dtype for the tensor core
    per_row = (2 * error + EXP + gamma(12) + rounding)[:, None] * spread * scale / temperature
    whole = spread * scale / temperature
    u = UNIT[dtype] * 1.001
    for name, a, e, size, length in (
        ("dhidden", got[0], expected[0], (per_row @ wa, whole @ wa), v),
        ("dweight", got[1], expected[1], (per_row.t() @ ha, whole.t() @ ha), n),
        ("dbias", got[2], expected[2], (per_row.sum(0), whole.sum(0)), n),
    ):
        slope = 4 * error.max() if cap else 0.0  # error of the soft cap's slope, which is at most 1
        assert_within(a, e, size[0] + (gamma(length) + slope) * size[1] + u * e.abs(), name)


def formula_logits(h, w, b, cap, factor):
    z = h.double() @ w.double().t() + b.double()
    return ((cap * torch.tanh(z / cap) if cap else z) * factor).log_softmax(-1)


@given(v=st.sampled_from([2000, 40000]), scale=st.sampled_from([0.05, 0.3]), dtype=dtypes, seed=seeds)
def test_logp_is_as_accurate_as_torch(v, scale, dtype, seed):
    """The mean error from the same fp32 logits does not exceed that of torch's log_softmax."""
    h, w = randn(64, 256, seed=seed, dtype=dtype), randn(v, 256, dtype=dtype, scale=scale)
    target = torch.randint(0, v, (64,))
    logits = ops.head_logits(h, w)
    exact, theirs = (z.log_softmax(-1).gather(1, target[:, None])[:, 0] for z in (logits.double(), logits))
    ours = ops.linear_logp(h, w, target)
    assert (ours - exact).abs().mean() <= (theirs - exact).abs().mean() + U32 * exact.abs().mean()
