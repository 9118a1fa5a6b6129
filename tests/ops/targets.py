"""Compilation of the ops' Triton kernels for any kind of GPU, on a CPU.

`compiling` runs ops on meta tensors, which have no memory. Launches compile and record their kernel alone. The queries
of the device and Triton's driver are replaced; the ops, the dispatch and the compiler are not.
"""

import contextlib
from dataclasses import dataclass
from unittest import mock

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

from alignkit.ops import gated_delta_rule
from alignkit.ops.linear import cublaslt, hopper
from alignkit.runtime import dispatch, families, validated
from alignkit.runtime import launch as launches

META = torch.device("meta")


@dataclass
class Compiled:
    """A compiled kernel."""

    kernel: triton.JITFunction
    arguments: str
    """Dtypes, constants and options."""
    shared: int
    """Bytes of shared memory per CTA."""
    tensor_memory: int
    """Columns of tensor memory."""
    ptx: str

    @property
    def name(self) -> str:
        return f"{self.kernel.fn.__module__.removeprefix('alignkit.ops.')}.{self.kernel.fn.__name__}"

    def __str__(self) -> str:
        return f"{self.name} ({self.arguments})"


class Driver:
    """A stand-in for Triton's driver of one GPU, which can compile but not launch."""

    def __init__(self, gpu: families.Gpu):
        self.target = GPUTarget("cuda", 10 * gpu.capability[0] + gpu.capability[1], 32)

    def get_current_device(self) -> int:
        return self.target.arch  # Triton caches kernels by device

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return self.target


@contextlib.contextmanager
def compiling(gpu: families.Gpu, wanted=lambda kernel: True):
    """Compile kernels for `gpu` within the block; yield the list of compiled kernels, without repetitions.

    Args:
        gpu: Row of `families.GPUS`.
        wanted: Function of a kernel that returns False to skip it.
    """
    found: dict[str, Compiled] = {}
    done: set[launches.Launch] = set()  # a Launch may serve other targets too, so it must not hold a compiled kernel

    def run(self, grid, args):
        if self in done or not wanted(self.kernel):
            return
        done.add(self)
        options = launches._fitted(self.kernel, args, self.options, self.constants, gpu)
        compiled = self.kernel.warmup(*args, grid=(1,), **self.constants, **options, **launches.EXACT)
        if compiled.hash not in found:
            dtypes = sorted({str(a.dtype).removeprefix("torch.") for a in args if isinstance(a, torch.Tensor)})
            text = ", ".join([*dtypes, *(f"{name}={value}" for name, value in (self.constants | options).items())])
            memory = getattr(compiled.metadata, "tmem_size", 0) or 0
            found[compiled.hash] = Compiled(self.kernel, text, compiled.metadata.shared, memory, compiled.asm["ptx"])

    with contextlib.ExitStack() as stack:
        for owner, name, value in (
            (families, "gpu", lambda device: gpu),
            (families, "DEVICE_TYPES", (*families.DEVICE_TYPES, META.type)),
            (gated_delta_rule, "_check_sequences", lambda starts, chunks, q: (starts, 4)),  # counts on the device
            (dispatch, "_backends", {(META, dispatch.choice()): families.TRITON}),
            (torch.cuda, "current_device", lambda: META_INDEX),
            (torch.cuda, "is_current_stream_capturing", lambda: False),
            (launches, "_ready", {}),
            (launches.Launch, "_run", run),
            (cublaslt, "rejects", lambda problem: "needs a GPU"),
            (hopper, "rejects", lambda problem: "is for Hopper alone, so every problem has another Triton kernel"),
        ):
            stack.enter_context(mock.patch.object(owner, name, value))
        before = driver._active
        driver.set_active(Driver(gpu))
        stack.callback(setattr, driver, "_active", before)
        dispatch.choose.cache_clear()
        stack.callback(dispatch.choose.cache_clear)
        stack.enter_context(validated.unchecked())
        yield found.values()


META_INDEX = torch.empty(0, device=META).get_device()
"""Index of a meta tensor's device."""
