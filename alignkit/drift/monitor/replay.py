"""Replay files: the complete batch that raised an alarm, with the machine's versions and a digest of the weights.

`Monitor` writes one at its first alarm and builds `Replay.info`. `load_replay` and `alignkit bisect --tokens` read
replays. Another layout, or a renamed or removed key of `info`, needs another `FORMAT_VERSION`; a new key does not.
"""

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
"""Maximum number of values in one tensor of a replay file."""
CONTEXT_NAME = re.compile(r"\w{1,100}", re.ASCII)
_MAX_HEADER = 2**20
"""Maximum size in bytes of the safetensors header that `load_replay` reads; the header holds `Replay.info`."""
MAX_CONTEXT = 96
"""Maximum number of context tensors in a replay file."""
_MAX_TENSORS = 4 + MAX_CONTEXT
"""Maximum number of tensors that `load_replay` reads: both logprobs, the mask, the tokens and the context."""
_CONTEXT = "context."
"""Prefix of the stored names of `Replay.context`."""
_WRITTEN_BY = "A replay must be written by alignkit.drift.Monitor."
_CHUNK = 2**24
"""schedule: maximum size of a chunk of weights copied to the CPU, in bytes."""

Weights = torch.nn.Module | Mapping[str, torch.Tensor] | Callable[[], Iterable[tuple[str, torch.Tensor]]]


@dataclass
class Replay:
    """Batch with the first difference of a run.

    Attributes:
        rollout_logp: Compared logprobs of the rollout engine, ``[B, S]``, fp32 or bf16.
        train_logp: Compared logprobs of the training engine, ``[B, S]``, fp32 or bf16.
        mask: ``[B, S]``, bool; true where the position is a sampled token.
        tokens: Sampled token ids, ``[B, S]``, int64; None if `Monitor.log` did not receive them.
        context: Other tensors that `Monitor.log` received, such as the prompts.
        info: JSON object: step, rank, time, contract, first_difference, differing (number of tokens), machine with
            versions, weights (their digest), meta, and as in records sides, epochs, identity and causes.
    """

    rollout_logp: torch.Tensor
    train_logp: torch.Tensor
    mask: torch.Tensor
    tokens: torch.Tensor | None
    context: dict[str, torch.Tensor] = field(default_factory=dict)
    info: dict = field(default_factory=dict)

    def report(self, worst: int = 10) -> DriftReport:
        """Repeat the comparison.

        Args:
            worst: Maximum number of tokens in `DriftReport.worst`.

        Returns:
            The report of `compare_tensors` for this batch; `info` has the identity and the causes that are known.
        """
        return compare_tensors(self.rollout_logp, self.train_logp, self.mask, worst=worst)


def save_replay(path: Path, replay: Replay) -> None:
    """Write `replay` atomically and flush it to disk."""
    tensors = {
        "rollout_logp": replay.rollout_logp,
        "train_logp": replay.train_logp,
        "mask": replay.mask,
        "tokens": replay.tokens,
        **{_CONTEXT + name: x for name, x in replay.context.items()},
    }
    # Clone: safetensors rejects tensors that share memory, and the caller may pass one tensor twice.
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
    """Read a replay written by a `Monitor`, bit for bit.

    Args:
        path: Replay file.

    Returns:
        The stored batch, on the CPU.

    Raises:
        InputError: The file is missing, truncated, not a replay, of another format version, inconsistent, or too
            large. Names the file and the problem; sizes are checked before a tensor is read.
    """
    path = Path(path)
    with bounded.opened(path, "a replay", _MAX_HEADER) as (file, metadata):
        bounded.check_format(path, metadata, "a replay", FORMAT, FORMAT_VERSION)
        _check_header(path, file)
        tensors = {name: file.get_tensor(name) for name in file.keys()}
    if "info" not in metadata:
        raise InputError(f"{path}: info is missing from the metadata. {_WRITTEN_BY}")
    try:
        info = json.loads(metadata["info"])
    except (ValueError, RecursionError) as e:
        raise InputError(f"{path}: info: must be JSON, got invalid JSON ({e!s:.100})") from None
    if not isinstance(info, dict):
        raise InputError(f"{path}: info: must be a JSON object, got a {type(info).__name__}")
    context = {name.removeprefix(_CONTEXT): x for name, x in tensors.items() if name.startswith(_CONTEXT)}
    return Replay(tensors["rollout_logp"], tensors["train_logp"], tensors["mask"], tensors.get("tokens"), context, info)


def weights_digest(weights: Weights) -> dict:
    """Return a SHA-256 digest of named weights.

    The digest covers names, dtypes, shapes and bits, independent of the tensors' order. Weights are read in chunks of
    at most 16 MiB.

    Args:
        weights: A module (its parameters and buffers, tied ones once), a mapping from name to tensor (other values are
            skipped), or a function that returns (name, tensor) pairs. For a DTensor, only the local shard is read.

    Returns:
        ``{"sha256": hex digest, "tensors": number of tensors, "bytes": total size}``.
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
    """Yield the values in order as one-dimensional tensors of at most `_CHUNK` bytes."""
    size = _CHUNK // tensor.element_size()
    if tensor.is_contiguous() or tensor.numel() <= size:
        yield from tensor.reshape(-1).split(size)
        return
    rows = size // (tensor.numel() // len(tensor))
    for part in tensor.split(rows) if rows else tensor:
        yield from _chunks(part)


def _check_header(path: Path, file: safe_open) -> None:
    names = list(file.keys())
    if len(names) > _MAX_TENSORS:
        raise InputError(f"{path}: a replay holds at most {_MAX_TENSORS} tensors, got {len(names)}")
    shape = None
    for name in ("rollout_logp", "train_logp", "mask", *(n for n in names if n == "tokens")):
        if name not in names:
            raise InputError(f"{path}: tensor {name!r} is missing. {_WRITTEN_BY}")
        header = file.get_slice(name)
        shape = shape or header.get_shape()
        types = {"mask": ("BOOL",), "tokens": ("I64",)}.get(name, ("F32", "BF16"))
        if header.get_dtype() not in types:
            raise InputError(f"{path}: tensor {name!r}: must have dtype {' or '.join(types)}, got {header.get_dtype()}")
        if len(shape) != 2:
            raise InputError(f"{path}: tensor {name!r}: must have shape [B, S], got {shape}")
        if header.get_shape() != shape:
            raise InputError(
                f"{path}: tensor {name!r}: must have the shape of 'rollout_logp', {shape}, got {header.get_shape()}"
            )
    for name in names:
        values = 1
        for n in file.get_slice(name).get_shape():
            values *= n
        if values > MAX_VALUES:
            raise InputError(f"{path}: tensor {name!r}: at most {MAX_VALUES} values are supported, got {values}")
