"""Sums over ranks in symmetric memory, which the GPUs of one host read over NVLink (csrc/sm90/tree_sum.cu).

A group has a workspace of one size, made when it is first asked for by all ranks together: larger sums take several pieces.
So nothing grows or waits later, and a CUDA graph may hold its addresses. Plain loads and stores; no multicast.

The memory is shared by CUDA's IPC, and the group itself tells the ranks where it is. torch's own symmetric memory would do,
but up to 2.12 a group's ranks wait for each other forever once one of them was in another group's rendezvous that the others
were not in (pytorch/pytorch#196082).
"""
from __future__ import annotations

import ctypes
import os
import socket
import warnings
import weakref
from collections.abc import Callable
from typing import TypeVar

import torch
import torch.distributed as dist

from . import backends, cuda
from .errors import BackendError

DTYPES = (torch.float32, torch.bfloat16)
"""What the kernel rounds to."""
SIZES = (2, 4, 8)
"""Numbers of ranks that the kernel adds."""
PIECE = 1 << 24
"""Sums that a rank has room for, 64 MiB; for rounded values there is as much again, divided among the ranks."""
HEAD = 4096
"""Bytes of a rank's memory before its sums, with the signals of the others: kHeadBytes."""
SHARED = {2: 1 << 19, 4: 1 << 17, 8: 1 << 16}
"""By number of ranks: from how many values on each rank adds a share and reads those of the others. Below, the additional
trip over NVLink takes longer than reading everything does. Measured with 2, reckoned with 4 and 8."""
_ROWS = 8
"""Pieces are of multiples of this many rows, so that each begins at a multiple of 16 bytes."""
_WHOLE, _SLICE, _SHARED = range(3)
_HANDLE = 64
"""Bytes of a cudaIpcMemHandle_t."""

T = TypeVar("T")
Product = Callable[[slice, torch.Tensor], object]
"""``product(rows, out)`` writes this rank's fp32 sums of `rows` to `out` [rows, N]."""
_made: weakref.WeakKeyDictionary[dist.ProcessGroup, Workspace | None] = weakref.WeakKeyDictionary()


def workspace(group: dist.ProcessGroup, device: torch.device) -> Workspace | None:
    """The group's workspace; None if a rank has ``ALIGNKIT_SYMMETRIC=0`` or cannot read another's memory. The first call is a
    collective one that waits for the device; while a CUDA graph is captured it decides nothing and is None."""
    if device.type != "cuda" or group in _made:
        return _made.get(group)
    if (dist.get_world_size(group) not in SIZES or "nccl" not in dist.get_backend(group)
            or torch.cuda.is_current_stream_capturing()):
        return None
    return _made.setdefault(group, _make(group, device))


