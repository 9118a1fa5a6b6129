"""Logprob files: the tokens of a set of sequences, their logprobs, and the contract that made them.

One safetensors file: sequences are packed end to end, `*_offsets` say where each begins. The token ids and
the contract id travel with the numbers, so two files can be refused when they cannot be compared.
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

from ..contract import contract_id
from ..errors import InputError
from ..runtime.families import on_host
from . import bounded

FORMAT = "alignkit-logprobs"
FORMAT_VERSION = "1"
MAX_TOKENS = 2**26
"""Most prompt tokens of a file, and most sampled ones: what a file can make a reader allocate has a bound."""
MAX_SEQUENCES = 2**20
MAX_CONTRACT = 200
MAX_META = 2**16
"""Most characters of `Logprobs.meta` as JSON."""
MAX_HEADER = 2**20
"""Bytes of a safetensors header; all but some hundreds are `Logprobs.meta`, escaped once more."""
_DTYPES = {
    "prompt_tokens": torch.int64,
    "prompt_offsets": torch.int64,
    "tokens": torch.int64,
    "offsets": torch.int64,
    "logprobs": torch.float32,
}
_LIMITS = {
    "prompt_tokens": MAX_TOKENS,
    "tokens": MAX_TOKENS,
    "logprobs": MAX_TOKENS,
    "prompt_offsets": MAX_SEQUENCES + 1,
    "offsets": MAX_SEQUENCES + 1,
}


@dataclass
class Logprobs:
    """Logprobs of the sampled tokens of some sequences.

    prompts: token ids before the sampled ones, one list a sequence.
    tokens: sampled token ids, one list a sequence.
    logprobs: fp32 ``[len(tokens[i])]``, natural logarithm, one tensor a sequence.
    contract: of aligned numbers what the engine says that computed them,
        `alignkit.vllm.worker_status(llm)[0]["contract"]` or `alignkit.megatron.status(model)["contract"]`; ``"stock"``
        otherwise.
    meta: free text for people (engine, versions, mode); never compared.
    """

    prompts: list[list[int]]
    tokens: list[list[int]]
    logprobs: list[torch.Tensor]
    contract: str
    meta: dict[str, str] = field(default_factory=dict)


def save(path: str | os.PathLike, logprobs: Logprobs) -> None:
    """Writes `logprobs` to `path`, whole or not at all.

    Raises InputError naming the field that is inconsistent or too large for a file, before anything is written.
    """
    _check(logprobs)
    prompt_tokens, prompt_offsets = _pack(logprobs.prompts)
    tokens, offsets = _pack(logprobs.tokens)
    flat = [x.detach().cpu().reshape(-1) for x in logprobs.logprobs]
    tensors = {
        "prompt_tokens": prompt_tokens,
        "prompt_offsets": prompt_offsets,
        "tokens": tokens,
        "offsets": offsets,
        "logprobs": torch.cat(flat) if flat else torch.empty(0),
    }
    metadata = {
        "format": FORMAT,
        "format_version": FORMAT_VERSION,
        "contract": logprobs.contract,
        "meta": json.dumps(logprobs.meta, sort_keys=True),
    }
    path = Path(path)
    # A reader never sees half a file: it appears under its name when it is complete.
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
    """Reads what `save` wrote, the same bits.

    Raises InputError, naming the file and what is wrong with it: absent, truncated, not a safetensors file,
    not a logprob file, of another format version, or inconsistent in itself.
    """
    path = Path(path)
    with bounded.opened(path, "a logprob file", MAX_HEADER) as (f, metadata):
        bounded.check_format(path, metadata, "a logprob file", FORMAT, FORMAT_VERSION)
        if "contract" not in metadata:
            raise InputError(f"{path}: the contract id is missing")
        # Only what is known to be small enough is read: the file may be any model's weights.
        for name in _DTYPES:
            _check_tensor(path, f, name)
        tensors = {name: f.get_tensor(name) for name in _DTYPES}
    try:
        meta = json.loads(metadata.get("meta", "{}"))
    except (ValueError, RecursionError) as e:
        raise InputError(f"{path}: meta is not JSON ({e})") from None
    if not isinstance(meta, dict):
        raise InputError(f"{path}: meta is not a JSON object")
    prompts = _unpack(path, tensors, "prompt_tokens", "prompt_offsets")
    tokens = _unpack(path, tensors, "tokens", "offsets")
    values = _unpack(path, tensors, "logprobs", "offsets")
    logprobs = Logprobs(
        prompts=[x.tolist() for x in prompts],
        tokens=[x.tolist() for x in tokens],
        logprobs=values,
        contract=metadata["contract"],
        meta=meta,
    )
    try:
        _check(logprobs)
    except InputError as e:
        raise InputError(f"{path}: {e}") from None
    return logprobs


def _check_tensor(path: Path, f: safe_open, name: str) -> None:
    """By the header alone."""
    if name not in f.keys():
        raise InputError(f"{path}: tensor {name!r} is missing")
    header = f.get_slice(name)
    dtype, shape = header.get_dtype(), header.get_shape()
    expected = {torch.int64: "I64", torch.float32: "F32"}[_DTYPES[name]]
    if dtype != expected or len(shape) != 1:
        raise InputError(f"{path}: tensor {name!r} is {dtype} of shape {shape}, expected {expected} of one dimension")
    if shape[0] > _LIMITS[name]:
        raise InputError(f"{path}: tensor {name!r} holds {shape[0]} values, more than {_LIMITS[name]}")


def _pack(rows: list[list[int]]) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows end to end, int64 [total], and where each begins, int64 [len(rows) + 1]."""
    lengths = torch.tensor([0] + [len(row) for row in rows], dtype=torch.int64)
    return torch.tensor([t for row in rows for t in row], dtype=torch.int64), lengths.cumsum(0)


