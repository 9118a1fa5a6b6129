"""The record of l2_norm: kernels, golden cases, self-test (../record.py)."""

from __future__ import annotations

import torch

from ...runtime.dispatch import one_per_backend
from ..inputs import Inputs
from ..record import ROWS, WIDTH, Golden, Op, Rows, Trial
from . import cpu, l2_norm, reference


def _triton():
    from . import triton_backend

    return triton_backend


def rounding_l2_norm(given: Inputs) -> list[torch.Tensor]:
    """Compute norms whose sums round; some rows are subnormal."""
    x = given.rough(70, 128, seed=1)
    x[:5] = given.rough(5, 128, seed=4, low=-140, high=-120)
    return given.run(lambda x: l2_norm(x, 1e-6), x, rough=True)


def _trial(given: Inputs, _) -> list[torch.Tensor]:
    return given.run(lambda x: l2_norm(x, 1e-6), given.rough(9, 3, 40, seed=1), rough=True)


def _self_test(normal):
    yield Rows("l2_norm", lambda x: l2_norm(x, 1e-6), [normal(0, ROWS, WIDTH)])


def _samples():
    from .samples import SAMPLES

    return SAMPLES


OP = Op(
    "l2_norm",
    kernels={"l2_norm": one_per_backend(_triton, cpu, reference)},
    golden=(Golden(rounding_l2_norm),),
    self_test=_self_test,
    samples=_samples,
    trials={"l2_norm": Trial(_trial)},
)
