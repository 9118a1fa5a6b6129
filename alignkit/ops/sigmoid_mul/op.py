"""The record of sigmoid_mul: kernels, custom ops, golden cases, self-test (../record.py)."""

from __future__ import annotations

import torch

from ...runtime.dispatch import one_per_backend
from .._common import require_tensors
from ..inputs import Inputs
from ..record import EXPERTS, ROWS, WIDTH, Custom, Golden, Op, Rows, Trial, fake_like
from . import check, cpu, forward, reference, sigmoid_mul


def _triton():
    from . import triton_backend

    return triton_backend


def _custom(gate, x):
    require_tensors(gate=gate, x=x)
    check(gate, x)
    return forward(gate, x)


def _trial(given: Inputs, _) -> list[torch.Tensor]:
    gate = given.rough(9, 1, seed=1, dtype=torch.float32, high=3)
    each = given.run(sigmoid_mul, given.rough(9, 70, seed=3, high=3), given.rough(9, 70, seed=2), rough=True)
    return given.run(sigmoid_mul, gate, given.rough(9, 70, seed=2), rough=True) + each


def rounding_sigmoid_mul_each(given: Inputs) -> list[torch.Tensor]:
    return given.run(sigmoid_mul, given.rough(70, 40, seed=1, high=3), given.rough(70, 40, seed=2), rough=True)


def _self_test(normal):
    gate = normal(17, ROWS, EXPERTS, dtype=torch.float32)
    yield Rows("sigmoid_mul", lambda z, x: sigmoid_mul(z[:, :1], x), [gate, normal(0, ROWS, WIDTH)])
    yield Rows("sigmoid_mul by element", sigmoid_mul, [normal(1, ROWS, WIDTH), normal(0, ROWS, WIDTH)])


def _samples():
    from .samples import SAMPLES

    return SAMPLES


OP = Op(
    "sigmoid_mul",
    kernels={"sigmoid_mul": one_per_backend(_triton, cpu, reference)},
    custom=(Custom("sigmoid_mul(Tensor gate, Tensor x) -> Tensor", _custom, lambda gate, x: fake_like(x)),),
    golden=(Golden(rounding_sigmoid_mul_each),),
    self_test=_self_test,
    samples=_samples,
    trials={"sigmoid_mul": Trial(_trial)},
)
