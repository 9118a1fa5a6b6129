"""Sums over ranks in memory that the GPUs of one host read over NVLink, torch's symmetric memory: the kernel is
csrc/sm90/rank_sum/all_reduce.cu.

A group has a workspace of one size, made when it is first asked for by all ranks together: larger sums take several pieces.
So nothing grows or waits later, and a CUDA graph may hold its addresses. Plain loads and stores; NVLink's multicast is off.

A piece is added while the next one's product is computed: by few multiprocessors, which are enough for NVLink, on a stream of
its own, and pieces lie by turns in two places.
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

DTYPES = (torch.float32, torch.bfloat16)
"""What the kernel rounds to."""
SIZES = (2, 4, 8)
"""Numbers of ranks that the kernel adds."""
PIECE = 1 << 23
"""Values of a piece, 32 MiB, at most. A rank has room for two, and for the rounded values of one, divided among the ranks."""
BLOCKS = 64
"""Blocks of the kernel at most, one on a multiprocessor: kMostBlocks."""
BESIDE = 24
"""Likewise, of a sum beside the product of the next piece, which leaves it so many multiprocessors."""
HEAD = 16384
"""Bytes of a rank's memory before its sums, with the signals of the others: kHeadBytes."""
ONCE = 1 << 19
"""Values of a sum within a CUDA graph for which ranks meet once, at most: kMostOnce. There are two places for such sums, before
those of the others."""
SHARED = {2: 1 << 19, 4: 1 << 17, 8: 1 << 16}
"""By number of ranks: of more values than these each rank adds a share and reads those of the others. Of fewer, the additional
trip over NVLink takes longer than reading everything does. Measured with 2 and 4, reckoned with 8."""
_ROWS = 8
"""Pieces are of multiples of this many rows, so that each begins at a multiple of 16 bytes."""
_WHOLE, _SLICE, _SHARED = range(3)
_NO_MULTICAST = "TORCH_SYMM_MEM_DISABLE_MULTICAST"
_TEN_MINUTES = 600.0
"""For so long a group's collectives wait unless it is made with another time, and where it does not say."""

T = TypeVar("T")
Product = Callable[[slice, torch.Tensor, int], object]
"""``product(rows, out, spare)`` writes this rank's fp32 sums of `rows` to `out` [rows, N], and leaves `spare` multiprocessors
to what runs beside it, if it can."""
_made_here = 0
"""How many workspaces this process has made, or tried to."""
_made: weakref.WeakKeyDictionary[dist.ProcessGroup, Workspace | None] = weakref.WeakKeyDictionary()


def workspace(group: dist.ProcessGroup, device: torch.device) -> Workspace | None:
    """The group's workspace; None if a rank has ``ALIGNKIT_SYMMETRIC=0`` or cannot read another's memory. The first call is a
    collective one that waits for the device; while a CUDA graph is captured it decides nothing and is None."""
    if families.on_host(device) or group in _made:
        return _made.get(group)
    if (
        dist.get_world_size(group) not in SIZES
        or "nccl" not in dist.get_backend(group)
        or torch.cuda.is_current_stream_capturing()
    ):
        return None
    return _made.setdefault(group, _make(group, device))


def used(group: dist.ProcessGroup | None) -> bool:
    """Whether this rank has added over the group in symmetric memory; if not, the group never added or NCCL gathers."""
    return group is not None and _made.get(group) is not None


