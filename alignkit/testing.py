"""What tests of the contract ask for: equal bytes, and several ranks to run a function on."""

from __future__ import annotations

import pickle
import queue
import socket
import time
import traceback
from collections.abc import Callable
from multiprocessing import connection
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from .check.store import meet, served
from .dist import TP


def bits(t: torch.Tensor) -> torch.Tensor:
    """The raw bytes of each element as integers, t's shape."""
    kinds = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    return t.detach().contiguous().view(kinds[t.element_size()])


def bitwise_equal(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Same type, shape and bytes."""
    return a.dtype == b.dtype and a.shape == b.shape and bool((bits(a) == bits(b)).all())


def assert_bitwise_equal(actual: torch.Tensor, expected: torch.Tensor, what: str = "result") -> None:
    """AssertionError naming the first element whose bytes differ."""
    assert actual.dtype == expected.dtype, f"{what}: {actual.dtype} is not {expected.dtype}"
    assert actual.shape == expected.shape, f"{what}: shape {tuple(actual.shape)} is not {tuple(expected.shape)}"
    differ = (bits(actual) != bits(expected)).nonzero()
    if len(differ):
        at = tuple(differ[0].tolist())
        raise AssertionError(
            f"{what}: {len(differ)} of {actual.numel()} elements differ, first at {at}: "
            f"{actual[at].item()!r} is not {expected[at].item()!r}"
        )


def free_port() -> int:
    """A TCP port of the loopback that is free now, for what can be given a number alone: until it is bound, others may take it."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def _serve(rank: int, world: int, port: int, inbox, outbox: connection.Connection) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=meet(port), rank=rank, world_size=world)
    groups: dict[int, Any] = {n: dist.new_group(list(range(n))) for n in range(1, world + 1)}
    while (job := inbox.get()) is not None:
        size, function, args = pickle.loads(job)
        try:
            outbox.send((rank, None, pickle.dumps(function(TP(groups[size]), *args))))
        except Exception as e:
            outbox.send((rank, traceback.format_exc(), pickle.dumps((type(e), str(e)))))
    dist.destroy_process_group()


class Ranks:
    """`world` processes joined by gloo, kept alive between calls. A context manager."""

    def __init__(self, world: int, serve: Callable = _serve, method: str = "spawn"):
        """serve: what each process runs, ``serve(rank, world, port, inbox, outbox)``; port: where they `meet`. method: how
        `multiprocessing` starts it."""
        context: Any = mp.get_context(method)
        self.inboxes = [context.Queue() for _ in range(world)]
        # A pipe each: of a queue that they share, a process that is killed may take the lock with it.
        pipes = [context.Pipe(duplex=False) for _ in range(world)]
        self.outboxes = [reader for reader, _ in pipes]
        self._store = served()
        self.processes = [
            context.Process(target=serve, args=(r, world, self._store.port, box, writer), daemon=True)
            for r, (box, (_, writer)) in enumerate(zip(self.inboxes, pipes, strict=True))
        ]
        for p, (_, writer) in zip(self.processes, pipes, strict=True):
            p.start()
            writer.close()  # so that what a process has not sent whole when it ends is not waited for

    def outcomes(self, size: int, function: Callable, *args: Any, timeout: float = 120) -> list[Any]:
        """``function(tp, *args)`` on ranks 0 to size - 1: each rank's result, or the pair (exception type, message)
        wrapped in `Failed`; of a rank whose process ended without an answer (ChildProcessError, its exit code). A rank
        that does neither within `timeout` seconds is an error."""
        self._send(size, function, args)
        results: dict[int, Any] = {}
        end = time.monotonic() + timeout
        while len(results) < size:
            ended = [rank for rank in range(size) if rank not in results and not self.processes[rank].is_alive()]
            try:
                rank, result = self._receive(0.1)
                results[rank] = result
            except queue.Empty:  # nor did those that had ended send anything before they did
                for rank in ended:
                    results[rank] = Failed(ChildProcessError, f"exit code {self.processes[rank].exitcode}", "")
                if not ended and time.monotonic() > end:
                    raise
        return [results[rank] for rank in range(size)]

    def answer(self, size: int, function: Callable, *args: Any, timeout: float = 120) -> Any:
        """As `outcomes`, of the first rank that answers; others may never."""
        self._send(size, function, args)
        return self._receive(timeout)[1]

    def _send(self, size: int, function: Callable, args: tuple) -> None:
        job = pickle.dumps((size, function, args))
        for box in self.inboxes[:size]:
            box.put(job)

    def _receive(self, timeout: float) -> tuple[int, Any]:
        end = time.monotonic() + timeout
        while ready := connection.wait(self.outboxes, max(end - time.monotonic(), 0)):
            reader = next(r for r in self.outboxes if r in ready)
            try:
                rank, trace, value = reader.recv()
            except (EOFError, OSError):  # its process has ended
                self.outboxes.remove(reader)
                continue
            value = pickle.loads(value)
            return rank, value if trace is None else Failed(value[0], value[1], trace)
        raise queue.Empty

    def run(self, size: int, function: Callable, *args: Any, timeout: float = 120) -> list[Any]:
        """`outcomes`, raising the first rank's failure with its traceback."""
        results = self.outcomes(size, function, *args, timeout=timeout)
        for rank, r in enumerate(results):
            if isinstance(r, Failed):
                raise RuntimeError(f"rank {rank}: {r.traceback}")
        return results

    def __enter__(self) -> Ranks:
        return self

    def __exit__(self, *exc) -> None:
        for box in self.inboxes:
            box.put(None)
        for p in self.processes:
            p.join(10)
            if p.is_alive():
                p.kill()


class Failed:
    """An exception raised on a rank."""

    def __init__(self, kind: type, message: str, trace: str):
        self.kind, self.message, self.traceback = kind, message, trace
