"""Concurrent starts of the GPU tests' engines (concurrent_engines.py), with fake processes on a CPU."""

import threading

import pytest

from tests.vllm.concurrent_engines import concurrent_engines


def test_requesting_an_engine_waits_for_that_engine_alone(tmp_path):
    """The second engine fails, the third is still starting, and the fourth never starts."""
    may_start, began = threading.Event(), []

    def process(**environment):
        def call(start, model, options):
            began.append(model)
            if model == "failing":
                raise ValueError(model)
            if model == "slow":
                assert may_start.wait(60)

        return call

    models = {"a": "quick", "b": "failing", "c": "slow", "d": "unstarted"}
    engines = {key: ({}, model, {}) for key, model in models.items()}
    with concurrent_engines(process, engines, tmp_path, at_once=1) as started:
        assert callable(started["a"])
        for _ in range(2):
            with pytest.raises(ValueError, match="failing"):
                started["b"]
    may_start.set()
    with pytest.raises(KeyError):
        started["e"]
    assert "unstarted" not in began
