"""Launches happen on the GPU of the tensors, not on the current one. Without a GPU: of tensors that only name one."""

import contextlib
from unittest import mock

import pytest
import torch

from alignkit.ops.linear import cublaslt
from alignkit.ops.linear.problem import Product

pytest.importorskip("triton")
from alignkit.runtime import launch as launches
from alignkit.runtime.launch import Launch


class On(torch.Tensor):
    """A tensor that says it is on GPU `number`."""

    @staticmethod
    def __new__(cls, number, *shape):
        t = torch.zeros(*shape, dtype=torch.bfloat16).as_subclass(cls)
        t.number = number
        return t

    def get_device(self):
        return self.number


class Kernel:
    """Notes which GPU is current where it is launched."""

    def __init__(self, gpus):
        self.fn, self.gpus, self.launched, self.compiled = None, gpus, [], 0

    def __getitem__(self, grid):
        def compile_and_launch(*args, **kwargs):
            self.compiled += 1
            self.run(*grid)
            compiled = mock.MagicMock(run=self.run)
            compiled.__getitem__.return_value = self.run
            return compiled

        return compile_and_launch

    def run(self, *args):
        self.launched.append(self.gpus.current)


class GPUs:
    """Two; 0 is current."""

    current = 0

    @contextlib.contextmanager
    def device(self, number):
        before, self.current = self.current, number
        try:
            yield
        finally:
            self.current = before


@pytest.fixture
def gpus(monkeypatch):
    found = GPUs()
    monkeypatch.setattr(torch.cuda, "current_device", lambda: found.current)
    monkeypatch.setattr(torch.cuda, "device", found.device)
    active = mock.Mock(get_current_device=lambda: found.current, get_current_stream=lambda device: 0)
    monkeypatch.setattr(launches, "driver", mock.Mock(active=active))
    monkeypatch.setattr(launches, "triton", mock.Mock(JITFunction=Kernel))
    monkeypatch.setattr(launches, "_ready", {})
    return found


def test_launch(gpus):
    kernel = Kernel(gpus)
    for number in (1, 0, 1, 0):
        launches.launch(kernel, (1,), (None, On(number, 8), 3), {"num_warps": 4}, BLOCK=8)
    assert kernel.launched == [1, 0, 1, 0] and kernel.compiled == 2 and gpus.current == 0


def test_launches_that_are_prepared(gpus):
    kernel = Kernel(gpus)
    for number in (1, 0):
        launch = Launch(number, kernel, (1, 1, 1), ())
        for _ in range(2):
            launch(On(number, 8))
    assert kernel.launched == [1, 1, 0, 0] and kernel.compiled == 2 and gpus.current == 0


def test_cublaslt(gpus, monkeypatch):
    """It is asked, tried and launched on the operands' GPU, whose stream it gets."""
    seen = []
    monkeypatch.setattr(cublaslt, "_launchers", {})
    monkeypatch.setattr(cublaslt, "_library", lambda: object())
    monkeypatch.setattr(cublaslt, "_chain", lambda: None)
    monkeypatch.setattr(cublaslt, "_stream", lambda device: 10 + device)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)

    def decide(p, chain):
        seen.append((p.device, gpus.current))
        return lambda a, b, bias, out, stream: seen.append((stream, gpus.current))

    monkeypatch.setattr(cublaslt, "_decide", decide)
    for number in (1, 0, 1):
        a, b, out = On(number, 40, 64), On(number, 24, 64), On(number, 40, 24)
        cublaslt.prepare(Product.of("triton", a, b, 1, None, out, False))(a, b, None, out)
    assert seen == [(1, 1), (11, 1), (0, 0), (10, 0), (11, 1)] and gpus.current == 0