class Workspace:
    """One rank's memory, and the addresses of all ranks'. Calls follow each other on the device: those of one stream do, and
    a stream that is new to it waits for the one before. Where a graph is replayed is not seen here: sums that overlap stop
    the device, with a message, as do a rank that does not come and ranks that add different things."""

    def __init__(self, group: dist.ProcessGroup, memory: torch.Tensor):
        """memory: of `allocate`. All ranks call it together."""
        from torch.distributed import _symmetric_memory

        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)
        with _without_multicast():
            self._handle = _symmetric_memory.rendezvous(memory, group)
        self._values = memory[HEAD // 4 :]
        self._addresses = (ctypes.c_void_p * self.size)(*self._handle.buffer_ptrs)
        self._order = (ctypes.c_uint64 * 3)()  # of calls within a graph: the kernel's launcher keeps it
        self._patience = ctypes.c_uint64(round(_timeout(group, memory.device) * 1e9))
        self._stream = torch.cuda.current_stream(memory.device)
        self._beside = _Beside(memory.device)

    def takes(self, rows: int, columns: int, scatter: bool) -> bool:
        """Whether fp32 [rows, columns] can be summed here; with `scatter`, slices must be a multiple of 16 bytes."""
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
        """`TP.sum_products`, for what it `takes`. shared: whether each rank adds a share; otherwise `SHARED` says."""
        self._follow()
        device, parts = self._values.device, self.size if scatter else 1
        bias = None if bias is None else bias.contiguous()
        height = rows // parts
        y = torch.empty(height, columns, dtype=dtype, device=device)
        pieces = _pieces(height, parts * columns)
        beside = self._beside if len(pieces) > 1 else _Alone()
        with beside.turns():
            for i, (begin, end) in enumerate(pieces):
                count = parts * (end - begin) * columns
                form = (
                    _SLICE
                    if scatter
                    else _SHARED
                    if (count > SHARED[self.size] if shared is None else shared)
                    else _WHOLE
                )
                first = self._begin(form, count, i % 2)
                sums, spare = self._values[first : first + count].view(-1, columns), BESIDE if i else 0
                beside.wait(i)
                if end - begin == height:
                    product(slice(0, rows), sums, spare)
                else:
                    for part, out in enumerate(sums.chunk(parts)):
                        product(slice(part * height + begin, part * height + end), out, spare)
                with beside.turn(i):
                    cuda.call(
                        "alignkit_tree_sum",
                        device,
                        self._addresses,
                        self.size,
                        self.rank,
                        form,
                        count,
                        ctypes.c_int64(2 * PIECE),
                        ctypes.c_int64(first),
                        bias,
                        int(bias is not None and bias.dtype == torch.bfloat16),
                        columns,
                        y[begin:end],
                        int(dtype == torch.bfloat16),
                        self._order,
                        self._patience,
                        BESIDE if end < height else BLOCKS,
                    )
        return y

    def _begin(self, form: int, count: int, place: int) -> int:
        """Where in `_values` the product is to leave what the next call adds: at that one of two places, but for sums that ranks
        meet once for."""
        begin = ctypes.c_int64(2 * ONCE)
        if torch.cuda.is_current_stream_capturing():
            order, device = self._order, self._values.device
            cuda.call("alignkit_tree_sum_begin", device, form, count, order, ctypes.byref(begin))
        return begin.value if begin.value < 2 * ONCE else begin.value + place * PIECE

    def _follow(self) -> None:
        stream = torch.cuda.current_stream(self._values.device)
        if stream != self._stream and not torch.cuda.is_current_stream_capturing():
            stream.wait_stream(self._stream)
            self._stream = stream


class _Alone:
    """How a sum of one piece runs: after its product, on its stream."""

    def turns(self) -> contextlib.AbstractContextManager:
        return contextlib.nullcontext()

    def wait(self, i: int) -> None: ...

    def turn(self, i: int) -> contextlib.AbstractContextManager:
        return contextlib.nullcontext()


class _Beside(_Alone):
    """How sums of several pieces run: each beside the product of the next piece, on a stream that goes first."""

    def __init__(self, device: torch.device):
        self._stream = torch.cuda.Stream(device, priority=-1)
        self._made, self._added = ([torch.cuda.Event() for _ in range(2)] for _ in range(2))

    @contextlib.contextmanager
    def turns(self) -> Iterator[None]:
        """After it the current stream goes on when all are added."""
        try:
            yield
        finally:
            torch.cuda.current_stream(self._stream.device).wait_stream(self._stream)

    def wait(self, i: int) -> None:
        """Until the piece that lay where i will has been added."""
        if i >= 2:
            self._added[i % 2].wait()

    @contextlib.contextmanager
    def turn(self, i: int) -> Iterator[None]:
        """Adds piece i, whose product is on the current stream."""
        self._made[i % 2].record()
        with torch.cuda.stream(self._stream):
            self._made[i % 2].wait()
            yield
            self._added[i % 2].record()


def _pieces(height: int, columns: int) -> list[tuple[int, int]]:
    """(begin, end) of rows, about as many in each; a row has so many columns of all slices together."""
    number = -(-height // (PIECE // columns // _ROWS * _ROWS))
    step = -(-height // (number * _ROWS)) * _ROWS
    return [(begin, min(begin + step, height)) for begin in range(0, height, step)]


def allocate(size: int, device: torch.device) -> torch.Tensor:
    """The memory of one of `size` ranks, its head zeros."""
    from torch._C._distributed_c10d import _SymmetricMemory

    # Not from torch's pool of such memory, where it would stay when the group is gone.
    words = HEAD // 4 + 2 * ONCE + 2 * PIECE + PIECE // size
    memory = _SymmetricMemory.empty_strided_p2p((words,), (1,), torch.float32, device)
    memory[: HEAD // 4].zero_()
    torch.cuda.synchronize(device)
    return memory


def _make(group: dist.ProcessGroup, device: torch.device) -> Workspace | None:
    global _made_here
    place = refusal = None
    try:
        place = (socket.gethostname(), _made_here) if _wanted(device) else None
    except InputError as e:  # of a variable: a rank that failed alone would leave others waiting
        refusal = str(e)
    said = _told(group, (place, refusal))
    if refusals := [why for _, why in said if why is not None]:
        raise InputError(refusals[0])
    told = [place for place, _ in said]
    hosts, made = zip(*(said or (None, None) for said in told), strict=True)
    if None in hosts or len(set(hosts)) > 1:
        return None
    if len(set(made)) > 1:
        # torch 2.11 counts by process which exchange is the next, so these would wait for each other forever
        # (pytorch/pytorch#196082).
        _gathers("its ranks were in different groups before")
        return None
    _made_here += 1
    memory = _together(group, lambda: allocate(dist.get_world_size(group), device))
    return None if memory is None else _together(group, lambda: Workspace(group, memory))


def _together(group: dist.ProcessGroup, make: Callable[[], T]) -> T | None:
    """What `make` returns; None, and a warning, on all ranks if it failed on any, which so leaves no other waiting."""
    made = failure = None
    try:
        with torch.inference_mode(False):  # what is made in it may be written to inside only
            made = make()
    # Of a driver, a torch that has none or another, or a value of ALIGNKIT_SYMMETRIC_TIMEOUT.
    except (RuntimeError, ImportError, AttributeError, TypeError, ValueError) as e:
        failure = f"{type(e).__name__}: {e}"
    failures = [said for said in _told(group, failure) if said is not None]
    if failures:
        _gathers(failures[0])
        return None
    return made


def _gathers(why: str) -> None:
    warnings.warn(f"no symmetric memory ({why}); NCCL gathers what tensor-parallel ranks add: same bits, slower")


def _wanted(device: torch.device) -> bool:
    if not config.symmetric:
        return False
    try:
        return dispatch.name(device) == families.CUDA
    except BackendError:
        return False


def _timeout(group: dist.ProcessGroup, device: torch.device) -> float:
    """In seconds."""
    if (seconds := config.symmetric_timeout) is not None:
        return seconds
    options = getattr(group._get_backend(device), "options", None)
    return options._timeout.total_seconds() if hasattr(options, "_timeout") else _TEN_MINUTES


def _told(group: dist.ProcessGroup, value: T) -> list[T]:
    """What each rank says."""
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
