"""The calls of `test_agreement.py` on two GPUs over NCCL: both ranks raise before a collective can hang or mix data."""

import functools
import signal

import pytest
import torch
import torch.distributed as dist

from alignkit.dist import TP
from alignkit.errors import AlignkitError, InputError
from alignkit.testing import Failed
from tests.megatron.gpus import GPUs

from . import agreement as calls

pytestmark = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")

SECONDS = 10
"""Timeout of a mismatched call."""


@pytest.fixture(scope="module")
def two():
    with GPUs(2) as ranks:
        ranks.run(2, functools.partial(_call, calls.linear, 4, device="cuda"))
        yield ranks


def _call(function, *args, **keywords):
    result = function(TP(dist.group.WORLD), *args, **keywords)
    torch.cuda.synchronize()
    return result.cpu() if isinstance(result, torch.Tensor) else None


def both_raise(ranks, message, function, *args, kind=InputError):
    for outcome in ranks.outcomes(2, functools.partial(_call, function, *args), timeout=SECONDS):
        assert isinstance(outcome, Failed), outcome
        assert outcome.kind is kind and message in outcome.message, outcome.traceback
    ranks.run(2, functools.partial(_call, calls.linear, 4, device="cuda"))  # the group still works


@pytest.mark.parametrize("row_parallel", [False, True])
@pytest.mark.parametrize("odd", [0, 1])
def test_new_size_on_one_rank_raises_on_both(two, odd, row_parallel):
    both_raise(two, "x: must be equal", calls.new_size_on_one_rank, odd, row_parallel, "cuda")


def test_exception_in_a_check_raises_on_both(two):
    outcomes = two.outcomes(2, functools.partial(_call, calls.check_fails_on_one_rank, 1, "cuda"), timeout=SECONDS)
    assert [outcome.kind for outcome in outcomes] == [AlignkitError, KeyError]
    two.run(2, functools.partial(_call, calls.linear, 4, device="cuda"))


def test_strict_on_one_rank_raises_on_both(two):
    both_raise(two, "ALIGNKIT_STRICT: must be equal", calls.strict_on_one_rank, 1, "cuda")


def test_gradients_on_one_rank_raise_on_both(two):
    both_raise(two, "requires_grad: must be equal", calls.gradients_on_one_rank, 0, "cuda")


@pytest.mark.parametrize("message", calls.HEAD_SETTINGS)
def test_other_settings_on_one_rank_raise_on_both(two, message):
    both_raise(two, message, calls.head_changed_on_one_rank, 1, calls.HEAD_SETTINGS[message], "cuda")


def test_equal_calls_give_equal_bytes(two):
    a, b = two.run(2, functools.partial(_call, calls.head_changed_on_one_rank, None, {}, "cuda"))
    assert torch.equal(a, b)


@pytest.mark.parametrize("message", calls.HEADS)
def test_other_values_on_one_rank_stop_both_devices(message):
    """The host does not wait: a device assertion surfaces at the next synchronization.

    NCCL's watchdog may see it first and end the process. CUDA may report the assertion as a launch failure if other
    processes stop on the same GPU.
    """
    with GPUs(2) as ranks:
        ranks.run(2, functools.partial(_call, calls.head, device="cuda"))
        for outcome in ranks.outcomes(
            2,
            functools.partial(_call, calls.head_changed_on_one_rank, 1, calls.HEADS[message], "cuda"),
            timeout=SECONDS,
        ):
            assert isinstance(outcome, Failed), outcome
            ended_by_nccl = outcome.kind is ChildProcessError and outcome.message == f"exit code {-signal.SIGABRT}"
            stopped = "device-side assert" in outcome.message or "unspecified launch failure" in outcome.message
            assert ended_by_nccl or stopped, outcome.traceback
