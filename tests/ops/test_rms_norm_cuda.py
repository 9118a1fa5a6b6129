"""CUDA RMSNorm gives the bits of Triton on a GPU, for every shape, stride and schedule."""

import random

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given

from alignkit import ops
from alignkit.runtime import cuda, dispatch
from alignkit.runtime.operands import operand
from alignkit.testing import assert_bitwise_equal

from .helpers import CPU, seeds

pytestmark = [
    pytest.mark.skipif(CPU, reason="needs a GPU"),
    pytest.mark.skipif(not cuda.available(), reason="the CUDA kernels are not built"),
]
BF16, FP32 = torch.bfloat16, torch.float32
SIZES = (
    40,
    64,
    72,
    128,
    136,
    256,
    264,
    512,
    520,
    768,
    1024,
    1032,
    2048,
    2056,
    2560,
    3072,
    3080,
    3584,
    4096,
    4104,
    5120,
    5128,
    6144,
    6152,
    8192,
    8200,
    9216,
    16384,
)
"""Limits of each kernel's range, and sizes between them; with d_total, one kernel covers 4104 to 8192."""
KINDS = ("usual", "any magnitude", "zeros of both signs", "products that underflow", "NaN and inf")


def random_values(shape, kind):
    t = torch.randn(shape)
    if kind == "any magnitude":
        t *= 10.0 ** torch.randint(-8, 8, shape)
    elif kind == "zeros of both signs":
        t = torch.where(torch.rand(shape) < 0.7, torch.where(torch.rand(shape) < 0.8, -0.0, 0.0), t * 1e-30)
    elif kind == "products that underflow":
        t = torch.where(torch.rand(shape) < 0.9, -1e-30 * t.abs(), t * 0)
    elif kind == "NaN and inf":
        t[torch.rand(shape) < 0.001] = float("nan")
        t[torch.rand(shape) < 0.001] = float("inf")
    return t.to(BF16)


def strided(rows, heads, h, kind):
    """Return a random view [rows, h] or [rows, heads, h] of a larger tensor."""
    if heads == 1:
        return random.choice(
            [lambda: random_values((rows, h), kind), lambda: random_values((rows, h + 16), kind)[:, 8 : 8 + h]]
        )()
    return random.choice(
        [
            lambda: random_values((rows, heads + 2, h), kind)[:, 1 : 1 + heads],
            lambda: random_values((rows, heads, h + 8), kind)[..., :h],
            lambda: random_values((heads, rows, h), kind).transpose(0, 1),
        ]
    )()


def assert_same(x, residual, weight, zero_centered, kind, what):
    """Compare forward and backward of both backends, with all schedules of the CUDA backward and unrounded dweight."""
    from alignkit.ops.rms_norm import cuda_backend as kernels
    from alignkit.ops.rms_norm import forward, triton_backend
    from alignkit.ops.rms_norm.problem import Norm

    got = forward(x, weight, 1e-6, residual, zero_centered)
    want = triton_backend.forward(x, weight, 1e-6, residual, zero_centered)
    for name, a, b in zip(("total", "y", "rstd"), got, want, strict=True):
        assert_bitwise_equal(a, b, f"{name}, {what}")
    total, y, rstd = got
    dy, d_total = random_values(y.shape, kind), None if residual is None else random_values(y.shape, kind)
    dx, dweight = triton_backend.backward(dy, total, weight, rstd, d_total, zero_centered)
    tensors = (total, dy, weight) if d_total is None else (total, dy, weight, d_total)
    if kernels.backward_rejects(Norm("cuda", tuple(map(operand, tensors)))) is not None:
        return
    for chains in (0, 1, 2, 4, 8, -2, -4, -8):
        got = kernels.backward(dy, total, weight, rstd, d_total, zero_centered, FP32, chains)
        for name, a, b in zip(("dx", "dweight"), got, (dx, dweight), strict=True):
            assert_bitwise_equal(a, b, f"{name}, {what}, {chains} chains")
    got = kernels.backward(dy, total, weight, rstd, d_total, zero_centered)
    assert_bitwise_equal(got[1], dweight.to(BF16), f"dweight rounded, {what}")


@pytest.mark.parametrize("h", SIZES)
@given(data=st.data(), seed=seeds)
def test_bits_equal_those_of_triton(h, data, seed):
    torch.manual_seed(seed)
    random.seed(seed)
    kind = data.draw(st.sampled_from(KINDS))
    rows, heads = data.draw(
        st.sampled_from([(65, 3), (64, 3), (17, 3), (16, 3), (15, 1), (3, 1), (2, 1), (1, 1), (1100, 1)])
    )
    x = strided(rows, heads, h, kind)
    weight = random_values((h,), kind if kind == "zeros of both signs" else "usual")
    for residual in (None, strided(rows, heads, h, kind)):
        assert_same(x, residual, weight, h % 3 == 0, kind, f"{h}, {rows} rows, {heads} heads, {kind}")


@pytest.mark.parametrize(
    "rows, heads, h",
    [
        (70001, 8, 128),
        (300007, 1, 64),
        (64 * 16, 1, 256),
        (64 * 64 * 16, 1, 64),
        (20011, 1, 2048),
        (20011, 1, 4096),
        (9001, 1, 5120),
        (4097, 1, 16384),
    ],
)
def test_far_more_rows_than_fit_on_the_device(rows, heads, h):
    """CTAs process runs of rows of several lengths; some trees of chains are complete."""
    torch.manual_seed(rows)
    for kind in ("usual", "products that underflow"):
        assert_same(
            strided(rows, heads, h, kind),
            None,
            random_values((h,), "usual"),
            False,
            kind,
            f"{rows} rows of {heads} x {h}",
        )


@pytest.mark.parametrize(
    "x",
    [
        lambda: random_values((50, 4096), "usual").float(),
        lambda: random_values((50, 100), "usual"),
        lambda: random_values((50, 32), "usual"),
        lambda: random_values((5, 16392), "usual"),
        lambda: random_values((50, 65), "usual")[:, 1:],
        lambda: random_values((50, 68), "usual")[:, :64],
        lambda: random_values((0, 64), "usual"),
    ],
)
def test_unsupported_inputs_use_triton(x):
    x = x()
    weight = random_values(x.shape[-1:], "usual").to(x.dtype)
    results = []
    for backend in ("cuda", "triton"):
        leaves = [t.detach().requires_grad_() for t in (x, weight, x)]
        with dispatch.use(backend):
            out = ops.rms_norm(*leaves[:2], 1e-6, leaves[2])
            results.append([*out, *torch.autograd.grad(out, leaves, [torch.ones_like(o) for o in out])])
    for i, (a, b) in enumerate(zip(*results, strict=True)):
        assert_bitwise_equal(a, b, f"output or gradient {i}")


def test_graph_capture_without_synchronization():
    x, weight, dy = (random_values(shape, "usual") for shape in ((3000, 1024), (1024,), (3000, 1024)))

    def run():
        leaves = [t.detach().requires_grad_() for t in (x, weight)]
        y = ops.rms_norm(*leaves, 1e-6)
        return y.detach(), *torch.autograd.grad(y, leaves, dy)

    want = run()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        again = run()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = run()
    x.neg_()
    graph.replay()
    for a, b, c, sign in zip(again, want, out, (-1, 1, -1), strict=True):
        assert_bitwise_equal(a, b, "again")
        assert_bitwise_equal(sign * c, b, "replayed")
