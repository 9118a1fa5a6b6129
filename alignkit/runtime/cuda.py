"""Loads the CUDA kernels of csrc/sm90 through ctypes.

The library has a plain C interface, so one build serves every torch and Python version. It holds its own CUDA
runtime and finds the driver when a kernel is launched: loading it takes no GPU.
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
"""Why there may be no library: with such an nvcc, an installation that cannot build it fails."""


@functools.cache
def library() -> ctypes.CDLL:
    """The kernel library. Raises BackendError where the package was installed without it, and for one that was built
    from other sources."""
    if not LIBRARY.exists():
        raise BackendError(f"alignkit's CUDA kernels were not built: {ABSENT}")
    lib = built.load(LIBRARY, families.SM90.part)
    lib.alignkit_cuda_error.restype = ctypes.c_char_p
    return lib


@functools.cache
def available() -> bool:
    """Whether the kernels are built. Raises BackendError if they are, but from other sources."""
    return LIBRARY.exists() and library() is not None


def mirrors(struct: str) -> Callable[[type[ctypes.Structure]], type[ctypes.Structure]]:
    """Of a class with the fields of a C `struct` of the kernels. Raises BackendError if they lie elsewhere there."""

    def check_layout(python: type[ctypes.Structure]) -> type[ctypes.Structure]:
        if available():
            built.check_layout(library(), struct, python)
        return python

    return check_layout


def pointer(t: torch.Tensor | None) -> int | None:
    """The address of a tensor."""
    return None if t is None else t.data_ptr()


def fail(message: str) -> NoReturn:
    """Raises BackendError for a call that returned an error; or torch's own error where the current GPU had failed before, in a
    device-side assertion, say: from then on all calls return errors, which do not tell of that."""
    if torch.cuda.is_initialized() and not torch.cuda.is_current_stream_capturing():
        torch.cuda.synchronize()
    raise BackendError(message)


def check(error: int, function: str) -> None:
    """`fail` in CUDA's words if `function` of the library returned an `error`, a cudaError_t other than 0."""
    if error:
        fail(f"{function}: {library().alignkit_cuda_error(error).decode()}")


def stream(device: int) -> int:
    """The address of the current stream of GPU `device`: torch's own object for it takes several times as long."""
    return torch._C._cuda_getCurrentRawStream(device)


def call(function: str, device: torch.device, *args) -> None:
    """A function of the library, on the current stream of `device`. Tensors and None are passed as addresses, an int as a C
    int. Raises BackendError as `check` does."""
    args = [ctypes.c_void_p(pointer(a)) if a is None or isinstance(a, torch.Tensor) else a for a in args]
    current = torch.cuda.current_device()
    index = current if device.index is None else device.index
    # Most calls are on the current device, and to choose one takes the host longer than the rest of this.
    with contextlib.nullcontext() if index == current else torch.cuda.device(index):
        check(getattr(library(), function)(*args, ctypes.c_void_p(stream(index))), function)
