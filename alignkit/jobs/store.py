"""TCP stores through which the processes of a group on this machine rendezvous.

`train`, the tests and the benchmarks use them to start torch.distributed groups without a fixed port.
"""

from __future__ import annotations

import socket

import torch.distributed as dist

_HOST = "127.0.0.1"


def listen() -> socket.socket:
    """Return a socket that listens on a free port, `getsockname()[1]`.

    Processes may already call `connect_store` with the port; their requests wait until `serve_store`.
    """
    return socket.create_server((_HOST, 0), backlog=128)


def serve_store(listener: socket.socket | None = None) -> dist.TCPStore:
    """Serve a store from this process, on the socket `listener` or on a free port.

    The store listens before this function returns, so no other process can take the port. The store stops when the
    returned object is deleted; its `port` is the argument of `connect_store`.

    The store's thread resolves client addresses. A process forked meanwhile can inherit glibc's resolver locks in the
    locked state and then hang in its first lookup. Callers that fork must call `listen`, fork, then `serve_store`.
    """
    listener = listener or listen()
    port = listener.getsockname()[1]
    return dist.TCPStore(_HOST, port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach())


def connect_store(port: int) -> dist.TCPStore:
    """Return a client of the store that another process serves on `port`, for `init_process_group(store=...)`."""
    return dist.TCPStore(_HOST, port, is_master=False)
