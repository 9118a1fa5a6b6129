"""Choice of the schedule for a skinny k-tree by the cost model of alignkit/ops/linear/cost.py, without a GPU.

Choices affect speed alone. After a refit of the model's constants (benchmarks/fit_linear.py), update
`test_choice_matches_the_measurements`.
"""

import pytest
import torch

pytest.importorskip("triton")
from alignkit.ops.linear import cost, cuda_backend, hopper, triton_backend
from alignkit.ops.linear.cublaslt import round_up_rows, warmup_rows
from alignkit.runtime import dispatch

from .helpers import gemm

GEMMS = [
    (m, n, k, leaves)
    for m in (1, 9, 16, 17, 61, 64, 65, 96, 97, 128, 129, 192, 193, 256)
    for n in (8, 896, 4096, 8192, 16896)
    for k in (128, 896, 4096, 11008)
    for leaves in (2, 4, 8)
]


def chosen(m, n, k, leaves):
    """Return the kernel's name and its schedule.

    The schedule is the split of leaves over CTAs ("tree"), the leaves that the owner of a cut tile keeps ("hopper"), or
    Triton's tile ("tiles").
    """
    p = gemm(m, k, n, leaves=leaves)
    name = dispatch.choose("linear", p).name
    if name == "tree":
        return name, cuda_backend.split_of(p)
    if name == "hopper":
        return name, hopper.cut_of(p).kept
    assert name == "tiles"
    tile = triton_backend.schedule(m, n, k, leaves, torch.bfloat16)
    return name, cost.Tile(*(tile[side] for side in ("BLOCK_M", "BLOCK_N", "BLOCK_K", "parts")))


@pytest.mark.parametrize("m, n, k, leaves", GEMMS)
def test_cheapest_schedule_is_chosen(m, n, k, leaves):
    (name, schedule), rows = chosen(m, n, k, leaves), round_up_rows(m)
    us = {
        ("tree", each): cuda_backend.cost_of(rows, n, k, leaves, each)
        for each in cuda_backend.candidate_splits(rows, leaves)
    }
    us |= {("tiles", each): cost.tiles(rows, n, k, leaves, each) for each in cost.all_tiles(rows, leaves)}
    if m > cost.MANY_ROWS:
        blocks = cost.SM_COUNT
        for cut in cost.cuts(m, n, leaves, blocks):
            us["hopper", cut.kept] = cost.MANY.of(m, n, k, leaves, blocks, cut)
    assert us[name, schedule] == min(us.values())
    assert us[name, schedule] > 3  # the launch alone takes 3 us or more in each model
    assert name != "tree" or schedule in cuda_backend.splits(m, leaves)


@pytest.mark.parametrize("n, k, leaves", [(1024, 4096, 8), (5120, 3456, 2), (4096, 1024, 2), (8192, 14784, 4)])
def test_warmup_rows_cover_the_schedules_of_all_row_counts(n, k, leaves):
    decided = {m: chosen(m, n, k, leaves) for m in warmup_rows(cuda_backend.TREE_ROWS)}
    assert all(chosen(m, n, k, leaves) == decided[round_up_rows(m)] for m in range(1, cuda_backend.TREE_ROWS + 1))


def test_every_cta_has_rows():
    """Neither half of a CTA's rows nor the second CTA of a cluster is out of range."""
    for m in range(1, cuda_backend.TREE_ROWS + 1):
        for parts, width, same_outputs in cuda_backend.candidate_splits(m, 8):
            assert parts == 1 or m <= (2 if same_outputs else 1) * width
            assert m > width or not same_outputs
            assert m <= 64 or width == 96 or m > 96


def test_leaves_that_a_step_does_not_divide_cost_more():
    """A step does not cross leaves, so its length divides a leaf's.

    Leaves of 3696 allow steps of gcd(128, 3696) = 16, and take longer than leaves of 3712 with steps of 128.
    """
    tile = cost.Tile(16, 64, 128, 2)
    assert cost.tiles(10, 8192, 4 * 3696, 4, tile) > 1.7 * cost.tiles(10, 8192, 4 * 3712, 4, tile)
    assert cuda_backend.best_split(10, 8192, 4 * 3696, 4) is not None


def test_choice_matches_the_measurements():
    """Choices equal the field `by` of these GEMMs' rows in benchmarks/results/h200/matmul.jsonl, in which `draw` is 1.

    None: another kernel is faster. After a refit by benchmarks/fit_linear.py, measure them again on an H200 with
    ``make gpu-matmul MATMUL_ARGS="--draw 1"``.
    """
    assert cuda_backend.best_split(5, 1536, 4480, 4) == cuda_backend.Split(4)
    assert cuda_backend.best_split(49, 896, 896, 8) == cuda_backend.Split(1)
    assert cuda_backend.best_split(67, 1536, 768, 4) == cuda_backend.Split(4, 96)
    assert cuda_backend.best_split(119, 4096, 4096, 8) == cuda_backend.Split(4, 128)
    assert cuda_backend.best_split(173, 2560, 4864, 4) == cuda_backend.Split(2, 96, True)
    assert cuda_backend.best_split(3, 5120, 17408, 8) is None
    assert cuda_backend.best_split(139, 1024, 512, 2) is None


def test_schedule_exists_without_k_or_rows():
    for m, k in ((0, 128), (3, 0)):
        assert triton_backend.schedule(m, 64, k, 8, torch.bfloat16)["parts"] <= 8