def _unpack(path: Path, tensors: dict[str, torch.Tensor], name: str, offsets_name: str) -> list[torch.Tensor]:
    packed, offsets = tensors[name], tensors[offsets_name]
    if (
        offsets.numel() == 0
        or offsets[0] != 0
        or offsets[-1] != packed.numel()
        or bool((offsets[1:] < offsets[:-1]).any())
    ):  # no differences: they can overflow
        raise InputError(f"{path}: {offsets_name!r} does not cut the {packed.numel()} values of {name!r}")
    bounds = offsets.tolist()
    return [packed[a:b].clone() for a, b in itertools.pairwise(bounds)]


def _check(logprobs: Logprobs) -> None:
    for name in ("tokens", "prompts"):
        rows = getattr(logprobs, name)
        if not isinstance(rows, (list, tuple)) or not all(isinstance(row, (list, tuple)) for row in rows):
            raise InputError(f"{name}: expected a list of lists of token ids")
        if len(rows) > MAX_SEQUENCES:
            raise InputError(f"{name}: {len(rows)} sequences, more than the {MAX_SEQUENCES} of a file")
        if sum(map(len, rows)) > MAX_TOKENS:
            raise InputError(f"{name}: {sum(map(len, rows))} tokens, more than the {MAX_TOKENS} of a file")
        for i, row in enumerate(rows):
            if any(type(t) is not int or not 0 <= t < 2**63 for t in row):
                raise InputError(f"{name}: sequence {i} holds something that is not a token id (an int >= 0)")
    sequences = len(logprobs.tokens)
    for name in ("prompts", "logprobs"):
        if len(getattr(logprobs, name)) != sequences:
            raise InputError(f"{name}: {len(getattr(logprobs, name))} sequences, but tokens has {sequences}")
    contract = logprobs.contract
    if not (
        isinstance(contract, str)
        and 0 < len(contract) <= MAX_CONTRACT
        and contract.isascii()
        and contract.isprintable()
    ):
        raise InputError(
            f"contract: a non-empty string is needed, of at most {MAX_CONTRACT} ASCII characters, not {contract!r:.80}"
        )
    for i, (row, values) in enumerate(zip(logprobs.tokens, logprobs.logprobs, strict=True)):
        if not isinstance(values, torch.Tensor) or values.dtype != torch.float32:
            kind = values.dtype if isinstance(values, torch.Tensor) else type(values).__name__
            raise InputError(f"logprobs: sequence {i} is {kind}, expected torch.float32")
        if list(values.shape) != [len(row)]:
            raise InputError(f"logprobs: sequence {i} has shape {list(values.shape)}, but {len(row)} tokens")
        # A value on a CPU may have come from anywhere; one that still lies elsewhere says who computed it.
        if not on_host(values.device) and contract not in ("stock", contract_id(values.device)):
            raise InputError(
                f"contract: {contract!r}, but sequence {i}'s logprobs lie on {values.device}, whose "
                f"contract is {contract_id(values.device)!r}"
            )
    if not isinstance(logprobs.meta, dict):
        raise InputError(f"meta: a dict of strings is needed, not {type(logprobs.meta).__name__}")
    for key, value in logprobs.meta.items():
        if not isinstance(key, str) or not isinstance(value, str):
            raise InputError(f"meta: {key!r:.80} maps to {value!r:.80}; keys and values are strings")
    if len(json.dumps(logprobs.meta)) > MAX_META:
        raise InputError(f"meta: longer than {MAX_META} characters as JSON")
