"""Host-side all-gather of small Python objects, used for collective checks before an op computes.

Messages travel over CPU tensors, never through a GPU, so nothing here synchronizes with a device. All ranks must
run the same version of alignkit: the message format has no version.
"""

from __future__ import annotations

import datetime
import pickle
import weakref
from typing import Any

import torch
import torch.distributed as dist

from ..errors import BackendError

SLOT = 1024
"""schedule: bytes of the first all-gather, equal on all ranks; if a message is longer, all ranks gather again."""
_LENGTH = 8
"""schedule: bytes of the length prefix, equal on all ranks."""
_CPU = torch.device("cpu")
_TIMEOUT = datetime.timedelta(minutes=30)
"""schedule: longest wait for another rank, which may be loading data; torch's default for gloo groups.

Only the gloo backends that `channel` creates have it."""

_channels: weakref.WeakKeyDictionary[dist.ProcessGroup, Any] = weakref.WeakKeyDictionary()


def channel(group: dist.ProcessGroup):
    """Return the CPU backend of `group`: its own, or a gloo backend that all ranks create at their first call."""
    found = _channels.get(group)
    if found is None:
        found = _channels[group] = _cpu_backend(group) or _create_gloo(group)
    return found


def _cpu_backend(group: dist.ProcessGroup):
    try:
        return group._get_backend(_CPU)
    except RuntimeError:
        return None


def _create_gloo(group: dist.ProcessGroup):
    """Create a gloo backend without `new_group`, which every process of the job would have to call."""
    store = dist.PrefixStore("alignkit", dist.distributed_c10d._get_process_group_store(group))
    return dist.ProcessGroupGloo(store, dist.get_rank(group), dist.get_world_size(group), _TIMEOUT)


def all_gather_objects(group: dist.ProcessGroup, value: Any, label: str = "tensor-parallel") -> list[Any]:
    """Return the values of all ranks, in rank order; a host-side collective.

    Args:
        group: Process group; all its ranks must call this.
        value: Any picklable object.
        label: Name of the group in errors.

    Raises:
        BackendError: the exchange failed, e.g. because another rank died.
    """
    size, message = dist.get_world_size(group), pickle.dumps(value)
    try:
        backend = channel(group)
        messages = _all_gather_bytes(backend, size, message, SLOT)
        longest = max(len(received) for received in messages)
        if longest > SLOT - _LENGTH:
            messages = _all_gather_bytes(backend, size, message, longest + _LENGTH)
    except RuntimeError as e:
        raise BackendError(
            f"{label} group: rank {dist.get_rank(group)} of {size} could not exchange messages with the other ranks: "
            f"{e}. Another rank may have died; see the output of all ranks"
        ) from e
    return [pickle.loads(received) for received in messages]


def _all_gather_bytes(backend, size: int, message: bytes, slot: int) -> list[bytes]:
    """Return the messages of all ranks; a message longer than the slot becomes zeros of the same length."""
    sent = bytearray(slot)
    sent[:_LENGTH] = len(message).to_bytes(_LENGTH, "little")
    if len(message) <= slot - _LENGTH:
        sent[_LENGTH : _LENGTH + len(message)] = message
    gathered = [torch.empty(slot, dtype=torch.uint8, device="cpu") for _ in range(size)]
    backend.allgather([gathered], [torch.frombuffer(sent, dtype=torch.uint8)]).wait()
    messages = []
    for received in (t.numpy().tobytes() for t in gathered):
        length, body = int.from_bytes(received[:_LENGTH], "little"), received[_LENGTH:]
        messages.append(body[:length] if length <= len(body) else bytes(length))
    return messages
