"""Which products of experts the grouped kernels are for, and the pairs that they are of."""

import pytest
import torch

pytest.importorskip("triton")
from alignkit.ops.moe_experts.grouped import MOST_EXPERTS
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
def test_stacked_and_listed_matrices_are_for_the_grouped_kernels(op):
    for b in (weights(4, 64, 32), [weights(64, 32) for _ in range(4)], weights(4, 32, 64).mT):
        assert dispatch.choose(op, problem(b)).name == "grouped"
        assert dispatch.choose(op, problem(b)._replace(backend=families.NATIVE)).name == "each"


@pytest.mark.parametrize(
    "why,p",
    [
        ("differ in strides", lambda: problem([weights(64, 32), weights(32, 64).t()])),
        ("operands are torch.float32 and torch.bfloat16", lambda: problem(weights(4, 64, 32), a_dtype=torch.float32)),
        (f"more than {MOST_EXPERTS} experts", lambda: problem(weights(4, 64, 32), experts=MOST_EXPERTS + 1)),
        ("columns are apart", lambda: problem(weights(4, 64, 32), out=weights(64, 8).t())),
    ],
)
@pytest.mark.parametrize("op", OPS)
def test_others_are_left_to_the_products_of_each(op, why, p):
    told = dispatch.explain(op, p())
    assert [kernel.name for kernel, _ in told] == ["grouped", "each"]
    assert why in told[0][1]


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32])
def test_pairs(dtype):
    """Of this rank's two experts, those of row 2 and what is no expert left out."""
    ids = torch.tensor([[3, 2], [1, 3], [0, 4], [-1, 2]], dtype=dtype)
    p = pairs(ids, 2, 2)
    assert p.offsets.tolist() == [0, 2, 4]
    assert p.row[:4].tolist() == [0, 3, 0, 1] and p.choice[:4].tolist() == [1, 7, 0, 3]
    assert p.place.tolist() == [[2, 0], [-1, 3], [-1, -1], [-1, 1]]
    assert len(p.row) == 8 and int(p.row.min()) >= 0 and int(p.row.max()) < 4
    assert p.cut(4).row.tolist() == [0, 3, 0, 1]
