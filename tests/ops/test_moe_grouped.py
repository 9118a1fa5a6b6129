"""Problems that the grouped MoE kernels accept, and their (row, expert) pairs. No GPU is needed."""

import pytest
import torch

pytest.importorskip("triton")
from alignkit.ops.moe_experts.grouped import MAX_EXPERTS
from alignkit.ops.moe_experts.pairs import pairs
from alignkit.ops.moe_experts.problem import Grouped, Matrices
from alignkit.runtime import dispatch, families
from alignkit.runtime.operands import operand

OPS = ("moe_products", "moe_gated", "moe_gradients")


def problem(b, *, a_dtype=torch.bfloat16, out=None, experts=4):
    a = torch.empty(8, 32, dtype=a_dtype, device="meta")
    out = torch.empty(8, 64, dtype=a_dtype, device="meta") if out is None else out
    return Grouped(families.TRITON, 0, operand(a), Matrices(b).operand(), operand(out), experts, 1, 8, False)  # pyright: ignore[reportArgumentType]


def weights(*shape, dtype=torch.bfloat16):
    return torch.empty(*shape, dtype=dtype)


@pytest.mark.parametrize("op", OPS)
def test_grouped_kernels_accept_stacked_and_listed_matrices(op):
    for b in (weights(4, 64, 32), [weights(64, 32) for _ in range(4)], weights(4, 32, 64).mT):
        assert dispatch.choose(op, problem(b)).name == "grouped"
        assert dispatch.choose(op, problem(b)._replace(backend=families.NATIVE)).name == "each"


@pytest.mark.parametrize(
    "reason,p",
    [
        (
            "scattered: must be no (all experts' matrices with equal strides and 16-byte alignment), got yes",
            lambda: problem([weights(64, 32), weights(32, 64).t()]),
        ),
        (
            "dtype: must be equal for both operands, got fp32 and bf16",
            lambda: problem(weights(4, 64, 32), a_dtype=torch.float32),
        ),
        (
            f"experts: must be at most {MAX_EXPERTS}, got {MAX_EXPERTS + 1}",
            lambda: problem(weights(4, 64, 32), experts=MAX_EXPERTS + 1),
        ),
        (
            "out: stride of the last dimension must be 1, got 8",
            lambda: problem(weights(4, 64, 32), out=weights(64, 8).t()),
        ),
    ],
)
@pytest.mark.parametrize("op", OPS)
def test_other_problems_use_products_per_expert(op, reason, p):
    explanation = dispatch.explain(op, p())
    assert [kernel.name for kernel, _ in explanation] == ["grouped", "each"]
    assert explanation[0][1] == reason


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32])
def test_pairs_of_this_ranks_experts(dtype):
    """Rows without an expert of this rank, and ids of -1, have no pair."""
    ids = torch.tensor([[3, 2], [1, 3], [0, 4], [-1, 2]], dtype=dtype)
    p = pairs(ids, 2, 2)
    assert p.offsets.tolist() == [0, 2, 4]
    assert p.row[:4].tolist() == [0, 3, 0, 1] and p.choice[:4].tolist() == [1, 7, 0, 3]
    assert p.place.tolist() == [[2, 0], [-1, 3], [-1, -1], [-1, 1]]
    assert len(p.row) == 8 and int(p.row.min()) >= 0 and int(p.row.max()) < 4
    assert p.cut(4).row.tolist() == [0, 3, 0, 1]
