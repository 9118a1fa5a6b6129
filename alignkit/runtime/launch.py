"""How kernels in Triton are launched, at a fraction of the time that Triton itself takes: from the arguments of every launch it
works out anew, in text, which compiled kernel is meant. A `Launch` is of one, and runs it; `launch` finds it by a shorter
description of the arguments, `repeated` finds it once, and `prepared` is for who has compared them already. Always with
`enable_fp_fusion=False`: a multiply-add is fused where the source says `tl.fma` and nowhere else, so that no schedule can change a
rounding."""

from __future__ import annotations

from collections.abc import Callable

import torch
import triton
from triton.runtime import driver

EXACT = {"enable_fp_fusion": False}


class Launch:
    """`kernel` as Triton compiles it for arguments of one description, with these options, on the GPU `device`. Triton's
    launch hooks are not called: CUDA's profilers see these kernels, Proton does not name them."""

    def __init__(self, device: int, kernel: triton.JITFunction, options: dict, constants: dict):
        self.device, self.kernel, self.options, self.constants = device, kernel, options, constants
        self.compiled = None

    def __call__(self, grid: tuple[int, int, int], *args) -> None:
        """Launch on the GPU's current stream; the first time, compile if need be. args: all of the kernel's but
        for the constants, which are its last, in its order. Once it is compiled, an address will do for a tensor."""
        if self.device == torch.cuda.current_device():  # where Triton would launch it
            self._run(grid, args)
        else:
            with torch.cuda.device(self.device):
                self._run(grid, args)

    def _run(self, grid: tuple[int, int, int], args: tuple) -> None:
        compiled = self.compiled
        if compiled is None:
            self.compiled = self.kernel[grid](*args, **self.constants, **self.options, **EXACT)
            return
        stream = driver.active.get_current_stream(self.device)
        values = *args, *self.constants.values()  # Triton's launcher counts the constants, and does not look at them
        compiled.run(*grid, stream, compiled.function, compiled.packed_metadata, None, None, None, *values)


_ready: dict[tuple, Launch] = {}


def launch(kernel, grid: tuple[int, ...], args: tuple, options: dict, **constants) -> None:
    """``kernel[grid](*args, **constants, **options, **EXACT)`` on the tensors' GPU, at a fraction of the host's time.

    args: tensors, of one GPU, None, and numbers; `constants`: the kernel's constexpr parameters, which are its last.

    The description is a tuple that tells apart whatever Triton compiles differently, and more: constants and options by
    value; of a tensor the type, the device, and the address modulo 16; of an integer whether it is 1, a multiple of 16, or
    beyond 32 bits; of anything else its type.
    """
    if isinstance(kernel, triton.JITFunction):
        _launched(kernel, grid, args, options, constants)
    else:  # Triton's interpreter
        kernel[grid](*args, **constants, **options, **EXACT)


def repeated(
    kernel, grid: tuple[int, ...], args: tuple, options: dict, changing: int, **constants
) -> Callable[..., None]:
    """As `launch`; returns what launches it again with other tensors for the first `changing` of `args`: of the same types, and
    where these begin at a multiple of 16 bytes, so do those. The rest of `args` is kept for it."""
    kept = args[changing:]
    if not isinstance(kernel, triton.JITFunction):
        launch(kernel, grid, args, options, **constants)
        return lambda *tensors: launch(kernel, grid, (*tensors, *kept), options, **constants)
    ready, grid, values = _launched(kernel, grid, args, options, constants)

    def again(*tensors: torch.Tensor, rest: tuple = (*values[changing:],), kept: tuple = kept) -> None:
        ready(grid, *[t.data_ptr() for t in tensors], *rest)

    return again


def _launched(
    kernel, grid: tuple[int, ...], args: tuple, options: dict, constants: dict
) -> tuple[Launch, tuple[int, int, int], list]:
    """What has launched it, with what grid, and with what for `args`."""
    key, values, device = [kernel.fn, *constants.values(), *options.values()], [], -1
    for a in args:
        if type(a) is int:
            key.append((a == 1) - (a % 16 == 0) if -(2**31) <= a < 2**31 else a)
        elif isinstance(a, torch.Tensor):
            dtype, device, a = a.dtype, a.get_device(), a.data_ptr()  # a pointer may be given as its address
            key += dtype, device, a % 16
        else:
            key.append(type(a))
        values.append(a)
    x, y, z, *_ = (*grid, 1, 1)
    name = tuple(key)
    ready = _ready.get(name)
    if ready is not None:
        ready((x, y, z), *values)
    else:
        ready = Launch(device, kernel, options, constants)
        ready((x, y, z), *args)  # to compile, Triton looks at the tensors themselves
        _ready[name] = ready
    return ready, (x, y, z), values


def prepared(
    device: int, kernel: triton.JITFunction, grid: tuple[int, int, int], rest: tuple, **options
) -> Callable[..., None]:
    """`kernel` on `grid`, to be called with its tensors, each of one `operand`, on the GPU `device`. rest: all its arguments
    after them, in its order. What decides which compiled kernel is meant was compared beforehand, with everything else that a
    schedule depends on: the operands but for their addresses."""
    ready = Launch(device, kernel, options, {})
    return lambda *tensors: ready(grid, *tensors, *rest)
