"""The record of silu_mul: kernels, custom ops, golden cases, self-test (../record.py)."""

from __future__ import annotations

import torch

from ...runtime import dispatch
from ...runtime.dispatch import one_per_backend
from .._common import as_rows, require_tensors
from ..inputs import Inputs
from ..record import ROWS, WIDTH, Custom, Op, Rows, Trial, fake_like
from . import check, cpu, reference, silu_mul


def _triton():
    from . import triton_backend

    return triton_backend


def _custom(gate, up):
    require_tensors(gate=gate, up=up)
    if gate.is_cpu or gate.shape != up.shape or gate.dtype != up.dtype:
        check(gate, up)
    return dispatch.select("silu_mul", gate.device).forward(as_rows(gate), as_rows(up)).view(gate.shape)


def _trial(given: Inputs, _) -> list[torch.Tensor]:
    return given.run(silu_mul, given.rough(9, 70, seed=1, high=3), given.rough(9, 70, seed=2), rough=True)


def _self_test(normal):
    yield Rows("silu_mul", silu_mul, [normal(0, ROWS, WIDTH), normal(1, ROWS, WIDTH)])


def _samples():
    from .samples import SAMPLES

    return SAMPLES


OP = Op(
    "silu_mul",
    kernels={"silu_mul": one_per_backend(_triton, cpu, reference)},
    custom=(Custom("silu_mul(Tensor gate, Tensor up) -> Tensor", _custom, fake_like),),
    self_test=_self_test,
    samples=_samples,
    trials={"silu_mul": Trial(_trial)},
)
