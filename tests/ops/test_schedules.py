"""On CUDA a schedule is free and a bit is not: every tile gives the same bytes."""
import pytest
import torch

from alignkit.testing import assert_bitwise_equal

from .helpers import CPU, randn

pytestmark = pytest.mark.skipif(CPU, reason="the schedules of the Triton backend need a GPU")

TILES = {torch.bfloat16: [(16, 32, 128, 4, 3), (16, 128, 32, 4, 2), (64, 32, 128, 4, 3), (64, 64, 64, 4, 3),
                          (64, 128, 64, 8, 3), (128, 128, 64, 8, 3), (128, 64, 16, 4, 3), (32, 64, 64, 4, 3)],
         torch.float32: [(16, 32, 32, 4, 2), (32, 64, 16, 4, 2)]}


@pytest.mark.parametrize("m,n,k", [(1, 512, 4096), (129, 1000, 1536), (300, 257, 384), (2134, 640, 1024)])
@pytest.mark.parametrize("leaves", [1, 8])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_matmul(m, n, k, leaves, dtype):
    from alignkit.ops.linear.triton import matmul
    a, b = randn(m, k, dtype=dtype, seed=m), randn(n, k, dtype=dtype)
    want = torch.empty(m, n)
    matmul(a, b, leaves, None, want, False)
    for bm, bn, bk, warps, stages in TILES[dtype]:
        got = torch.full((m, n), float("nan"))
        matmul(a, b, leaves, None, got, False, BLOCK_M=bm, BLOCK_N=bn, BLOCK_K=bk, num_warps=warps, num_stages=stages)
        assert_bitwise_equal(got, want, f"tile {bm}x{bn}x{bk}")
    if leaves == 1:
        got = torch.empty(n, m)
        matmul(b, a, 1, None, got, False)
        assert_bitwise_equal(got.t().contiguous(), want, "operands swapped")


@pytest.mark.parametrize("dim,heads,kv", [(64, 8, 4), (128, 16, 8), (128, 7, 1)])
def test_attention(dim, heads, kv):
    from alignkit.ops.attention.triton import _launch
    lens = [1, 63, 64, 65, 700]
    starts = torch.tensor([0, *lens]).cumsum(0)
    q, k, v = (randn(sum(lens), h, dim, dtype=torch.bfloat16, seed=h) for h in (heads, kv, kv))
    want = _launch(q, k, v, starts, None, None, 0, dim**-0.5, True, block_m=64)
    for block_m in (16, 32, 128):
        got = _launch(q, k, v, starts, None, None, 0, dim**-0.5, True, block_m=block_m)
        for name, a, b in zip(("out", "m", "l"), got, want):
            assert_bitwise_equal(a, b, f"{name}, {block_m} rows a tile")


@pytest.mark.parametrize("m", [1, 64, 1024])
@pytest.mark.parametrize("n,k", [(6144, 4096), (4096, 4096), (151936, 1024)])
def test_cublas_is_a_chain_or_known_not_to_be(m, n, k):
    """Where cuBLAS does not split k its bits are the chain's; this names where it does not on this machine."""
    from alignkit.ops.linear import matmul
    a, b = randn(m, k, dtype=torch.bfloat16, seed=m), randn(n, k, dtype=torch.bfloat16)
    ours, theirs = matmul(a, b, out_dtype=torch.bfloat16), a @ b.t()
    share = (ours == theirs).float().mean().item()
    print(f"cuBLAS at M={m} N={n} K={k}: {share:.4%} of the chain's bf16 values")
    assert share > 0.9
