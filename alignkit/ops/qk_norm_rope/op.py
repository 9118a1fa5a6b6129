"""The record of qk_norm_rope: kernels, custom ops, golden cases, self-test (../record.py)."""

from __future__ import annotations

import functools

import torch

from ...runtime.dispatch import one_per_backend
from .._common import checks_values, require_tensors
from ..inputs import Inputs
from ..record import ROWS, WIDTH, Custom, Golden, Op, Rows, Trial, fake_like
from ..rope import rope_table
from . import check, cpu, forward, qk_norm_rope, reference


def _triton():
    from . import triton_backend

    return triton_backend


def _qk_norm_rope(q, k, q_weight, k_weight, eps, positions, table, rotary_dim=None):
    tensors = {"q": q, "k": k, "q_weight": q_weight, "k_weight": k_weight, "positions": positions, "table": table}
    require_tensors(**tensors)
    if (
        checks_values(q.device)
        or q.ndim != 3
        or k.ndim != 3
        or not q.shape[0] == k.shape[0] == positions.shape[0]
        or not q.shape[2] == k.shape[2] == q_weight.shape[0] == k_weight.shape[0] == table.shape[1]
        or not q.dtype == k.dtype == q_weight.dtype == k_weight.dtype
        or rotary_dim not in (None, table.shape[1])
    ):
        check(q, k, q_weight, k_weight, eps, positions, table, rotary_dim)
    return forward(q, k, q_weight, k_weight, eps, positions, table)


def normed_rotations(given: Inputs) -> list[torch.Tensor]:
    """Compute qk_norm_rope of odd integers times a power of two.

    Their sum of squares is exact in any order, and no product is zero. All device families give the same bits, and so
    do the separate ops.
    """

    def odd(*shape: int, seed: int) -> torch.Tensor:
        return ((2 * given.integers(*shape, seed=seed, below=200) - 199).double() * 2.0**-7).to(given.dtype)

    positions, found = 1 + given.integers(70, seed=1, below=499), []
    for dim, rotary, zero_centered in ((64, 64, False), (96, 96, True), (64, 24, False)):
        q, k, *weights = (odd(*shape, dim, seed=seed) for seed, shape in enumerate(((70, 4), (70, 2), (), ()), 2))
        table = rope_table(rotary, 500, 1e6, given.device)
        found += qk_norm_rope(q, k, *weights, 1e-6, positions, table, rotary_dim=rotary, zero_centered=zero_centered)
    return found


def rounding_rotations(given: Inputs) -> list[torch.Tensor]:
    """Compute qk_norm_rope whose sums round, and its gradients."""
    positions, found = given.integers(70, seed=1, below=500), []
    for dim, rotary, zero_centered in ((96, 96, True), (64, 24, False)):
        q, k, *weights = (
            given.rough(*shape, dim, seed=seed) for seed, shape in enumerate(((70, 4), (70, 2), (), ()), 2)
        )
        q[:5] = given.rough(5, 4, dim, seed=6, low=-140, high=-120)
        table = rope_table(rotary, 500, 1e6, given.device)
        options = {"rotary_dim": rotary, "zero_centered": zero_centered}
        function = functools.partial(_rotated, positions, table, options)
        found += given.run(function, q, k, *weights, rough=True)
    return found


def _rotated(positions, table, options, q, k, *weights):
    return qk_norm_rope(q, k, *weights, 1e-6, positions, table, **options)


def _self_test(normal):
    table = rope_table(64, 512, 10000.0, normal.device)
    x, positions, weight = normal(0, ROWS, WIDTH), normal.integers(6, ROWS, below=512), normal(4, WIDTH)
    scales = weight[:64], weight[64:128]
    yield Rows(
        "qk_norm_rope",
        lambda x, p: qk_norm_rope(*x.unflatten(-1, (-1, 64)).split([3, 1], 1), *scales, 1e-6, p, table),
        [x, positions],
    )


def _samples():
    from .samples import SAMPLES

    return SAMPLES


OP = Op(
    "qk_norm_rope",
    kernels={"qk_norm_rope": one_per_backend(_triton, cpu, reference)},
    custom=(
        Custom(
            "qk_norm_rope(Tensor q, Tensor k, Tensor q_weight, Tensor k_weight, float eps, Tensor positions, "
            "Tensor table, int? rotary_dim=None) -> (Tensor, Tensor)",
            _qk_norm_rope,
            lambda q, k, *_: (fake_like(q), fake_like(k)),
        ),
    ),
    golden=(Golden(normed_rotations), Golden(rounding_rotations)),
    self_test=_self_test,
    samples=_samples,
    trials={"qk_norm_rope": Trial(lambda given, _: rounding_rotations(given))},
)
