"""qk_norm_rope gives the bits of rms_norm followed by rope, for every shape, stride and rotary_dim, on each device.

test_qk_norm_rope_cuda.py imports the helpers.
"""

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given

from alignkit import ops
from alignkit.errors import UnsupportedError
from alignkit.ops import library
from alignkit.runtime import dispatch
from alignkit.testing import assert_bitwise_equal

from .helpers import CPU, dtypes, randn, seeds

POSITIONS = 50


def separate(q, k, q_weight, k_weight, eps, positions, table, *, rotary_dim=None, zero_centered=False):
    normed = (ops.rms_norm(x, weight, eps, zero_centered=zero_centered) for x, weight in ((q, q_weight), (k, k_weight)))
    return tuple(ops.rope(x, positions, table, rotary_dim=rotary_dim) for x in normed)


def assert_same(*arguments, **options):
    found = ops.qk_norm_rope(*arguments, **options)
    for name, a, b in zip("qk", found, separate(*arguments, **options), strict=True):
        assert_bitwise_equal(a, b, name)
    return found


def views(t, heads, kv_heads, dim, dtype, layout):
    """Return queries and keys in a memory layout, such as views of a joint QKV projection."""
    if layout == "joint":  # fused QKV rows
        return (
            randn(t, (heads + 2 * kv_heads) * dim, dtype=dtype)
            .view(t, heads + 2 * kv_heads, dim)
            .split([heads, kv_heads, kv_heads], 1)[:2]
        )
    if layout == "by head":
        return tuple(randn(n, t, dim, dtype=dtype).transpose(0, 1) for n in (heads, kv_heads))
    if layout == "by column":  # no unit stride
        return tuple(randn(t, dim, n, dtype=dtype).transpose(1, 2) for n in (heads, kv_heads))
    if layout == "odd":  # addresses and strides not aligned to 16 bytes
        return tuple(randn(t, n, dim + 3, dtype=dtype)[..., 1 : dim + 1] for n in (heads, kv_heads))
    return tuple(randn(t, n, dim, dtype=dtype) for n in (heads, kv_heads))


LAYOUTS = ("dense", "joint", "by head", "by column", "odd")


@given(
    t=st.integers(0, 20),
    heads=st.integers(0, 5),
    kv_heads=st.integers(0, 3),
    half=st.one_of(st.integers(1, 70), st.sampled_from([32, 64, 128])),
    rotated=st.floats(0, 1),
    zero_centered=st.booleans(),
    layout=st.sampled_from(LAYOUTS),
    dtype=dtypes,
    seed=seeds,
)
def test_bits_equal_those_of_the_separate_ops(t, heads, kv_heads, half, rotated, zero_centered, layout, dtype, seed):
    torch.manual_seed(seed)
    rotary = 2 * max(1, round(half * rotated))
    q, k = views(t, heads, kv_heads, 2 * half, dtype, layout)
    weights = randn(2 * half, dtype=dtype), randn(2 * half + 1, dtype=dtype)[1:]
    table = ops.rope_table(rotary, POSITIONS, 1e4, q.device)
    given = q, k, *weights, 1e-6, torch.randint(0, POSITIONS, (t,)), table
    found = assert_same(*given, rotary_dim=rotary, zero_centered=zero_centered)
    assert all(a.is_contiguous() for a in found)
    if rotary == 2 * half:
        assert_same(*given, zero_centered=zero_centered)
    if not zero_centered:
        for a, b in zip(library.qk_norm_rope(*given, rotary), found, strict=True):
            assert_bitwise_equal(a, b, "the custom op")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("dim, rotary", [(128, 128), (128, 64), (96, 96), (256, 64), (80, 20), (2, 2)])
