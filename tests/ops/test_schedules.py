"""Schedules of Triton's GEMMs on a GPU: every tile gives the same bits, and hopper.py gives the bits of the tiles.

A new tile of the Triton backend is added to TILES.
"""

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings

from alignkit.ops.linear import matmul
from alignkit.ops.linear.problem import Product
from alignkit.runtime import families
from alignkit.testing import assert_bitwise_equal

from .helpers import CPU, by_hopper, randn, seeds

pytestmark = pytest.mark.skipif(CPU, reason="the schedules of the Triton backend need a GPU")

# BLOCK_M, BLOCK_N, BLOCK_K, warps, stages, parts
TILES = {
    torch.bfloat16: [
        (16, 32, 128, 4, 3, 1),
        (16, 128, 32, 4, 2, 8),
        (64, 32, 128, 4, 3, 4),
        (64, 64, 64, 4, 3, 2),
        (64, 128, 64, 8, 3, 1),
        (128, 128, 64, 8, 3, 8),
        (128, 64, 16, 4, 3, 1),
        (32, 64, 64, 4, 3, 4),
    ],
    torch.float32: [(16, 32, 32, 4, 2, 1), (32, 64, 16, 4, 2, 4)],
}


@pytest.mark.parametrize("m,n,k", [(1, 512, 4096), (129, 1000, 1536), (300, 257, 384), (2134, 640, 1024)])
@pytest.mark.parametrize("leaves", [1, 8])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_every_tile_gives_the_same_bits(m, n, k, leaves, dtype):
    from alignkit.ops.linear.triton_backend import tiles

    a, b, bias = randn(m, k, dtype=dtype, seed=m), randn(n, k, dtype=dtype), randn(n, dtype=dtype)
    want = torch.empty(m, n)
    tiles(a, b, leaves, bias, want, False)
    for bm, bn, bk, warps, stages, parts in TILES[dtype]:
        got = torch.full((m, n), float("nan"))
        tiles(
            a,
            b,
            leaves,
            bias,
            got,
            False,
            BLOCK_M=bm,
            BLOCK_N=bn,
            BLOCK_K=bk,
            num_warps=warps,
            num_stages=stages,
            parts=parts,
        )
        assert_bitwise_equal(got, want, f"tile {bm}x{bn}x{bk}, {parts} parts")
    if leaves == 1:
        tiles(a, b, 1, None, want, False)
        got = torch.empty(n, m)
        tiles(b, a, 1, None, got, False)
        assert_bitwise_equal(got.t().contiguous(), want, "operands swapped")


def assert_hopper(a, b, leaves, bias, dtype):
    """Check that hopper.py computes the product with the bits of `tiles`, for every cut of the last wave's tiles."""
    from alignkit.ops.linear import hopper
    from alignkit.ops.linear.triton_backend import tiles

    want = torch.empty(a.shape[0], b.shape[0], dtype=dtype)
    tiles(a, b, leaves, bias, want, False)
    for _ in range(3):  # a missing barrier may not show in each run
        got = torch.full_like(want, float("nan"))
        assert by_hopper(a, b, leaves, bias, got)
        assert_bitwise_equal(got, want, f"{tuple(a.shape)} x {tuple(b.shape)}, {leaves} leaves")
    p = Product.of(families.TRITON, a, b, leaves, bias, want, False)
    for cut in hopper.ways(p):
        run = hopper.prepare_cut(p, cut)
        for _ in range(2):  # stale flags of the first run would break the second
            got = torch.full_like(want, float("nan"))
            run(a, b, bias, got)
            assert_bitwise_equal(got, want, f"{tuple(a.shape)} x {tuple(b.shape)}, {leaves} leaves, {cut}")
    return want


@settings(max_examples=30)
@given(
    m=st.integers(1, 3000),
    n=st.integers(1, 300),
    slices=st.integers(1, 28),
    leaves=st.sampled_from([1, 2, 4, 8]),
    bias=st.booleans(),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    pad=st.sampled_from([0, 8]),
    seed=seeds,
)
def test_hopper_has_the_bits_of_tiles(m, n, slices, leaves, bias, dtype, pad, seed):
    n, k = 8 * n, 16 * slices * leaves
    torch.manual_seed(seed)
    a, b = (randn(rows, k + pad, dtype=torch.bfloat16)[:, :k] for rows in (m, n))
    bias = randn(n, dtype=torch.bfloat16) if bias else None
    want = assert_hopper(a, b, leaves, bias, dtype)
    assert_bitwise_equal(matmul(a, b, leaves=leaves, bias=bias, out_dtype=dtype), want, "the chosen kernel")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("leaves", [1, 8])
