"""Tensor parallelism over up to four gloo ranks: the same bits at every TP size, and errors that all ranks raise.

test_eight_ranks.py and test_linear_logp.py import the helpers; test_tp_cuda.py tests GPUs.
"""

import contextlib
import warnings
from unittest import mock

import pytest
import torch

from alignkit import ops
from alignkit.dist import symmetric
from alignkit.errors import InputError
from alignkit.runtime import cuda
from alignkit.testing import Failed, assert_bitwise_equal

from .helpers import CPU, UNIT, assert_within, gamma, randn

pytestmark = pytest.mark.skipif(not CPU, reason="the ranks are gloo processes on the CPU")

HEADS = {  # shards of a vocabulary of 1000 rows, 30 of them padding; tiles have 128 rows
    1: [1000],
    2: [512, 488],
    3: [300, 43, 657],
    4: [10, 20, 940, 30],
}


def head_inputs(dtype):
    h, w = randn(150, 64, dtype=dtype, seed=5), randn(1000, 64, dtype=dtype)
    target = torch.randint(0, 970, (150,))
    target[::7] = -100
    return h, w, randn(1000, dtype=dtype), target, torch.randn(150), torch.randn(150)


def run_head(tp, sizes, dtype, kwargs):
    h, w, b, target, g1, g2 = head_inputs(dtype)
    start = sum(sizes[: tp.rank])
    s = slice(start, start + sizes[tp.rank])
    leaves = [t.clone().requires_grad_() for t in (h, w[s], b[s])]
    out = ops.linear_logp(
        leaves[0],
        leaves[1],
        target,
        bias=leaves[2],
        vocab_size=970,
        vocab_start=start,
        tp=tp,
        return_entropy=True,
        **kwargs,
    )
    torch.autograd.backward(out, (g1, g2))
    logits = ops.head_logits(h, w[s], b[s], soft_cap=kwargs.get("soft_cap"))
    given = ops.logp_from_logits(
        logits, target, vocab_size=970, vocab_start=start, tp=tp, temperature=kwargs.get("temperature", 1.0)
    )
    return [o.detach() for o in out], given, [t.grad for t in leaves]


def head_terms(dtype, temperature, soft_cap):
    """Return the sum of the absolute terms of dhidden, in float64."""
    h, w, b, target, g1, g2 = head_inputs(dtype)
    x = (h.double() @ w[:970].double().t() + b[:970].double()).requires_grad_()
    lp = (soft_cap * torch.tanh(x / soft_cap) / temperature).log_softmax(-1)
    keep = target != -100
    loss = (lp.gather(1, target.clamp(min=0)[:, None])[:, 0] * g1 - (lp.exp() * lp).sum(-1) * g2)[keep].sum()
    return torch.autograd.grad(loss, x)[0].abs() @ w[:970].double().abs()