class Workspace:
    """One rank's memory, and the addresses of all ranks'. Calls follow each other on the device: those of one stream do, and
    a stream that is new to it waits for the one before; graphs must be replayed where eager calls would run."""

    def __init__(self, group: dist.ProcessGroup, memory: Memory, device: torch.device):
        """All ranks call it together, each with its own memory."""
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)
        self._memory, handles = memory, _told(group, memory.handle)
        everyone = [memory if rank == self.rank else Opened(handle, device) for rank, handle in enumerate(handles)]
        self._everyone = everyone
        self._sums = torch.as_tensor(memory, device=device)[HEAD // 4:HEAD // 4 + PIECE]
        self._addresses = (ctypes.c_void_p * self.size)(*(m.address for m in everyone))
        self._stream = torch.cuda.current_stream(device)

    def takes(self, rows: int, columns: int, scatter: bool) -> bool:
        """Whether fp32 [rows, columns] can be summed here; with `scatter`, slices must be a multiple of 16 bytes."""
        parts = self.size if scatter else 1
        return 0 < rows * columns and _ROWS * columns * parts <= PIECE and not (scatter and rows * columns % (4 * parts))

    @torch.no_grad()
    def sum(self, product: Product, rows: int, columns: int, bias: torch.Tensor | None, dtype: torch.dtype, scatter: bool,
            shared: bool | None = None) -> torch.Tensor:
        """`TP.sum_products`, for what it `takes`. shared: whether each rank adds a share; otherwise `SHARED` says."""
        self._follow()
        device, parts = self._sums.device, self.size if scatter else 1
        bias = None if bias is None else bias.contiguous()
        height = rows // parts
        y = torch.empty(height, columns, dtype=dtype, device=device)
        step = PIECE // (parts * columns) // _ROWS * _ROWS
        for begin in range(0, height, step):
            end = min(begin + step, height)
            count = parts * (end - begin) * columns
            sums = self._sums[:count].view(-1, columns)
            if end - begin == height:
                product(slice(0, rows), sums)
            else:
                for part, out in enumerate(sums.chunk(parts)):
                    product(slice(part * height + begin, part * height + end), out)
            form = _SLICE if scatter else _SHARED if (count >= SHARED[self.size] if shared is None else shared) else _WHOLE
            cuda.call("alignkit_tree_sum", device, self._addresses, self.size, self.rank, form, count, ctypes.c_int64(PIECE),
                      bias, int(bias is not None and bias.dtype == torch.bfloat16), columns, y[begin:end],
                      int(dtype == torch.bfloat16))
        return y

    def _follow(self) -> None:
        stream = torch.cuda.current_stream(self._sums.device)
        if stream != self._stream and not torch.cuda.is_current_stream_capturing():
            stream.wait_stream(self._stream)
            self._stream = stream


class Memory:
    """Of one of `size` ranks, on its GPU: the head, which is zeros, sums, rounded values. `handle` opens it in another process;
    ``torch.as_tensor`` takes it as fp32. It is there until the process ends: a handle of the same address made later would
    open, in a process that still has this open, what was there before."""

    def __init__(self, size: int, device: torch.device):
        address, handle = ctypes.c_void_p(), ctypes.create_string_buffer(_HANDLE)
        count = HEAD // 4 + PIECE + PIECE // size
        cuda.call("alignkit_shared_memory_make", device, ctypes.byref(address), ctypes.c_int64(4 * count), ctypes.c_int64(HEAD),
                  handle)
        self.address, self.handle = address.value, handle.raw
        self.__cuda_array_interface__ = {"data": (self.address, False), "shape": (count,), "typestr": "<f4", "version": 3}


class Opened:
    """The `Memory` of another process. BackendError where this GPU cannot read it."""

    def __init__(self, handle: bytes, device: torch.device):
        address = ctypes.c_void_p()
        cuda.call("alignkit_shared_memory_open", device, ctypes.byref(address), handle)
        self.address = address.value


def _make(group: dist.ProcessGroup, device: torch.device) -> Workspace | None:
    hosts = _told(group, socket.gethostname() if _wanted(device) else None)
    if None in hosts or len(set(hosts)) > 1:
        return None
    memory = _together(group, lambda: Memory(dist.get_world_size(group), device))
    return None if memory is None else _together(group, lambda: Workspace(group, memory, device))


def _together(group: dist.ProcessGroup, make: Callable[[], T]) -> T | None:
    """What `make` returns; None, and a warning, on all ranks if it failed on any, which so leaves no other waiting."""
    made = failure = None
    try:
        with torch.inference_mode(False):  # what is made in it may be written to inside only
            made = make()
    except RuntimeError as e:  # torch's, or a BackendError
        failure = str(e)
    failures = [said for said in _told(group, failure) if said is not None]
    if failures:
        warnings.warn(f"no symmetric memory ({failures[0]}); NCCL gathers what tensor-parallel ranks add: same bits, slower")
        return None
    return made


def _wanted(device: torch.device) -> bool:
    if os.environ.get("ALIGNKIT_SYMMETRIC", "1") == "0":
        return False
    try:
        return backends.name(device) == "cuda"
    except BackendError:
        return False


def _told(group: dist.ProcessGroup, value: T) -> list[T]:
    """What each rank says."""
    values: list[T] = [None] * dist.get_world_size(group)
    dist.all_gather_object(values, value, group=group)
    return values
