"""MoE over four gloo ranks: the same bits however the ranks share the experts and their features."""

import pytest
import torch
import torch.distributed as dist

from alignkit import ops
from alignkit.dist import TP
from alignkit.errors import InputError
from alignkit.ops import library
from alignkit.testing import Failed, assert_bitwise_equal

from .helpers import CPU, UNIT, assert_within, gamma, randn

pytestmark = pytest.mark.skipif(not CPU, reason="the ranks are gloo processes on the CPU")

H, F, ROWS = 24, 64, 16
"""F has four k-tree leaves, so one, two or four ranks can share the features."""
_groups: dict[tuple[int, ...], dist.ProcessGroup] = {}
"""Process groups of this process, by their ranks."""


def make_groups(world):
    for some in ((0, 1), (2, 3), (0, 2), (1, 3), (0, 1, 2), (0, 1, 2, 3)):
        _groups[some] = dist.new_group(list(some))


@pytest.fixture(scope="module")
def grids(ranks):
    ranks.run(4, make_groups)
    return ranks


def grid(rank, ep, tp):
    """Return this rank's TP group, which shares the experts' features, and its EP group, which shares the experts."""
    row, column = divmod(rank, tp)
    members = range(row * tp, row * tp + tp), range(column, ep * tp, tp)
    return [TP(None if len(some) == 1 else _groups[tuple(some)]) for some in members]


def inputs(n, dtype):
    """Return inputs with uneven ids: many rows for expert 1, none for expert n - 2, some ids and one row of padding."""
    x, g = randn(ROWS, H, dtype=dtype, seed=n), randn(ROWS, H, dtype=dtype)
    gate_up, down = randn(n, 2 * F, H, dtype=dtype, scale=0.3), randn(n, H, F, dtype=dtype, scale=0.3)
    ids = torch.rand(ROWS, n).argsort(1)[:, :4]
    ids[ids == n - 2] = -1
    ids[1:9] = torch.where((ids[1:9] == 1).any(1, keepdim=True), ids[1:9], torch.tensor([1, -1, -1, -1]))
    ids[3] = -1
    return x, ids, torch.rand(ROWS, 4), gate_up, down, g


def run(world, ep, tp, gather, n, dtype, sequence=False):
    """Return the output, and the gradients of x, weights and this rank's matrices."""
    ranks, experts = grid(world.rank, ep, tp)
    x, ids, weights, gate_up, down, g = inputs(n, dtype)
    if gather:
        x, ids, weights, g = (t.chunk(ep * tp)[world.rank] for t in (x, ids, weights, g))
    gate, up = gate_up.chunk(ep)[experts.rank].chunk(2, 1)
    gate_up = torch.cat([t.chunk(tp, 1)[ranks.rank] for t in (gate, up)], 1)
    down = down.chunk(ep)[experts.rank].chunk(tp, 2)[ranks.rank]
    x, weights, gate_up, down = leaves = [t.clone().requires_grad_() for t in (x, weights, gate_up, down)]
    out = ops.moe_experts(
        x,
        ids,
        weights,
        gate_up.unbind() if sequence else gate_up,
        down.unbind() if sequence else down,
        num_experts=n,
        first_expert=len(gate_up) * experts.rank,
        tp=ranks,
        ep=experts,
        gather=gather,
    )
    out.backward(g)
    return out.detach(), *(t.grad for t in leaves)


def whole(results, ep, tp, gather):
    """Combine the ranks' results into those of one rank."""
    if gather:
        rows = [torch.cat([r[i] for r in results]) for i in range(3)]
    else:
        rows = results[0][:3]
        for r in results:
            for a, b in zip(r[:3], rows, strict=True):
                assert_bitwise_equal(a, b, "replicated results")
    by_expert_rank = [results[e * tp : e * tp + tp] for e in range(ep)]
    gate_up = [
        torch.cat([torch.cat([r[3].chunk(2, 1)[i] for r in one], 1) for i in (0, 1)], 1) for one in by_expert_rank
    ]
    down = [torch.cat([r[4] for r in one], 2) for one in by_expert_rank]
    return [*rows, torch.cat(gate_up), torch.cat(down)]


NAMES = ("output", "dx", "dweights", "dgate_up", "ddown")


@pytest.mark.parametrize("gather", [False, True])
@pytest.mark.parametrize("n", [12, 60])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_bits_do_not_depend_on_ep_and_tp(grids, n, dtype, gather):
    """Gradients of x and of the routing weights depend on the TP size only."""
    by_tp = {tp: whole(grids.run(tp, run, 1, tp, False, n, dtype), 1, tp, False) for tp in (1, 2)}
    for ep, tp in ((1, 2), (2, 1), (2, 2), (4, 1)):
        got = whole(grids.run(ep * tp, run, ep, tp, gather, n, dtype), ep, tp, gather)
        for i, name in enumerate(NAMES):
            want = by_tp[tp if name in ("dx", "dweights") else 1][i]
            assert_bitwise_equal(got[i], want, f"{name} at EP {ep}, TP {tp}")
    # Only the order of the sums over features differs between TP sizes. Each term is at most ~10 here.
    for i in (1, 2):
        tiny = 2 * gamma(2 * F) * 1e4 + 8 * UNIT[dtype] * by_tp[1][i].abs().max()
        assert_within(by_tp[2][i], by_tp[1][i], tiny, NAMES[i])


