"""ctypes bindings of the CUDA kernels of csrc/sm90.

The library has a plain C interface, so one build serves every torch and Python version. It links the CUDA runtime
statically and finds the driver at the first launch, so loading it needs no GPU. native.py is the counterpart for CPUs.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
from collections.abc import Callable
from typing import NoReturn

import torch

from ..errors import BackendError
from . import built, families

LIBRARY = families.SM90.library
ABSENT = "no nvcc 12.8 or newer was found when alignkit was installed"
"""The only reason for a missing library: with such an nvcc, a failed build fails the installation."""
CUBLASLT = f"libcublasLt.so.{(torch.version.cuda or '').split('.')[0]}"
"""Name under which torch loads cuBLASLt, if it is built with CUDA."""


@functools.cache
def library() -> built.Library:
    """Return the kernel library; raise BackendError if it is missing or was built from different sources."""
    if not LIBRARY.exists():
        raise BackendError(
            f"alignkit's CUDA kernels were not built: {ABSENT}. Install nvcc 12.8 or newer, then reinstall alignkit"
        )
    return built.load(LIBRARY, families.SM90.part)


@functools.cache
def available() -> bool:
    """Return whether the kernels are built; raise BackendError if they were built from different sources."""
    return LIBRARY.exists() and library() is not None


def pointer(t: torch.Tensor | None) -> int | None:
    """Return the address of a tensor, or None for None."""
    return None if t is None else t.data_ptr()


def fail(message: str) -> NoReturn:
    """Raise BackendError for a failed call.

    If the GPU failed earlier, e.g. by a device-side assertion, every later call returns an unrelated error; then the
    synchronization raises torch's error of the original failure instead.
    """
    if torch.cuda.is_initialized() and not torch.cuda.is_current_stream_capturing():
        torch.cuda.synchronize()
    raise BackendError(message)


def check(error: int, function: str) -> None:
    """Call `fail` with CUDA's message if `function` of the library returned a nonzero cudaError_t."""
    if error:
        fail(f"{function}: failed with CUDA error {error}, {library().alignkit_cuda_error(error).decode()}")


@functools.cache
def driver_version() -> str:
    """Return the CUDA version of the installed driver, such as 13000."""
    version = ctypes.c_int()
    error = ctypes.CDLL("libcuda.so.1").cuDriverGetVersion(ctypes.byref(version))
    if error:
        fail(f"cuDriverGetVersion: failed with CUDA error {error}")
    return str(version.value)


def stream(device: int) -> int:
    """Return the handle of the current stream of GPU `device`; faster than through torch's stream object."""
    return torch._C._cuda_getCurrentRawStream(device)


def call(function: str, device: torch.device, *args) -> None:
    """Call a function of the library on the current stream of `device`; raise BackendError if it fails.

    Tensors and None are passed as addresses.
    """
    current = torch.cuda.current_device()
    index = current if device.index is None else device.index
    # Setting the device costs the host more than the rest of the call, and is rarely needed.
    with contextlib.nullcontext() if index == current else torch.cuda.device(index):
        check(getattr(library(), function)(*args, ctypes.c_void_p(stream(index))), function)


def struct(name: str) -> Callable[..., ctypes.Structure]:
    """Return the constructor of a struct of the library, with a keyword argument for each field."""
    return library().constructor(name)
