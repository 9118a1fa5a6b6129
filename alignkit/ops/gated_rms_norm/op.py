"""The record of gated_rms_norm: kernels, golden cases, self-test (../record.py)."""

from __future__ import annotations

import torch

from ...runtime.dispatch import one_per_backend
from ..inputs import Inputs
from ..record import ROWS, WIDTH, Golden, Op, Rows, Trial
from . import cpu, gated_rms_norm, reference


def _triton():
    from . import triton_backend

    return triton_backend


def rounding_gated_rms_norm(given: Inputs) -> list[torch.Tensor]:
    """Compute norms whose sums round; some rows are subnormal."""
    x, weight, gate = given.rough(70, 128, seed=1), given.rough(128, seed=2), given.rough(70, 128, seed=3, high=3)
    x[:5] = given.rough(5, 128, seed=4, low=-140, high=-120)
    return given.run(lambda *t: gated_rms_norm(*t, 1e-6), x, weight, gate, rough=True)


def _trial(given: Inputs, _) -> list[torch.Tensor]:
    x, weight, gate = given.rough(9, 40, seed=1), given.rough(40, seed=2), given.rough(9, 40, seed=3, high=3)
    return given.run(lambda *t: gated_rms_norm(*t, 1e-6), x, weight, gate, rough=True)


def _self_test(normal):
    weight = normal(4, WIDTH)
    inputs = [normal(0, ROWS, WIDTH), normal(1, ROWS, WIDTH)]
    yield Rows("gated_rms_norm", lambda x, gate: gated_rms_norm(x, weight, gate, 1e-6), inputs)


def _samples():
    from .samples import SAMPLES

    return SAMPLES


OP = Op(
    "gated_rms_norm",
    kernels={"gated_rms_norm": one_per_backend(_triton, cpu, reference)},
    golden=(Golden(rounding_gated_rms_norm),),
    self_test=_self_test,
    samples=_samples,
    trials={"gated_rms_norm": Trial(_trial)},
)
