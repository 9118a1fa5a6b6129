"""Launches happen on the GPU of the tensors, not on the current one. Without a GPU: of tensors that only name one."""

import contextlib
from unittest import mock

import pytest
import torch

from alignkit import BackendError
from alignkit.ops.linear import cublaslt
from alignkit.ops.linear.problem import Product

pytest.importorskip("triton")
from alignkit.runtime import launch as launches


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
    """Notes which GPU is current where it is launched, and, once it is compiled, with what."""

    def __init__(self, gpus):
        self.fn, self.gpus, self.launched, self.compiled, self.given = None, gpus, [], 0, []

    def __getitem__(self, grid):
        def compile_and_launch(*args, **kwargs):
            assert len(grid) == 3 and kwargs.pop("enable_fp_fusion") is False
            self.compiled += 1
            self.launched.append(self.gpus.current)
            self.given.append((grid, args, kwargs))
            return mock.Mock(run=self.run, function="function", packed_metadata="metadata")

        return compile_and_launch

    def run(self, x, y, z, stream, function, metadata, of_launch, enter, leave, *args):
        assert (function, metadata, of_launch, enter, leave) == ("function", "metadata", None, None, None)
        assert stream == 10 + self.gpus.current
        self.launched.append(self.gpus.current)
        self.given.append(((x, y, z), args, {}))


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
    active = mock.Mock(get_current_device=lambda: found.current, get_current_stream=lambda device: 10 + device)
    monkeypatch.setattr(launches, "driver", mock.Mock(active=active))
    monkeypatch.setattr(launches, "triton", mock.Mock(JITFunction=Kernel))
    monkeypatch.setattr(launches, "_ready", {})
    return found


def test_launch(gpus):
    kernel, tensors = Kernel(gpus), [On(0, 8), On(1, 8)]
    for number in (1, 0, 1, 0):
        launches.launch(kernel, (5,), (None, tensors[number], 3 + number), {"num_warps": 4}, BLOCK=8, FAST=True)
    assert kernel.launched == [1, 0, 1, 0] and kernel.compiled == 2 and gpus.current == 0
    compiled, ran = kernel.given[:2], kernel.given[2:]
    for (grid, args, options), number in zip(compiled, (1, 0), strict=True):
        assert grid == (5, 1, 1) and options == {"num_warps": 4, "BLOCK": 8, "FAST": True}, "by name: in any order"
        assert args[1] is tensors[number] and (args[0], *args[2:]) == (None, 3 + number)
    for (grid, args, _), number in zip(ran, (1, 0), strict=True):
        assert grid == (5, 1, 1) and args == (None, tensors[number].data_ptr(), 3 + number, 8, True)


def test_launches_that_are_repeated(gpus):
    """With other tensors for the first ones: from the first time on by their addresses, on their own GPU."""
    kernel, (x, y, z) = Kernel(gpus), [On(1, 8) for _ in range(3)]
    again = launches.repeated(kernel, (5,), (x, None, z, 3), {"num_warps": 4}, changing=1, BLOCK=8)
    again(y)
    again(x)
    assert kernel.launched == [1, 1, 1] and kernel.compiled == 1 and gpus.current == 0
    (grid, args, options), *repeats = kernel.given
    assert grid == (5, 1, 1) and options == {"num_warps": 4, "BLOCK": 8} and args == (x, None, z, 3)
    assert repeats == [((5, 1, 1), (t.data_ptr(), None, z.data_ptr(), 3, 8), {}) for t in (y, x)]
    launches.repeated(kernel, (5,), (x, None, z, 3), {"num_warps": 4}, changing=1, BLOCK=8)
    assert kernel.compiled == 1


@pytest.mark.parametrize("other", [{"BLOCK": 16}, {"number": 1}, {"number": 32}, {"number": 2**31}, {"given": 0}])
def test_what_triton_compiles_differently_is_compiled_again(gpus, other):
    """And numbers that it does not tell apart are not."""
    kernel, x = Kernel(gpus), On(0, 8)

    def launch(BLOCK=8, number=3, given=None):
        launches.launch(kernel, (1,), (given, x, number), {}, BLOCK=BLOCK)

    launch()
    launch(number=5)
    assert kernel.compiled == 1
    launch(**other)
    assert kernel.compiled == 2


def test_what_failed_to_compile_is_compiled_when_it_is_launched_again(gpus):
    """From the tensors, not from their addresses."""
    kernel, x = Kernel(gpus), On(0, 8)
    with mock.patch.object(Kernel, "__getitem__", side_effect=MemoryError), pytest.raises(MemoryError):
        launches.launch(kernel, (1,), (x,), {})
    launches.launch(kernel, (1,), (x,), {})
    assert kernel.given[0][1][0] is x


def test_launches_that_are_prepared(gpus):
    kernel = Kernel(gpus)
    for number in (1, 0):
        launch = launches.prepared(number, kernel, (5, 2, 1), (3, 8), num_warps=4)
        for _ in range(2):
            launch("x", None)
    assert kernel.launched == [1, 1, 0, 0] and kernel.compiled == 2 and gpus.current == 0
    first, again = ((5, 2, 1), ("x", None, 3, 8), {"num_warps": 4}), ((5, 2, 1), ("x", None, 3, 8), {})
    assert kernel.given == [first, again, first, again]


@pytest.mark.parametrize("broken, capturing, said", [(True, False, "assert"), (False, False, "13"), (True, True, "13")])
def test_an_error_of_cublaslt_tells_its_cause(gpus, monkeypatch, broken, capturing, said):
    """What a kernel before it did; but while a graph is captured, nothing can be waited for."""

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
    a, b, out = On(0, 40, 64), On(0, 24, 64), On(0, 40, 24)
    launch = cublaslt.prepare(Product.of("triton", a, b, 1, None, out, False))
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: capturing)
    with pytest.raises(RuntimeError, match=said) as raised:
        launch(a, b, None, out)
    assert isinstance(raised.value, BackendError) is (said == "13")


def test_cublaslt(gpus, monkeypatch):
    """It is asked, tried and launched on the operands' GPU, whose stream it gets."""
    seen = []
    monkeypatch.setattr(cublaslt, "_launchers", {})
    monkeypatch.setattr(cublaslt, "_library", lambda: object())
    monkeypatch.setattr(cublaslt, "_chain", lambda: None)
    monkeypatch.setattr(cublaslt, "stream", lambda device: 10 + device)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)

    def decide(p, chain):
        seen.append((p.device, gpus.current))
        return lambda a, b, bias, out, stream: seen.append((stream, gpus.current))

    monkeypatch.setattr(cublaslt, "_decide", decide)
    for number in (1, 0, 1):
        a, b, out = On(number, 40, 64), On(number, 24, 64), On(number, 40, 24)
        cublaslt.prepare(Product.of("triton", a, b, 1, None, out, False))(a, b, None, out)
    assert seen == [(1, 1), (11, 1), (0, 0), (10, 0), (11, 1)] and gpus.current == 0
