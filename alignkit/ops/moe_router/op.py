"""The record of moe_router: kernels, custom ops, golden cases, self-test (../record.py)."""

from __future__ import annotations

import torch

from ...runtime.dispatch import one_per_backend
from .._common import require_tensors
from ..inputs import Inputs
from ..record import EXPERTS, ROWS, Custom, Op, Rows, Trial
from . import check, cpu, moe_router, reference, route


def _triton():
    from . import triton_backend

    return triton_backend


def _moe_router(logits, top_k, score, normalize, bias, groups, top_groups, scale):
    require_tensors(logits=logits)
    options = check(logits, top_k, score, normalize, bias, groups, top_groups, scale)
    return route(logits, bias, options)


def _fake_router(logits, top_k, *_):
    shape = (*logits.shape[:-1], top_k)
    return logits.new_empty(shape), logits.new_empty(shape, dtype=torch.int64)


def _trial(given: Inputs, _) -> list[torch.Tensor]:
    z, bias = given.rough(9, 12, seed=1, dtype=torch.float32, high=2), given.rough(12, seed=2, dtype=torch.float32)
    limited = {"score": "sigmoid", "bias": bias, "groups": 4, "top_groups": 2, "scale": 2.5}
    found = []
    for options in ({}, {"normalize": False}, limited):
        found += given.run(lambda z, options=options: moe_router(z, 3, **options)[0], z, rough=True)
        found.append(moe_router(z, 3, **options)[1])
    return found


def _self_test(normal):
    yield Rows("moe_router", lambda z: moe_router(z, 2), [normal(17, ROWS, EXPERTS, dtype=torch.float32)])


def _samples():
    from .samples import SAMPLES

    return SAMPLES


OP = Op(
    "moe_router",
    kernels={"moe_router": one_per_backend(_triton, cpu, reference)},
    custom=(
        Custom(
            "moe_router(Tensor logits, int top_k, str score, bool normalize, Tensor? bias, int groups, int top_groups, "
            "float scale) -> (Tensor, Tensor)",
            _moe_router,
            _fake_router,
        ),
    ),
    self_test=_self_test,
    samples=_samples,
    trials={"moe_router": Trial(_trial)},
)
