"""Verified weight syncs: the trainer's fingerprint travels with its weights, as one more tensor of their stream.

Frameworks send a stream of (HF name, tensor) from the trainer to each rollout worker, in buckets and over transports of
their own. `append` adds the fingerprint of the trainer's model to the stream, `take` removes it in the worker, and
`require_equal` compares the fingerprint with that of the engine's weights. So every step in between is covered:
gathering, conversion to HF's format, transport, loading. No engine code.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator, Mapping

import torch

from alignkit.errors import InputError

from .weights import DIGITS, Fingerprint, Part, whole

NAME = "alignkit.fingerprint"
"""Name of the tensor that holds the trainer's fingerprint."""
_DTYPES = ("bfloat16", "float32", "float16", "float64")
_ENTRY = struct.Struct("<BQ")
"""Index of a tensor's dtype in `_DTYPES`, and the tensor's sum."""


def pack(fingerprint: Fingerprint) -> torch.Tensor:
    """Return a fingerprint as uint8 ``[DIGITS / 2 + 9 * tensors]``: the digest, then an entry per tensor by name.

    The length depends on the architecture alone, as transports may fix the sizes before the first sync.
    """
    entries = (_ENTRY.pack(_DTYPES.index(dtype), total) for _, (dtype, _, total) in sorted(fingerprint.tensors.items()))
    return torch.frombuffer(bytearray(bytes.fromhex(fingerprint.digest) + b"".join(entries)), dtype=torch.uint8)


def unpack(packed: bytes, shapes: Mapping[str, tuple[int, ...]]) -> Fingerprint:
    """Return the fingerprint that `pack` packed. shapes: shape of each HF tensor of the receiving engine.

    Raises:
        InputError: the sender's model has other tensors.
    """
    digest, entries = packed[: DIGITS // 2], packed[DIGITS // 2 :]
    if len(entries) == _ENTRY.size * len(shapes):
        each = zip(sorted(shapes), _ENTRY.iter_unpack(entries), strict=True)
        found = Fingerprint({name: (_DTYPES[dtype], tuple(shapes[name]), total) for name, (dtype, total) in each})
        if found.digest == digest.hex():
            return found
    raise InputError(
        "weight sync: the trainer's model must have the HF tensors of the rollout's config.json, got other names, "
        "shapes or numbers of tensors"
    )


def append(
    weights: Iterable[tuple[str, torch.Tensor]], fingerprint: Fingerprint, device: torch.device | str
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield `weights`, then the fingerprint as a tensor on `device`."""
    yield from weights
    yield NAME, pack(fingerprint).to(device)


def take(weights: Iterable[tuple[str, torch.Tensor]]) -> tuple[list[tuple[str, torch.Tensor]], bytes | None]:
    """Return the weights of a bucket, and the packed fingerprint if the bucket has it."""
    held = list(weights)
    # Some transports cast all tensors, for example to bf16, which represents the integers up to 256.
    found = [bytes(tensor.to("cpu", torch.uint8).tolist()) for name, tensor in held if name == NAME]
    return [(name, tensor) for name, tensor in held if name != NAME], found[-1] if found else None


def require_equal(
    workers: Iterable[tuple[bytes | None, Mapping[str, Part]]], shapes: Mapping[str, tuple[int, ...]]
) -> None:
    """Require the weights of an engine's workers to be the trainer's.

    Args:
        workers: the packed fingerprint that each worker received, or None, and the parts of the weights that it holds.
        shapes: shape of each HF tensor of the engine.

    Raises:
        InputError: the weights differ; the message names the HF tensor. Or a worker received no fingerprint.
    """
    workers = list(workers)
    try:
        rollout = whole([held for _, held in workers], shapes)
    except InputError as e:
        raise InputError(f"weight sync: the rollout's workers must hold one model: {e}") from e
    for packed, _ in workers:
        if packed is None:
            raise InputError(
                f"weight sync: must end with the trainer's fingerprint, the tensor {NAME!r}, got none. Enable alignkit "
                "in the trainer, and use a transport that sends all tensors"
            )
        if (problem := unpack(packed, shapes).difference(rollout)) is not None:
            raise InputError(f"weight sync: the rollout must have the trainer's weights: {problem}")
