"""Concurrent starts of the GPU tests' engines."""

import threading

import pytest

from tests.vllm.test_cuda import side_by_side


def test_requesting_an_engine_waits_for_that_engine_alone(tmp_path):
    """The second engine fails, the third is still starting, and the fourth never starts."""
    may_start, began = threading.Event(), []

    def process(**environment):
        def call(start, model, options):
            began.append(model)
            if model == "refused":
                raise ValueError(model)
            if model == "slow":
                assert may_start.wait(60)

        return call

    models = {"a": "quick", "b": "refused", "c": "slow", "d": "left"}
    engines = {key: ({}, model, {}) for key, model in models.items()}
    with side_by_side(process, engines, tmp_path, at_once=1) as started:
        assert callable(started["a"])
        for _ in range(2):
            with pytest.raises(ValueError, match="refused"):
                started["b"]
    may_start.set()
    with pytest.raises(KeyError):
        started["e"]
    assert "left" not in began
