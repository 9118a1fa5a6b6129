"""Sums over the GPUs of one host through torch's symmetric memory (csrc/sm90/rank_sum/all_reduce.cu).

Each process group has one workspace of fixed size, created collectively at the first sum; larger sums are split into
pieces. No later allocation is needed, so CUDA graphs may hold its addresses. The kernel uses plain loads and stores
over NVLink, no multicast.

The all-reduce of a piece overlaps the GEMM of the next one. It runs on a side stream with a few SMs, which saturate
NVLink, and the pieces alternate between two buffers.

The order of summation, the tree of ranks, is the contract's. Pieces, forms and numbers of CTAs are free, but must be
equal on all ranks. Names of torch's private symmetric memory API are those of torch 2.11.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import socket
import warnings
import weakref
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from ..config import config
from ..errors import BackendError, InputError
from ..runtime import cuda, dispatch, families
from ..runtime.shared import KERNELS

DTYPES = (torch.float32, torch.bfloat16)
"""Output dtypes of the kernel; `TP.sum_products` rounds to other dtypes after the sum."""
SIZES = (2, 4, 8)
"""schedule: group sizes, a limit that the kernel checks; groups of other sizes gather with NCCL."""
PIECE = 1 << 23
"""schedule: maximum values per piece, 32 MiB.

A rank has buffers for two pieces, and for its share of one rounded piece.
"""
BLOCKS = KERNELS["kSumMaxBlocks"]
"""Maximum CTAs of the kernel, one per SM."""
OVERLAP_BLOCKS = 24
"""schedule: CTAs of a sum that overlaps the next piece's GEMM, which leaves as many SMs free."""
HEAD, ONE_BARRIER = KERNELS["kSumHeadBytes"], KERNELS["kSumMaxOneBarrier"]
"""Bytes of signals at the start of a rank's memory; maximum values of a one-barrier sum in a CUDA graph.

Two buffers for such sums precede the buffers of pieces.
"""
ONE_SHOT_MAX = {2: 1 << 19, 4: 1 << 17, 8: 1 << 16}
"""schedule: largest sum, by group size, for which every rank reads all values (one-shot all-reduce).

Beyond it, each rank reduces a share and reads the others' results (two-shot). Measured for 2 and 4 ranks,
extrapolated for 8.
"""
_ROWS = 8
"""schedule: row granularity of pieces, a multiple of 8, so that each piece starts at a multiple of 16 bytes."""
_WHOLE, _SLICE, _SHARED = (KERNELS[name] for name in ("kWhole", "kSlice", "kShared"))
_NO_MULTICAST = "TORCH_SYMM_MEM_DISABLE_MULTICAST"
_TEN_MINUTES = 600.0
"""schedule: timeout, in seconds, if the process group does not report one."""

T = TypeVar("T")
Product = Callable[[slice, torch.Tensor, int], object]
"""GEMM callback: ``product(rows, out, spare)`` writes this rank's fp32 results of `rows` to `out` [rows, N].

It leaves `spare` SMs to concurrent kernels, if it can.
"""
_created_count = 0
"""Number of workspaces that this process has created or tried to create."""
_workspaces: weakref.WeakKeyDictionary[dist.ProcessGroup, Workspace | None] = weakref.WeakKeyDictionary()


def workspace(group: dist.ProcessGroup, device: torch.device) -> Workspace | None:
    """Return the group's workspace, or None if symmetric memory is disabled or unavailable on any rank.

    The first call is collective and synchronizes with the device. During CUDA graph capture a first call returns None
    without deciding.
    """
    if families.on_host(device) or group in _workspaces:
        return _workspaces.get(group)
    if (
        dist.get_world_size(group) not in SIZES
        or "nccl" not in dist.get_backend(group)
        or torch.cuda.is_current_stream_capturing()
    ):
        return None
    return _workspaces.setdefault(group, _create_workspace(group, device))


def used(group: dist.ProcessGroup | None) -> bool:
    """Return whether this rank sums over the group through symmetric memory."""
    return group is not None and _workspaces.get(group) is not None


