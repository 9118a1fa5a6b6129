"""The record of rms_norm: kernels, custom ops, golden cases, self-test (../record.py)."""

from __future__ import annotations

from collections.abc import Callable

import torch

from ...runtime.dispatch import Kernel, one_per_backend
from ...runtime.families import CUDA
from .._common import require_tensors
from ..inputs import Inputs
from ..record import ROWS, WIDTH, Custom, Golden, Op, Rows, Trial, fake_like
from ..words import Words, dense
from . import check, cpu, forward, reference, rms_norm
from .problem import Norm


def _triton():
    from . import triton_backend

    return triton_backend


def _cuda():
    from . import cuda_backend

    return cuda_backend


def _add_rms_norm(x, residual, weight, eps):
    require_tensors(x=x, weight=weight)
    if (
        x.is_cpu
        or x.shape[-1] != weight.shape[0]
        or x.dtype != weight.dtype
        or (residual is not None and (residual.shape != x.shape or residual.dtype != x.dtype))
    ):
        check(x, weight, eps, residual)
    total, y, _ = forward(x, weight.contiguous(), eps, residual)
    return y, total


def _add_rms_norm_with_residual(x, residual, weight, eps):
    require_tensors(residual=residual)
    return _add_rms_norm(x, residual, weight, eps)


def _rms_norm(x, weight, eps):
    return _add_rms_norm(x, None, weight, eps)[0]


def _described(others: int) -> Callable[[str, Words], Norm]:
    def described(backend: str, given: Words) -> Norm:
        shape, dtype = (given.size("rows"), given.size("h")), given.dtype("dtype")
        x = dense(dtype, *shape, aligned=given.flag("aligned", "yes"))
        return Norm(backend, (x, *[dense(dtype, *shape)] * others, dense(dtype, shape[1])))

    return described


def norms(given: Inputs) -> list[torch.Tensor]:
    x, r, w = given.values(70, 200, seed=1), given.values(70, 200, seed=3), given.values(200, seed=2)
    return given.run(lambda x, w: rms_norm(x, w, 1e-6), x, w) + given.run(
        lambda *t: rms_norm(*t[:2], 1e-6, t[2]), x, w, r
    )


def rounding_norms(given: Inputs) -> list[torch.Tensor]:
    """Compute norms whose sums round; some rows are subnormal."""
    x, r, w = given.rough(70, 200, seed=1), given.rough(70, 200, seed=3), given.rough(200, seed=2)
    x[:5] = given.rough(5, 200, seed=4, low=-140, high=-120)
    return given.run(lambda x, w: rms_norm(x, w, 1e-6), x, w, rough=True) + given.run(
        lambda *t: rms_norm(*t[:2], 1e-6, t[2], zero_centered=True), x, w, r, rough=True
    )


def _samples():
    from .samples import SAMPLES

    return SAMPLES


def _trial(given: Inputs, p: Norm | None) -> list[torch.Tensor]:
    rows, h = (9, 40) if p is None else p.tensors[0][0]
    x, weight = given.rough(rows, h, seed=1), given.rough(h, seed=2)
    if p is not None:
        first, second = given.halves(rows, seed=90)  # the halves of `rough_gradients`: the exact gradient of w is 0
        x[second] = x[first]
        return given.run(lambda x, w: rms_norm(x, w, 1e-6), x, weight, rough=True)
    residual = given.rough(rows, h, seed=3)
    return given.run(lambda x, w, r: rms_norm(x, w, 1e-6, r), x, weight, residual, rough=True)


def _self_test(normal):
    x, residual, weight = normal(0, ROWS, WIDTH), normal(1, ROWS, WIDTH), normal(4, WIDTH)
    yield Rows("rms_norm", lambda x: rms_norm(x, weight, 1e-6), [x])
    yield Rows("rms_norm with residual", lambda x, r: rms_norm(x, weight, 1e-6, residual=r), [x, residual])


_EACH = one_per_backend(_triton, cpu, reference)
OP = Op(
    "rms_norm",
    kernels={
        "rms_norm": (Kernel("cuda", CUDA, _cuda, rule=lambda p: _cuda().forward_rejects(p)), *_EACH),
        "add_rms_norm": _EACH,
        "rms_norm_backward": (Kernel("cuda", CUDA, _cuda, rule=lambda p: _cuda().backward_rejects(p)), *_EACH),
    },
    described={"rms_norm": _described(0), "rms_norm_backward": _described(1)},
    custom=(
        Custom("rms_norm(Tensor x, Tensor weight, float eps) -> Tensor", _rms_norm, fake_like),
        Custom(
            "add_rms_norm(Tensor x, Tensor residual, Tensor weight, float eps) -> (Tensor, Tensor)",
            _add_rms_norm_with_residual,
            lambda x, *_: (fake_like(x), fake_like(x)),
        ),
    ),
    golden=(Golden(norms), Golden(rounding_norms)),
    self_test=_self_test,
    samples=_samples,
    trials={
        "rms_norm": Trial(_trial, {"": ("rows=9 h=40", "rows=9 h=40 dtype=fp32"), "cuda": ("rows=400 h=2056",)}),
        "add_rms_norm": Trial(_trial),
        "rms_norm_backward": Trial(
            _trial, {"": ("rows=40 h=40", "rows=40 h=40 dtype=fp32"), "cuda": ("rows=4096 h=256",)}
        ),
    },
)
