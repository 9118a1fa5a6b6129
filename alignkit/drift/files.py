"""Logprob files: the token ids of a set of sequences, their logprobs, the contract id and the identity of the weights.

A logprob file is a safetensors file. Sequences are concatenated; the `offsets` tensors hold each sequence's start.
The token ids and the contract id are stored with the logprobs, so `compare` can reject files that do not match. Files
outlive a release: another layout needs another `FORMAT_VERSION`, and docs/drift.md describes it. Optional parts do not:
readers of version 1 ignore unknown tensors and metadata, and the other parts keep their meaning.
"""

from __future__ import annotations

import itertools
import json
import os
import tempfile
from dataclasses import dataclass, field
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from ..errors import InputError
from ..identity import Identity
from ..runtime.families import on_host
from ..runtime.ids import contract_id
from . import bounded
from .causes import MIXED

FORMAT = "alignkit-logprobs"
FORMAT_VERSION = "1"
MAX_TOKENS = 2**26
"""Maximum number of prompt tokens and of sampled tokens in a file; bounds what a file can make its reader allocate."""
MAX_SEQUENCES = 2**20
"""Maximum number of sequences in a file, and in a recording of bisect."""
MAX_META = 2**16
"""Maximum length of `Logprobs.meta` as JSON, in characters."""
MAX_HEADER = 2**20
"""Maximum size of the safetensors header in bytes; most of it is `Logprobs.meta`, JSON-escaped a second time."""
_DTYPES = {
    "prompt_tokens": torch.int64,
    "prompt_offsets": torch.int64,
    "tokens": torch.int64,
    "offsets": torch.int64,
    "logprobs": torch.float32,
    "epochs": torch.int64,
}
_OPTIONAL = {"epochs"}
"""Tensors that a file may lack."""
_LIMITS = {
    "prompt_tokens": MAX_TOKENS,
    "tokens": MAX_TOKENS,
    "logprobs": MAX_TOKENS,
    "epochs": MAX_TOKENS,
    "prompt_offsets": MAX_SEQUENCES + 1,
    "offsets": MAX_SEQUENCES + 1,
}


@dataclass
class Logprobs:
    """Logprobs of the sampled tokens of a set of sequences. None means unknown.

    Attributes:
        prompts: Token ids before the sampled ones, one list per sequence.
        tokens: Sampled token ids, one list per sequence.
        logprobs: One fp32 tensor ``[len(tokens[i])]`` per sequence, natural logarithm.
        contract: Contract id reported by the aligned engine: `alignkit.vllm.worker_status(llm)[0]["contract"]` or
            `alignkit.megatron.status(model)["contract"]`. ``"stock"`` for an unpatched engine.
        meta: Free text for people (engine, versions, mode); never compared.
        weights: Digest of the weights' fingerprint, ``alignkit.fingerprint(model).digest``.
        epochs: One int64 tensor ``[len(tokens[i])]`` per sequence: the epoch of the weights that computed each token,
            or -1 if its KV cache has entries of several epochs. `weights` are those of the last epoch.
        temperature: Number that divided the logits, positive and finite in fp32: 1.0 for raw logprobs, prompt logprobs
            and greedy requests. vLLM replaces a temperature in (0, 0.01) by 0.01.
    """

    prompts: list[list[int]]
    tokens: list[list[int]]
    logprobs: list[torch.Tensor]
    contract: str
    meta: dict[str, str] = field(default_factory=dict)
    weights: str | None = None
    epochs: list[torch.Tensor] | None = None
    temperature: float | None = None


def save(path: str | os.PathLike, logprobs: Logprobs) -> None:
    """Write `logprobs` to `path` atomically.

    Args:
        path: File to write. An existing file is replaced.
        logprobs: Data to write, at most 2^26 prompt tokens, 2^26 sampled tokens and 2^20 sequences.

    Raises:
        InputError: A field is inconsistent or too large for a file. Names the field; nothing is written.
    """
    _check(logprobs)
    prompt_tokens, prompt_offsets = _pack(logprobs.prompts)
    tokens, offsets = _pack(logprobs.tokens)
    tensors = {
        "prompt_tokens": prompt_tokens,
        "prompt_offsets": prompt_offsets,
        "tokens": tokens,
        "offsets": offsets,
        "logprobs": _concatenated(logprobs.logprobs, torch.float32),
    }
    if logprobs.epochs is not None:
        tensors["epochs"] = _concatenated(logprobs.epochs, torch.int64)
    metadata = {
        "format": FORMAT,
        "format_version": FORMAT_VERSION,
        "contract": logprobs.contract,
        "meta": json.dumps(logprobs.meta, sort_keys=True),
    }
    if logprobs.weights is not None:
        metadata["weights"] = logprobs.weights
    if logprobs.temperature is not None:
        metadata["temperature"] = repr(float(logprobs.temperature))
    path = Path(path)
    # The rename makes the file appear under its name only when it is complete.
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    os.close(handle)
    try:
        save_file(tensors, temporary, metadata=metadata)
        os.chmod(temporary, 0o644)
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise


