"""Which way computes a k-tree of few rows, by a model of what each takes (alignkit/ops/linear/cost.py)."""

import pytest
import torch

pytest.importorskip("triton")
from alignkit.ops.linear import cost, cuda, hopper, triton
from alignkit.ops.linear.cublaslt import ladder, rounded
from alignkit.runtime import dispatch

from .helpers import product

PRODUCTS = [
    (m, n, k, leaves)
    for m in (1, 9, 16, 17, 61, 64, 65, 96, 97, 128, 129, 192, 193, 256)
    for n in (8, 896, 4096, 8192, 16896)
    for k in (128, 896, 4096, 11008)
    for leaves in (2, 4, 8)
]


def chosen(m, n, k, leaves):
    """The kernel, and how the leaves are dealt out to blocks of CUDA's, how many of a cut tile its owner keeps, or Triton's tile."""
    p = product(m, k, n, leaves=leaves)
    name = dispatch.choose("linear", p).name
    if name == "tree":
        return name, cuda.dealt(p)
    if name == "hopper":
        return name, hopper.cut_of(p).kept
    assert name == "tiles"
    tile = triton.schedule(m, n, k, leaves, torch.bfloat16)
    return name, cost.Tile(*(tile[side] for side in ("BLOCK_M", "BLOCK_N", "BLOCK_K", "parts")))


@pytest.mark.parametrize("m, n, k, leaves", PRODUCTS)
def test_the_least_runs(m, n, k, leaves):
    (name, how), rows = chosen(m, n, k, leaves), rounded(m)
    us = {("tree", each): cuda.cost_of(rows, n, k, leaves, each) for each in cuda.sensible(rows, leaves)}
    us |= {("tiles", each): cost.tiles(rows, n, k, leaves, each) for each in cost.all_tiles(rows, leaves)}
    if m > cost.MANY_ROWS:
        blocks = cost.MULTIPROCESSORS
        for cut in cost.cuts(m, n, leaves, blocks):
            us["hopper", cut.kept] = cost.MANY.of(m, n, k, leaves, blocks, cut)
    assert us[name, how] == min(us.values()) > 3
    assert name != "tree" or how in cuda.deals(m, leaves)


@pytest.mark.parametrize("n, k, leaves", [(1024, 4096, 8), (5120, 3456, 2), (4096, 1024, 2), (8192, 14784, 4)])
def test_nothing_new_runs_between_the_rows_of_the_ladder(n, k, leaves):
    foreseen = {m: chosen(m, n, k, leaves) for m in ladder(cuda.FEW)}
    assert all(chosen(m, n, k, leaves) == foreseen[rounded(m)] for m in range(1, cuda.FEW + 1))


def test_blocks_have_rows():
    """Neither half of a block's rows nor the second of a cluster's blocks is outside."""
    for m in range(1, cuda.FEW + 1):
        for parts, width, same_outputs in cuda.sensible(m, 8):
            assert parts == 1 or m <= (2 if same_outputs else 1) * width
            assert m > width or not same_outputs
            assert m <= 64 or width == 96 or m > 96


def test_leaves_that_a_step_does_not_divide_take_longer():
    """A step of 128 ends with the leaf: 28 of 128 and one of 112 are 231 of 16."""
    tile = cost.Tile(16, 64, 128, 2)
    assert cost.tiles(10, 8192, 4 * 3696, 4, tile) > 1.7 * cost.tiles(10, 8192, 4 * 3712, 4, tile)
    assert cuda.deal(10, 8192, 4 * 3696, 4) is not None


def test_products_of_the_measurements():
    """Of the ways that were measured on an H200 the fastest, or within a few percent of it."""
    assert cuda.deal(5, 1536, 4480, 4) == cuda.Deal(4)
    assert cuda.deal(49, 896, 896, 8) == cuda.Deal(1)
    assert cuda.deal(67, 1536, 768, 4) == cuda.Deal(4, 96)
    assert cuda.deal(119, 4096, 4096, 8) == cuda.Deal(4, 128)
    assert cuda.deal(173, 2560, 4864, 4) == cuda.Deal(2, 96, True)
    assert cuda.deal(3, 5120, 17408, 8) is None
    assert cuda.deal(139, 1024, 512, 2) is None


def test_no_k_or_no_rows():
    for m, k in ((0, 128), (3, 0)):
        assert triton.schedule(m, 64, k, 8, torch.bfloat16)["parts"] <= 8
