"""The record of bit_sums: kernels, golden cases, self-test, samples (../record.py)."""

from __future__ import annotations

import torch

from ...runtime.dispatch import Kernel, one_per_backend
from ...runtime.families import TRITON
from ..inputs import Inputs
from ..record import ROWS, WIDTH, Golden, Op, Rows, Trial
from ..samples import Sample, Source, Tensor
from . import bit_sums, cpu, reference


def _triton():
    from . import triton_backend

    return triton_backend


def _products():
    from . import products

    return products


def bits(given: Inputs) -> list[torch.Tensor]:
    x, weights = given.rough(19, 300, seed=1, low=-30, high=30), given.integers(300, seed=2, below=1 << 32)
    return [bit_sums(x, weights * weights - weights), bit_sums(x[3:, 5:70], weights[5:70])]


def bits_of_several(given: Inputs) -> list[torch.Tensor]:
    """Compute tensors whose addresses are aligned, and tensors whose are not."""
    x, weights = given.rough(60, 520, seed=1, low=-30, high=30), given.integers(520, seed=2, below=1 << 32)
    aligned, others = [x[:20], x[20:40], x[40:]], [x[3:20, 5:], x[23:40, 5:], x[43:, 5:]]
    return [bit_sums(aligned, weights * weights), bit_sums(others, weights[5:] * weights[5:])]


def _self_test(normal):
    weights = normal.integers(1, WIDTH, below=1 << 62)
    yield Rows("bit_sums", lambda x: bit_sums(x, weights), [normal(0, ROWS, WIDTH)])


def _sample(s: Source) -> Sample:
    x = s.floats(s.tokens(60), s.size(700, 0), dtype=s.dtype())
    given = {
        "x": Tensor(x, (1,), (torch.float32, torch.bfloat16, torch.float16), ndim=True, rows=True),
        "weights": Tensor(s.ints((x.shape[1],), 0, 1 << 62), (0,), (torch.int64,), "weights", ndim=True),
    }
    return Sample("bit_sums", bit_sums, given, forward_only=True)


OP = Op(
    "bit_sums",
    kernels={"bit_sums": (Kernel("products", TRITON, _products), *one_per_backend(_triton, cpu, reference))},
    golden=(Golden(bits, modelled=True), Golden(bits_of_several, modelled=True)),
    self_test=_self_test,
    samples=lambda: {_sample: 2},
    trials={"bit_sums": Trial(lambda given, _: bits_of_several(given))},
)
