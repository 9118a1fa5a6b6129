"""Norms of queries and keys and their rotation in one op have the bytes of the ops one after the other, whatever the
shape, the strides and the rotated part."""

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
    """Queries and keys, as a projection leaves them or otherwise."""
    if layout == "joint":  # rows of queries, keys and values
        return (
            randn(t, (heads + 2 * kv_heads) * dim, dtype=dtype)
            .view(t, heads + 2 * kv_heads, dim)
            .split([heads, kv_heads, kv_heads], 1)[:2]
        )
    if layout == "by head":
        return tuple(randn(n, t, dim, dtype=dtype).transpose(0, 1) for n in (heads, kv_heads))
    if layout == "by column":  # no unit stride
        return tuple(randn(t, dim, n, dtype=dtype).transpose(1, 2) for n in (heads, kv_heads))
    if layout == "odd":  # addresses and strides that are no multiples of 16 bytes
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
def test_bits_are_those_of_the_separate_ops(t, heads, kv_heads, half, rotated, zero_centered, layout, dtype, seed):
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
def test_special_values(dim, rotary, dtype):
    """Zeros of both signs, what overflows and underflows when it is squared, NaN and infinity: in one op as in two."""
    torch.manual_seed(dim + rotary)
    joint = randn(64, 6, dim) * 10.0 ** torch.randint(-25, 20, (64, 6, 1))
    joint = torch.where(torch.rand(joint.shape) < 0.1, -0.0, joint)
    joint[3, 1, 0], joint[7, 5, dim - 1], joint[9, 2, 1], joint[11] = float("nan"), float("inf"), -float("inf"), -0.0
    joint = joint.to(dtype)
    weights = [torch.where(torch.rand(dim) < 0.1, -0.0, randn(dim)).to(dtype) for _ in range(2)]
    positions = torch.randint(0, POSITIONS, (64,)) * (torch.arange(64) % 4 > 0)  # position 0 turns by nothing
    table = ops.rope_table(rotary, POSITIONS, 1e4, joint.device)
    for eps in (1e-6, 1e-37):
        found = assert_same(joint[:, :4], joint[:, 4:], *weights, eps, positions, table, rotary_dim=rotary)
        assert [bool(a.isnan().any()) for a in found] == [True, True]


def test_it_is_rounded_between_norm_and_rotation():
    """Else a bit would be another, of this many elements."""
    q, k, weight = randn(40, 4, 64, dtype=torch.bfloat16, seed=3), randn(40, 2, 64), randn(64, dtype=torch.bfloat16)
    positions, table = torch.randint(1, POSITIONS, (40,)), ops.rope_table(64, POSITIONS, 1e4, q.device)
    rounded, _ = ops.qk_norm_rope(q, k.bfloat16(), weight, weight, 1e-6, positions, table)
    exact, _ = ops.qk_norm_rope(q.float(), k, weight.float(), weight.float(), 1e-6, positions, table)
    assert not torch.equal(rounded, exact.bfloat16())


@pytest.mark.skipif(not CPU, reason="backends of the CPU")
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


def test_a_token_does_not_know_of_others():
    q, k, weight = randn(70, 4, 64, dtype=torch.bfloat16, seed=5), randn(70, 2, 64).bfloat16(), randn(64).bfloat16()
    positions, table = torch.randint(0, POSITIONS, (70,)), ops.rope_table(64, POSITIONS, 1e4, q.device)

    def run(rows):
        return ops.qk_norm_rope(q[rows], k[rows], weight, weight, 1e-6, positions[rows], table)

    whole, order = run(slice(None)), torch.randperm(70)
    for rows in (order, slice(0, 1), slice(33, 70), order[:17]):
        for a, b in zip(run(rows), whole, strict=True):
            assert_bitwise_equal(a, b[rows])


@pytest.mark.parametrize("leaf", ["q", "k", "q_weight", "k_weight"])
def test_gradients_are_refused(leaf):
    given = {"q": randn(3, 4, 8), "k": randn(3, 2, 8), "q_weight": randn(8), "k_weight": randn(8)}
    given[leaf].requires_grad_()
    rest = 1e-6, torch.arange(3), ops.rope_table(8, POSITIONS, 1e4, given["q"].device)
    found = ops.qk_norm_rope(*given.values(), *rest)
    for a, b in zip(found, separate(*given.values(), *rest), strict=True):
        assert_bitwise_equal(a.detach(), b.detach())
    with pytest.raises(UnsupportedError, match="^qk_norm_rope: forward only; rms_norm and rope have gradients"):
        sum(a.sum() for a in found).backward()
    with pytest.raises(UnsupportedError, match="^alignkit::qk_norm_rope: forward only"):
        sum(a.sum() for a in library.qk_norm_rope(*given.values(), *rest)).backward()
