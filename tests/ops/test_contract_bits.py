"""The C++ kernels give the bits of the references on every instruction set of this machine.

Functions named contract_* restate docs/contract.md independently of the references, and change only with that page.
GPU kernels are compared by the `*_cuda.py` and `*_sm90.py` files.
"""

import contextlib
import math

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given

from alignkit import ops
from alignkit.contract.rope import Llama3, Yarn, yarn_attention_factor
from alignkit.errors import BackendError
from alignkit.ops import _common
from alignkit.ops.linear import matmul
from alignkit.ops.rope import _table
from alignkit.runtime import dispatch, families, native
from alignkit.testing import assert_bitwise_equal
from tests.samples import GENERATORS, arguments, generate, leaves_of, results, written_by
from tests.samples import assert_same as assert_results_same

from .helpers import CPU, dtypes, linear_dtypes, randn, seeds

pytestmark = pytest.mark.skipif(not CPU, reason="these are the bits of the CPU")

ISAS = ("generic", "avx2", "avx512")
SCALINGS = [
    Llama3(8.0, 1.0, 4.0, 8192),
    Yarn(4.0, 1024, 32.0, 1.0, yarn_attention_factor(4.0), True),
    Yarn(40.0, 4096, 32.0, 1.0, 1.0, False),
]


@pytest.fixture(params=ISAS, autouse=True)
def isa(request):
    with contextlib.ExitStack() as stack:
        try:
            stack.enter_context(native.use_isa(request.param))
        except BackendError:
            pytest.skip(f"this machine has no {request.param}")
        yield


def assert_same(function, *grads_of):
    """Check that `function` has the same outputs and gradients on both CPU backends."""
    results = []
    for backend in ("cpu", "reference"):
        leaves = [t.detach().clone().requires_grad_() for t in grads_of]
        with dispatch.use(backend):
            out = function(*leaves)
            out = out if isinstance(out, tuple) else (out,)
            if leaves:
                torch.manual_seed(7)
                torch.autograd.backward(out, [torch.randn(o.shape).to(o.dtype) for o in out])
        results.append([*out, *(t.grad for t in leaves)])
    for i, (a, b) in enumerate(zip(*results, strict=True)):
        assert_bitwise_equal(a, b, f"output {i} of {len(grads_of)} gradients")


def test_fma_rounds_once():
    """Compare the references' fma with exact fractions, for values that fp32 operations would round twice."""
    a = torch.tensor([1 + 2.0**-12, 1 + 2.0**-23, 3.0, 2.0**-80])
    b = torch.tensor([1 + 2.0**-12, 1 - 2.0**-23, 1 / 3, 2.0**-80])
    c = torch.tensor([2.0**-24, -1.0, -1.0, 2.0**-149])
    from fractions import Fraction

    exact = [
        Fraction(x) * Fraction(y) + Fraction(z) for x, y, z in zip(a.tolist(), b.tolist(), c.tolist(), strict=True)
    ]
    for got, want in zip(_common.fma(a, b, c).tolist(), exact, strict=True):
        below, above = (torch.nextafter(torch.tensor(got), torch.tensor(s * float("inf"))).item() for s in (-1, 1))
        assert abs(Fraction(got) - want) <= min(abs(Fraction(below) - want), abs(Fraction(above) - want))


def test_default_dtype_changes_no_bit():
    """Engines build models with bf16 as torch's default dtype."""
    torch.manual_seed(0)
    q, cu = torch.randn(40, 2, 16), torch.tensor([0, 40])
    w, target = torch.randn(150, 32), torch.arange(40)

    def everything():
        _table.cache_clear()
        leaves = [t.clone().requires_grad_() for t in (q, w)]
        x = ops.rope(leaves[0], torch.arange(40), ops.rope_table(16, 64, 1e4))
        x = ops.attention(x, x, x, cu).reshape(40, 32)
        x = ops.silu_mul(ops.rms_norm(x, w[0], 1e-6), x)
        out = ops.linear_logp(ops.linear(x, w[:32]), leaves[1], target, return_entropy=True)
        torch.stack(out).sum().backward()
        return *out, ops.log_softmax(w), *(t.grad for t in leaves)

    for backend in ("cpu", "reference"):
        with dispatch.use(backend):
            want = everything()
            torch.set_default_dtype(torch.bfloat16)
            try:
                got = everything()
            finally:
                torch.set_default_dtype(torch.float32)
        for a, b in zip(got, want, strict=True):
            assert_bitwise_equal(a, b, backend)