def test_special_values_give_the_bits_of_the_separate_ops(dim, rotary, dtype):
    """Use zeros of both signs, values whose squares overflow or underflow, NaN and infinity."""
    torch.manual_seed(dim + rotary)
    joint = randn(64, 6, dim) * 10.0 ** torch.randint(-25, 20, (64, 6, 1))
    joint = torch.where(torch.rand(joint.shape) < 0.1, -0.0, joint)
    joint[3, 1, 0], joint[7, 5, dim - 1], joint[9, 2, 1], joint[11] = float("nan"), float("inf"), -float("inf"), -0.0
    joint = joint.to(dtype)
    weights = [torch.where(torch.rand(dim) < 0.1, -0.0, randn(dim)).to(dtype) for _ in range(2)]
    positions = torch.randint(0, POSITIONS, (64,)) * (torch.arange(64) % 4 > 0)  # position 0 does not rotate
    table = ops.rope_table(rotary, POSITIONS, 1e4, joint.device)
    for eps in (1e-6, 1e-37):
        found = assert_same(joint[:, :4], joint[:, 4:], *weights, eps, positions, table, rotary_dim=rotary)
        assert [bool(a.isnan().any()) for a in found] == [True, True]


def test_result_is_rounded_between_norm_and_rotation():
    """Without this rounding, at least one bit of these elements would differ."""
    q, k, weight = randn(40, 4, 64, dtype=torch.bfloat16, seed=3), randn(40, 2, 64), randn(64, dtype=torch.bfloat16)
    positions, table = torch.randint(1, POSITIONS, (40,)), ops.rope_table(64, POSITIONS, 1e4, q.device)
    rounded, _ = ops.qk_norm_rope(q, k.bfloat16(), weight, weight, 1e-6, positions, table)
    exact, _ = ops.qk_norm_rope(q.float(), k, weight.float(), weight.float(), 1e-6, positions, table)
    assert not torch.equal(rounded, exact.bfloat16())


@pytest.mark.skipif(not CPU, reason="compares backends of the CPU")
def test_backends_agree():
    q, k, weight = randn(9, 4, 24, seed=1), randn(9, 2, 24), randn(24)
    for dtype in (torch.float32, torch.bfloat16):
        seen = []
        for backend in ("cpu", "reference"):
            with dispatch.use(backend):
                table = ops.rope_table(16, POSITIONS, 1e4)
                given = q.to(dtype), k.to(dtype), weight.to(dtype), weight.to(dtype), 1e-6, torch.arange(9), table
                seen.append(ops.qk_norm_rope(*given, rotary_dim=16, zero_centered=True))
        for a, b in zip(*seen, strict=True):
            assert_bitwise_equal(a, b)


def test_tokens_are_independent():
    q, k, weight = randn(70, 4, 64, dtype=torch.bfloat16, seed=5), randn(70, 2, 64).bfloat16(), randn(64).bfloat16()
    positions, table = torch.randint(0, POSITIONS, (70,)), ops.rope_table(64, POSITIONS, 1e4, q.device)

    def run(rows):
        return ops.qk_norm_rope(q[rows], k[rows], weight, weight, 1e-6, positions[rows], table)

    whole, order = run(slice(None)), torch.randperm(70)
    for rows in (order, slice(0, 1), slice(33, 70), order[:17]):
        for a, b in zip(run(rows), whole, strict=True):
            assert_bitwise_equal(a, b[rows])


def gradients(run, leaves, dy):
    leaves = [t.detach().requires_grad_() for t in leaves]
    results, dy = zip(*((y, d) for y, d in zip(run(*leaves), dy, strict=True) if d is not None), strict=True)
    return torch.autograd.grad(results, leaves, dy, allow_unused=True)


def assert_same_gradients(leaves, dy, eps, positions, table, **options):
    """Check the gradients of queries, keys and norm weights against those of the separate ops; return them."""
    rest = eps, positions, table
    found = gradients(lambda *given: ops.qk_norm_rope(*given, *rest, **options), leaves, dy)
    want = gradients(lambda *given: separate(*given, *rest, **options), leaves, dy)
    for name, a, b in zip(("q", "k", "q_weight", "k_weight"), found, want, strict=True):
        assert (a is None) == (b is None), name
        if a is not None:
            assert_bitwise_equal(a, b, f"the gradient of {name}")
    return found