def test_list_of_matrices_equals_a_stacked_tensor(grids):
    for a, b in zip(*(grids.run(4, run, 2, 2, True, 12, torch.bfloat16, s) for s in (False, True)), strict=True):
        for name, x, y in zip(NAMES, a, b, strict=True):
            assert_bitwise_equal(x, y, name)


def call(world, ep, tp, change):
    ranks, experts = grid(world.rank, ep, tp)
    arguments = {
        "x": torch.ones(3, 16),
        "ids": torch.tensor([[0], [5], [-1]]),
        "weights": torch.ones(3, 1),
        "gate_up": torch.ones(12 // ep, 64 // tp, 16),
        "down": torch.ones(12 // ep, 16, 32 // tp),
        "first_expert": 12 // ep * experts.rank,
        "tp": ranks,
        "ep": experts,
    } | change.get(world.rank, {})
    return ops.moe_experts(
        arguments.pop("x"), *(arguments.pop(n) for n in ("ids", "weights", "gate_up", "down")), **arguments
    )


BAD = {
    "x: dtype": {1: {"x": torch.ones(3, 16, dtype=torch.float64)}},
    "x: must be equal": {
        3: {k: torch.ones(4, *s) for k, s in (("x", (16,)), ("weights", (1,)))}
        | {"ids": torch.zeros(4, 1, dtype=torch.int64)}
    },
    "ids (hash of its values): must be equal": {2: {"ids": torch.tensor([[0], [4], [-1]])}},
    "ids: must be expert ids in [0, 12), or -1 for no expert, got 12 at (1, 0)": {
        0: {"ids": torch.tensor([[0], [12], [-1]])}
    },
    "first_expert: must be 0 (rank 0 of ep, 6 experts per rank)": {1: {"first_expert": 6}},
    "gather: must be equal": {0: {"gather": True}},
    "requires_grad: must be equal": {2: {"weights": torch.ones(3, 1, requires_grad=True)}},
}


@pytest.mark.parametrize("message", BAD)
def test_error_on_one_rank_raises_on_all(grids, message):
    for outcome in grids.outcomes(4, call, 2, 2, BAD[message], timeout=20):
        assert isinstance(outcome, Failed) and outcome.kind is InputError, outcome
        assert outcome.message.startswith(message), outcome.traceback


def test_ranks_must_divide_leaves_and_subtrees(grids):
    grids.run(4, call, 4, 1, {})
    for message, sizes in (
        ("tp: number of ranks must divide alignkit.contract.k_leaves(32) = 2, got 4", (1, 4)),
        ("ep: number of ranks must be a power of two that divides the 12 experts, got 3", (3, 1)),
    ):
        for outcome in grids.outcomes(sizes[0] * sizes[1], call, *sizes, {}, timeout=20):
            assert isinstance(outcome, Failed) and outcome.message.startswith(message), outcome


class Padded(TP):
    """A stand-in for an engine's group, in which each rank knows the row counts of the others."""

    def __init__(self, group, max_rows):
        super().__init__(group, agreed=True)
        self.max_rows = max_rows

    def padded_rows(self, rows):
        return self.max_rows


def uneven(world, counts, share, dtype):
    """Run the custom op on four ranks, which form one replica per entry of `counts`, its number of rows.

    All ranks share the experts ("ep") or their features ("tp").
    """
    replica, place = divmod(world.rank, 4 // len(counts))
    owners = Padded(_groups[tuple(range(place, 4, 4 // len(counts)))], max(counts))
    library.register_group("all", TP(_groups[0, 1, 2, 3], agreed=True))
    library.register_group("owners", owners)
    x, ids, weights, gate_up, down, _ = inputs(12, dtype)
    x, ids, weights = (t.split(counts)[replica] for t in (x, ids, weights))
    if share == "ep":
        gate_up, down = gate_up.chunk(4)[world.rank], down.chunk(4)[world.rank]
    else:
        gate_up = torch.cat([t.chunk(4, 1)[world.rank] for t in gate_up.chunk(2, 1)], 1)
        down = down.chunk(4, 2)[world.rank]
    first, groups = (3 * world.rank, ("", "all")) if share == "ep" else (0, ("all", ""))
    return library.moe_experts(x, ids, weights, gate_up, down, 12, first, *groups, "owners")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("share", ["ep", "tp"])
@pytest.mark.parametrize("counts", [(7, 0, 3, 6), (1, 15)])
def test_replicas_may_have_different_row_counts(grids, counts, share, dtype):
    x, ids, weights, gate_up, down, _ = inputs(12, dtype)
    want = ops.moe_experts(x, ids, weights, gate_up, down).split(counts)
    for rank, got in enumerate(grids.run(4, uneven, counts, share, dtype)):
        assert_bitwise_equal(got, want[rank // (4 // len(counts))], f"rank {rank}")


def without_rows(world):
    ranks, experts = grid(world.rank, 2, 2)
    x = torch.zeros(0, 16, requires_grad=True)
    matrices = (t.requires_grad_() for t in (torch.ones(6, 32, 16), torch.ones(6, 16, 16)))
    ids, weights = torch.zeros(0, 2, dtype=torch.int64), torch.zeros(0, 2)
    out = ops.moe_experts(x, ids, weights, *matrices, first_expert=6 * experts.rank, tp=ranks, ep=experts, gather=True)
    out.sum().backward()
    return out.detach(), x.grad


def test_empty_batch(grids):
    for out, dx in grids.run(4, without_rows):
        assert out.shape == dx.shape == (0, 16)
