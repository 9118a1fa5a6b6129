"""Tensors on a GPU other than the current one, on a machine with two GPUs; part of `make gpu-test`.

Every op, forward and backward, gives the bits of the current GPU and uses the stream of the tensors' GPU. The current
device does not change.
"""

import pytest
import torch

from alignkit import ops
from alignkit.ops import golden, library
from alignkit.ops.linear import matmul
from alignkit.runtime import cuda, dispatch
from alignkit.testing import assert_bitwise_equal

from . import test_gated_delta_rule
from .helpers import CPU, randn

pytestmark = pytest.mark.skipif(CPU or torch.cuda.device_count() < 2, reason="needs two GPUs")

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
BACKENDS = ["triton", *(["cuda"] if cuda.available() else [])]
GEMMS = (
    (8, 17000, 512, 1),
    (8, 1024, 4096, 1),
    (40, 512, 4096, 8),
    (16, 64, 1024, 8),
    (300, 512, 1024, 8),
    (300, 1024, 1024, 1),
)
"""m, n, k and leaves: with fp32 outputs, one problem per kernel of "linear"."""


def random_on(device, *shape, dtype=BF16):
    return randn(*shape, dtype=dtype).to(device)


def gemms(device):
    torch.manual_seed(0)
    results = []
    for m, n, k, leaves in GEMMS:
        for dtype in (BF16, FP16):
            a, b, bias = (
                random_on(device, m, k, dtype=dtype),
                random_on(device, n, k, dtype=dtype),
                random_on(device, n, dtype=dtype),
            )
            results += [matmul(a, b, leaves=leaves), matmul(a, b, leaves=leaves, bias=bias, out_dtype=dtype)]
        if leaves == 1:
            results.append(matmul(a, b, out=random_on(device, m, n, dtype=FP32)))
    return results


def delta_rule(device):
    rows, rest = test_gated_delta_rule.problem(k_dim=128, v_dim=128, dtype=BF16, starts=[0, 30, 130])
    rows, rest = (
        {name: t.to(device) if isinstance(t, torch.Tensor) else t for name, t in arguments.items()}
        for arguments in (rows, rest)
    )
    return list(test_gated_delta_rule.run(rows, rest))


def both_rotated(device):
    torch.manual_seed(0)
    positions = torch.randint(500, (70,)).to(device)
    q, k = random_on(device, 70, 4, 64), random_on(device, 70, 2, 64)
    return list(library.rope_qk(q, k, positions, ops.rope_table(64, 500, 1e6, device)))


def picked(device):
    torch.manual_seed(0)
    z, ids = random_on(device, 70, 3000, dtype=FP32), torch.randint(3000, (70, 5)).to(device)
    return [ops.token_logp(z, ids, temperature=0.7)]


CASES = {f.__name__: f for f in (gemms, delta_rule, both_rotated, picked)}
CASES |= {
    name: lambda on, case=case, dtype=dtype: case.function(golden.Inputs(on, dtype))
    for name, (case, dtype) in golden.CASES.items()
}


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("case", CASES)
def test_bits_on_another_gpu_equal_those_of_the_current_gpu(case, backend):
    assert torch.cuda.current_device() == 0
    got = []
    for number in (1, 0):  # compiled kernels, trials and caches belong to one GPU
        with dispatch.use(backend):
            got.append(CASES[case](torch.device("cuda", number)))
        assert torch.cuda.current_device() == 0
        assert {t.get_device() for t in got[-1]} == {number}
    for i, (other, current) in enumerate(zip(*got, strict=True)):
        assert_bitwise_equal(other.cpu(), current.cpu(), f"{case}, result {i}")


WEIGHTS = {
    "linear": (1024, 1024),
    "row_parallel_linear": (1024, 1024),
    "rms_norm": (1024,),
    "silu_mul": (300, 1024),
    "linear_logp": (3000, 1024),
}
"""Shape of the second argument, by op."""


def _op(name, x, weight):
    if name == "rms_norm":
        return ops.rms_norm(x, weight, 1e-6)
    if name == "linear_logp":
        return ops.linear_logp(x, weight, torch.arange(len(x), device=x.device))
    return getattr(ops, name)(x, weight)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", WEIGHTS)
def test_op_uses_the_stream_of_the_tensors_gpu(name, backend):
    """The op's input is written late, on the other GPU's current stream."""
    other = torch.device("cuda", 1)
    x, weight = random_on(other, 300, 1024), random_on(other, *WEIGHTS[name])
    stream = torch.cuda.Stream(other)
    with dispatch.use(backend):
        want = _op(name, x, weight)
        torch.cuda.synchronize(other)
        with torch.cuda.stream(stream):
            late = torch.zeros_like(x)
            torch.cuda._sleep(50_000_000)
            late.copy_(x)
            with torch.cuda.device(0):
                got = _op(name, late, weight)
                assert torch.cuda.current_device() == 0
    stream.synchronize()
    assert_bitwise_equal(got, want, name)
