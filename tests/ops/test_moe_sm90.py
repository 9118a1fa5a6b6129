"""CUDA MoE kernels give the bits of Triton's kernels on a GPU, for random shapes and routings."""

import random

import pytest
import torch

from alignkit import BackendError, ops
from alignkit.testing import assert_bitwise_equal

from .helpers import CPU, randn, times, without

pytestmark = pytest.mark.skipif(CPU, reason="needs a GPU")
if not CPU:
    from alignkit.ops.moe_experts import cuda_backend, few, grouped
    from alignkit.ops.moe_experts import pairs as in_torch
    from alignkit.ops.moe_experts import triton_backend as rows_of
    from alignkit.ops.moe_experts.problem import Matrices

BF16 = torch.bfloat16
SEEDS = times(24)


def random_ids(generator: random.Random, rows: int, experts: int, k: int) -> torch.Tensor:
    """Return ids [rows, k], even, skewed to a few experts or to one; some experts have no rows, some ids are -1."""
    z = torch.rand(rows, experts)
    skew = generator.choice(("even", "few", "one"))
    if skew == "few":
        z[:, : max(experts // 8, k)] += generator.random()
    if skew == "one":
        z[:, 0] += 1
    if experts > k + 2:
        z[:, generator.randrange(experts)] = -1.0
    ids = z.topk(k).indices
    ids[torch.rand(rows, k) < generator.choice((0.0, 0.1, 0.9))] = -1
    return ids


def random_matrices(generator: random.Random, experts: int, n: int, k: int) -> torch.Tensor | list[torch.Tensor]:
    """Return expert matrices that are contiguous, with gaps between them, with padded rows, or in a list."""
    layout = generator.choice(("stacked", "spaced", "wide", "listed", "listed"))
    if layout == "listed":
        return [randn(n, k, dtype=BF16, scale=k**-0.5) for _ in range(experts)]
    padding = {"stacked": (0, 0), "spaced": (3, 0), "wide": (0, 16)}[layout]
    return randn(experts, n + padding[0], k + padding[1], dtype=BF16, scale=k**-0.5)[:, :n, :k]


class RandomProblem:
    """A random problem with many or few rows per expert on average."""

    def __init__(self, seed: int, many: bool = True):
        generator = random.Random(seed)
        torch.manual_seed(seed)
        self.experts = generator.choice((1, 2, 3, 8, 60, 128, 160))
        self.top = generator.randint(1, min(self.experts, 8))
        self.h = 8 * generator.randint(1, 80)
        self.leaves = generator.choice((1, 2, 4, 8, 8))
        self.f = 16 * self.leaves * generator.randint(1, 12) if self.leaves > 1 else 8 * generator.randint(1, 99)
        if many:
            self.rows = generator.choice((1, 70, 300)) * self.experts + generator.randrange(100)
        else:
            self.rows = generator.choice((1, 3, 17, 3 * self.experts, 40 * self.experts // self.top + 1))
        self.ids = random_ids(generator, self.rows, self.experts, self.top)
        self.pairs = in_torch.pairs(self.ids, 0, self.experts)
        self.count = int(self.pairs.offsets[-1])
        self.x = randn(self.rows, self.h + 8, dtype=BF16)[:, : self.h]
        self.gate_up = random_matrices(generator, self.experts, 2 * self.f, self.h)
        self.down = random_matrices(generator, self.experts, self.h, self.f)

    def __str__(self):
        return f"{self.rows} rows, {self.top} of {self.experts} experts, {self.h} x {self.f}, {self.leaves} leaves"


def filled(*shape, dtype=BF16):
    return torch.full(shape, float("nan"), dtype=dtype)


@pytest.mark.parametrize("seed", SEEDS)
def test_gate_and_up_have_tritons_bits(seed):
    """Rows behind the last pair are not written."""
    p = RandomProblem(seed)
    weights, rows_of_pairs = Matrices(p.gate_up), p.ids.numel()
    for keep in (True, False):
        h, h_want = (filled(rows_of_pairs, 2 * p.f) if keep else None for _ in range(2))
        got = cuda_backend.gated(p.x, p.pairs.row, weights, p.pairs.offsets, h)
        want = grouped.gated(p.x, p.pairs.row, weights, p.pairs.offsets, h_want)
        assert_bitwise_equal(got[: p.count], want[: p.count], f"{p}")
        if keep:
            assert_bitwise_equal(h, h_want, f"gate and up of {p}")


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("rows_per_expert", ["many", "few"])
def test_down_has_tritons_bits(seed, rows_per_expert):
    p, kernels = RandomProblem(seed, rows_per_expert == "many"), cuda_backend if rows_per_expert == "many" else few
    weights, a = Matrices(p.down), randn(p.ids.numel(), p.f, dtype=BF16)
    a[p.count :] = float("nan")
    for dtype in (BF16, torch.float32):
        got, want = (filled(p.ids.numel(), p.h, dtype=dtype) for _ in range(2))
        kernels.products(a, None, weights, p.pairs.offsets, p.leaves, got)
        grouped.products(a, None, weights, p.pairs.offsets, p.leaves, want)
        assert_bitwise_equal(got, want, f"{p}, {dtype}")


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("rows_per_expert", ["many", "few"])
def test_matrix_gradients_have_tritons_bits(seed, rows_per_expert):
    """Either operand or none is gathered; rows without a pair do not contribute."""
    p = RandomProblem(seed, rows_per_expert == "many")
    n = 8 * random.Random(-seed).randint(1, 60)
    row, count, rows_of_pairs = p.pairs.row, p.count, p.ids.numel()
    ordered = randn(rows_of_pairs, n + 8, dtype=BF16)[:, :n]
    ordered[count:] = float("nan")
    unused = torch.ones(p.rows, dtype=torch.bool)
    unused[row[:count]] = False
    p.x[unused] = float("nan")
    sides = [(ordered, None, p.x, row), (p.x, row, ordered, None), (ordered, None, p.x[row], None)]
    for a, a_row, b, b_row in sides:
        got, want = (filled(p.experts, a.shape[1], b.shape[1]) for _ in range(2))
        cuda_backend.gradients(a, a_row, b, b_row, p.pairs.offsets, got)
        grouped.gradients(a, a_row, b, b_row, p.pairs.offsets, want)
        assert_bitwise_equal(got, want, f"{p}, {n} features, gathered: {a_row is not None}, {b_row is not None}")


def test_two_gathered_operands_are_rejected():
    p = RandomProblem(3)
    out = filled(p.experts, p.h, p.h)
    with pytest.raises(BackendError, match="moe_gradients: the CUDA kernel needs one of"):
        cuda_backend.gradients(p.x, p.pairs.row, p.x, p.pairs.row, p.pairs.offsets, out)


@pytest.mark.parametrize(
    "n,k,first,own", [(1, 1, 0, 1), (4, 2, 0, 4), (60, 4, 15, 15), (128, 8, 0, 128), (512, 10, 0, 512)]
)
@pytest.mark.parametrize("dtype,out_dtype", [(BF16, BF16), (BF16, torch.float32), (torch.float32, torch.float32)])
@pytest.mark.parametrize("ids_dtype", [torch.int64, torch.int32])
def test_combine_has_tritons_bits(n, k, first, own, dtype, out_dtype, ids_dtype):
    ids = random_ids(random.Random(n), 333, n, k).to(ids_dtype)
    p = in_torch.pairs(ids, first, own)
    for h in (8, 72, 2048):
        y = randn(ids.numel(), h, dtype=dtype)
        y[torch.rand(y.shape) < 0.1] = -0.0
        y[int(p.offsets[-1]) :] = float("nan")
        for weights in (randn(333, k), None):
            got, want = (filled(333, h, dtype=out_dtype) for _ in range(2))
            cuda_backend.combine(y, p.place, ids, weights, n, got)
            rows_of.combine(y, p.place, ids, weights, n, want)
            assert_bitwise_equal(got, want, f"h = {h}, weighted: {weights is not None}")


def test_nan_stays_in_its_row():
    p = RandomProblem(5)
    p.x[3] = float("nan")
    got = cuda_backend.gated(p.x, p.pairs.row, Matrices(p.gate_up), p.pairs.offsets, None)[: p.count]
    assert torch.equal(got.isnan().any(1), p.pairs.row[: p.count] == 3)


@pytest.mark.parametrize("rows", [1, 5, 100, 1500, 8000])
@pytest.mark.parametrize("listed", [False, True])
def test_the_op_has_the_same_bits_without_these_kernels(rows, listed):
    """Forward and backward, at the widths of Qwen3-30B-A3B with fewer experts."""
    n, k, h, f = 32, 8, 2048, 768
    torch.manual_seed(rows)
    ids, weights = torch.rand(rows, n).topk(k).indices, torch.rand(rows, k)
    x, dout = randn(rows, h, dtype=BF16), randn(rows, h, dtype=BF16)
    matrices = randn(n, 2 * f, h, dtype=BF16, scale=h**-0.5), randn(n, h, f, dtype=BF16, scale=f**-0.5)

    def run():
        leaves = [t.detach().clone().requires_grad_() for t in (x, weights, *matrices)]
        expert_matrices = [[*t.unbind()] if listed else t for t in leaves[2:]]
        out = ops.moe_experts(leaves[0], ids, leaves[1], *expert_matrices)
        return [out.detach(), *torch.autograd.grad(out, leaves, dout)]

    got = run()
    with without(
        *((cuda_backend, f"{name}_rejects") for name in ("pairs", "gated", "products", "gradients", "combine")),
        (few, "rejects"),
    ):
        want = run()
    for i, (a, b) in enumerate(zip(got, want, strict=True)):
        assert_bitwise_equal(a, b, f"result {i}")
