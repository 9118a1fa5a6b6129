"""What the Triton backends share. Kernels are launched with `enable_fp_fusion=False`: a multiply-add is fused where the
source says `tl.fma` and nowhere else, so that no schedule can change a rounding."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.compiler import CompiledKernel
from triton.runtime import driver

LOG2E = tl.constexpr(1.4426950408889634)
EXACT = {"enable_fp_fusion": False}


@triton.jit
def exp(x):
    """2^(x log2 e) by the hardware's ex2."""
    return tl.exp2(x * LOG2E)


@triton.jit
def fixed(v):
    """v in [0, 1] as a multiple of 2^-23, int32: adding 1 rounds it, to nearest, and leaves the multiple in the low
    bits."""
    return (v + 1.0).to(tl.int32, bitcast=True) - 0x3F800000


@triton.jit
def tree_sum(x, LEVELS: tl.constexpr):
    """Balanced tree over the last axis of x [R, 2^LEVELS], neighbours first. A pair has one sum, so no layout can
    change a bit."""
    for _ in tl.static_range(LEVELS):
        x = tl.sum(tl.reshape(x, (x.shape[0], x.shape[1] // 2, 2)), axis=2)
    return tl.reshape(x, (x.shape[0],))


def next_power_of_2(n: int) -> int:
    return 1 << max(n - 1, 0).bit_length()


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
