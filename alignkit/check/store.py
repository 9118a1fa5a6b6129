"""Where processes of this machine that form a group meet: a store that the process which starts them serves."""

from __future__ import annotations

import torch.distributed as dist


def served() -> dist.TCPStore:
    """A store of this process, by whose `port` processes of this machine `meet`, for as long as it is kept. It listens already, so
    nobody takes the port while they start."""
    return dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


def meet(port: int) -> dist.TCPStore:
    """For `init_process_group(store=...)`: the store of the process that has it `served`."""
    return dist.TCPStore("127.0.0.1", port, is_master=False)
