"""Decorators of ops: floating-point environment, supported torch modes, and rejection of double backward.

`in_default_mode` and `in_torch` protect bits: without them, a thread's rounding mode or torch's settings could change
results on a CPU.
"""

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
"""hardware: FE_DFL_ENV: rounding to nearest, denormals preserved."""
_ONE, _HALF, _MORE, _TINY = 1.0, 2.0**-53, 1.5 * 2.0**-53, 2.0**-1074
"""hardware: operands of the mode probe; variables, because CPython folds constant expressions at compile time."""
_FAKE = torch._C._TorchDispatchModeKey.FAKE


def _is_default_mode() -> bool:
    """Return whether this thread rounds to nearest and preserves denormals."""
    return _ONE + _HALF == _ONE < _ONE + _MORE and _TINY * _ONE > 0.0


@contextlib.contextmanager
def _default_mode():
    """Set this thread to rounding to nearest with denormals within the block."""
    saved = ctypes.create_string_buffer(128)  # a fenv_t takes at most 32 bytes
    _C.fegetenv(saved)
    _C.fesetenv(_DEFAULT)
    try:
        yield
    finally:
        _C.fesetenv(saved)


def in_default_mode(function: Callable) -> Callable:
    """Decorate a function so that it runs in the default floating-point mode: it computes on the calling thread."""

    @functools.wraps(function)
    def wrapper(*args, **kwargs):
        if _is_default_mode():
            return function(*args, **kwargs)
        with _default_mode():
            return function(*args, **kwargs)

    return wrapper


def op(function: Callable) -> Callable:
    """Decorate a public op: default floating-point mode; reject torch modes whose tensors have no memory."""
    function = in_default_mode(function)

    @functools.wraps(function)
    def wrapper(*args, **kwargs):
        if torch._C._get_dispatch_mode(_FAKE) is not None:
            raise UnsupportedError(f"{function.__name__}: unsupported under FakeTensorMode, where tensors lack memory")
        if torch._C._are_functorch_transforms_active():
            raise UnsupportedError(f"{function.__name__}: unsupported inside torch.func transforms (grad, vmap, ...)")
        return function(*args, **kwargs)

    return wrapper


def in_torch(function: Callable) -> Callable:
    """Decorate reference code computed by torch on a CPU so that its bits do not depend on torch's settings.

    It runs on one thread, because torch's worker threads may have another floating-point mode. Autocast and oneDNN are
    disabled; oneDNN's GEMMs follow `torch.set_float32_matmul_precision`.
    """

    @functools.wraps(function)
    def wrapper(*args, **kwargs):
        threads, onednn = torch.get_num_threads(), torch._C._get_mkldnn_enabled()
        torch.set_num_threads(1)
        torch._C._set_mkldnn_enabled(False)
        try:
            with _default_mode(), torch.autocast(CPU.device_type, enabled=False):
                return function(*args, **kwargs)
        finally:
            torch._C._set_mkldnn_enabled(onednn)
            torch.set_num_threads(threads)

    return wrapper


class _NoDoubleBackward(torch.autograd.Function):
    """Identity of the first `count` tensors, with a dependency on all tensors whose gradient raises."""

    @staticmethod
    def forward(ctx, op, count, *tensors):
        ctx.op = op
        return tuple(t if t is None else t.view_as(t) for t in tensors[:count])

    @staticmethod
    def backward(ctx, *_):
        raise UnsupportedError(f"{ctx.op}: double backward (the gradient of a gradient) is not supported")


def forbid_double_backward(op: str, results: tuple, sources) -> tuple:
    """Return `results` (tensors or None), attached to `sources` so that their backward raises UnsupportedError."""
    sources = [t for t in sources if t is not None and t.requires_grad]
    return (
        _NoDoubleBackward.apply(op, len(results), *results, *sources)
        if sources and torch.is_grad_enabled()
        else results
    )


def _materialized(name: str, grad: torch.Tensor | None) -> torch.Tensor | None:
    """Return an incoming gradient as a plain tensor: materialize zero tensors and pending negations."""
    if grad is None:
        return None
    if grad.layout == torch.strided and (grad._is_zerotensor() or grad.is_neg()):
        grad = grad.clone()
    check_plain(name, grad)
    return grad


def differentiable_once(op: str) -> Callable:
    """Decorate an autograd Function so that double backward raises UnsupportedError instead of giving wrong results.

    Its gradients depend on the incoming gradients and on the tensors that `forward` saves. `forward` may set `ctx.op`
    to override the op's name in the error.
    """

    def decorate(function: type) -> type:
        backward = function.backward

        @functools.wraps(backward)
        def backward_once(ctx, *grads):
            name = getattr(ctx, "op", op)
            with torch.no_grad(), contextlib.nullcontext() if _is_default_mode() else _default_mode():
                out = backward(ctx, *(_materialized(f"{name}: the gradient of a result", g) for g in grads))
            if not torch.is_grad_enabled():
                return out
            return forbid_double_backward(name, out if isinstance(out, tuple) else (out,), (*ctx.saved_tensors, *grads))

        function.backward = staticmethod(backward_once)
        return function

    return decorate
