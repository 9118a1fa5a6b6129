"""On CUDA a schedule is free and a bit is not: every tile gives the same bytes."""
import pytest
import torch

from alignkit.testing import assert_bitwise_equal

from .helpers import CPU, randn

pytestmark = pytest.mark.skipif(CPU, reason="the schedules of the Triton backend need a GPU")

# BLOCK_M, BLOCK_N, BLOCK_K, warps, stages, parts
TILES = {torch.bfloat16: [(16, 32, 128, 4, 3, 1), (16, 128, 32, 4, 2, 8), (64, 32, 128, 4, 3, 4), (64, 64, 64, 4, 3, 2),
                          (64, 128, 64, 8, 3, 1), (128, 128, 64, 8, 3, 8), (128, 64, 16, 4, 3, 1), (32, 64, 64, 4, 3, 4)],
         torch.float32: [(16, 32, 32, 4, 2, 1), (32, 64, 16, 4, 2, 4)]}


@pytest.mark.parametrize("m,n,k", [(1, 512, 4096), (129, 1000, 1536), (300, 257, 384), (2134, 640, 1024)])
@pytest.mark.parametrize("leaves", [1, 8])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_matmul(m, n, k, leaves, dtype):
    from alignkit.ops.linear.triton import tiles
    a, b, bias = randn(m, k, dtype=dtype, seed=m), randn(n, k, dtype=dtype), randn(n, dtype=dtype)
    want = torch.empty(m, n)
    tiles(a, b, leaves, bias, want, False)
    for bm, bn, bk, warps, stages, parts in TILES[dtype]:
        got = torch.full((m, n), float("nan"))
        tiles(a, b, leaves, bias, got, False, BLOCK_M=bm, BLOCK_N=bn, BLOCK_K=bk, num_warps=warps, num_stages=stages,
              parts=parts)
        assert_bitwise_equal(got, want, f"tile {bm}x{bn}x{bk}, {parts} parts")
    if leaves == 1:
        tiles(a, b, 1, None, want, False)
        got = torch.empty(n, m)
        tiles(b, a, 1, None, got, False)
        assert_bitwise_equal(got.t().contiguous(), want, "operands swapped")
