"""Launches of Triton and cuBLASLt use the GPU of the tensors, not the current GPU.

Fake tensors, kernels and devices take the place of two GPUs. test_devices_cuda.py uses real ones.
"""

import contextlib
from unittest import mock

import pytest
import torch

from alignkit import BackendError
from alignkit.ops.linear import cublaslt
from alignkit.ops.linear.problem import Product

pytest.importorskip("triton")
from alignkit.runtime import families
from alignkit.runtime import launch as launches


class FakeGPUTensor(torch.Tensor):
    """A tensor that reports GPU `number` as its device."""

    @staticmethod
    def __new__(cls, number, *shape):
        t = torch.zeros(*shape, dtype=torch.bfloat16).as_subclass(cls)
        t.number = number
        return t

    def get_device(self):
        return self.number


class Kernel:
    """A stand-in for Triton's JITFunction that records the current GPU and the arguments of each launch.

    alignkit/runtime/launch.py calls `run` of the compiled kernel with its `function` and `packed_metadata`.
    """

    def __init__(self, gpus):
        self.fn, self.gpus, self.launched, self.compiled, self.arguments = None, gpus, [], 0, []

    def __getitem__(self, grid):
        def compile_and_launch(*args, **kwargs):
            assert len(grid) == 3 and kwargs.pop("enable_fp_fusion") is False
            self.compiled += 1
            self.launched.append(self.gpus.current)
            self.arguments.append((grid, args, kwargs))
            return mock.Mock(run=self.run, function="function", packed_metadata="metadata")

        return compile_and_launch

    def run(self, x, y, z, stream, function, metadata, launch_metadata, enter, leave, *args):
        assert (function, metadata, launch_metadata, enter, leave) == ("function", "metadata", None, None, None)
        assert stream == 10 + self.gpus.current
        self.launched.append(self.gpus.current)
        self.arguments.append(((x, y, z), args, {}))


class GPUs:
    """A stand-in for torch.cuda and Triton's driver with two GPUs; GPU 0 is current."""

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
    active = mock.Mock(get_current_device=lambda: found.current, get_current_stream=lambda device: 10 + device)
    monkeypatch.setattr(launches, "driver", mock.Mock(active=active))
    monkeypatch.setattr(launches, "triton", mock.Mock(JITFunction=Kernel))
    monkeypatch.setattr(launches, "_ready", {})
    monkeypatch.setattr(families, "gpu", lambda device: families.HOPPER)
    return found


def test_launch_uses_the_gpu_of_its_tensors(gpus):
    kernel, tensors = Kernel(gpus), [FakeGPUTensor(0, 8), FakeGPUTensor(1, 8)]
    for number in (1, 0, 1, 0):
        launches.launch(kernel, (5,), (None, tensors[number], 3 + number), {"num_warps": 4}, BLOCK=8, FAST=True)
    assert kernel.launched == [1, 0, 1, 0] and kernel.compiled == 2 and gpus.current == 0
    compiled, ran = kernel.arguments[:2], kernel.arguments[2:]
    for (grid, args, options), number in zip(compiled, (1, 0), strict=True):
        assert grid == (5, 1, 1) and options == {"num_warps": 4, "BLOCK": 8, "FAST": True}, (
            "keyword arguments: in any order"
        )
        assert args[1] is tensors[number] and (args[0], *args[2:]) == (None, 3 + number)
    for (grid, args, _), number in zip(ran, (1, 0), strict=True):
        assert grid == (5, 1, 1) and args == (None, tensors[number].data_ptr(), 3 + number, 8, True)


def test_repeatable_launch_takes_other_tensors(gpus):
    """Repeated launches pass addresses of other tensors, on the tensors' GPU."""
    kernel, (x, y, z) = Kernel(gpus), [FakeGPUTensor(1, 8) for _ in range(3)]
    again = launches.launch_repeatable(kernel, (5,), (x, None, z, 3), {"num_warps": 4}, changing=1, BLOCK=8)
    again(y)
    again(x)
    assert kernel.launched == [1, 1, 1] and kernel.compiled == 1 and gpus.current == 0
    (grid, args, options), *repeats = kernel.arguments
    assert grid == (5, 1, 1) and options == {"num_warps": 4, "BLOCK": 8} and args == (x, None, z, 3)
    assert repeats == [((5, 1, 1), (t.data_ptr(), None, z.data_ptr(), 3, 8), {}) for t in (y, x)]
    launches.launch_repeatable(kernel, (5,), (x, None, z, 3), {"num_warps": 4}, changing=1, BLOCK=8)
    assert kernel.compiled == 1


