"""Process states that a caller may have set, such as the default dtype or autocast, as context managers by name.

draw.py chooses among them, and judge.py enters them.
"""

from __future__ import annotations

import contextlib
import ctypes
import ctypes.util

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

_libm = ctypes.CDLL(ctypes.util.find_library("m"))
ROUNDING = {"down": 0x400, "up": 0x800, "towards zero": 0xC00}
"""Arguments of fesetround on x86."""


class _ForwardFunctions(TorchFunctionMode):
    def __torch_function__(self, function, types, args=(), kwargs=None):
        return function(*args, **(kwargs or {}))


class _ForwardOps(TorchDispatchMode):
    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        return function(*args, **(kwargs or {}))


@contextlib.contextmanager
def _set(setter, value, before):
    setter(value)
    try:
        yield
    finally:
        setter(before)


def _default_device(device):
    return lambda: torch.device(device)


def _default_dtype(dtype):
    return lambda: _set(torch.set_default_dtype, dtype, torch.get_default_dtype())


def _rounding(mode):
    return lambda: _set(_libm.fesetround, mode, _libm.fegetround())


def _threads(n):
    return lambda: _set(torch.set_num_threads, n, torch.get_num_threads())


def _deterministic():
    return _set(torch.use_deterministic_algorithms, True, torch.are_deterministic_algorithms_enabled())


def _saved_hooks():
    return torch.autograd.graph.saved_tensors_hooks(torch.clone, lambda t: t.clone())


SAFE = {
    "default device meta": _default_device("meta"),
    "default dtype float64": _default_dtype(torch.float64),
    "default dtype bfloat16": _default_dtype(torch.bfloat16),
    "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
    "autocast float16": lambda: torch.autocast("cpu", torch.float16),
    "deterministic algorithms": _deterministic,
    "flush denormals": lambda: _set(torch.set_flush_denormal, True, False),
    **{f"rounding {name}": _rounding(mode) for name, mode in ROUNDING.items()},
    "2 threads": _threads(2),
    "3 threads": _threads(3),
    "anomaly detection": lambda: torch.autograd.detect_anomaly(check_nan=False),
    "saved tensors are cloned": _saved_hooks,
    "multithreading off": lambda: torch.autograd.set_multithreading_enabled(False),
    "matmul precision": lambda: _set(
        torch.set_float32_matmul_precision, "medium", torch.get_float32_matmul_precision()
    ),
}
"""Modes that change no result of an op."""
FORWARD = {"inference mode": torch.inference_mode, "no grad": torch.no_grad}
"""Modes that change no result, without a backward pass."""
ODD = {"function mode": _ForwardFunctions, "dispatch mode": _ForwardOps}
"""Modes in which an op returns the same result or raises."""


def state() -> dict:
    """Return the process state that an op must preserve."""
    tiny = 5e-324
    return {
        "default device": str(torch.get_default_device()),
        "default dtype": torch.get_default_dtype(),
        "threads": torch.get_num_threads(),
        "grad": torch.is_grad_enabled(),
        "inference": torch.is_inference_mode_enabled(),
        "autocast": torch.is_autocast_enabled("cpu"),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "rounding": _libm.fegetround(),
        "denormals": tiny * 1.0 != 0.0,
    }