@given(
    t=st.integers(0, 40),
    heads=st.integers(0, 5),
    kv_heads=st.integers(0, 3),
    half=st.one_of(st.integers(1, 70), st.sampled_from([32, 64, 128])),
    rotated=st.floats(0, 1),
    zero_centered=st.booleans(),
    layouts=st.tuples(st.sampled_from(LAYOUTS), st.sampled_from(LAYOUTS)),
    without=st.sampled_from([None, None, "q", "k"]),
    dtype=dtypes,
    seed=seeds,
)
def test_gradients_equal_those_of_the_separate_ops(
    t, heads, kv_heads, half, rotated, zero_centered, layouts, without, dtype, seed
):
    torch.manual_seed(seed)
    rotary = 2 * max(1, round(half * rotated))
    x, dy = (views(t, heads, kv_heads, 2 * half, dtype, layout) for layout in layouts)
    weights = randn(2 * half, dtype=dtype), randn(2 * half + 1, dtype=dtype)[1:]
    table = ops.rope_table(rotary, POSITIONS, 1e4, x[0].device)
    dy = [None if without == name else d for name, d in zip("qk", dy, strict=True)]
    given = (*x, *weights), dy, 1e-6, torch.randint(0, POSITIONS, (t,)), table
    assert_same_gradients(*given, rotary_dim=rotary, zero_centered=zero_centered)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("dim, rotary", [(128, 128), (128, 64), (96, 96), (80, 20)])
def test_gradients_of_special_values_equal_those_of_the_separate_ops(dim, rotary, dtype):
    """Both the inputs and the incoming gradients hold special values."""
    torch.manual_seed(dim + rotary)
    joint = randn(64, 12, dim) * 10.0 ** torch.randint(-25, 20, (64, 12, 1))
    joint = torch.where(torch.rand(joint.shape) < 0.1, -0.0, joint)
    joint[3, 1, 0], joint[7, 5, dim - 1], joint[9, 8, 1], joint[11] = float("nan"), float("inf"), -float("inf"), -0.0
    q, k, dyq, dyk = joint.to(dtype).split([4, 2, 4, 2], 1)
    weights = [torch.where(torch.rand(dim) < 0.1, -0.0, randn(dim)).to(dtype) for _ in range(2)]
    positions = torch.randint(0, POSITIONS, (64,)) * (torch.arange(64) % 4 > 0)
    table = ops.rope_table(rotary, POSITIONS, 1e4, joint.device)
    # Separate calls keep NaN out of the weight gradients of the rows before and after.
    for rows in (slice(0, 3), slice(3, 12), slice(12, 64)):
        leaves = q[rows], k[rows], *weights
        assert_same_gradients(leaves, (dyq[rows], dyk[rows]), 1e-6, positions[rows], table, rotary_dim=rotary)


def test_gradients_match_the_formula():
    """The float64 bound allows one bf16 rounding each of norm, rotation and gradient."""
    q, k = randn(30, 4, 64, dtype=torch.bfloat16, seed=7), randn(30, 2, 64, dtype=torch.bfloat16, seed=8)
    weights = [randn(64, dtype=torch.bfloat16, seed=9), randn(64, dtype=torch.bfloat16, seed=10)]
    dy = [randn(*t.shape, dtype=torch.bfloat16, seed=i) for i, t in enumerate((q, k))]
    positions, table = torch.arange(30), ops.rope_table(64, POSITIONS, 1e4, q.device)

    def formula(q, k, q_weight, k_weight):
        cos, sin = table.double()[positions][:, None].chunk(2, -1)
        for x, w in ((q, q_weight), (k, k_weight)):
            a, b = (x * (x.square().mean(-1, keepdim=True) + 1e-6).rsqrt() * w).chunk(2, -1)
            yield torch.cat([a * cos - b * sin, b * cos + a * sin], -1)

    exact = gradients(formula, [t.double() for t in (q, k, *weights)], [d.double() for d in dy])
    found = gradients(lambda *given: ops.qk_norm_rope(*given, 1e-6, positions, table), (q, k, *weights), dy)
    for a, b in zip(found, exact, strict=True):
        assert (a.double() - b).abs().max() <= 4 * 2**-8 * b.abs().max()


def test_custom_op_has_no_gradients():
    given = [randn(3, 4, 8), randn(3, 2, 8).requires_grad_(), randn(8), randn(8)]
    rest = 1e-6, torch.arange(3), ops.rope_table(8, POSITIONS, 1e4, given[0].device)
    with pytest.raises(UnsupportedError, match="^alignkit::qk_norm_rope: unsupported in a backward pass"):
        sum(a.sum() for a in library.qk_norm_rope(*given, *rest)).backward()
