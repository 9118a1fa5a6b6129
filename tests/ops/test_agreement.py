"""Ranks whose calls do not fit together are told so, all of them and at once, whatever they have met before."""

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

pytestmark = pytest.mark.skipif(not CPU, reason="these ranks are processes on the CPU, joined by gloo")


def both_raise(outcomes, kind, message):
    for outcome in outcomes:
        assert isinstance(outcome, Failed), outcome
        assert outcome.kind is kind and outcome.message.startswith(message), outcome.traceback


@pytest.mark.parametrize("row_parallel", [False, True])
@pytest.mark.parametrize("odd", [0, 1])
def test_what_only_one_rank_has_met(ranks, odd, row_parallel):
    both_raise(ranks.outcomes(2, calls.forgetful, odd, row_parallel, "cpu", timeout=20), InputError, "x: differs")
    ranks.run(2, calls.linear, 4)  # the group still works


@pytest.mark.parametrize("odd", [0, 1])
def test_any_exception_is_the_verdict_of_all(ranks, odd):
    outcomes = ranks.outcomes(2, calls.fails_alone, odd, "cpu", timeout=20)
    assert outcomes[odd].kind is KeyError
    assert outcomes[1 - odd].kind is AlignkitError
    assert outcomes[1 - odd].message.startswith("KeyError: 'a mistake of the caller' (in an op, on rank")
    ranks.run(2, calls.linear, 4)


def test_strict_on_one_rank(ranks):
    both_raise(ranks.outcomes(2, calls.strict_alone, 1, "cpu", timeout=20), InputError, "ALIGNKIT_STRICT: differs")


def test_gradients_on_one_rank(ranks):
    both_raise(ranks.outcomes(2, calls.trains_alone, 0, "cpu", timeout=20), InputError, "requires_grad: differs")


@pytest.mark.parametrize("message", calls.HEADS | calls.HEAD_SETTINGS)
def test_head_of_one_rank(ranks, message):
    change = (calls.HEADS | calls.HEAD_SETTINGS)[message]
    both_raise(ranks.outcomes(2, calls.head_alone, 1, change, "cpu", timeout=20), InputError, message.rstrip())
    same = ranks.run(2, calls.head_alone, None, {}, "cpu")
    assert_bitwise_equal(*same)


def long_verdicts(tp):
    """Messages beyond a slot, on one rank or all."""
    for lengths in ((10, 5000), (5000, 10), (3000, 5000), (agreement.SLOT - 40, 20)):
        said = "x" * lengths[tp.rank]
        assert [len(v) for v in tp.check("an op", lambda said=said: said)] == list(lengths)


def test_long_verdicts(ranks):
    ranks.run(2, long_verdicts)


def through_a_channel(tp):
    """A group whose tensors live on GPUs has none for the hosts: its ranks make one, once."""
    with (
        mock.patch.object(agreement, "_own", return_value=None),
        mock.patch.object(agreement, "_channels", WeakKeyDictionary()),
    ):
        calls.linear(tp, 4)
        made = agreement.channel(tp.group)
        calls.linear(tp, 8)
        return agreement.channel(tp.group) is made


def test_channel(ranks):
    assert ranks.run(2, through_a_channel) == [True, True]


def growth(tp):
    calls.linear(tp, 4)
    tracemalloc.start()
    before = tracemalloc.take_snapshot()
    for rows in range(5, 205):
        calls.linear(tp, rows)
    return sum(s.size_diff for s in tracemalloc.take_snapshot().compare_to(before, "filename") if "alignkit" in str(s))


def test_nothing_is_remembered_of_a_call(ranks):
    """Servers and trainers meet ever new numbers of tokens."""
    assert max(ranks.run(2, growth)) < 20_000


def saved(tp, rows):
    """The sizes of what a column-parallel layer under sequence parallelism keeps for its backward pass."""
    x, w = randn(rows, 3, 64, seed=1).requires_grad_(), randn(32, 64, seed=2).requires_grad_()
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(tuple(t.shape)) or t, lambda t: t):
        y = ops.linear(x, w, tp=tp, sequence_parallel=True)
    y.sum().backward()
    return kept, x.grad, w.grad


def test_sequence_parallel_keeps_only_its_rows(ranks):
    for kept, *_ in ranks.run(2, saved, 10):
        assert sorted(kept) == [(10, 3, 64), (32, 64)]


def test_a_rank_that_died():
    """The other one learns it at once."""
    with Ranks(2, method=METHOD) as two:
        two.run(2, calls.linear, 4)
        begin = time.monotonic()
        answer = two.answer(2, calls.dies_alone, 1, timeout=20)
        assert time.monotonic() - begin < 10
        assert isinstance(answer, Failed) and answer.kind is BackendError
        assert answer.message.startswith("tensor-parallel group: ")