class Workspace:
    """One rank's symmetric memory and the peer addresses of all ranks.

    Sums of a workspace must not overlap on the device. A sum on a new stream first waits for the previous stream; the
    stream of a graph replay is unknown here. The kernel traps with a message if sums overlap, if a peer times out, or
    if the ranks sum different shapes.
    """

    def __init__(self, group: dist.ProcessGroup, memory: torch.Tensor):
        """Exchange peer addresses; collective. `memory` comes from `allocate`."""
        from torch.distributed import _symmetric_memory

        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)
        with _without_multicast():
            self._handle = _symmetric_memory.rendezvous(memory, group)
        self._values = memory[HEAD // 4 :]
        self._addresses = (ctypes.c_void_p * self.size)(*self._handle.buffer_ptrs)
        self._order = (ctypes.c_uint64 * 3)()  # state of the kernel's launcher: order of calls within a graph
        self._timeout_ns = round(_timeout(group, memory.device) * 1e9)
        self._stream = torch.cuda.current_stream(memory.device)
        self._overlapped = _Overlapped(memory.device)

    def supports(self, rows: int, columns: int, scatter: bool) -> bool:
        """Return whether fp32 [rows, columns] can be summed; with `scatter`, slices must be multiples of 16 bytes."""
        parts = self.size if scatter else 1
        return (
            0 < rows * columns and _ROWS * columns * parts <= PIECE and not (scatter and rows * columns % (4 * parts))
        )

    @torch.no_grad()
    def sum(
        self,
        product: Product,
        rows: int,
        columns: int,
        bias: torch.Tensor | None,
        dtype: torch.dtype,
        scatter: bool,
        shared: bool | None = None,
    ) -> torch.Tensor:
        """Return `TP.sum_products` of a shape that `supports` accepts; `shared` overrides the two-shot threshold."""
        self._wait_for_previous_stream()
        device, parts = self._values.device, self.size if scatter else 1
        bias = None if bias is None else bias.contiguous()
        height = rows // parts
        y = torch.empty(height, columns, dtype=dtype, device=device)
        pieces = _pieces(height, parts * columns)
        schedule = self._overlapped if len(pieces) > 1 else _Serial()
        with schedule.all_pieces():
            for i, (begin, end) in enumerate(pieces):
                count = parts * (end - begin) * columns
                form = (
                    _SLICE
                    if scatter
                    else _SHARED
                    if (count > ONE_SHOT_MAX[self.size] if shared is None else shared)
                    else _WHOLE
                )
                first = self._begin(form, count, i % 2)
                sums, spare = self._values[first : first + count].view(-1, columns), OVERLAP_BLOCKS if i else 0
                schedule.wait_for_buffer(i)
                if end - begin == height:
                    product(slice(0, rows), sums, spare)
                else:
                    for part, out in enumerate(sums.chunk(parts)):
                        product(slice(part * height + begin, part * height + end), out, spare)
                with schedule.reduction(i):
                    cuda.call(
                        "alignkit_tree_sum",
                        device,
                        self._addresses,
                        self.size,
                        self.rank,
                        form,
                        count,
                        2 * PIECE,
                        first,
                        bias,
                        bias is not None and bias.dtype == torch.bfloat16,
                        columns,
                        y[begin:end],
                        dtype == torch.bfloat16,
                        self._order,
                        self._timeout_ns,
                        OVERLAP_BLOCKS if end < height else BLOCKS,
                    )
        return y

    def _begin(self, form: int, count: int, buffer: int) -> int:
        """Return the offset in `_values` for the GEMM's output; the launcher picks it for one-barrier sums."""
        begin = ctypes.c_int64(2 * ONE_BARRIER)
        if torch.cuda.is_current_stream_capturing():
            order, device = self._order, self._values.device
            cuda.call("alignkit_tree_sum_begin", device, form, count, order, ctypes.byref(begin))
        return begin.value if begin.value < 2 * ONE_BARRIER else begin.value + buffer * PIECE

    def _wait_for_previous_stream(self) -> None:
        stream = torch.cuda.current_stream(self._values.device)
        if stream != self._stream and not torch.cuda.is_current_stream_capturing():
            stream.wait_stream(self._stream)
            self._stream = stream


class _Serial:
    """Schedule of a sum of one piece: GEMM, then reduction, on the same stream."""

    def all_pieces(self) -> contextlib.AbstractContextManager:
        return contextlib.nullcontext()

    def wait_for_buffer(self, i: int) -> None: ...

    def reduction(self, i: int) -> contextlib.AbstractContextManager:
        return contextlib.nullcontext()


class _Overlapped(_Serial):
    """Schedule of a sum of several pieces: each reduction overlaps the next GEMM, on a high-priority side stream."""

    def __init__(self, device: torch.device):
        self._stream = torch.cuda.Stream(device, priority=-1)
        self._computed, self._reduced = ([torch.cuda.Event() for _ in range(2)] for _ in range(2))

    @contextlib.contextmanager
    def all_pieces(self) -> Iterator[None]:
        """Make the current stream wait for all reductions on exit."""
        try:
            yield
        finally:
            torch.cuda.current_stream(self._stream.device).wait_stream(self._stream)

    def wait_for_buffer(self, i: int) -> None:
        """Wait until the piece that used the buffer of piece i is reduced."""
        if i >= 2:
            self._reduced[i % 2].wait()

    @contextlib.contextmanager
    def reduction(self, i: int) -> Iterator[None]:
        """Run the body, the reduction of piece i, on the side stream after the GEMM on the current stream."""
        self._computed[i % 2].record()
        with torch.cuda.stream(self._stream):
            self._computed[i % 2].wait()
            yield
            self._reduced[i % 2].record()


def _pieces(height: int, columns: int) -> list[tuple[int, int]]:
    """Return the (begin, end) row ranges of the pieces, balanced; `columns` counts the columns of all slices."""
    number = -(-height // (PIECE // columns // _ROWS * _ROWS))
    step = -(-height // (number * _ROWS)) * _ROWS
    return [(begin, min(begin + step, height)) for begin in range(0, height, step)]


def allocate(size: int, device: torch.device) -> torch.Tensor:
    """Return the symmetric memory of one of `size` ranks, its signals zeroed."""
    from torch._C._distributed_c10d import _SymmetricMemory

    # Bypasses torch's symmetric memory pool, which would hold the memory after the group is destroyed.
    words = HEAD // 4 + 2 * ONE_BARRIER + 2 * PIECE + PIECE // size
    memory = _SymmetricMemory.empty_strided_p2p((words,), (1,), torch.float32, device)
    memory[: HEAD // 4].zero_()
    torch.cuda.synchronize(device)
    return memory


def _create_workspace(group: dist.ProcessGroup, device: torch.device) -> Workspace | None:
    global _created_count
    info = error = None
    try:
        info = (socket.gethostname(), _created_count) if _enabled(device) else None
    except InputError as e:  # invalid environment variable; all ranks must raise together
        error = str(e)
    answers = _all_gather_objects(group, (info, error))
    if errors := [f"{why} (on rank {rank})" for rank, (_, why) in enumerate(answers) if why is not None]:
        raise InputError(errors[0])
    infos = [info for info, _ in answers]
    hosts, counts = zip(*(info or (None, None) for info in infos), strict=True)
    if None in hosts or len(set(hosts)) > 1:
        return None
    if len(set(counts)) > 1:
        # torch 2.11 numbers rendezvous per process, so unequal counts would deadlock (pytorch/pytorch#196082).
        _warn_fallback(f"the ranks have created it for different numbers of groups before: {list(counts)}, by rank")
        return None
    _created_count += 1
    memory = _together(group, lambda: allocate(dist.get_world_size(group), device))
    return None if memory is None else _together(group, lambda: Workspace(group, memory))


def _together(group: dist.ProcessGroup, make: Callable[[], T]) -> T | None:
    """Return `make()`; if it fails on any rank, warn and return None on all ranks."""
    result = failure = None
    try:
        with torch.inference_mode(False):  # inference tensors could not be written outside inference mode
            result = make()
    # Errors of the driver, of an unsupported torch version, or of ALIGNKIT_SYMMETRIC_TIMEOUT.
    except (RuntimeError, ImportError, AttributeError, TypeError, ValueError) as e:
        failure = f"{type(e).__name__}: {e}"
    answers = _all_gather_objects(group, failure)
    failures = [f"rank {rank}: {why}" for rank, why in enumerate(answers) if why is not None]
    if failures:
        _warn_fallback(failures[0])
        return None
    return result


def _warn_fallback(why: str) -> None:
    warnings.warn(
        f"symmetric memory is unavailable ({why}); tensor-parallel sums use NCCL gathers: same bits, slower. "
        "ALIGNKIT_SYMMETRIC=0 disables symmetric memory without this warning"
    )


def _enabled(device: torch.device) -> bool:
    if not config.symmetric:
        return False
    try:
        return dispatch.backend_of(device) == families.CUDA
    except BackendError:
        return False


def _timeout(group: dist.ProcessGroup, device: torch.device) -> float:
    """Return the timeout of a sum in seconds."""
    if (seconds := config.symmetric_timeout) is not None:
        return seconds
    options = getattr(group._get_backend(device), "options", None)
    return options._timeout.total_seconds() if hasattr(options, "_timeout") else _TEN_MINUTES


def _all_gather_objects(group: dist.ProcessGroup, value: T) -> list[T]:
    """Return the values of all ranks, in rank order."""
    values: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(values, value, group=group)
    return values


@contextlib.contextmanager
def _without_multicast() -> Iterator[None]:
    before = os.environ.get(_NO_MULTICAST)
    os.environ[_NO_MULTICAST] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ[_NO_MULTICAST]
        else:
            os.environ[_NO_MULTICAST] = before
