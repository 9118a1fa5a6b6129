"""How ops are called: the floating-point mode they run in, and what autograd may ask of them."""

from __future__ import annotations

import contextlib
import ctypes
import functools
from collections.abc import Callable

import torch

from ..errors import UnsupportedError
from ..runtime.families import CPU
from ._common import check_plain

_C = ctypes.CDLL(None)
_DEFAULT = ctypes.c_void_p(-1)
"""FE_DFL_ENV: to nearest, denormals kept."""
_ONE, _HALF, _MORE, _TINY = 1.0, 2.0**-53, 1.5 * 2.0**-53, 2.0**-1074
"""Variables: what is written out is computed when Python compiles."""
_FAKE = torch._C._TorchDispatchModeKey.FAKE


def _default() -> bool:
    """Whether this thread rounds to nearest and keeps denormals."""
    return _ONE + _HALF == _ONE < _ONE + _MORE and _TINY * _ONE > 0.0


@contextlib.contextmanager
def _default_mode():
    """This thread rounds to nearest and keeps denormals."""
    saved = ctypes.create_string_buffer(128)  # a fenv_t, of 32 bytes or fewer
    _C.fegetenv(saved)
    _C.fesetenv(_DEFAULT)
    try:
        yield
    finally:
        _C.fesetenv(saved)


def in_default_mode(function: Callable) -> Callable:
    """Decorator: numbers are rounded on the calling thread, so it has the default mode meanwhile."""

    @functools.wraps(function)
    def called(*args, **kwargs):
        if _default():
            return function(*args, **kwargs)
        with _default_mode():
            return function(*args, **kwargs)

    return called


def op(function: Callable) -> Callable:
    """Decorator of what users call: in the default mode, and not where torch makes tensors without memory of their own."""
    function = in_default_mode(function)

    @functools.wraps(function)
    def called(*args, **kwargs):
        if torch._C._get_dispatch_mode(_FAKE) is not None:
            raise UnsupportedError(f"{function.__name__}: not under FakeTensorMode, where tensors have no memory")
        if torch._C._are_functorch_transforms_active():
            raise UnsupportedError(f"{function.__name__}: not inside a transform of torch.func (grad, vmap, ...)")
        return function(*args, **kwargs)

    return called


def in_torch(function: Callable) -> Callable:
    """Decorator of what is computed by torch on a CPU, and slow anyway. torch's own threads may be in another mode, so there
    is one thread; and its products follow autocast and, in oneDNN, `torch.set_float32_matmul_precision`, so there is neither."""

    @functools.wraps(function)
    def called(*args, **kwargs):
        threads, onednn = torch.get_num_threads(), torch._C._get_mkldnn_enabled()
        torch.set_num_threads(1)
        torch._C._set_mkldnn_enabled(False)
        try:
            with _default_mode(), torch.autocast(CPU.device_type, enabled=False):
                return function(*args, **kwargs)
        finally:
            torch._C._set_mkldnn_enabled(onednn)
            torch.set_num_threads(threads)

    return called


class _Final(torch.autograd.Function):
    """The first `count` tensors as they are; they depend on the others, but how is not known."""

    @staticmethod
    def forward(ctx, op, count, *tensors):
        ctx.op = op
        return tuple(t if t is None else t.view_as(t) for t in tensors[:count])

    @staticmethod
    def backward(ctx, *_):
        raise UnsupportedError(f"{ctx.op}: the gradient of a gradient is not supported")


def final(op: str, results: tuple, sources) -> tuple:
    """`results`, tensors or None, such that to differentiate them by one of `sources`, or by what these were made of, is
    refused in the name of `op`."""
    sources = [t for t in sources if t is not None and t.requires_grad]
    return _Final.apply(op, len(results), *results, *sources) if sources and torch.is_grad_enabled() else results


def _incoming(name: str, grad: torch.Tensor | None) -> torch.Tensor | None:
    """A gradient as autograd hands it over, as memory that holds its values."""
    if grad is None:
        return None
    if grad.layout == torch.strided and (grad._is_zerotensor() or grad.is_neg()):
        grad = grad.clone()
    check_plain(name, grad)
    return grad


def differentiable_once(op: str) -> Callable:
    """Class decorator of an autograd Function: its gradients are constants, which would silently be wrong where they are
    differentiated again; so that is refused by name. What a gradient depends on are the gradient that comes in, and inputs
    and outputs, which `forward` saves as they are. It may set ctx.op to a better name."""

    def decorate(function: type) -> type:
        backward = function.backward

        @functools.wraps(backward)
        def once(ctx, *grads):
            name = getattr(ctx, "op", op)
            with torch.no_grad(), contextlib.nullcontext() if _default() else _default_mode():
                out = backward(ctx, *(_incoming(f"{name}: the gradient of a result", g) for g in grads))
            if not torch.is_grad_enabled():
                return out
            return final(name, out if isinstance(out, tuple) else (out,), (*ctx.saved_tensors, *grads))

        function.backward = staticmethod(once)
        return function

    return decorate
