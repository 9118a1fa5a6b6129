"""Helpers for tests of the contract: bitwise comparison of tensors, and process groups to run a function on.

Public: `assert_bitwise_equal` (docs/api/testing.md). The rest serves the project's tests and benchmarks.
"""

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

from .dist import TP
from .jobs.store import connect_store, serve_store


def bits(t: torch.Tensor) -> torch.Tensor:
    """Return the bits of each element as an integer tensor of t's shape."""
    kinds = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    return t.detach().contiguous().view(kinds[t.element_size()])


def bitwise_equal(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Return whether two tensors have equal dtypes, shapes and bits."""
    return a.dtype == b.dtype and a.shape == b.shape and bool((bits(a) == bits(b)).all())


def assert_bitwise_equal(actual: torch.Tensor, expected: torch.Tensor, what: str = "result") -> None:
    """Assert that two tensors have equal dtypes, shapes and bits.

    Args:
        actual: The tensor to check.
        expected: The tensor to compare it to.
        what: The name of the tensor in error messages.

    Raises:
        AssertionError: If the tensors differ; the message names the first element that differs.
    """
    assert actual.dtype == expected.dtype, f"{what}: expected dtype {expected.dtype}, got {actual.dtype}"
    assert actual.shape == expected.shape, f"{what}: expected shape {tuple(expected.shape)}, got {tuple(actual.shape)}"
    differ = (bits(actual) != bits(expected)).nonzero()
    if len(differ):
        index = tuple(differ[0].tolist())
        raise AssertionError(
            f"{what}: {len(differ)} of {actual.numel()} elements differ, first at {index}: "
            f"expected {expected[index].item()!r}, got {actual[index].item()!r}"
        )


def free_port() -> int:
    """Return a loopback TCP port that is free now.

    Another process may bind it first. Use this only for callees that accept a port number but no open socket.
    """
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def _serve(rank: int, world: int, port: int, inbox, outbox: connection.Connection) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=connect_store(port), rank=rank, world_size=world)
    groups: dict[int, Any] = {n: dist.new_group(list(range(n))) for n in range(1, world + 1)}
    while (job := inbox.get()) is not None:
        size, function, args = pickle.loads(job)
        try:
            outbox.send((rank, None, pickle.dumps(function(TP(groups[size]), *args))))
        except Exception as e:
            outbox.send((rank, traceback.format_exc(), pickle.dumps((type(e), str(e)))))
    dist.destroy_process_group()


class Ranks:
    """A pool of `world` processes in a gloo process group, alive until the context manager exits."""

    def __init__(self, world: int, serve: Callable = _serve, method: str = "spawn"):
        """Start the processes.

        Args:
            world: Number of processes.
            serve: Function that each process runs, ``serve(rank, world, port, inbox, outbox)``. `port` is the TCP port
                of the rendezvous store.
            method: Start method of `multiprocessing`.
        """
        context: Any = mp.get_context(method)
        self.inboxes = [context.Queue() for _ in range(world)]
        # One pipe per process: a killed process could leave the lock of a shared queue locked.
        pipes = [context.Pipe(duplex=False) for _ in range(world)]
        self.outboxes = [reader for reader, _ in pipes]
        self._store = serve_store()
        self.processes = [
            context.Process(target=serve, args=(r, world, self._store.port, box, writer), daemon=True)
            for r, (box, (_, writer)) in enumerate(zip(self.inboxes, pipes, strict=True))
        ]
        for p, (_, writer) in zip(self.processes, pipes, strict=True):
            p.start()
            writer.close()  # the reader then gets EOFError when the process ends

    def outcomes(self, size: int, function: Callable, *args: Any, timeout: float = 120) -> list[Any]:
        """Run ``function(tp, *args)`` on ranks 0 to size - 1 and return all outcomes.

        Args:
            size: Number of ranks; `tp` is their `TP`.
            function: A picklable function.
            *args: Its other arguments.
            timeout: Time limit in seconds.

        Returns:
            Per rank, the result, or a `Failed` if the function raised. A rank whose process ended early has a `Failed`
            of kind ChildProcessError with the exit code.

        Raises:
            queue.Empty: If a rank does not answer in time.
        """
        self._send(size, function, args)
        results: dict[int, Any] = {}
        end = time.monotonic() + timeout
        while len(results) < size:
            ended = [rank for rank in range(size) if rank not in results and not self.processes[rank].is_alive()]
            try:
                rank, result = self._receive(0.1)
                results[rank] = result
            except queue.Empty:  # processes that ended before this call have sent nothing
                for rank in ended:
                    results[rank] = Failed(ChildProcessError, f"exit code {self.processes[rank].exitcode}", "")
                if not ended and time.monotonic() > end:
                    raise
        return [results[rank] for rank in range(size)]

    def answer(self, size: int, function: Callable, *args: Any, timeout: float = 120) -> Any:
        """Run ``function(tp, *args)`` like `outcomes`, but return the outcome of the first rank that answers."""
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
            except (EOFError, OSError):  # the process has ended
                self.outboxes.remove(reader)
                continue
            value = pickle.loads(value)
            return rank, value if trace is None else Failed(value[0], value[1], trace)
        raise queue.Empty

    def run(self, size: int, function: Callable, *args: Any, timeout: float = 120) -> list[Any]:
        """Run ``function(tp, *args)`` like `outcomes`; raise RuntimeError with the first failed rank's traceback."""
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
    """An exception that was raised on a rank: its type, message and traceback."""

    def __init__(self, kind: type, message: str, trace: str):
        self.kind, self.message, self.traceback = kind, message, trace