@pytest.mark.parametrize("size", HEADS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_keep_logits_changes_no_bit(ranks, size, dtype):
    kwargs = {"temperature": 0.7, "soft_cap": 8.0}
    for rank, (want, got) in enumerate(
        zip(
            *(ranks.run(size, run_head, HEADS[size], dtype, kwargs | keep) for keep in ({}, {"keep_logits": True})),
            strict=True,
        )
    ):
        for name, a, b in zip(
            ("logp", "entropy", "dhidden", "dweight", "dbias"), (*got[0], *got[2]), (*want[0], *want[2]), strict=True
        ):
            assert_bitwise_equal(a, b, f"{name} on rank {rank}")


@pytest.mark.parametrize("size", HEADS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_linear_logp_bits_do_not_depend_on_tp(ranks, size, dtype):
    """Shards are uneven, with borders inside tiles, several borders in a tile, and padding on the last rank."""
    kwargs = {"temperature": 0.7, "soft_cap": 8.0}
    (want, entropy), given, grads = ranks.run(1, run_head, HEADS[1], dtype, kwargs)[0]
    assert_bitwise_equal(given, want, "logp_from_logits")
    results = ranks.run(size, run_head, HEADS[size], dtype, kwargs)
    for rank, (out, from_logits, got) in enumerate(results):
        assert_bitwise_equal(out[0], want, f"logp on rank {rank}")
        assert_bitwise_equal(out[1], entropy, f"entropy on rank {rank}")
        assert_bitwise_equal(from_logits, want, f"logp_from_logits on rank {rank}")
        assert_bitwise_equal(got[0], results[0][2][0], f"dhidden on rank {rank}")
    for name, i in (("dweight", 1), ("dbias", 2)):
        assert_bitwise_equal(torch.cat([r[2][i] for r in results]), grads[i], name)
    # dhidden sums the same 970 terms in another order, and is rounded to the dtype once.
    assert_within(
        results[0][2][0],
        grads[0],
        2 * gamma(970) * head_terms(dtype, **kwargs) + 2 * UNIT[dtype] * grads[0].abs(),
        "dhidden",
    )


def run_linears(tp, dtype, sequence_parallel, rows=12):
    x, w1, w2 = randn(rows, 3, 256, dtype=dtype, seed=3), randn(512, 256, dtype=dtype), randn(96, 512, dtype=dtype)
    b = randn(96, dtype=dtype)
    g = randn(rows, 3, 96, dtype=dtype)
    x, g = (tp.shard(x), tp.shard(g)) if sequence_parallel else (x, g)
    leaves = [t.clone().requires_grad_() for t in (x, w1.chunk(tp.size)[tp.rank], w2.chunk(tp.size, 1)[tp.rank], b)]
    y = ops.linear(leaves[0], leaves[1], tp=tp, sequence_parallel=sequence_parallel)
    z = ops.row_parallel_linear(y, leaves[2], leaves[3], tp=tp, sequence_parallel=sequence_parallel)
    y.retain_grad()
    z.backward(g)
    terms = tp.tree_sum(y.grad.double().abs() @ leaves[1].double().abs())
    return z.detach(), [t.grad for t in leaves], terms


@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_linear_bits_do_not_depend_on_tp(ranks, dtype, sequence_parallel):
    """Column-parallel, then row-parallel: outputs and weight gradients have the bits of one rank."""
    want, grads, terms = ranks.run(1, run_linears, dtype, False)[0]
    for size in (2, 4):
        results = ranks.run(size, run_linears, dtype, sequence_parallel)
        whole = torch.cat([r[0] for r in results]) if sequence_parallel else results[0][0]
        assert_bitwise_equal(whole, want, f"output at TP {size}")
        for name, i, dim in (("first weight", 1, 0), ("second weight", 2, 1)):
            assert_bitwise_equal(
                torch.cat([r[1][i] for r in results], dim), grads[i], f"gradient of {name} at TP {size}"
            )
        assert_bitwise_equal(results[0][1][3], grads[3], f"gradient of the bias at TP {size}")
        dx = torch.cat([r[1][0] for r in results]) if sequence_parallel else results[0][1][0]
        # Only the order of the sum over the 512 features differs, before one rounding.
        assert_within(dx, grads[0], 2 * gamma(512) * terms + 2 * UNIT[dtype] * grads[0].abs(), f"dx at TP {size}")


def sums_of_denormals(tp):
    """Return sums of denormals, without and with the calling thread's flush to zero."""
    x, bias = torch.full((3, 8), 1e-41), torch.full((8,), 1e-41)

    def product(rows, to, _):
        to.copy_(x[rows])

    found = []
    for flush in (False, True):
        torch.set_flush_denormal(flush)
        found += [tp.tree_sum(x), tp.sum_products(product, 3, 8, x.device, bias=bias)]
    torch.set_flush_denormal(False)
    return found


def test_thread_mode_changes_no_sum(ranks):
    for plain, product, flushed, flushed_product in ranks.run(2, sums_of_denormals):
        assert plain.min() > 0 and product.min() > plain.min()
        assert_bitwise_equal(flushed, plain, "tree_sum")
        assert_bitwise_equal(flushed_product, product, "sum_products")


def run_pieces(tp, rows, columns, scatter):
    """Sum pieces in a CPU workspace of two pieces of 512 values.

    gloo stands in for the kernel, and sums a piece after the next piece has been written.
    """
    x, bias = randn(rows, columns, seed=tp.rank), randn(columns, seed=9)
    waiting = []

    class Overlapped(symmetric._Serial):
        def wait_for_buffer(self, i):
            while len(waiting) > 1:
                waiting.pop(0)()

        @contextlib.contextmanager
        def all_pieces(self):
            yield
            while waiting:
                waiting.pop(0)()

    workspace = object.__new__(symmetric.Workspace)
    vars(workspace).update(
        rank=tp.rank,
        size=tp.size,
        _values=torch.full((1024,), float("nan")),
        _overlapped=Overlapped(),
        _addresses=None,
        _wait_for_previous_stream=lambda: None,
        _begin=lambda form, count, place: place * 512,
        _order=None,
        _timeout_ns=None,
    )
    counts = []

    def kernel(name, device, addresses, size, rank, form, count, capacity, begin, bias, bias_bf16, columns, y, *_):
        def add():
            total = tp.tree_sum(workspace._values[begin : begin + count])
            y.copy_((total.chunk(size)[rank] if form == symmetric._SLICE else total).view(-1, columns) + bias.float())

        counts.append(count)
        waiting.append(add)
        if count == rows * columns:  # a single piece: summed right after its product
            waiting.pop()()

    with mock.patch.object(symmetric, "PIECE", 512), mock.patch.object(cuda, "call", kernel):
        if not workspace.supports(rows, columns, scatter):
            return None
        y = workspace.sum(lambda part, out, _: out.copy_(x[part]), rows, columns, bias, torch.bfloat16, scatter)
    want = (tp.tree_sum(x) + bias).bfloat16()
    assert_bitwise_equal(y, tp.shard(want) if scatter else want)
    return counts


def run_first_use(tp, created):
    """Return whether a workspace was created, the number of workspaces, and the warnings."""
    with (
        warnings.catch_warnings(record=True) as caught,
        mock.patch.multiple(
            symmetric,
            _enabled=lambda _: True,
            allocate=lambda *_: "memory",
            _created_count=created[tp.rank],
            Workspace=lambda group, memory: (group, memory),
        ),
    ):
        warnings.simplefilter("always")
        found = symmetric._create_workspace(tp.group, torch.device("cpu"))
        return found == (tp.group, "memory"), symmetric._created_count, [str(w.message) for w in caught]


def test_ranks_with_different_earlier_groups_use_no_workspace(ranks):
    """Ranks would deadlock in torch otherwise."""
    assert ranks.run(2, run_first_use, (3, 3)) == [(True, 4, [])] * 2
    for rank, (found, created, caught) in enumerate(ranks.run(2, run_first_use, (1, 0))):
        assert not found and created == 1 - rank
        assert len(caught) == 1 and "for different numbers of groups before" in caught[0] and "same bits" in caught[0]


@pytest.mark.parametrize(
    "rows, columns, scatter, counts",
    [
        (40, 7, False, [280]),
        (100, 7, False, [392, 308]),
        (104, 7, True, [448, 280]),
        (64, 8, True, [512]),
        (80, 9, True, [288, 288, 144]),
        (100, 7, True, None),
        (0, 7, False, None),
        (8, 65, False, None),
    ],
)
def test_sums_larger_than_the_workspace_are_cut_into_pieces(ranks, rows, columns, scatter, counts):
    """Slices that are not contiguous or not aligned to 16 bytes use no workspace."""
    for got in ranks.run(2 if columns == 7 else 4, run_pieces, rows, columns, scatter):
        assert got == counts


def call_head(tp, change):
    """linear_logp on two good shards, with `change[rank]` applied to this rank's arguments."""
    h, w, _, target, *_ = head_inputs(torch.float32)
    args = {
        "hidden": h,
        "weight": w[:512] if tp.rank == 0 else w[512:],
        "target": target,
        "vocab_start": 512 * tp.rank,
        "tp": tp,
        **change.get(tp.rank, {}),
    }
    ops.linear_logp(args.pop("hidden"), args.pop("weight"), args.pop("target"), **args)


NAN = randn(150, 64)
NAN[3, 4] = float("nan")
BAD_HEADS = {
    "target": {1: {"target": torch.full((150,), 1000)}},
    "hidden": {0: {"hidden": NAN}},
    "bias": {1: {"bias": torch.zeros(488, 1)}},
    "weight: shape": {0: {"weight": torch.zeros(512, 65)}},
    "weight: must not be empty": {1: {"weight": torch.zeros(0, 64)}},
    "vocab_start: shards must be contiguous, but overlap": {1: {"vocab_start": 500}},
    "vocab_start: shards must be contiguous, but leave a gap": {1: {"vocab_start": 600}},
    "vocab_size: must be equal": {1: {"vocab_size": 970}},
    "vocab_size: must be at most 1000": {0: {"vocab_size": 1001}, 1: {"vocab_size": 1001}},
    "temperature": {0: {"temperature": 0.0}},
    "soft_cap: must be equal": {1: {"soft_cap": 3.0}},
    "soft_cap": {0: {"soft_cap": -1.0}},
}


@pytest.mark.parametrize("message", BAD_HEADS)
def test_head_error_on_one_rank_raises_on_all(ranks, message):
    """A rank that fails alone must not leave the other waiting in a collective."""
    for outcome in ranks.outcomes(2, call_head, BAD_HEADS[message], timeout=20):
        assert isinstance(outcome, Failed), outcome
        assert outcome.kind is InputError and outcome.message.startswith(message), outcome.traceback
    ranks.run(2, call_head, {})  # the group still works


def call_linear(tp, row, bad_rank):
    x, w = randn(4, 64, seed=1), randn(8, 64)
    w = w[:, :63] if tp.rank == bad_rank else w
    (ops.row_parallel_linear if row else ops.linear)(x, w, tp=tp)


@pytest.mark.parametrize("row", [False, True])
def test_linear_error_on_one_rank_raises_on_all(ranks, row):
    for outcome in ranks.outcomes(2, call_linear, row, 1, timeout=20):
        assert isinstance(outcome, Failed) and outcome.kind is InputError, outcome
        assert outcome.message.startswith("weight: shape"), outcome.traceback
    ranks.run(2, call_linear, row, None)


def too_many_ranks(tp):
    ops.row_parallel_linear(randn(2, 24), randn(4, 24), tp=tp)


def test_ranks_must_divide_the_leaves(ranks):
    for outcome in ranks.outcomes(4, too_many_ranks, timeout=20):
        assert isinstance(outcome, Failed) and outcome.message.startswith(
            "tp: number of ranks must divide alignkit.contract.k_leaves(96) = 2, got 4"
        ), outcome.traceback
