"""Floating-point modes of the caller or of torch's threads change no bit of any op.

The calls follow from the ops' samples. A subprocess imports `everything` by name.
"""

import contextlib
import ctypes
import subprocess
import sys

import pytest
import torch

from alignkit.ops.rope import _table
from alignkit.runtime import dispatch
from tests.samples import GENERATORS, arguments, assert_same, generate, leaves_of, random_gradient, results

from .helpers import CPU

MODES = {"flush": None, "up": 0x800, "down": 0x400, "zero": 0xC00}
"""Flush denormals (None), or a rounding mode of x86-64's <fenv.h>."""


@contextlib.contextmanager
def in_mode(mode):
    libm = ctypes.CDLL(None)
    flushed = mode == "flush"
    assert torch.set_flush_denormal(True) if flushed else libm.fesetround(MODES[mode]) == 0
    try:
        yield
    finally:
        torch.set_flush_denormal(False)
        libm.fesetround(0)


def inputs(rows):
    """Return calls of all ops; with 400 rows, torch uses several threads.

    Some values are so small that sums and products are denormal.
    """
    found = {}
    for generator in GENERATORS:
        for dtype in (torch.float32, torch.bfloat16):
            samples = (generate(generator, seed, rows=rows) for seed in range(100))
            sample = next((s for s in samples if {dtype} & {t.value.dtype for t in s.tensors().values()}), None)
            if sample is None:
                continue
            for t in sample.tensors().values():
                if t.leaf and t.value.is_floating_point() and t.value.ndim:
                    t.value[..., ::3] *= 2.0**-70
                    t.value[::5] *= 2.0**-60
            found[f"{sample.op} {generator.__name__} {dtype}"] = sample
    return found


GRADIENTS = {}
"""Gradients of results, which are made in the first call: modes would change their random values."""


def tiny_gradient(i, result):
    key = i, result.shape, result.dtype
    if key not in GRADIENTS:
        GRADIENTS[key] = random_gradient(i, result) * 2.0**-60
    return GRADIENTS[key]


def everything(given):
    _table.cache_clear()
    return {name: results(s.call, arguments(s), leaves_of(s), tiny_gradient) for name, s in given.items()}


def sums():
    """Return results that differ between all modes: three sums and whether denormals are kept."""
    one, eps = 1.0, sys.float_info.epsilon
    return one + eps / 2, -one - eps / 2, one + eps * 0.75, sys.float_info.min * 0.5 > 0.0


def assert_all_same(got, want, what):
    for name, tensors in want.items():
        assert_same(got[name], tensors, f"{what}: {name}")


@pytest.mark.skipif(not CPU, reason="the modes of a CPU")
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("backend", ["cpu", "reference"])
def test_mode_of_the_caller_changes_no_bit(backend, mode):
    given = inputs(12 if backend == "reference" else 400)
    with dispatch.use(backend):
        want, of_default = everything(given), sums()
        with in_mode(mode):
            of_caller = sums()
            assert of_caller != of_default
            assert_all_same(everything(given), want, mode)
            assert sums() == of_caller  # the caller's mode is restored


@pytest.mark.skipif(not CPU, reason="the modes of a CPU")
@pytest.mark.parametrize("mode", ["flush", "up"])
def test_mode_of_torchs_threads_changes_no_bit(mode):
    """New torch threads inherit the mode of their creator and keep it."""
    code = f"""
import torch
from tests.ops.test_modes import assert_all_same, everything, in_mode, inputs
torch.set_num_threads(1)
given = inputs(400)
want = everything(given)
probe, least = torch.full((300000,), 1 + 2500 * 2.0**-23), torch.full((300000,), 2.0**-140)
torch.set_num_threads(3)
with in_mode({mode!r}):
    probe.clone()
products = probe * probe, -probe * probe, (least * 1).view(torch.int32)
assert any(len(t.unique()) > 1 for t in products), "torch's threads have the default mode, so the test proves nothing"
assert_all_same(everything(given), want, {mode!r})
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.skipif(not CPU, reason="the autocast of a CPU")
@pytest.mark.parametrize("backend", ["cpu", "reference"])
def test_matmul_precision_of_torch_changes_no_bit(backend):
    given = inputs(12)
    with dispatch.use(backend):
        want = everything(given)
        with torch.autocast("cpu", torch.bfloat16):
            assert_all_same(everything(given), want, "autocast")
        torch.set_float32_matmul_precision("medium")
        try:
            assert_all_same(everything(given), want, "products in bf16")
        finally:
            torch.set_float32_matmul_precision("highest")
