"""Where processes of this machine that form a group meet: a store that the process which starts them serves."""

from __future__ import annotations

import socket

import torch.distributed as dist

_HOST = "127.0.0.1"


def listening() -> socket.socket:
    """A port of its own, `getsockname()[1]`, at which processes may `meet` already: what they ask waits until it is `served`."""
    return socket.create_server((_HOST, 0), backlog=128)


def served(listener: socket.socket | None = None) -> dist.TCPStore:
    """A store of this process, by whose `port` processes of this machine `meet`, for as long as it is kept; at the port of a
    listener, which it takes over. It listens already, so nobody takes the port while they start.

    It answers from a thread that looks up the names of who calls. A process that is forked meanwhile may find glibc's locks
    taken and waits in its own first look for an address without an end: who forks is `listening` first, and serves after."""
    listener = listener or listening()
    port = listener.getsockname()[1]
    return dist.TCPStore(_HOST, port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach())


def meet(port: int) -> dist.TCPStore:
    """For `init_process_group(store=...)`: the store of the process that has it `served`."""
    return dist.TCPStore(_HOST, port, is_master=False)
