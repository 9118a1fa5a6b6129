"""Trials of the self-test: every kernel has problems that it accepts, and a kernel that fails is passed over."""

import dataclasses
import os
import types
from typing import Any

import pytest
import torch

from alignkit import ops
from alignkit.ops import golden, trials
from alignkit.ops.inputs import Inputs
from alignkit.ops.record import Trial
from alignkit.ops.registry import RECORDS
from alignkit.runtime import dispatch, families, prover, validated
from alignkit.testing import assert_bitwise_equal

DEVICE = torch.device(os.environ.get("ALIGNKIT_TEST_DEVICE", "cpu"))
OPERATIONS = [(record, op) for record in RECORDS for op in record.kernels]
OPERATION = pytest.mark.parametrize(("record", "op"), OPERATIONS, ids=[op for _, op in OPERATIONS])


@pytest.fixture
def passed_over(monkeypatch):
    """Return the kernels that are passed over in this test."""
    monkeypatch.setattr(prover, "_passed_over", {})
    yield prover._passed_over
    dispatch._forget_choices()


@OPERATION
@pytest.mark.parametrize("family", families.FAMILIES, ids=lambda family: family.name)
def test_every_kernel_has_a_problem_that_it_accepts(record, op, family):
    """Without one, the self-test would never run the kernel."""
    for backend in family.backends:
        *others, _ = dispatch.kernels(op, backend)
        for kernel in others:
            found = list(trials.cases(record, op, kernel))
            assert found
            assert kernel.rule is None or kernel.name in record.trials[op].words or "" in record.trials[op].words
            for words, _ in found:
                why = kernel.rejects(trials.problem(record, op, backend, words))
                assert why is None, f"{kernel.name} rejects {words!r}: {why}"


def test_every_kernel_of_this_device_equals_the_last_of_its_order(passed_over):
    backend = dispatch.backend_of(DEVICE)
    with validated.unchecked():
        assert trials.compare(DEVICE, backend) is None
    assert not passed_over


def test_forced_kernel_is_selected_and_others_are_the_last_of_their_orders():
    order = dispatch.kernels("silu_mul", "cpu")
    for kernel in order:
        with dispatch.forced("silu_mul", kernel) as used:
            assert dispatch.kernels("rope", "cpu") == dispatch.order("rope")[-1:]
            assert dispatch.kernels("rope", "cuda") == tuple(
                k for k in dispatch.order("rope") if k.backend in families.SM90.backends
            )
            assert dispatch.static_kernel("silu_mul", "cpu") is kernel.load()
            assert len(used) == 1
    assert dispatch.kernels("silu_mul", "cpu") == order
    assert dispatch.static_kernel("silu_mul", "cpu") is order[0].load()


def test_forced_launchers_are_not_cached(monkeypatch):
    """A launcher that was cached before the block is not used in it, and one from the block not after it."""
    launches = []
    cache: dict = {}

    def order_of(*names):
        make = lambda name: lambda problem: lambda: launches.append(name)  # noqa: E731
        return tuple(dispatch.Kernel(n, "cpu", lambda: types, prepare=make(n)) for n in names)

    order = order_of("fast", "slow")
    monkeypatch.setitem(dispatch._orders, "an op", order)
    problem = type("P", (), {"backend": "cpu"})()
    for kernel in (None, *order, None):
        if kernel is None:
            dispatch.prepare("an op", problem, cache)()
        else:
            with dispatch.forced("an op", kernel) as used:
                assert not cache
                dispatch.prepare("an op", problem, cache)()
                assert len(used) == 1
        assert len(cache) == (kernel is None)
    assert launches == ["fast", "fast", "slow", "fast"]


def broken(how: str) -> Any:
    """Return a module in place of silu_mul's C++ kernel."""
    from alignkit.ops.silu_mul import cpu

    def forward(g, u):
        if how == "raises":
            raise RuntimeError("no such instruction")
        y = cpu.forward(g, u)
        y.view(-1)[:1] += 0.5
        return y

    return types.SimpleNamespace(forward=forward, backward=cpu.backward)


@pytest.mark.skipif(DEVICE.type != "cpu", reason="replaces a kernel of the CPU")
@pytest.mark.parametrize("how", ["raises", "differs"])
def test_kernel_that_fails_is_passed_over_with_a_warning(how, passed_over, monkeypatch, tmp_path):
    kernel = dispatch.Kernel("cpu", families.NATIVE, lambda: broken(how))
    _, *rest = dispatch.order("silu_mul")[-2:]
    monkeypatch.setitem(dispatch._orders, "silu_mul", (kernel, *rest))
    monkeypatch.setattr(trials, "RECORDS", [record for record in RECORDS if record.folder == "silu_mul"])
    monkeypatch.setattr(golden, "CASES", {"elementwise float32": golden.CASES["elementwise float32"]})
    monkeypatch.setattr(families.CPU, "validated", ({"torch": "1.0"},))
    monkeypatch.setattr(dispatch, "_backends", {})
    monkeypatch.setattr(validated, "_verdicts", {})
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    given = Inputs("cpu", torch.float32)
    reason = "RuntimeError: no such instruction" if how == "raises" else "tensor 1 of 3 differs"
    with pytest.warns(UserWarning, match=f"silu_mul: the kernel 'cpu' of the backend 'cpu' failed.*: {reason}"):
        got = ops.silu_mul(given.rough(5, 8, seed=1), given.rough(5, 8, seed=2))
    assert [*passed_over] == [("silu_mul", "cpu", "cpu")]
    assert dispatch.kernels("silu_mul", "cpu") == (rest[-1],)
    monkeypatch.undo()
    assert_bitwise_equal(got, ops.silu_mul(given.rough(5, 8, seed=1), given.rough(5, 8, seed=2)))
    assert not list(tmp_path.rglob("*.json"))  # the next process warns again


@pytest.mark.skipif(DEVICE.type != "cpu", reason="replaces a kernel of the CPU")
def test_op_whose_last_kernel_fails_is_rejected(passed_over, monkeypatch):
    last = dispatch.Kernel("reference", families.REFERENCE, lambda: broken("raises"))
    first = dispatch.order("silu_mul")[-2]
    monkeypatch.setitem(dispatch._orders, "silu_mul", (first, last))
    monkeypatch.setattr(trials, "RECORDS", [record for record in RECORDS if record.folder == "silu_mul"])
    why = golden.difference(torch.device("cpu"), "cpu")
    assert why == "silu_mul: the kernel reference raised RuntimeError: no such instruction"
    assert not passed_over


@pytest.mark.skipif(DEVICE.type != "cpu", reason="replaces a trial of the CPU")
def test_trial_that_does_not_call_the_operation_is_rejected(passed_over, monkeypatch):
    record = next(record for record in RECORDS if record.folder == "silu_mul")
    idle = Trial(lambda given, _: [given.rough(3, seed=1)])
    monkeypatch.setattr(trials, "RECORDS", [dataclasses.replace(record, trials={"silu_mul": idle})])
    with validated.unchecked():
        assert trials.compare(torch.device("cpu"), "cpu") == "silu_mul: the trial '' does not call the operation"