def test_hopper_has_the_bits_of_tiles_for_special_values(leaves, dtype):
    a, b, bias = (randn(*shape, dtype=torch.bfloat16) for shape in ((300, 512), (264, 512), (264,)))
    for t in (a, b):
        t[0], t[1], t[2] = 0.0, -0.0, -t[2].abs()
    a[3, 5], a[4, 511], a[5, 64] = float("inf"), float("nan"), -float("inf")
    a[6] *= 2.0**-70
    b[6] *= 2.0**-70
    bias[:3] = -0.0
    assert_hopper(a, b, leaves, None, dtype)
    assert_hopper(a, b, leaves, bias, dtype)


def test_more_than_2_31_elements():
    a, b = randn(2**15 + 72, 512, dtype=torch.bfloat16), randn(2**16 + 8, 512, dtype=torch.bfloat16)
    got = matmul(a, b, leaves=8, out_dtype=torch.bfloat16)
    for rows in (slice(0, 100), slice(-100, None)):
        assert_bitwise_equal(got[rows], matmul(a[rows], b, leaves=8, out_dtype=torch.bfloat16), f"rows {rows}")


@pytest.mark.parametrize(
    "case", ["fp32", "mixed", "leaf", "odd rows", "odd out", "address", "expanded", "by column", "no k"]
)
def test_unsupported_operands_use_tiles(case):
    m, n, k = 300, 100 if case == "odd out" else 264, 8 * (24 if case == "leaf" else 64)
    a, b = randn(m, k, dtype=torch.bfloat16), randn(n, k, dtype=torch.bfloat16)
    if case == "fp32":
        a, b = a.float(), b.float()
    elif case == "mixed":
        a = a.float()
    elif case == "odd rows":
        a = randn(m, k + 4, dtype=torch.bfloat16)[:, :k]
    elif case == "address":
        a = randn(m, k + 8, dtype=torch.bfloat16).as_strided((m, k), (k + 8, 1), 4)
    elif case == "expanded":
        a = a[:1].expand(m, k)
    elif case == "by column":
        b = randn(k, n, dtype=torch.bfloat16).t()
    elif case == "no k":
        a, b = a[:, :0], b[:, :0]
    out = torch.full((m, n), 7.0, dtype=torch.bfloat16)
    assert not by_hopper(a, b, 8, None, out)
    assert bool((out == 7).all())
    if case not in ("no k", "leaf"):  # the contract's leaves have lengths that are multiples of 16
        got = matmul(a, b, leaves=8)
        assert_bitwise_equal(got[:40], matmul(a[:40].contiguous(), b.contiguous(), leaves=8), "some of the rows alone")


@pytest.mark.parametrize("m", [40, 300])
def test_cached_launch_is_used_only_for_its_own_problem(m):
    """Address, strides, dtypes and bias change between calls; each result equals that of new, contiguous operands."""
    n, k = 264, 512
    pool, b, bias = (randn(*shape, dtype=torch.bfloat16) for shape in ((m * 1040,), (n, k), (2 * n,)))
    for _ in range(2):
        for offset, stride, dtype, c in (
            (0, (k, 1), torch.float32, None),
            (8, (k, 1), torch.float32, None),
            (1, (k, 1), torch.float32, None),
            (0, (2 * k, 2), torch.float32, None),
            (0, (1, m), torch.float32, None),
            (0, (k + 8, 1), torch.bfloat16, bias[:n]),
            (0, (k + 8, 1), torch.bfloat16, bias[1 : n + 1]),
            (0, (k + 8, 1), torch.bfloat16, bias[::2]),
        ):
            a = pool.as_strided((m, k), stride, offset)
            for leaves in (1, 8):
                got = matmul(a, b, leaves=leaves, bias=c, out_dtype=dtype)
                want = matmul(a.clone(memory_format=torch.contiguous_format), b, leaves=leaves, out_dtype=torch.float32)
                want = (want if c is None else want + c.float()).to(dtype)
                assert_bitwise_equal(got, want, f"offset {offset}, strides {stride}, {leaves} leaves")
