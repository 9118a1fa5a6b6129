"""Inputs and error bounds for the op tests."""

import contextlib
import os
from unittest import mock

import hypothesis.strategies as st
import torch

from alignkit.runtime import dispatch, families

U32 = 2.0**-24
"""Unit roundoff of fp32."""
CPU = os.environ.get("ALIGNKIT_TEST_DEVICE", "cpu") == "cpu"
EXP = (4 if CPU else 100) * U32
"""Relative error of exp: a few units on the CPU; elsewhere x log2(e) is rounded, and |x| < 88 multiplies that."""
UNIT = {torch.float32: 2.0**-24, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}
"""Unit roundoff of each model type."""
SMALLEST = {torch.float32: 2.0**-149, torch.bfloat16: 2.0**-133, torch.float16: 2.0**-24}
"""Spacing of the numbers next to zero."""

dtypes = st.sampled_from([torch.float32, torch.bfloat16])
linear_dtypes = st.sampled_from([torch.float32, torch.bfloat16, torch.float16])
seeds = st.integers(0, 2**31)


def times(n: int) -> range:
    """0 to n - 1, for what a test repeats by itself; fewer of the last ones if ALIGNKIT_TEST_EXAMPLES are fewer."""
    return range(max(n - int(os.environ.get("ALIGNKIT_TEST_EXAMPLES", n)), 0), n)


def gamma(n: int) -> float:
    """Relative bound of a chain of n fp32 operations."""
    return n * U32 / (1 - n * U32)


def randn(*shape, dtype=torch.float32, scale=1.0, seed=None):
    if seed is not None:
        torch.manual_seed(seed)
    return (torch.randn(shape) * scale).to(dtype)


@contextlib.contextmanager
def without(*rules):
    """Within the block, the kernels with these rules, each a module and the name of a function there, are for no problem."""
    with contextlib.ExitStack() as stack:
        for module, name in rules:
            stack.enter_context(mock.patch.object(module, name, return_value="the test has it so"))
        stack.callback(dispatch.choose.cache_clear)
        dispatch.choose.cache_clear()
        yield


def assert_within(actual, expected, bound, what="result"):
    """|actual - expected| <= bound elementwise; names the worst element."""
    excess = (actual.double() - expected.double()).abs() - bound
    worst = excess.argmax()
    assert not excess.isnan().any(), f"{what}: NaN"
    assert (excess <= 0).all(), (
        f"{what}: element {worst.item()}: {actual.flatten()[worst].item()!r} is further than the "
        f"bound from {expected.flatten()[worst].item()!r} (by {excess.max().item():.3g})"
    )


def product(m=64, k=4096, n=6144, backend=families.CUDA, leaves=1):
    """As it is described, of no tensors that are anywhere."""
    from alignkit.ops.linear.problem import Product

    a, b = (torch.empty(rows, k, dtype=torch.bfloat16, device="meta") for rows in (m, n))
    out = torch.empty(m, n, dtype=torch.bfloat16, device="meta")
    return Product.of(backend, a, b, leaves, None, out, False)._replace(device=None)


def by_hopper(a, b, leaves, bias, out) -> bool:
    """Whether hopper.py computes the product, however many rows, which it then has."""
    from alignkit.ops.linear import hopper
    from alignkit.ops.linear.problem import Product

    p = Product.of("triton", a, b, leaves, bias, out, False)
    refused = hopper.refuses(p._replace(a=((hopper.FEW + 1, p.k), *p.a[1:])))
    if refused is None:
        hopper.prepare(p)(a, b, bias, out)
    return refused is None
