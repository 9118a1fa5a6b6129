"""The C++ kernels give the bytes of the references, on every instruction set of this machine."""

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
from alignkit.runtime import dispatch, native
from alignkit.testing import assert_bitwise_equal

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
    """`function()` and the gradients of its sum of outputs, on both backends."""
    seen = []
    for backend in ("cpu", "reference"):
        leaves = [t.detach().clone().requires_grad_() for t in grads_of]
        with dispatch.use(backend):
            out = function(*leaves)
            out = out if isinstance(out, tuple) else (out,)
            if leaves:
                torch.manual_seed(7)
                torch.autograd.backward(out, [torch.randn(o.shape).to(o.dtype) for o in out])
        seen.append([*out, *(t.grad for t in leaves)])
    for i, (a, b) in enumerate(zip(*seen, strict=True)):
        assert_bitwise_equal(a, b, f"output {i} of {len(grads_of)} gradients")


def test_fma_is_exact():
    """The references' fma against integer arithmetic, where fp32 would round twice."""
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


def test_the_default_dtype_does_not_matter():
    """Engines build models with bf16 as torch's default type."""
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


def test_exp():
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
def test_matmul(m, n, leaf, leaves, dtype, transposed, seed):
    k = leaf * leaves
    a, b = randn(m, k, dtype=dtype, seed=seed), randn(n, k, dtype=dtype)
    if transposed:
        a, b = a.t().contiguous().t(), b.t().contiguous().t()
    assert_same(lambda: matmul(a, b, leaves=leaves))
    if leaves == 1:
        start = randn(m, n)
        assert_same(lambda: matmul(a, b, out=start.clone()))


@given(rows=st.integers(1, 9), h=st.integers(1, 100), dtype=dtypes, seed=seeds)
def test_rms_norm(rows, h, dtype, seed):
    x, w = randn(rows, h, dtype=dtype, seed=seed), randn(h, dtype=dtype)
    assert_same(lambda a, b: ops.rms_norm(a, b, 1e-6), x, w)
    r = randn(rows, h, dtype=dtype)
    for zero_centered in (False, True):
        assert_same(lambda a, b, r, z=zero_centered: ops.rms_norm(a, b, 1e-6, r, zero_centered=z), x, w, r)


@given(tokens=st.integers(1, 9), heads=st.integers(1, 3), half=st.integers(1, 20), dtype=dtypes, seed=seeds)
def test_rope(tokens, heads, half, dtype, seed):
    x = randn(tokens, heads, 2 * half, dtype=dtype, seed=seed)
    positions = torch.randint(0, 50, (tokens,))
    table = ops.rope_table(2 * half, 50, 10000.0)
    assert_same(lambda a: ops.rope(a, positions, table), x)


def test_rope_table():
    _table.cache_clear()
    with dispatch.use("reference"):
        reference = ops.rope_table(64, 300, 1e6)
    _table.cache_clear()
    assert_bitwise_equal(ops.rope_table(64, 300, 1e6), reference)
    assert_bitwise_equal(ops.rope_table(64, 5, 1e6), reference[:5], "a shorter table")


@pytest.mark.parametrize("scaling", SCALINGS, ids=repr)
def test_scaled_rope_table(scaling):
    _table.cache_clear()
    with dispatch.use("reference"):
        reference = ops.rope_table(64, 300, 1e4, scaling=scaling)
    _table.cache_clear()
    assert_bitwise_equal(ops.rope_table(64, 300, 1e4, scaling=scaling), reference)
    assert_bitwise_equal(ops.rope_table(64, 5, 1e4, scaling=scaling), reference[:5], "a shorter table")
    assert not torch.equal(reference, ops.rope_table(64, 300, 1e4))


def test_frequencies_that_are_not_scaled_give_the_plain_table():
    """By Llama 3's formula waves shorter than its borders stay: the two ways to a table are one."""
    same = Llama3(8.0, 1.0, 4.0, 2**40)
    assert_bitwise_equal(ops.rope_table(64, 300, 1e4, scaling=same), ops.rope_table(64, 300, 1e4))


@given(rows=st.integers(1, 9), f=st.integers(1, 70), dtype=dtypes, seed=seeds)
def test_silu_mul(rows, f, dtype, seed):
    joint = randn(rows, 2 * f, dtype=dtype, scale=20.0, seed=seed)
    assert_same(lambda a: ops.silu_mul(a[:, :f], a[:, f:]), joint)


@given(
    lens=st.lists(st.integers(0, 45), min_size=1, max_size=3),
    group=st.integers(1, 3),
    kv=st.integers(1, 2),
    dim=st.sampled_from([8, 16, 40]),
    dtype=dtypes,
    seed=seeds,
)
def test_attention(lens, group, kv, dim, dtype, seed):
    cu = torch.tensor([0, *lens]).cumsum(0)
    q, k, v = (randn(sum(lens), h, dim, dtype=dtype, seed=seed + h) for h in (group * kv, kv, kv))
    assert_same(lambda q, k, v: ops.attention(q, k, v, cu), q, k, v)


@given(
    n=st.integers(1, 80),
    heads=st.sampled_from([1, 3]),
    bad=st.lists(st.integers(0, 79), min_size=1, max_size=3),
    value=st.sampled_from([float("inf"), -float("inf"), float("nan")]),
    dtype=dtypes,
    seed=seeds,
)
def test_attention_sees_nothing_of_later_positions(n, heads, bad, value, dtype, seed):
    """Values that are infinite or NaN, each in one head: a query before them does not know, and one after them does."""
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
def test_linear_logp(n, d, v, dtype, entropy, cap, scale, seed):
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


def written_out(h, w, b, target, temperature, cap, scale):
    """docs/contract.md, "Log-softmax over the vocabulary", a number at a time: logprobs and entropies."""

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
        for m, q, of_u in tiles:
            weight = _common.exp(m - top).item()
            s += round(2**16 * weight * q)
            u += round(2**16 * weight * (of_u + q * (top.item() - m.item())))
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
def test_linear_logp_is_what_the_contract_says(n, d, v, dtype, cap, scale, seed):
    """Shares no code with the ops but fma and exp, which have tests of their own."""
    h, w, b = randn(n, d, dtype=dtype, seed=seed), randn(v, d, dtype=dtype), randn(v, dtype=dtype)
    target = torch.randint(0, v, (n,))
    temperature = torch.tensor(0.7).item()
    want = written_out(h, w, b, target, temperature, cap, scale)
    for backend in ("cpu", "reference"):
        with dispatch.use(backend):
            got = ops.linear_logp(
                h, w, target, bias=b, temperature=0.7, soft_cap=cap, logit_scale=scale, return_entropy=True
            )
        for name, a, expected in zip(("logp", "entropy"), got, want, strict=True):
            assert_bitwise_equal(a, expected, f"{name}, {backend}")