def load(path: str | os.PathLike) -> Logprobs:
    """Read a file written by `save`, bit for bit.

    Args:
        path: Logprob file.

    Returns:
        The stored logprobs, on the CPU.

    Raises:
        InputError: The file is missing, truncated, not a safetensors file, not a logprob file, of another format
            version, too large, or inconsistent. Names the file and the problem.
    """
    path = Path(path)
    with bounded.opened(path, "a logprob file", MAX_HEADER) as (f, metadata):
        bounded.check_format(path, metadata, "a logprob file", FORMAT, FORMAT_VERSION)
        if "contract" not in metadata:
            raise InputError(f"{path}: contract is missing from the metadata. Write the file with alignkit.drift.save.")
        # Check every size in the header before reading a tensor: the file may be any safetensors file.
        names = [name for name in _DTYPES if name not in _OPTIONAL or name in f.keys()]
        for name in names:
            _check_tensor(path, f, name)
        tensors = {name: f.get_tensor(name) for name in names}
    try:
        meta = json.loads(metadata.get("meta", "{}"))
    except (ValueError, RecursionError) as e:
        raise InputError(f"{path}: meta: must be JSON, got invalid JSON ({e!s:.100})") from None
    if not isinstance(meta, dict):
        raise InputError(f"{path}: meta: must be a JSON object, got a {type(meta).__name__}")
    temperature = metadata.get("temperature")
    try:
        temperature = None if temperature is None else float(temperature)
    except ValueError:
        raise InputError(f"{path}: temperature: must be a number, got {temperature!r:.80}") from None
    prompts = _unpack(path, tensors, "prompt_tokens", "prompt_offsets")
    tokens = _unpack(path, tensors, "tokens", "offsets")
    values = _unpack(path, tensors, "logprobs", "offsets")
    logprobs = Logprobs(
        prompts=[x.tolist() for x in prompts],
        tokens=[x.tolist() for x in tokens],
        logprobs=values,
        contract=metadata["contract"],
        meta=meta,
        weights=metadata.get("weights"),
        epochs=_unpack(path, tensors, "epochs", "offsets") if "epochs" in tensors else None,
        temperature=temperature,
    )
    try:
        _check(logprobs)
    except InputError as e:
        raise InputError(f"{path}: {e}") from None
    return logprobs


def check_epochs(logprobs: Logprobs) -> None:
    """Raise InputError unless `epochs` is None or has one int64 tensor of epochs for each sequence's tokens."""
    epochs = logprobs.epochs
    if epochs is None:
        return
    if not isinstance(epochs, (list, tuple)):
        raise InputError(f"epochs: expected a list of tensors or None, got {type(epochs).__name__}")
    if len(epochs) != len(logprobs.tokens):
        raise InputError(f"epochs: expected {len(logprobs.tokens)} sequences as in tokens, got {len(epochs)}")
    for i, (row, values) in enumerate(zip(logprobs.tokens, epochs, strict=True)):
        if not isinstance(values, torch.Tensor) or values.dtype != torch.int64:
            kind = values.dtype if isinstance(values, torch.Tensor) else type(values).__name__
            raise InputError(f"epochs: sequence {i}: expected a torch.int64 tensor, got {kind}")
        if list(values.shape) != [len(row)]:
            raise InputError(f"epochs: sequence {i}: expected shape [{len(row)}], got {list(values.shape)}")
        if len(row) and int(values.min()) < MIXED:
            raise InputError(f"epochs: sequence {i}: must be at least {MIXED} (mixed), got {int(values.min())}")


def check_temperature(temperature: float) -> None:
    """Raise InputError unless `temperature` is a number that is positive and finite in fp32."""
    number = isinstance(temperature, (int, float)) and not isinstance(temperature, bool)
    if not number or not torch.finfo(torch.float32).tiny <= temperature <= torch.finfo(torch.float32).max:
        raise InputError(f"temperature: must be positive and finite in fp32, got {temperature!r:.80}")


def _check_tensor(path: Path, f: safe_open, name: str) -> None:
    """Check dtype, rank and size of one tensor from the header alone."""
    if name not in f.keys():
        raise InputError(f"{path}: tensor {name!r} is missing. Write the file with alignkit.drift.save.")
    header = f.get_slice(name)
    dtype, shape = header.get_dtype(), header.get_shape()
    expected = {torch.int64: "I64", torch.float32: "F32"}[_DTYPES[name]]
    if dtype != expected or len(shape) != 1:
        raise InputError(f"{path}: tensor {name!r}: expected {expected} of one dimension, got {dtype} of shape {shape}")
    if shape[0] > _LIMITS[name]:
        raise InputError(f"{path}: tensor {name!r}: at most {_LIMITS[name]} values are supported, got {shape[0]}")


