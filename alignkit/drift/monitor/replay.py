"""What an alarm leaves on disk: the batch that differed, whole, and what computed it."""

from __future__ import annotations

import hashlib
import json
import os
import re
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from ...errors import InputError
from .. import bounded
from ..compare import DriftReport, compare_tensors

FORMAT = "alignkit-replay"
FORMAT_VERSION = "1"
MAX_VALUES = 2**28
"""Most values of one tensor of a file that is read."""
CONTEXT_NAME = re.compile(r"\w{1,100}", re.ASCII)
_MAX_HEADER = 2**20
_MAX_TENSORS = 100
_CONTEXT = "context."
_CHUNK = 2**24
"""Bytes of weights that are on the CPU at a time."""

Weights = torch.nn.Module | Mapping[str, torch.Tensor] | Callable[[], Iterable[tuple[str, torch.Tensor]]]


@dataclass
class Replay:
    """The batch of the first difference of a run.

    rollout_logp, train_logp: ``[B, S]``, the bits that were compared. mask: ``[B, S]``, bool.
    tokens: ``[B, S]``, int64, the sampled ids; None if the monitor was not given them.
    context: the other tensors that `Monitor.log` was given, such as the prompts.
    info: step, rank, contract, first_difference, machine and versions, weights (their digest), meta.
    """

    rollout_logp: torch.Tensor
    train_logp: torch.Tensor
    mask: torch.Tensor
    tokens: torch.Tensor | None
    context: dict[str, torch.Tensor] = field(default_factory=dict)
    info: dict = field(default_factory=dict)

    def report(self, worst: int = 10) -> DriftReport:
        """The comparison, once more."""
        return compare_tensors(self.rollout_logp, self.train_logp, self.mask, worst=worst)


def save_replay(path: Path, replay: Replay) -> None:
    """Writes `replay`, on the disk and under its name only when it is whole."""
    tensors = {
        "rollout_logp": replay.rollout_logp,
        "train_logp": replay.train_logp,
        "mask": replay.mask,
        "tokens": replay.tokens,
        **{_CONTEXT + name: x for name, x in replay.context.items()},
    }
    # Copies: safetensors takes no two tensors of one memory, and rollout may be training.
    tensors = {
        name: x.detach().cpu().clone(memory_format=torch.contiguous_format)
        for name, x in tensors.items()
        if x is not None
    }
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    os.close(handle)
    try:
        save_file(
            tensors,
            temporary,
            metadata={"format": FORMAT, "format_version": FORMAT_VERSION, "info": json.dumps(replay.info)},
        )
        with open(temporary, "rb") as file:
            os.fsync(file.fileno())
        os.chmod(temporary, 0o644)
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise


def load_replay(path: str | os.PathLike) -> Replay:
    """Reads what a monitor wrote.

    Raises InputError, naming the file and what is wrong with it, before a tensor is read: absent, truncated, not a
    replay, of another format version, or too large.
    """
    path = Path(path)
    with bounded.opened(path, "a replay", _MAX_HEADER) as (file, metadata):
        bounded.check_format(path, metadata, "a replay", FORMAT, FORMAT_VERSION)
        _check_header(path, file)
        tensors = {name: file.get_tensor(name) for name in file.keys()}
    try:
        info = json.loads(metadata.get("info", "null"))
    except (ValueError, RecursionError) as e:
        raise InputError(f"{path}: info is not JSON ({e})") from None
    if not isinstance(info, dict):
        raise InputError(f"{path}: info is not a JSON object")
    context = {name.removeprefix(_CONTEXT): x for name, x in tensors.items() if name.startswith(_CONTEXT)}
    return Replay(tensors["rollout_logp"], tensors["train_logp"], tensors["mask"], tensors.get("tokens"), context, info)


def weights_digest(weights: Weights) -> dict:
    """A digest of weights: ``{"sha256", "tensors", "bytes"}``.

    weights: a module (its parameters and buffers, tied ones once), a mapping of names to tensors (what is no tensor is
        left out), or a function that returns pairs of name and tensor. Of a DTensor, what this rank holds.

    Names, types, shapes and bits count, the order of the tensors does not. Reads 16 MiB at a time.
    """
    if isinstance(weights, torch.nn.Module):
        pairs = [*weights.named_parameters(), *weights.named_buffers()]
    else:
        pairs = weights.items() if isinstance(weights, Mapping) else weights()
    digests, size = {}, 0
    for name, tensor in pairs:
        if not isinstance(tensor, torch.Tensor):
            continue
        tensor = tensor.detach()
        local = getattr(tensor, "to_local", None)
        tensor = tensor if local is None else local()
        total = hashlib.sha256(f"{name}\0{tensor.dtype}\0{list(tensor.shape)}\0".encode())
        for chunk in _chunks(tensor):
            total.update(chunk.cpu().contiguous().view(torch.uint8).numpy().data)
        digests[name] = total.hexdigest()
        size += tensor.numel() * tensor.element_size()
    whole = hashlib.sha256("\n".join(digests[name] for name in sorted(digests)).encode())
    return {"sha256": whole.hexdigest(), "tensors": len(digests), "bytes": size}


def _chunks(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """The values in order, as tensors of one dimension and at most `_CHUNK` bytes."""
    most = _CHUNK // tensor.element_size()
    if tensor.is_contiguous() or tensor.numel() <= most:
        yield from tensor.reshape(-1).split(most)
        return
    rows = most // (tensor.numel() // len(tensor))
    for part in tensor.split(rows) if rows else tensor:
        yield from _chunks(part)


def _check_header(path: Path, file: safe_open) -> None:
    names = list(file.keys())
    if len(names) > _MAX_TENSORS:
        raise InputError(f"{path}: {len(names)} tensors, more than the {_MAX_TENSORS} of a replay")
    shape = None
    for name in ("rollout_logp", "train_logp", "mask", *(n for n in names if n == "tokens")):
        if name not in names:
            raise InputError(f"{path}: tensor {name!r} is missing")
        header = file.get_slice(name)
        shape = shape or header.get_shape()
        types = {"mask": ("BOOL",), "tokens": ("I64",)}.get(name, ("F32", "BF16"))
        if header.get_dtype() not in types or header.get_shape() != shape or len(shape) != 2:
            raise InputError(
                f"{path}: tensor {name!r} is {header.get_dtype()} of shape {header.get_shape()}, expected "
                f"{' or '.join(types)} of the shape [B, S] of 'rollout_logp'"
            )
    for name in names:
        values = 1
        for n in file.get_slice(name).get_shape():
            values *= n
        if values > MAX_VALUES:
            raise InputError(f"{path}: tensor {name!r} holds {values} values, more than {MAX_VALUES}")
