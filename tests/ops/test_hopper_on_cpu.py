"""The Gluon kernel (linear/hopper.py) compiles for sm_90a with the installed Triton; nothing is launched.

Triton's releases rename parts of Gluon. The trials' problems cover a chain, split tiles and whole tiles.
"""

import types

import pytest
import torch

from alignkit.ops import trials
from alignkit.ops.linear.op import OP
from alignkit.ops.linear.problem import Product
from alignkit.runtime import dispatch, families

from .helpers import CPU

pytest.importorskip("triton")
pytestmark = pytest.mark.skipif(not CPU, reason="the tests of the kernel run it on a GPU")
KERNEL = next(kernel for kernel in dispatch.order("linear") if kernel.name == "hopper")


@pytest.fixture
def hopper(monkeypatch):
    """Return the module, with Triton's driver replaced by one that only names the target."""
    from triton.runtime.driver import driver

    from .targets import Driver

    monkeypatch.setattr(driver, "_active", Driver(families.HOPPER))
    return KERNEL.load()


@pytest.mark.parametrize("words", OP.trials["linear"].words["hopper"])
def test_gluon_kernel_compiles(hopper, words, monkeypatch):
    p = trials.problem(OP, "linear", "triton", words)
    a, b, out = (torch.empty(t[0], dtype=t[2]) for t in (p.a, p.b, p.out))
    bias = None if p.bias is None else torch.empty(p.bias[0], dtype=p.bias[2])
    compiled = []

    def compile_only(device, kernel, grid, rest, **options):
        return lambda *tensors: compiled.append(kernel.warmup(*tensors, *rest, grid=grid, **options))

    monkeypatch.setattr(hopper, "prepared", compile_only)
    monkeypatch.setattr(hopper, "torch", types.SimpleNamespace(**vars(torch) | {"device": lambda *_: "cpu"}))
    monkeypatch.setattr(Product, "sm_count", 132)
    hopper.prepare(p._replace(device=0))(a, b, bias, out)
    assert compiled[0].asm["ptx"].count("wgmma.mma_async") >= 4