def _concatenated(rows: list[torch.Tensor], dtype: torch.dtype) -> torch.Tensor:
    return torch.cat([torch.empty(0, dtype=dtype, device="cpu"), *(x.detach().cpu().reshape(-1) for x in rows)])


def _pack(rows: list[list[int]]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the concatenated rows, int64 [total], and their offsets, int64 [len(rows) + 1]."""
    lengths = torch.tensor([0] + [len(row) for row in rows], dtype=torch.int64, device="cpu")
    return torch.tensor([t for row in rows for t in row], dtype=torch.int64, device="cpu"), lengths.cumsum(0)


def _unpack(path: Path, tensors: dict[str, torch.Tensor], name: str, offsets_name: str) -> list[torch.Tensor]:
    packed, offsets = tensors[name], tensors[offsets_name]
    subject = f"{path}: tensor {offsets_name!r}"
    if offsets.numel() == 0:
        raise InputError(f"{subject}: must have at least one value, got none")
    if offsets[0] != 0:
        raise InputError(f"{subject}: must start with 0, got {offsets[0]}")
    if offsets[-1] != packed.numel():
        raise InputError(f"{subject}: must end with {packed.numel()}, the number of {name!r}, got {offsets[-1]}")
    if len(smaller := (offsets[1:] < offsets[:-1]).nonzero()):  # compared, not subtracted: a difference can overflow
        i = int(smaller[0])
        raise InputError(f"{subject}: must not decrease, got {offsets[i]} then {offsets[i + 1]} at index {i}")
    bounds = offsets.tolist()
    return [packed[a:b].clone() for a, b in itertools.pairwise(bounds)]


def _check(logprobs: Logprobs) -> None:
    for name in ("tokens", "prompts"):
        rows = getattr(logprobs, name)
        if not isinstance(rows, (list, tuple)):
            raise InputError(f"{name}: expected a list of lists of token ids, got {type(rows).__name__}")
        for i, row in enumerate(rows):
            if not isinstance(row, (list, tuple)):
                raise InputError(f"{name}: sequence {i}: expected a list of token ids, got {type(row).__name__}")
        if len(rows) > MAX_SEQUENCES:
            raise InputError(f"{name}: a file holds at most {MAX_SEQUENCES} sequences, got {len(rows)}")
        if sum(map(len, rows)) > MAX_TOKENS:
            raise InputError(f"{name}: a file holds at most {MAX_TOKENS} tokens, got {sum(map(len, rows))}")
        for i, row in enumerate(rows):
            for j, t in enumerate(row):
                if type(t) is not int or not 0 <= t < 2**63:
                    raise InputError(
                        f"{name}: sequence {i}: every token id must be an int in [0, 2^63), got {t!r:.50} at position "
                        f"{j}"
                    )
    sequences = len(logprobs.tokens)
    for name in ("prompts", "logprobs"):
        if len(getattr(logprobs, name)) != sequences:
            raise InputError(f"{name}: expected {sequences} sequences as in tokens, got {len(getattr(logprobs, name))}")
    contract = logprobs.contract
    Identity(contract, logprobs.weights)  # raises InputError that names the field
    check_epochs(logprobs)
    if logprobs.temperature is not None:
        check_temperature(logprobs.temperature)
    for i, (row, values) in enumerate(zip(logprobs.tokens, logprobs.logprobs, strict=True)):
        if not isinstance(values, torch.Tensor) or values.dtype != torch.float32:
            kind = values.dtype if isinstance(values, torch.Tensor) else type(values).__name__
            raise InputError(f"logprobs: sequence {i}: expected a torch.float32 tensor, got {kind}")
        if list(values.shape) != [len(row)]:
            raise InputError(f"logprobs: sequence {i}: expected shape [{len(row)}], got {list(values.shape)}")
        # CPU tensors may have been computed on any device; a GPU tensor must match its own device's contract.
        if not on_host(values.device) and contract not in ("stock", contract_id(values.device)):
            raise InputError(
                f"contract: sequence {i}'s logprobs are on {values.device}, so contract must be "
                f"{contract_id(values.device)!r} or 'stock', got {contract!r}"
            )
    if not isinstance(logprobs.meta, dict):
        raise InputError(f"meta: expected a dict of strings, got {type(logprobs.meta).__name__}")
    for key, value in logprobs.meta.items():
        if not isinstance(key, str) or not isinstance(value, str):
            raise InputError(f"meta: keys and values must be strings, got {key!r:.80}: {value!r:.80}")
    if len(json.dumps(logprobs.meta)) > MAX_META:
        raise InputError(f"meta: must have at most {MAX_META} characters as JSON, got {len(json.dumps(logprobs.meta))}")
