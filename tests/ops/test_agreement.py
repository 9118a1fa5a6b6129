"""Mismatched calls of two gloo ranks raise on all ranks without a timeout, whatever the ranks have checked before.

agreement.py holds the calls; alignkit/dist/agreement.py is under test.
"""

import time
import tracemalloc
from unittest import mock
from weakref import WeakKeyDictionary

import pytest
import torch

from alignkit import ops
from alignkit.dist import agreement
from alignkit.errors import AlignkitError, BackendError, InputError
from alignkit.testing import Failed, Ranks, assert_bitwise_equal
from tests.forks import METHOD

from . import agreement as calls
from .helpers import CPU, randn

pytestmark = pytest.mark.skipif(not CPU, reason="the ranks are gloo processes on the CPU")


def both_raise(outcomes, kind, message):
    for outcome in outcomes:
        assert isinstance(outcome, Failed), outcome
        assert outcome.kind is kind and outcome.message.startswith(message), outcome.traceback


@pytest.mark.parametrize("row_parallel", [False, True])
@pytest.mark.parametrize("odd", [0, 1])
def test_new_size_on_one_rank_raises_on_both(ranks, odd, row_parallel):
    both_raise(
        ranks.outcomes(2, calls.new_size_on_one_rank, odd, row_parallel, "cpu", timeout=20),
        InputError,
        "x: must be equal",
    )
    ranks.run(2, calls.linear, 4)  # the group still works


@pytest.mark.parametrize("odd", [0, 1])
def test_exception_in_a_check_raises_on_both(ranks, odd):
    outcomes = ranks.outcomes(2, calls.check_fails_on_one_rank, odd, "cpu", timeout=20)
    assert outcomes[odd].kind is KeyError
    assert outcomes[1 - odd].kind is AlignkitError
    assert outcomes[1 - odd].message.startswith("KeyError: 'a mistake of the caller' (in an op, on rank")
    ranks.run(2, calls.linear, 4)


def test_strict_on_one_rank_raises_on_both(ranks):
    both_raise(
        ranks.outcomes(2, calls.strict_on_one_rank, 1, "cpu", timeout=20), InputError, "ALIGNKIT_STRICT: must be equal"
    )


def test_gradients_on_one_rank_raise_on_both(ranks):
    both_raise(
        ranks.outcomes(2, calls.gradients_on_one_rank, 0, "cpu", timeout=20), InputError, "requires_grad: must be equal"
    )


@pytest.mark.parametrize("message", calls.HEADS | calls.HEAD_SETTINGS)
def test_other_head_arguments_on_one_rank_raise_on_both(ranks, message):
    change = (calls.HEADS | calls.HEAD_SETTINGS)[message]
    both_raise(
        ranks.outcomes(2, calls.head_changed_on_one_rank, 1, change, "cpu", timeout=20), InputError, message.rstrip()
    )
    same = ranks.run(2, calls.head_changed_on_one_rank, None, {}, "cpu")
    assert_bitwise_equal(*same)


def long_verdicts(tp):
    """Exchange messages longer than a slot, on one rank or on both."""
    for lengths in ((10, 5000), (5000, 10), (3000, 5000), (agreement.SLOT - 40, 20)):
        text = "x" * lengths[tp.rank]
        assert [len(v) for v in tp.check("an op", lambda text=text: text)] == list(lengths)


def test_messages_longer_than_a_slot_are_exchanged(ranks):
    ranks.run(2, long_verdicts)


def through_a_channel(tp):
    """Make calls in a group without a host channel, as with NCCL, whose ranks create one."""
    with (
        mock.patch.object(agreement, "_cpu_backend", return_value=None),
        mock.patch.object(agreement, "_channels", WeakKeyDictionary()),
    ):
        calls.linear(tp, 4)
        first = agreement.channel(tp.group)
        calls.linear(tp, 8)
        return agreement.channel(tp.group) is first


def test_channel_is_created_once_per_group(ranks):
    assert ranks.run(2, through_a_channel) == [True, True]


def growth(tp):
    calls.linear(tp, 4)
    tracemalloc.start()
    before = tracemalloc.take_snapshot()
    for rows in range(5, 205):
        calls.linear(tp, rows)
    return sum(s.size_diff for s in tracemalloc.take_snapshot().compare_to(before, "filename") if "alignkit" in str(s))


def test_new_sizes_do_not_grow_memory(ranks):
    """Servers and trainers keep calling with new token counts."""
    assert max(ranks.run(2, growth)) < 20_000


def saved(tp, rows):
    """Return the shapes that a sequence-parallel column-parallel layer saves for backward, and its gradients."""
    x, w = randn(rows, 3, 64, seed=1).requires_grad_(), randn(32, 64, seed=2).requires_grad_()
    shapes = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: shapes.append(tuple(t.shape)) or t, lambda t: t):
        y = ops.linear(x, w, tp=tp, sequence_parallel=True)
    y.sum().backward()
    return shapes, x.grad, w.grad


def test_sequence_parallel_saves_only_its_own_rows(ranks):
    for shapes, *_ in ranks.run(2, saved, 10):
        assert sorted(shapes) == [(10, 3, 64), (32, 64)]


def test_death_of_one_rank_is_reported_without_a_timeout():
    with Ranks(2, method=METHOD) as two:
        two.run(2, calls.linear, 4)
        begin = time.monotonic()
        answer = two.answer(2, calls.death_of_one_rank, 1, timeout=20)
        assert time.monotonic() - begin < 10
        assert isinstance(answer, Failed) and answer.kind is BackendError
        assert answer.message.startswith("tensor-parallel group: ")
