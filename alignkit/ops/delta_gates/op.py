"""The record of delta_gates: kernels, golden cases, self-test (../record.py)."""

from __future__ import annotations

import torch

from ...runtime.dispatch import one_per_backend
from ..inputs import Inputs
from ..record import EXPERTS, ROWS, Golden, Op, Rows, Trial
from . import cpu, delta_gates, reference


def _triton():
    from . import triton_backend

    return triton_backend


def _run(given: Inputs, rows: int, heads: int) -> list[torch.Tensor]:
    a, b = given.rough(rows, heads, seed=1, high=4), given.rough(rows, heads, seed=2, high=3)
    a_log, dt_bias = (given.rough(heads, seed=seed, high=1, dtype=torch.float32) for seed in (3, 4))
    return given.run(delta_gates, a, b, a_log, dt_bias, rough=True)


def rounding_delta_gates(given: Inputs) -> list[torch.Tensor]:
    """Compute gates on both sides of softplus' linear part."""
    return _run(given, 70, 32)


def _self_test(normal):
    heads = [normal(seed, EXPERTS, dtype=torch.float32) for seed in (3, 4)]
    yield Rows(
        "delta_gates", lambda a, b: delta_gates(a, b, *heads), [normal(0, ROWS, EXPERTS), normal(1, ROWS, EXPERTS)]
    )


def _samples():
    from .samples import SAMPLES

    return SAMPLES


OP = Op(
    "delta_gates",
    kernels={"delta_gates": one_per_backend(_triton, cpu, reference)},
    golden=(Golden(rounding_delta_gates),),
    self_test=_self_test,
    samples=_samples,
    trials={"delta_gates": Trial(lambda given, _: _run(given, 9, 24))},
)
