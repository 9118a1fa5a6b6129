"""What ranks that share a layer tell each other before they compute: short messages through the hosts' memory and network,
never through a GPU, so that nothing here waits for one."""

from __future__ import annotations

import datetime
import pickle
import weakref
from typing import Any

import torch
import torch.distributed as dist

from ..errors import BackendError

SLOT = 1024
"""Bytes of a message that travels at once; if a rank's is longer, all ranks send theirs a second time."""
_LENGTH = 8
_CPU = torch.device("cpu")
_TIMEOUT = datetime.timedelta(minutes=30)
"""For how long a rank waits for another, which may be loading data: that of torch's groups by gloo."""

_channels: weakref.WeakKeyDictionary[dist.ProcessGroup, Any] = weakref.WeakKeyDictionary()


def channel(group: dist.ProcessGroup):
    """What carries CPU tensors between the ranks of `group`: its own backend for them, or one by gloo that the ranks make
    together when they first ask."""
    found = _channels.get(group)
    if found is None:
        found = _channels[group] = _own(group) or _made(group)
    return found


def _own(group: dist.ProcessGroup):
    try:
        return group._get_backend(_CPU)
    except RuntimeError:
        return None


def _made(group: dist.ProcessGroup):
    """Not by `new_group`, which all processes of the job would have to call."""
    store = dist.PrefixStore("alignkit", dist.distributed_c10d._get_process_group_store(group))
    return dist.ProcessGroupGloo(store, dist.get_rank(group), dist.get_world_size(group), _TIMEOUT)


def told(group: dist.ProcessGroup, value: Any, called: str = "tensor-parallel") -> list[Any]:
    """What each rank says, in rank order. A collective of the hosts. Raises BackendError, which calls the group as it is
    `called`, if another rank is gone."""
    size, ours = dist.get_world_size(group), pickle.dumps(value)
    try:
        through = channel(group)
        messages = _send(through, size, ours, SLOT)
        longest = max(len(ours) for ours in messages)
        if longest > SLOT - _LENGTH:
            messages = _send(through, size, ours, longest + _LENGTH)
    except RuntimeError as e:
        raise BackendError(f"{called} group: its ranks could not reach each other, one may have ended: {e}") from e
    return [pickle.loads(message) for message in messages]


def _send(through, size: int, message: bytes, slot: int) -> list[bytes]:
    """The messages of all ranks; one that is longer than the slot as so many zeros."""
    ours = bytearray(slot)
    ours[:_LENGTH] = len(message).to_bytes(_LENGTH, "little")
    if len(message) <= slot - _LENGTH:
        ours[_LENGTH : _LENGTH + len(message)] = message
    gathered = [torch.empty(slot, dtype=torch.uint8, device="cpu") for _ in range(size)]
    through.allgather([gathered], [torch.frombuffer(ours, dtype=torch.uint8)]).wait()
    messages = []
    for taken in (t.numpy().tobytes() for t in gathered):
        length, body = int.from_bytes(taken[:_LENGTH], "little"), taken[_LENGTH:]
        messages.append(body[:length] if length <= len(body) else bytes(length))
    return messages
