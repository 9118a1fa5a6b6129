"""Inputs, error bounds and problem descriptions for the op tests.

ALIGNKIT_TEST_DEVICE selects the device of the tests, ALIGNKIT_TEST_EXAMPLES the number of random cases. Each file of
this folder runs in `make test` (CPU) and in `make gpu-test` (GPU), unless its `pytestmark` skips one of them.
"""

import contextlib
import functools
import os
import types
from unittest import mock

import hypothesis.strategies as st
import pytest
import torch

from alignkit.runtime import cuda, dispatch, families, validated

U32 = 2.0**-24
"""Unit roundoff of fp32."""
CPU = os.environ.get("ALIGNKIT_TEST_DEVICE", "cpu") == "cpu"
EXP = (4 if CPU else 100) * U32
"""Relative error of exp: 4 units on the CPU; a GPU rounds x log2(e), and |x| < 88 multiplies that error."""
UNIT = {torch.float32: 2.0**-24, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}
"""Unit roundoff of each model dtype."""
SMALLEST = {torch.float32: 2.0**-149, torch.bfloat16: 2.0**-133, torch.float16: 2.0**-24}
"""Spacing of the numbers next to zero."""

dtypes = st.sampled_from([torch.float32, torch.bfloat16])
linear_dtypes = st.sampled_from([torch.float32, torch.bfloat16, torch.float16])
seeds = st.integers(0, 2**31)


def times(n: int) -> range:
    """Return range(n) for a test's own loop, or only its last ALIGNKIT_TEST_EXAMPLES numbers if they are fewer."""
    return range(max(n - int(os.environ.get("ALIGNKIT_TEST_EXAMPLES", n)), 0), n)


def gamma(n: int) -> float:
    """Return the relative error bound of a chain of n fp32 operations."""
    return n * U32 / (1 - n * U32)


def randn(*shape, dtype=torch.float32, scale=1.0, seed=None):
    if seed is not None:
        torch.manual_seed(seed)
    return (torch.randn(shape) * scale).to(dtype)


@pytest.fixture(autouse=True)
def hopper_without_gpu(monkeypatch):
    """Let rules be tested for a Hopper GPU where there is none, in the files that import this fixture."""
    if not torch.cuda.is_available():
        monkeypatch.setattr(families, "gpu", lambda device: families.HOPPER)


def pretend_gpu(monkeypatch, capability: tuple[int, int], name: str = "a GPU") -> torch.device:
    """Make torch report one GPU of a compute capability, and return it; nothing can be computed there."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: name)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    properties = types.SimpleNamespace(name=name, multi_processor_count=100)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    monkeypatch.setattr(cuda, "driver_version", lambda: "13000")
    monkeypatch.setattr(validated, "_cublaslt", lambda: "130000")
    monkeypatch.setattr(families, "_gpu", functools.cache(families._gpu.__wrapped__))
    monkeypatch.setattr(dispatch, "_backends", {})
    return torch.device("cuda:0")


@contextlib.contextmanager
def without(*rules):
    """Make kernels reject every problem; each rule is a module and the name of a kernel's rule function there."""
    with contextlib.ExitStack() as stack:
        for module, name in rules:
            stack.enter_context(mock.patch.object(module, name, return_value="rejected by the test"))
        stack.callback(dispatch.choose.cache_clear)
        dispatch.choose.cache_clear()
        yield


def assert_within(actual, expected, bound, what="result"):
    """Check |actual - expected| <= bound elementwise; report the worst element."""
    excess = (actual.double() - expected.double()).abs() - bound
    worst = excess.argmax()
    assert not excess.isnan().any(), f"{what}: NaN"
    assert (excess <= 0).all(), (
        f"{what}: element {worst.item()}: {actual.flatten()[worst].item()!r} is further than the "
        f"bound from {expected.flatten()[worst].item()!r} (by {excess.max().item():.3g})"
    )


def gemm(m=64, k=4096, n=6144, backend=families.CUDA, leaves=1):
    """Return the description of a GEMM of bf16 meta tensors."""
    from alignkit.ops.linear.problem import Product

    a, b = (torch.empty(rows, k, dtype=torch.bfloat16, device="meta") for rows in (m, n))
    out = torch.empty(m, n, dtype=torch.bfloat16, device="meta")
    return Product.of(backend, a, b, leaves, None, out, False)._replace(device=None)


def by_hopper(a, b, leaves, bias, out) -> bool:
    """Compute the GEMM by hopper.py, for any number of rows; return False if hopper.py rejects it."""
    from alignkit.ops.linear import hopper
    from alignkit.ops.linear.problem import Product

    p = Product.of("triton", a, b, leaves, bias, out, False)
    reason = hopper.rejects(p._replace(a=((hopper.SMALL_M + 1, p.k), *p.a[1:])))
    if reason is None:
        hopper.prepare(p)(a, b, bias, out)
    return reason is None
