"""The record of linear and row_parallel_linear: kernels, custom ops, golden cases, self-test (../record.py)."""

from __future__ import annotations

import torch

from ...contract import k_leaves
from ...errors import InputError
from ...runtime.dispatch import Kernel, select
from ...runtime.families import CUDA, NATIVE, REFERENCE, TRITON
from .._common import DTYPES, WITH_FP16, check_like, check_tensor, check_weight, require, require_tensors
from ..groups import group_of
from ..inputs import Inputs
from ..record import ROWS, WIDTH, Custom, Golden, Op, Rows, Trial, fake_like
from ..words import Words, dense
from . import cpu, linear, matmul, reference, row_parallel_linear
from .problem import Product


def _triton():
    from . import triton_backend

    return triton_backend


def _cuda():
    from . import cuda_backend

    return cuda_backend


def _cublaslt():
    from . import cublaslt

    return cublaslt


def _hopper():
    from . import hopper

    return hopper


def _matmul(x, weight, bias, leaves, out_dtype=None):
    require_tensors(x=x, weight=weight)
    if (
        x.is_cpu
        or x.shape[-1] != weight.shape[1]
        or x.dtype != weight.dtype
        or (bias is not None and (bias.shape[0] != weight.shape[0] or bias.dtype != weight.dtype))
    ):
        check_weight(x, weight, bias, dtypes=WITH_FP16)
    out_dtype = out_dtype or x.dtype
    if x.ndim == 2:
        return matmul(x, weight, leaves=leaves, bias=bias, out_dtype=out_dtype)
    y = matmul(x.reshape(-1, x.shape[-1]), weight, leaves=leaves, bias=bias, out_dtype=out_dtype)
    return y.view(*x.shape[:-1], weight.shape[0])


def _linear(x, weight, bias):
    return _matmul(x, weight, bias, 1)


def _linear_fp32(x, weight, bias):
    return _matmul(x, weight, bias, 1, torch.float32)


def _row_parallel_linear(x, weight, bias, group):
    if group:
        return row_parallel_linear(x, weight, bias, tp=group_of(group))
    require_tensors(x=x, weight=weight)
    return _matmul(x, weight, bias, k_leaves(x.shape[-1]))


def _add(x, y):
    require_tensors(x=x, y=y)
    if x.is_cpu or x.shape != y.shape or x.dtype != y.dtype or x.dtype not in DTYPES:
        check_tensor("x", x)
        check_tensor("y", y)
        require(x.shape == y.shape, f"y: shape must equal x's {tuple(x.shape)}, got {tuple(y.shape)}")
        check_like("y", y, "x", x)
    return x + y


def _fake_linear(x, weight, *_):
    return x.new_empty((*x.shape[:-1], weight.shape[0]))


def _described(backend: str, given: Words) -> Product:
    m, k, n = (given.size(name) for name in ("rows", "k", "n"))
    dtype, leaves = given.dtype("dtype"), given.size("leaves", 1)
    out_dtype = given.dtype("out_dtype", given.used["dtype"])
    bias = dense(dtype, n) if given.flag("bias") else None
    aligned, accumulate = given.flag("aligned", "yes"), given.flag("accumulate")
    if not leaves or k % leaves:
        raise InputError(f"leaves: must divide k = {k}, got {leaves}")
    a, b, out = dense(dtype, m, k, aligned=aligned), dense(dtype, n, k), dense(out_dtype, m, n)
    return Product(backend, None, a, b, bias, out, leaves, accumulate)


def linears(given: Inputs) -> list[torch.Tensor]:
    x, w, b = given.values(70, 384, seed=1), given.values(200, 384, seed=2), given.values(200, seed=3)
    return given.run(linear, x, w, b) + given.run(row_parallel_linear, x, w, b)


def rounding_linears(given: Inputs) -> list[torch.Tensor]:
    """Compute linear layers whose sums round.

    For every other output, the products over k come in pairs of opposite sign. The exact sum is 0, so the result
    consists of rounding errors alone, and any other order shows, in bf16 too.
    """
    x, w = given.rough(70, 384, seed=1), given.rough(200, 384, seed=2)
    first, second = given.halves(384, seed=4)
    x[:, second] = x[:, first]
    w[::2, second] = -w[::2, first]
    b = given.rough(200, seed=3, low=-30, high=-20)
    return given.run(linear, x, w, b, rough=True) + given.run(row_parallel_linear, x, w, b, rough=True)


def subnormal_linears(given: Inputs) -> list[torch.Tensor]:
    """Compute linear layers whose operands, products or sums are subnormal."""
    x, w = given.rough(20, 64, seed=1, low=-80, high=-60), given.rough(40, 64, seed=2, low=-80, high=-60)
    tiny, ones = given.rough(20, 64, seed=3, low=-134, high=-124), given.rough(40, 64, seed=4)
    return given.run(row_parallel_linear, x, w, rough=True) + given.run(linear, tiny, ones, rough=True)


