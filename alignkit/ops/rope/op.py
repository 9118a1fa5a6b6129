"""The record of rope: kernels, custom ops, golden cases, self-test (../record.py)."""

from __future__ import annotations

import torch

from ...contract.rope import Llama3, Yarn, yarn_attention_factor
from ...runtime import dispatch
from ...runtime.dispatch import one_per_backend
from .._common import checks_values, require, require_tensors, unit
from ..inputs import Inputs
from ..record import ROWS, WIDTH, Custom, Golden, Op, Rows, Trial, fake_like
from . import check, cpu, reference, rope, rope_table


def _triton():
    from . import triton_backend

    return triton_backend


def _check_rotation(name, x, positions, table, rotary_dim):
    if (
        checks_values(x.device)
        or x.ndim != 3
        or x.shape[0] != positions.shape[0]
        or x.shape[2] != table.shape[1]
        or rotary_dim not in (None, table.shape[1])
    ):
        check(x, positions, table, name, rotary_dim)


def _rope_qk(q, k, positions, table, rotary_dim=None):
    require_tensors(q=q, k=k, positions=positions, table=table)
    _check_rotation("q", q, positions, table, rotary_dim)
    _check_rotation("k", k, positions, table, rotary_dim)
    require(k.shape[2] == q.shape[2], f"k: head_dim must equal q's {q.shape[2]}, got {k.shape[2]}")
    return dispatch.select("rope", q.device).apply_qk(unit(q), unit(k), positions.contiguous(), table.contiguous())


def elementwise(given: Inputs) -> list[torch.Tensor]:
    from .. import silu_mul  # deferred: a measurement's digest covers the ops that are imported by name

    x, gate = given.values(70, 3, 64, seed=1), given.values(70, 300, seed=2, scale=2.0**-3)
    positions = given.integers(70, seed=3, below=500)
    return given.run(lambda x: rope(x, positions, rope_table(64, 500, 1e6, x.device)), x) + given.run(
        lambda g: silu_mul(g[:, :150], g[:, 150:]), gate
    )


def rounding_elementwise(given: Inputs) -> list[torch.Tensor]:
    from .. import silu_mul

    x, gate, up = given.rough(70, 3, 64, seed=1), given.rough(70, 150, seed=2, high=3), given.rough(70, 150, seed=3)
    x[:5], gate[:5] = given.rough(5, 3, 64, seed=4, low=-140, high=-120), given.rough(5, 150, seed=6, low=-140)
    positions = given.integers(70, seed=5, below=500)
    rotated = given.run(lambda x: rope(x, positions, rope_table(64, 500, 1e6, x.device)), x, rough=True)
    return rotated + given.run(silu_mul, gate, up, rough=True)


def scaled_tables(given: Inputs) -> list[torch.Tensor]:
    llama3 = Llama3(8.0, 1.0, 4.0, 8192)
    yarns = (Yarn(4.0, 1024, 32.0, 1.0, yarn_attention_factor(4.0), truncate) for truncate in (True, False))
    return [rope_table(64, 3000, 1e4, given.device, scaling) for scaling in (llama3, *yarns)]


def _trial(given: Inputs, _) -> list[torch.Tensor]:
    x, positions = given.rough(9, 3, 64, seed=1), given.integers(9, seed=2, below=500)
    return given.run(lambda x: rope(x, positions, rope_table(64, 500, 1e6, x.device)), x, rough=True)


def _self_test(normal):
    table = rope_table(64, 512, 10000.0, normal.device)
    x, positions = normal(0, ROWS, WIDTH), normal.integers(6, ROWS, below=512)
    yield Rows("rope", lambda x, p: rope(x.unflatten(-1, (-1, 64)), p, table), [x, positions])


def _samples():
    from .samples import SAMPLES

    return SAMPLES


OP = Op(
    "rope",
    kernels={"rope": one_per_backend(_triton, cpu, reference)},
    custom=(
        Custom(
            "rope_qk(Tensor q, Tensor k, Tensor positions, Tensor table, int? rotary_dim=None) -> (Tensor, Tensor)",
            _rope_qk,
            lambda q, k, *_: (fake_like(q), fake_like(k)),
        ),
    ),
    golden=(Golden(elementwise), Golden(rounding_elementwise), Golden(scaled_tables)),
    self_test=_self_test,
    samples=_samples,
    trials={"rope": Trial(_trial)},
)
