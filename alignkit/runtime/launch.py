"""How kernels in Triton are launched, at a fraction of the time that Triton itself takes: by `launch`, which tells apart what
Triton compiles differently, or by a `Launch`, which is prepared once for operands of one description. Always with
`enable_fp_fusion=False`: a multiply-add is fused where the source says `tl.fma` and nowhere else, so that no schedule can
change a rounding."""

from __future__ import annotations

import torch
import triton
from triton.compiler import CompiledKernel
from triton.runtime import driver

EXACT = {"enable_fp_fusion": False}
_ready: dict[tuple, CompiledKernel] = {}


def launch(kernel, grid: tuple[int, ...], args: tuple, options: dict, **constants) -> None:
    """``kernel[grid](*args, **constants, **options, **EXACT)`` on the tensors' GPU, at a fraction of the host's time.

    args: tensors, of one GPU, None, and numbers; `constants`: the kernel's constexpr parameters, which are its last, in
    order.

    On each launch Triton describes all of that in text, to find what it compiled. Here the description is a tuple that
    tells apart whatever Triton compiles differently, and more: constants and options by value; of a tensor the type,
    the device, and the address modulo 16; of an integer whether it is 1, a multiple of 16, or beyond 32 bits; of
    anything else its type. Triton's launch hooks are not called: CUDA's profilers see these kernels,
    Proton does not name them.
    """
    if not isinstance(kernel, triton.JITFunction):  # Triton's interpreter
        kernel[grid](*args, **constants, **options, **EXACT)
        return
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
    if device != driver.active.get_current_device() and device >= 0:  # where Triton would launch it
        with torch.cuda.device(device):
            launch(kernel, grid, args, options, **constants)
        return
    name = tuple(key)
    compiled = _ready.get(name)
    if compiled is None:
        _ready[name] = kernel[grid](*args, **constants, **options, **EXACT)
        return
    compiled.run(
        *grid,
        *(1, 1)[len(grid) - 1 :],
        driver.active.get_current_stream(device),
        compiled.function,
        compiled.packed_metadata,
        None,
        None,
        None,
        *values,
        *constants.values(),
    )


class Launch:
    """From the arguments of every launch Triton works out anew which compiled kernel is meant, and a product of few rows takes
    the device less time than that takes the host. What decides it is compared beforehand, with everything else that a
    schedule depends on: the operands but for their addresses.

    `kernel` on `grid` with `rest`, all its arguments after the tensors, in the kernel's order. It is for tensors of one
    `operand` each, on the GPU `device`."""

    def __init__(self, device: int, kernel: triton.JITFunction, grid: tuple[int, int, int], rest: tuple, **options):
        self.device, self.kernel, self.grid, self.rest, self.options = device, kernel, grid, rest, options
        self.again = None

    def __call__(self, *tensors) -> None:
        """Launch on the GPU's current stream; the first time, compile if need be."""
        if self.device != torch.cuda.current_device():  # where Triton would launch it
            with torch.cuda.device(self.device):
                self(*tensors)
        elif self.again is None:
            self.again = self.kernel[self.grid](*tensors, *self.rest, **self.options, **EXACT)[self.grid]
        else:
            self.again(*tensors, *self.rest)
