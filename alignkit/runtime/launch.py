"""Launches of Triton kernels with a fraction of Triton's host time.

Triton derives a text key for the compiled kernel from the arguments of every launch. Here a `Launch` holds one compiled
kernel. `launch` finds it by a cheaper key; `launch_repeatable` looks it up once; `prepared` serves callers that have
compared the operands themselves. All launches set `enable_fp_fusion=False`: a multiply-add is fused only where the
source says `tl.fma`, so no schedule can change a rounding.

The key of a `Launch` must distinguish everything that Triton specializes a kernel on. A change of the key is otherwise
free.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import triton
from triton.runtime import driver

from ..errors import UnsupportedError
from . import families

EXACT = {"enable_fp_fusion": False}
"""contract: compile option of every Triton kernel."""


class Launch:
    """A Triton kernel compiled for one argument signature, set of options and GPU.

    Triton's launch hooks are not called: CUDA profilers see these kernels, Proton does not name them.
    """

    def __init__(self, device: int, kernel: triton.JITFunction, options: dict, constants: dict):
        self.device, self.kernel, self.options, self.constants = device, kernel, options, constants
        self.compiled = None

    def __call__(self, grid: tuple[int, int, int], *args) -> None:
        """Launch on the GPU's current stream; the first call compiles if needed.

        `args` are the kernel's arguments without its trailing constexpr parameters. After compilation, addresses may be
        passed instead of tensors.
        """
        if self.device == torch.cuda.current_device():  # Triton launches on the current device
            self._run(grid, args)
        else:
            with torch.cuda.device(self.device):
                self._run(grid, args)

    def _run(self, grid: tuple[int, int, int], args: tuple) -> None:
        compiled = self.compiled
        if compiled is None:
            options = _fitted(self.kernel, args, self.options, self.constants, families.gpu(self.device))
            self.compiled = self.kernel[grid](*args, **self.constants, **options, **EXACT)
            return
        stream = driver.active.get_current_stream(self.device)
        values = *args, *self.constants.values()  # Triton's launcher expects the constants and ignores their values
        compiled.run(*grid, stream, compiled.function, compiled.packed_metadata, None, None, None, *values)


def _fitted(kernel: triton.JITFunction, args: tuple, options: dict, constants: dict, gpu: families.Gpu) -> dict:
    """Return the options with the most stages, at most those given, that fit into the GPU's shared memory.

    Schedules are chosen for Hopper GPUs, where every kernel fits. The number of stages changes no bit.

    Raises:
        UnsupportedError: the kernel does not fit with one stage either.
    """
    if gpu.shared_memory >= families.HOPPER.shared_memory:
        return options
    for stages in range(options.get("num_stages", 1), 0, -1):
        fitted = options | {"num_stages": stages} if "num_stages" in options else options
        compiled = kernel.warmup(*args, grid=(1,), **constants, **fitted, **EXACT)
        if compiled.metadata.shared <= gpu.shared_memory:
            return fitted
    op = kernel.fn.__module__.split(".")[2]
    raise UnsupportedError(
        f"{op}: the kernel {kernel.fn.__name__} must fit into {gpu.shared_memory} bytes of shared memory per CTA on "
        f"GPUs of compute capability {gpu}, but needs {compiled.metadata.shared}"
    )


_ready: dict[tuple, Launch] = {}


def launch(kernel, grid: tuple[int, ...], args: tuple, options: dict, **constants) -> None:
    """Run ``kernel[grid](*args, **constants, **options, **EXACT)`` on the tensors' GPU, with less host time.

    The cache key distinguishes everything that Triton specializes on: constants and options by value; dtype, device
    and address modulo 16 of tensors; equality to 1, divisibility by 16 and 64-bit range of integers; the type of
    anything else.

    Args:
        kernel: A `triton.jit` function, whose constexpr parameters come last.
        grid: 1 to 3 dimensions.
        args: Tensors of one GPU, None, and numbers.
        options: Launch options, such as num_warps.
        **constants: Values of the constexpr parameters.
    """
    if isinstance(kernel, triton.JITFunction):
        _launched(kernel, grid, args, options, constants)
    else:  # Triton's interpreter
        kernel[grid](*args, **constants, **options, **EXACT)


def launch_repeatable(
    kernel, grid: tuple[int, ...], args: tuple, options: dict, changing: int, **constants
) -> Callable[..., None]:
    """Launch as `launch` does; return a function that launches again with new tensors.

    The function takes tensors for the first `changing` of `args`. They must have the same dtypes, and 16-byte alignment
    where the originals had it. The function keeps the other `args` alive.
    """
    fixed = args[changing:]
    if not isinstance(kernel, triton.JITFunction):
        launch(kernel, grid, args, options, **constants)
        return lambda *tensors: launch(kernel, grid, (*tensors, *fixed), options, **constants)
    ready, grid, values = _launched(kernel, grid, args, options, constants)

    def relaunch(*tensors: torch.Tensor, rest: tuple = (*values[changing:],), fixed: tuple = fixed) -> None:
        ready(grid, *[t.data_ptr() for t in tensors], *rest)

    return relaunch


def _launched(
    kernel, grid: tuple[int, ...], args: tuple, options: dict, constants: dict
) -> tuple[Launch, tuple[int, int, int], list]:
    """Launch; return the `Launch`, the grid in three dimensions, and `args` with addresses for tensors."""
    key, values, device = [kernel.fn, *constants.values(), *options.values()], [], -1
    for a in args:
        if type(a) is int:
            key.append((a == 1) - (a % 16 == 0) if -(2**31) <= a < 2**31 else a)
        elif isinstance(a, torch.Tensor):
            dtype, device, a = a.dtype, a.get_device(), a.data_ptr()  # a compiled kernel accepts addresses
            key += dtype, device, a % 16
        else:
            key.append(type(a))
        values.append(a)
    x, y, z, *_ = (*grid, 1, 1)
    signature = tuple(key)
    ready = _ready.get(signature)
    if ready is not None:
        ready((x, y, z), *values)
    else:
        ready = Launch(device, kernel, options, constants)
        ready((x, y, z), *args)  # Triton needs the tensors to compile
        _ready[signature] = ready
    return ready, (x, y, z), values


def prepared(
    device: int, kernel: triton.JITFunction, grid: tuple[int, int, int], rest: tuple, **options
) -> Callable[..., None]:
    """Return a launcher of `kernel` on `grid` that takes only the tensors.

    The caller guarantees that every call passes tensors with the same `operand` descriptors, which determine the
    compiled kernel and the schedule.

    Args:
        device: Index of the GPU.
        kernel: A `triton.jit` function.
        grid: 3 dimensions.
        rest: All arguments after the tensors, in order.
        **options: Launch options, such as num_warps.
    """
    ready = Launch(device, kernel, options, {})
    return lambda *tensors: ready(grid, *tensors, *rest)