@pytest.mark.parametrize("generator", GENERATORS, ids=lambda g: f"{g.__module__.split('.')[-2]} {g.__name__}")
@given(style=st.sampled_from(["normal", "large", "zeros"]), seed=seeds)
def test_kernels_have_the_bits_of_the_reference(generator, style, seed):
    """The calls follow from the ops' samples."""
    sample = generate(generator, seed, style)
    leaves, written = leaves_of(sample), written_by(sample)
    got = results(sample.call, arguments(sample), leaves, written=written)
    with dispatch.use("reference"):
        want = results(sample.call, arguments(sample), leaves, written=written)
    assert_results_same(got, want, sample.op)


def test_exp_has_the_bits_of_the_reference():
    x = torch.cat(
        [randn(20000, scale=30.0), torch.tensor([0.0, -0.0, 88.0, 88.1, -87.0, -87.1, float("inf"), float("-inf")])]
    )
    assert_bitwise_equal(native.exp(x), _common.exp(x))
    assert native.exp(torch.tensor([0.0])).item() == 1.0
    assert native.exp(torch.tensor([float("nan")])).isnan().all()


@given(
    m=st.integers(1, 19),
    n=st.integers(1, 70),
    leaf=st.integers(1, 20),
    leaves=st.sampled_from([1, 2, 4, 8]),
    dtype=linear_dtypes,
    transposed=st.booleans(),
    seed=seeds,
)
def test_matmul_has_the_bits_of_the_reference(m, n, leaf, leaves, dtype, transposed, seed):
    k = leaf * leaves
    a, b = randn(m, k, dtype=dtype, seed=seed), randn(n, k, dtype=dtype)
    if transposed:
        a, b = a.t().contiguous().t(), b.t().contiguous().t()
    assert_same(lambda: matmul(a, b, leaves=leaves))
    if leaves == 1:
        start = randn(m, n)
        assert_same(lambda: matmul(a, b, out=start.clone()))


@given(tokens=st.integers(1, 9), heads=st.integers(1, 3), half=st.integers(1, 20), dtype=dtypes, seed=seeds)
def test_rope_has_the_bits_of_the_reference(tokens, heads, half, dtype, seed):
    x = randn(tokens, heads, 2 * half, dtype=dtype, seed=seed)
    positions = torch.randint(0, 50, (tokens,))
    table = ops.rope_table(2 * half, 50, 10000.0)
    assert_same(lambda a: ops.rope(a, positions, table), x)
    for rest in (0, 2, 14):  # dimensions beyond the rotated part stay unchanged
        wider = torch.cat([x, randn(tokens, heads, rest, dtype=dtype)], dim=-1)
        assert_same(lambda a: ops.rope(a, positions, table, rotary_dim=2 * half), wider)
        parts = torch.cat([ops.rope(x, positions, table), wider[..., 2 * half :]], dim=-1)
        assert_bitwise_equal(ops.rope(wider, positions, table, rotary_dim=2 * half), parts)


def test_rope_table_has_the_bits_of_the_reference():
    _table.cache_clear()
    with dispatch.use("reference"):
        reference = ops.rope_table(64, 300, 1e6)
    _table.cache_clear()
    assert_bitwise_equal(ops.rope_table(64, 300, 1e6), reference)
    assert_bitwise_equal(ops.rope_table(64, 5, 1e6), reference[:5], "a shorter table")


@pytest.mark.parametrize("scaling", SCALINGS, ids=repr)
def test_scaled_rope_table_has_the_bits_of_the_reference(scaling):
    _table.cache_clear()
    with dispatch.use("reference"):
        reference = ops.rope_table(64, 300, 1e4, scaling=scaling)
    _table.cache_clear()
    assert_bitwise_equal(ops.rope_table(64, 300, 1e4, scaling=scaling), reference)
    assert_bitwise_equal(ops.rope_table(64, 5, 1e4, scaling=scaling), reference[:5], "a shorter table")
    assert not torch.equal(reference, ops.rope_table(64, 300, 1e4))