@pytest.mark.parametrize("other", [{"BLOCK": 16}, {"number": 1}, {"number": 32}, {"number": 2**31}, {"given": 0}])
def test_specialized_arguments_are_compiled_separately(gpus, other):
    """Numbers in the same Triton specialization class share a compiled kernel."""
    kernel, x = Kernel(gpus), FakeGPUTensor(0, 8)

    def launch(BLOCK=8, number=3, given=None):
        launches.launch(kernel, (1,), (given, x, number), {}, BLOCK=BLOCK)

    launch()
    launch(number=5)
    assert kernel.compiled == 1
    launch(**other)
    assert kernel.compiled == 2


def test_launch_after_a_failed_compilation_compiles_again(gpus):
    """The second compilation receives tensors, not addresses."""
    kernel, x = Kernel(gpus), FakeGPUTensor(0, 8)
    with mock.patch.object(Kernel, "__getitem__", side_effect=MemoryError), pytest.raises(MemoryError):
        launches.launch(kernel, (1,), (x,), {})
    launches.launch(kernel, (1,), (x,), {})
    assert kernel.arguments[0][1][0] is x


def test_prepared_launch_uses_its_gpu(gpus):
    kernel = Kernel(gpus)
    for number in (1, 0):
        launch = launches.prepared(number, kernel, (5, 2, 1), (3, 8), num_warps=4)
        for _ in range(2):
            launch("x", None)
    assert kernel.launched == [1, 1, 0, 0] and kernel.compiled == 2 and gpus.current == 0
    first, again = ((5, 2, 1), ("x", None, 3, 8), {"num_warps": 4}), ((5, 2, 1), ("x", None, 3, 8), {})
    assert kernel.arguments == [first, again, first, again]


@pytest.mark.parametrize(
    "broken, capturing, message", [(True, False, "assert"), (False, False, "13"), (True, True, "13")]
)
def test_cublaslt_error_reports_an_earlier_device_assertion(gpus, monkeypatch, broken, capturing, message):
    """An earlier kernel's assertion is the cause; during graph capture, the host cannot synchronize to find it."""

    def synchronize():
        if broken:
            raise RuntimeError("CUDA error: device-side assert triggered")

    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(torch.cuda, "synchronize", synchronize)
    monkeypatch.setattr(cublaslt, "stream", lambda device: 0)
    monkeypatch.setattr(cublaslt, "_library", lambda: object())
    monkeypatch.setattr(cublaslt, "_launchers", {})
    monkeypatch.setattr(cublaslt, "_decide", lambda p, chain: lambda *args: 13)
    a, b, out = FakeGPUTensor(0, 40, 64), FakeGPUTensor(0, 24, 64), FakeGPUTensor(0, 40, 24)
    launch = cublaslt.prepare(Product.of("triton", a, b, 1, None, out, False))
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: capturing)
    with pytest.raises(RuntimeError, match=message) as raised:
        launch(a, b, None, out)
    assert isinstance(raised.value, BackendError) is (message == "13")


def test_cublaslt_uses_the_gpu_and_stream_of_its_operands(gpus, monkeypatch):
    calls = []
    monkeypatch.setattr(cublaslt, "_launchers", {})
    monkeypatch.setattr(cublaslt, "_library", lambda: object())
    monkeypatch.setattr(cublaslt, "_chain", lambda: None)
    monkeypatch.setattr(cublaslt, "stream", lambda device: 10 + device)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)

    def decide(p, chain):
        calls.append((p.device, gpus.current))
        return lambda a, b, bias, out, stream: calls.append((stream, gpus.current))

    monkeypatch.setattr(cublaslt, "_decide", decide)
    for number in (1, 0, 1):
        a, b, out = FakeGPUTensor(number, 40, 64), FakeGPUTensor(number, 24, 64), FakeGPUTensor(number, 40, 24)
        cublaslt.prepare(Product.of("triton", a, b, 1, None, out, False))(a, b, None, out)
    assert calls == [(1, 1), (11, 1), (0, 0), (10, 0), (11, 1)] and gpus.current == 0