def _trial(given: Inputs, p: Product) -> list[torch.Tensor]:
    a, b = given.rough(p.m, p.k, seed=1), given.rough(p.n, p.k, seed=2)
    bias = None if p.bias is None else given.rough(p.n, seed=3)
    return [matmul(a, b, leaves=p.leaves, bias=bias, out_dtype=p.out[2])]


def _trial_of_resume(given: Inputs, _) -> list[torch.Tensor]:
    out = given.rough(9, 20, seed=1, dtype=torch.float32)
    a, b = given.rough(9, 96, seed=2), given.rough(20, 96, seed=3)
    select("linear_resume", out.device).resume(a, b, out)
    return [out]


def _self_test(normal):
    x, weight, bias = normal(0, ROWS, WIDTH), normal(2, 96, WIDTH), normal(3, 96)
    yield Rows("linear", lambda x: linear(x, weight, bias), [x])
    yield Rows("row_parallel_linear", lambda x: row_parallel_linear(x, weight, bias), [x])


def _samples():
    from .samples import SAMPLES

    return SAMPLES


OP = Op(
    "linear",
    kernels={
        "linear": (
            Kernel("tree", CUDA, _cuda, lambda p: _cuda().tree_rejects(p), lambda p: _cuda().prepare_tree(p)),
            Kernel("few", CUDA, _cuda, lambda p: _cuda().few_rejects(p), lambda p: _cuda().prepare_few(p)),
            Kernel("narrow", CUDA, _cuda, lambda p: _cuda().narrow_rejects(p), lambda p: _cuda().prepare_narrow(p)),
            Kernel(
                "cublaslt",
                TRITON,
                _cublaslt,
                lambda p: _cublaslt().rejects(p),
                lambda p: _cublaslt().prepare(p),
                declines="none of its algorithms gives the chain's bits in a trial on the GPU",
            ),
            Kernel("hopper", TRITON, _hopper, lambda p: _hopper().rejects(p), lambda p: _hopper().prepare(p)),
            Kernel("tiles", TRITON, _triton, prepare=lambda p: _triton().prepare(p)),
            Kernel("cpu", NATIVE, lambda: cpu),
            Kernel("reference", REFERENCE, lambda: reference),
        ),
        "linear_resume": (
            Kernel("tiles", TRITON, _triton),
            Kernel("cpu", NATIVE, lambda: cpu),
            Kernel("reference", REFERENCE, lambda: reference),
        ),
    },
    described={"linear": _described},
    custom=(
        Custom("linear(Tensor x, Tensor weight, Tensor? bias) -> Tensor", _linear, _fake_linear),
        Custom(
            "linear_fp32(Tensor x, Tensor weight, Tensor? bias) -> Tensor",
            _linear_fp32,
            lambda x, weight, *_: x.new_empty((*x.shape[:-1], weight.shape[0]), dtype=torch.float32),
        ),
        Custom(
            "row_parallel_linear(Tensor x, Tensor weight, Tensor? bias, str group) -> Tensor",
            _row_parallel_linear,
            _fake_linear,
        ),
        # T(x + y), opaque because a compiler could fuse the sum and round later.
        Custom("add(Tensor x, Tensor y) -> Tensor", _add, fake_like),
    ),
    golden=(Golden(linears, modelled=True), Golden(rounding_linears, modelled=True), Golden(subnormal_linears)),
    self_test=_self_test,
    samples=_samples,
    trials={
        "linear": Trial(
            _trial,
            {
                "": ("rows=9 k=96 n=20 leaves=2 bias=yes", "rows=9 k=96 n=20 dtype=fp32 out_dtype=fp32"),
                "tree": (
                    "rows=40 k=1024 n=512 leaves=8 bias=yes",
                    "rows=40 k=1024 n=512 leaves=8 out_dtype=fp32",
                    "rows=200 k=2048 n=512 leaves=8 out_dtype=fp32",
                ),
                "few": ("rows=20 k=64 n=16896 out_dtype=fp32",),
                "narrow": ("rows=20 k=2064 n=72 bias=yes", "rows=20 k=2064 n=72 out_dtype=fp32"),
                "cublaslt": ("rows=200 k=512 n=256 bias=yes",),
                "hopper": (  # a chain, split tiles, whole tiles
                    "rows=300 k=512 n=512 bias=yes",
                    "rows=300 k=4096 n=256 leaves=8",
                    "rows=300 k=1024 n=512 leaves=8 out_dtype=fp32",
                ),
            },
        ),
        "linear_resume": Trial(_trial_of_resume),
    },
)