def test_scaling_without_effect_gives_the_plain_table():
    """Llama 3's formula keeps wavelengths below its thresholds."""
    same = Llama3(8.0, 1.0, 4.0, 2**40)
    assert_bitwise_equal(ops.rope_table(64, 300, 1e4, scaling=same), ops.rope_table(64, 300, 1e4))


@given(
    lens=st.lists(st.integers(0, 45), min_size=1, max_size=3),
    group=st.integers(1, 3),
    kv=st.integers(1, 2),
    dim=st.sampled_from([8, 16, 40]),
    spread=st.sampled_from([1.0, 20.0]),  # scale of the scores; 20 makes the shift change
    dtype=dtypes,
    seed=seeds,
)
def test_attention_has_the_bits_of_the_reference(lens, group, kv, dim, spread, dtype, seed):
    cu = torch.tensor([0, *lens]).cumsum(0)
    q, k, v = (randn(sum(lens), h, dim, dtype=dtype, seed=seed + h) for h in (group * kv, kv, kv))
    q = q * spread
    assert_same(lambda q, k, v: ops.attention(q, k, v, cu), q, k, v)


@pytest.mark.parametrize(
    "isa, dtype",
    [
        ("avx2", torch.bfloat16),
        pytest.param("avx2", torch.float32, marks=pytest.mark.slow),
        pytest.param("avx512", torch.float32, marks=pytest.mark.slow),
        pytest.param("avx512", torch.bfloat16, marks=pytest.mark.matrix),
        pytest.param("generic", torch.bfloat16, marks=pytest.mark.slow),
        pytest.param("generic", torch.float32, marks=pytest.mark.matrix),
    ],
    indirect=["isa"],
    ids=str,
)
def test_attention_has_the_bits_of_the_reference_around_leaf_lengths(dtype):
    """Use lengths around one and two leaves, and paged queries that start within a leaf."""
    leaf = families.CPU.kv_leaf
    for n in (leaf - 1, leaf, leaf + 1, 2 * leaf + 1):
        q, k, v = (randn(n, h, 8, dtype=dtype, seed=n + i) for i, h in enumerate((2, 1, 1)))
        assert_same(lambda q, k, v, n=n: ops.attention(q, k, v, torch.tensor([0, n])), q, k, v)
        table, lens = torch.randperm(-(-n // 16))[None].int(), torch.tensor([n])
        caches = [torch.full((table.shape[1], 16, 1, 8), float("nan"), dtype=dtype) for _ in range(2)]
        for cache, t in zip(caches, (k, v), strict=True):
            cache[table[0, torch.arange(n) // 16].long(), torch.arange(n) % 16] = t
        whole = ops.attention(q, k, v, torch.tensor([0, n]))
        for take in (1, leaf // 2 + 3):
            got = ops.paged_attention(q[-take:], *caches, table, torch.tensor([0, take]), lens)
            assert_bitwise_equal(got, whole[-take:], f"the last {take} of {n}")


@given(
    n=st.integers(1, 80),
    heads=st.sampled_from([1, 3]),
    bad=st.lists(st.integers(0, 79), min_size=1, max_size=3),
    value=st.sampled_from([float("inf"), -float("inf"), float("nan")]),
    dtype=dtypes,
    seed=seeds,
)
def test_attention_ignores_later_positions(n, heads, bad, value, dtype, seed):
    """Non-finite values affect their own channel of later queries, and no earlier query."""
    cu = torch.tensor([0, n])
    q, k, v = (randn(n, h, 16, dtype=dtype, seed=seed + h) for h in (heads, 1, 1))
    want = ops.attention(q, k, v, cu)
    for i in bad:
        v[i % n, 0, i % 16] = value
    first = min(i % n for i in bad)
    got = ops.attention(q, k, v, cu)
    assert_bitwise_equal(got[:first], want[:first])
    assert not got[first:].isfinite().flatten(1).all(1).any()
    clean = torch.ones(16, dtype=torch.bool)
    clean[[i % 16 for i in bad]] = False
    assert_bitwise_equal(got[..., clean], want[..., clean], "channels without such values")


@given(
    n=st.integers(1, 6),
    d=st.integers(1, 20),
    v=st.integers(2, 400),
    dtype=dtypes,
    entropy=st.booleans(),
    cap=st.sampled_from([None, 3.0]),
    scale=st.sampled_from([1.0, 0.5]),
    seed=seeds,
)
def test_linear_logp_has_the_bits_of_the_reference(n, d, v, dtype, entropy, cap, scale, seed):
    h, w, b = randn(n, d, dtype=dtype, seed=seed), randn(v, d, dtype=dtype), randn(v, dtype=dtype)
    target = torch.randint(0, v, (n,))
    assert_same(
        lambda h, w, b: ops.linear_logp(
            h, w, target, bias=b, temperature=0.7, soft_cap=cap, logit_scale=scale, return_entropy=entropy
        ),
        h,
        w,
        b,
    )
    assert_same(lambda: ops.log_softmax(ops.head_logits(h, w, b, soft_cap=cap, logit_scale=scale)))


def contract_logp(h, w, b, target, temperature, cap, scale):
    """Compute logprobs and entropies as docs/contract.md, "Log-softmax over the vocabulary", one number at a time."""

    def fp32(v):
        return torch.tensor(v, dtype=torch.float64).float().item()

    z = torch.zeros(len(h), len(w))
    for k in range(h.shape[1]):
        z = _common.fma(h[:, k, None].float().expand_as(z), w[None, :, k].float().expand_as(z), z)
    z += b.float()
    if cap is not None:
        z = torch.tensor([[fp32(math.tanh(v)) for v in row] for row in (z / cap).tolist()]) * cap
    z = z * scale / temperature
    found = []
    for row, i in zip(z, target.tolist(), strict=True):
        tiles = []
        for tile in row.split(128):
            m = tile.max()
            e = _common.exp(tile - m)
            tiles.append((m, *(sum(round(2**23 * v) for v in values.tolist()) for values in (e, e * (m - tile)))))
        top = row.max()
        s = u = 0
        for m, q, u_sum in tiles:
            weight = _common.exp(m - top).item()
            s += round(2**16 * weight * q)
            u += round(2**16 * weight * (u_sum + q * (top.item() - m.item())))
        log = math.log(s * 2.0**-39)
        found.append((fp32(row[i].item() - (top.item() + log)), fp32(top.item() + log - top.item() + u / s)))
    return torch.tensor(found).unbind(1)


@given(
    n=st.integers(1, 4),
    d=st.integers(1, 9),
    v=st.integers(2, 400),
    dtype=dtypes,
    cap=st.sampled_from([None, 3.0]),
    scale=st.sampled_from([1.0, 0.5]),
    seed=seeds,
)
def test_linear_logp_matches_the_contract(n, d, v, dtype, cap, scale, seed):
    """The test shares only fma and exp with the ops; they have tests of their own."""
    h, w, b = randn(n, d, dtype=dtype, seed=seed), randn(v, d, dtype=dtype), randn(v, dtype=dtype)
    target = torch.randint(0, v, (n,))
    temperature = torch.tensor(0.7).item()
    want = contract_logp(h, w, b, target, temperature, cap, scale)
    for backend in ("cpu", "reference"):
        with dispatch.use(backend):
            got = ops.linear_logp(
                h, w, target, bias=b, temperature=0.7, soft_cap=cap, logit_scale=scale, return_entropy=True
            )
        for name, a, expected in zip(("logp", "entropy"), got, want, strict=True):
            assert_bitwise_equal(a, expected, f"{name}, {backend}")


def routings(draw):
    """Return a number of experts, top k, and options of `moe_router`."""
    groups = draw(st.sampled_from([1, 1, 2, 3, 4]))
    n = groups * draw(st.integers(1, 16))
    options = {"normalize": draw(st.booleans()), "scale": draw(st.sampled_from([1.0, 2.5, 0.3]))}
    candidates = n
    if draw(st.booleans()):
        top_groups = draw(st.integers(1, groups))
        candidates = n // groups * top_groups
        bias = draw(st.sampled_from([None, torch.arange(n).float() % 3 / 7]))
        options |= {"score": "sigmoid", "groups": groups, "top_groups": top_groups, "bias": bias}
    return n, draw(st.integers(1, min(candidates, 8))), options


@given(rows=st.integers(1, 9), routing=st.composite(routings)(), ties=st.booleans(), odd=st.booleans(), seed=seeds)
def test_moe_router_has_the_bits_of_the_reference(rows, routing, ties, odd, seed):
    n, k, options = routing
    z = randn(rows, n, scale=4.0, seed=seed)
    if ties:
        z = z.round() * 0.0 if odd else z.round()  # zeros of both signs
    results = []
    for backend in ("cpu", "reference"):
        with dispatch.use(backend):
            leaf = z.clone().requires_grad_()
            weights, ids = ops.moe_router(leaf, k, **options)
            weights.backward(torch.linspace(-2, 3, weights.numel()).view(weights.shape))
            results.append((weights.detach(), ids, leaf.grad))
    for name, a, b in zip(("weights", "ids", "gradient"), *results, strict=True):
        assert_bitwise_equal(a, b, name)


def moe_inputs(n, rows, k, h, f, dtype, seed):
    """Return x, ids, weights, gate_up and down; some ids are -1."""
    x, weights = randn(rows, h, dtype=dtype, seed=seed), torch.rand(rows, k)
    ids = torch.rand(rows, n).argsort(1)[:, :k]
    ids = ids.masked_fill(torch.rand(rows, k) < 0.2, -1)
    return x, ids, weights, randn(n, 2 * f, h, dtype=dtype), randn(n, h, f, dtype=dtype)


@given(
    n=st.sampled_from([1, 2, 5, 6, 16, 60]),
    rows=st.integers(1, 6),
    k=st.integers(1, 5),
    h=st.integers(1, 40),
    f=st.sampled_from([1, 7, 16, 33, 64]),
    dtype=dtypes,
    seed=seeds,
)
def test_moe_experts_has_the_bits_of_the_reference(n, rows, k, h, f, dtype, seed):
    x, ids, weights, gate_up, down = moe_inputs(n, rows, min(n, k), h, f, dtype, seed)
    assert_same(lambda x, w, g, d: ops.moe_experts(x, ids, w, g, d), x, weights, gate_up, down)


def contract_expert_tree(values: dict[int, float], n: int) -> torch.Tensor:
    """Sum fp32 values by expert as docs/contract.md, "Mixture of experts", "Tree over experts"."""
    odd = n
    while odd % 2 == 0:
        odd //= 2
    size = 1
    while size < odd:
        size *= 2

    def node(first, leaves):
        if leaves == 1:
            group, place = divmod(first, size)
            return values.get(group * odd + place, torch.tensor(0.0)) if place < odd else torch.tensor(0.0)
        return node(first, leaves // 2) + node(first + leaves // 2, leaves // 2)

    return node(0, n // odd * size) + 0.0


def dot(a, b, leaves=1):
    """Return the tree of chains over `leaves` equal parts of k."""
    parts = []
    for x, w in zip(a.float().chunk(leaves), b.float().chunk(leaves, 1), strict=True):
        acc = torch.zeros(len(b))
        for i in range(len(x)):
            acc = _common.fma(x[i].expand(len(b)), w[:, i], acc)
        parts.append(acc)
    while len(parts) > 1:
        parts = [a + b for a, b in zip(parts[::2], parts[1::2], strict=True)]
    return parts[0]


@given(
    n=st.sampled_from([4, 6, 12]),
    rows=st.integers(1, 3),
    score=st.sampled_from(["softmax", "sigmoid"]),
    dtype=dtypes,
    normalize=st.booleans(),
    seed=seeds,
)
def test_moe_matches_the_contract(n, rows, score, dtype, normalize, seed):
    """Check the forward and the gradients of x, weights and matrices; only fma and exp are shared with the ops."""
    h, f, k = 9, 32, 3  # f has two k-tree leaves
    x, _, _, gate_up, down = moe_inputs(n, rows, k, h, f, dtype, seed)
    z = (randn(rows, n) * 2).round() / 2
    g = randn(rows, h, dtype=dtype)
    leaves = [t.clone().requires_grad_() for t in (x, z, gate_up, down)]
    weights, ids = ops.moe_router(leaves[1], k, score=score, normalize=normalize, scale=0.5)
    weights.retain_grad()
    out = ops.moe_experts(leaves[0], ids, weights, *leaves[2:])
    out.backward(g)

    d_gate_up, d_down = torch.zeros(gate_up.shape), torch.zeros(down.shape)
    for r in range(rows):
        scores = _common.exp(z[r] - z[r].max()) if score == "softmax" else 1 / (1 + _common.exp(-z[r]))
        chosen = sorted(sorted(range(n), key=lambda e: (-float(z[r, e]), e))[:k])
        assert ids[r].tolist() == chosen
        summed = chosen if normalize else range(n)
        total = contract_expert_tree({e: scores[e] for e in summed}, n)
        total = total + 1e-20 if score == "sigmoid" else total
        w = scores if score == "sigmoid" and not normalize else scores / total
        assert_bitwise_equal(weights[r].detach(), torch.stack([w[e] * 0.5 for e in chosen]), "weights")
        parts, dx, dw = {}, {}, {}
        for e in chosen:
            gate, up = dot(x[r], gate_up[e]).to(dtype).chunk(2)
            s = 1 / (1 + _common.exp(-gate.float()))
            a = (gate.float() / (1 + _common.exp(-gate.float())) * up.float()).to(dtype)
            y = dot(a, down[e], leaves=2).to(dtype)
            parts[e] = (w[e] * 0.5) * y.float()
            g_a = dot(g[r], down[e].t())
            lanes = torch.zeros(16)
            for j in range(0, f, 16):
                lanes = _common.fma(g_a[j : j + 16], a[j : j + 16].float(), lanes)
            for half in (8, 4, 2, 1):
                lanes = lanes[:half] + lanes[half:]
            dw[e] = lanes[0] + 0.0
            da = (w[e] * 0.5 * g_a).to(dtype).float()
            slope = s * _common.fma(gate.float(), 1 - s, torch.ones(f))
            d = torch.cat([(da * up.float() * slope).to(dtype), (da * (gate.float() * s)).to(dtype)])
            dx[e] = dot(d, gate_up[e].t()).to(dtype).float()
            weighed = (w[e] * 0.5 * a.float()).to(dtype).float()
            d_gate_up[e] = _common.fma(d[:, None].float().expand(-1, h), x[r].float().expand(2 * f, h), d_gate_up[e])
            d_down[e] = _common.fma(g[r][:, None].float().expand(h, f), weighed.expand(h, f), d_down[e])
        for name, seen, values in (("output", out.detach(), parts), ("dx", leaves[0].grad, dx)):
            want = torch.stack([contract_expert_tree({e: v[i] for e, v in values.items()}, n) for i in range(h)])
            assert_bitwise_equal(seen[r], want.to(dtype), name)
        assert_bitwise_equal(weights.grad[r], torch.stack([dw[e] for e in chosen]), "dweights")
        grads = {e: v * 0.5 for e, v in dw.items()}
        shared = contract_expert_tree({e: w[e] * v for e, v in grads.items()}, n)
        for e in range(n):
            if score == "softmax":
                want = w[e] * (grads.get(e, torch.tensor(0.0)) - shared)
            else:
                ds = (grads.get(e, torch.tensor(0.0)) - shared) / total if normalize else grads.get(e)
                want = torch.tensor(0.0) if e not in chosen else ds * scores[e] * (1 - scores[e])
            if normalize and e not in chosen:
                want = torch.tensor(0.0)
            assert_bitwise_equal(leaves[1].grad[r, e], want, f"dlogits of {e}")
    assert_bitwise_equal(leaves[2].grad, d_gate_up.to(dtype), "dgate_up")
    assert_bitwise_equal(leaves[3].grad, d_down.to(dtype), "ddown")
