"""Recordings of a model's points, token by token: digests of all rows and values of selected rows.

A row is a (sequence, position), independent of the engine's batching. Rows are numbered over the concatenated
sequences. A digest is computed from the row's values as fp32, which represents bf16 and fp16 exactly; sides of
different dtypes therefore compare by value. Digests are computed on the tensor's device. Only digests and selected rows
are copied to the CPU. A recording is a directory with ``recording.json`` and ``recording.safetensors``.

Recordings outlive a release. A change of `digests`, `weights_digest` or the file layout needs another `FORMAT_VERSION`;
`load` rejects other versions. `comparison` compares recordings, and the ``*_side`` modules record.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from ..convert import Architecture, Checkpoint
from ..drift import bounded
from ..drift.files import MAX_SEQUENCES, MAX_TOKENS
from ..errors import InputError
from ..identity.identity import MAX_CONTRACT
from .points import Point, points

FORMAT = "alignkit-recording"
FORMAT_VERSION = 2
JSON, TENSORS = "recording.json", "recording.safetensors"
MAX_JSON = 2**28
"""Maximum size of ``recording.json`` in bytes."""
MAX_HEADER = 2**24
"""Maximum size of the header of ``recording.safetensors`` in bytes."""
MAX_LAYERS = 4096
"""Maximum number of layers in the architecture of ``recording.json``."""
DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
"""Supported dtypes of recorded values, by their names in safetensors."""


class Recorder:
    """Recorder of one rank's points; `index` holds the row of each token of the running step, -1 for padding.

    keep: point -> rows. Digests and values of these rows are recorded, and nothing else. None records digests of every
    row, values of all logprobs, and values of the rows `sample` at every point. Only digests and selected rows are held
    in memory.
    """

    def __init__(
        self,
        arch: Architecture,
        rows: int,
        keep: Mapping[str, Sequence[int]] | None,
        tp: int = 1,
        sample: Sequence[int] = (),
    ):
        self._points = {p.name: p for p in points(arch)}
        self._rows, self._tp = rows, tp
        self._only = None if keep is None else frozenset(keep)
        if keep is None:
            keep = {name: sample for name in self._points if len(sample)} | {"logprob": range(rows)}
        self._keep = keep
        self._digests: dict[str, np.ndarray] = {}
        self._seen: dict[str, np.ndarray] = {}
        self._values: dict[str, torch.Tensor] = {}
        self._slot_maps: dict[str, np.ndarray] = {}
        self.dtypes: dict[str, str] = {}
        self.index = np.zeros(0, dtype=np.int64)

    def wants(self, name: str) -> bool:
        return name in self._points and (self._only is None or name in self._only)

    def put(self, name: str, value: torch.Tensor, index: np.ndarray | None = None) -> None:
        """Record a point; `value` holds the rows `index` (default: the running step), in any leading dimensions."""
        if not self.wants(name):
            return
        point = self._points[name]
        index = self.index if index is None else index
        parts = self._tp if point.sharded else 1
        width, pieces = point.width // parts, point.pieces // parts
        if value.numel() != len(index) * width:
            raise InputError(
                f"point {name}: expected {len(index)} rows of {width} values, got shape {list(value.shape)}. alignkit "
                "bisect does not support this model or engine version."
            )
        wanted = index >= 0
        if self._only is not None:
            wanted &= self._slots(name)[index] >= 0  # padding (-1) indexes the last entry; `wanted` already excludes it
        if not wanted.any():
            return
        rows = index[wanted]
        value = value.detach().reshape(len(index), width)
        chosen = value if wanted.all() else value[torch.from_numpy(wanted).to(value.device)]
        self.dtypes[name] = str(value.dtype).removeprefix("torch.")
        if name not in self._digests:
            self._digests[name] = np.zeros((self._rows, pieces), dtype=np.int64)
            self._seen[name] = np.zeros(self._rows, dtype=np.uint8)
        self._digests[name][rows] = digests(chosen, pieces)
        self._seen[name][rows] = 1
        if name in self._keep:
            slot = self._slots(name)[rows]
            if name not in self._values:
                self._values[name] = torch.zeros(len(self._keep[name]), width, dtype=chosen.dtype)
            selected = np.flatnonzero(slot >= 0)
            kept = chosen if len(selected) == len(rows) else chosen[torch.from_numpy(selected).to(chosen.device)]
            self._values[name][torch.from_numpy(slot[selected])] = kept.cpu()

    def _slots(self, name: str) -> np.ndarray:
        """Return each row's index in the recorded values, -1 for rows that are not recorded."""
        if name not in self._slot_maps:
            slots = np.full(self._rows + 1, -1, dtype=np.int64)
            slots[self._keep[name]] = np.arange(len(self._keep[name]))
            self._slot_maps[name] = slots
        return self._slot_maps[name]

    def save(self, path: Path) -> None:
        """Write this rank's part, an input of `merge`."""
        tensors = {f"digest/{n}": torch.from_numpy(d) for n, d in self._digests.items()}
        tensors |= {f"seen/{n}": torch.from_numpy(s) for n, s in self._seen.items()}
        tensors |= {f"value/{n}": v.contiguous() for n, v in self._values.items()}
        tensors |= {f"kept/{n}": torch.tensor(list(self._keep[n]), dtype=torch.int64) for n in self._values}
        save_file(tensors, path, metadata={"dtypes": json.dumps(self.dtypes)})


def digests(rows: torch.Tensor, pieces: int) -> np.ndarray:
    """Return int64 digests [rows, pieces] of rows [rows, width], in integer arithmetic that is equal on every device.

    A digest is the sum of a piece's values, each value's fp32 bits hashed with its column. Two rows that differ in one
    value never collide; rows that differ in several collide with probability 2^-64.
    """
    size = rows.shape[1] // pieces
    columns = _mix(torch.arange(1, size + 1, device=rows.device) * _GOLDEN_RATIO)
    chunk = max(1, (_CHUNK_GPU if rows.is_cuda else _CHUNK_CPU) // rows.shape[1])
    parts = []
    for part in rows.split(chunk):
        bits = part.to(torch.float32).contiguous().view(torch.int32).view(-1, pieces, size)
        parts.append(_mix(bits.long().mul_(_GOLDEN_RATIO).add_(columns)).sum(-1))
    return torch.cat(parts).cpu().numpy()


_CHUNK_CPU, _CHUNK_GPU = 2**16, 2**25
"""schedule: values digested per chunk: fits a core's cache (CPU), or the GPU memory left beside an engine."""
_GOLDEN_RATIO = 0x9E3779B97F4A7C15 - 2**64
"""SplitMix64's increment, 2^64 over the golden ratio, as int64. Another value needs another `FORMAT_VERSION`."""
_MIX = ((30, 0xBF58476D1CE4E5B9 - 2**64), (27, 0x94D049BB133111EB - 2**64))
"""Shifts and factors of the first two steps of SplitMix64's finalizer. Others need another `FORMAT_VERSION`."""


def _mix(x: torch.Tensor) -> torch.Tensor:
    """Apply SplitMix64's finalizer in place: a bijection in which a one-bit change flips about half of the bits."""
    for shift, factor in _MIX:
        x.bitwise_xor_((x >> shift).bitwise_and_(2 ** (64 - shift) - 1)).mul_(factor)
    return x.bitwise_xor_((x >> 31).bitwise_and_(2**33 - 1))


@dataclass
class Recording:
    """Recorded points of one side.

    Maps are keyed by point. sequences: token ids. contract: contract id reported by the aligned engine, or "stock".
    digests: int64 [rows, pieces]. seen: uint8 [rows], 1 where the row was recorded. ranks_differ: uint8 [rows], 1 where
    tensor-parallel ranks disagree on a replicated row. values: recorded values of the rows in `kept`. dtypes: the
    engine's dtype.
    """

    engine: str
    contract: str
    architecture: dict
    weights: str
    sequences: list[list[int]]
    settings: dict
    digests: dict[str, np.ndarray]
    seen: dict[str, np.ndarray]
    dtypes: dict[str, str]
    ranks_differ: dict[str, np.ndarray] = field(default_factory=dict)
    values: dict[str, torch.Tensor] = field(default_factory=dict)
    kept: dict[str, np.ndarray] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.architecture = json.loads(json.dumps(self.architecture))  # lists instead of tuples, as in a file

    @property
    def rows(self) -> int:
        return sum(map(len, self.sequences))

    def token(self, row: int) -> tuple[int, int]:
        """Return the (sequence, position) of a row."""
        for i, sequence in enumerate(self.sequences):
            if row < len(sequence):
                return i, row
            row -= len(sequence)
        raise InputError(f"row: must be in [0, {self.rows}), got {self.rows + row}")

    def save(self, path: Path) -> None:
        path.mkdir(parents=True, exist_ok=True)
        tensors = {}
        for kind, arrays in (
            ("digest", self.digests),
            ("seen", self.seen),
            ("ranks_differ", self.ranks_differ),
            ("kept", self.kept),
        ):
            tensors |= {f"{kind}/{n}": torch.from_numpy(np.ascontiguousarray(a)) for n, a in arrays.items()}
        tensors |= {f"value/{n}": v.contiguous() for n, v in self.values.items()}
        save_file(tensors, path / TENSORS)
        about = {
            "format": FORMAT,
            "format_version": FORMAT_VERSION,
            "engine": self.engine,
            "contract": self.contract,
            "architecture": self.architecture,
            "weights": self.weights,
            "settings": self.settings,
            "dtypes": self.dtypes,
            "sequences": self.sequences,
        }
        # Written last and atomically: its presence marks a complete recording.
        temporary = path / f".{JSON}"
        temporary.write_text(json.dumps(about) + "\n")
        os.replace(temporary, path / JSON)


def merge(parts: list[Path], extra: Path | None, arch: Architecture, **about) -> Recording:
    """Merge the ranks' parts into one recording.

    extra: an additional part with points that no rank recorded. about: the fields of `Recording` that no part holds.
    """
    ranks = [safe_open(part, framework="pt") for part in parts]
    files = ranks + ([safe_open(extra, framework="pt")] if extra else [])
    names = [set(f.keys()) for f in files]
    dtypes: dict[str, str] = {}
    for f in files:
        dtypes |= json.loads(f.metadata()["dtypes"])
    merged = Recording(digests={}, seen={}, dtypes=dtypes, **about)
    for point in points(arch):
        holders = [f for f, keys in zip(files, names, strict=True) if f"digest/{point.name}" in keys]
        if not holders:
            continue
        digest = [f.get_tensor(f"digest/{point.name}").numpy() for f in holders]
        seen = [f.get_tensor(f"seen/{point.name}").numpy() for f in holders]
        if point.sharded and len(holders) != len(ranks):
            held = [i for i, keys in enumerate(names) if f"digest/{point.name}" in keys]
            raise InputError(
                f"point {point.name}: must be recorded by each of the {len(ranks)} tensor-parallel ranks, got it from "
                + ", ".join(f"rank {i}" if i < len(ranks) else "the driver" for i in held)
            )
        merged.digests[point.name] = np.concatenate(digest, 1) if point.sharded else digest[0]
        merged.seen[point.name] = np.minimum.reduce(seen)
        if not point.sharded and len(holders) > 1:
            others = [(d != digest[0]).any(1) | (s != seen[0]) for d, s in zip(digest[1:], seen[1:], strict=True)]
            merged.ranks_differ[point.name] = np.any(others, axis=0).astype(np.uint8)
        if f"value/{point.name}" in holders[0].keys():
            values = [f.get_tensor(f"value/{point.name}") for f in holders]
            merged.values[point.name] = torch.cat(values, 1) if point.sharded else values[0]
            merged.kept[point.name] = holders[0].get_tensor(f"kept/{point.name}").numpy()
    return merged


def load(path: str | os.PathLike) -> Recording:
    """Read a recording written by `Recording.save`; raise InputError naming the file and the problem.

    Sizes stated in a file are checked before any data of that size is read.
    """
    path = Path(path)
    about = _load_json(path / JSON)
    known = {p.name: p for p in points(_architecture(path / JSON, about["architecture"]))}
    recording = Recording(digests={}, seen={}, **{k: about[k] for k in _ABOUT})
    rows = recording.rows
    file = path / TENSORS
    with bounded.opened(file, "a recording", MAX_HEADER) as (f, _):
        # Check the whole header before reading a tensor.
        shapes = {key: _shape(file, f, key, known, rows) for key in f.keys()}
        _check_complete(file, shapes)
        for key in shapes:
            kind, _, name = key.partition("/")
            value = f.get_tensor(key)
            target = {
                "digest": recording.digests,
                "seen": recording.seen,
                "ranks_differ": recording.ranks_differ,
                "kept": recording.kept,
                "value": recording.values,
            }[kind]
            target[name] = value if kind == "value" else value.numpy()
    for name, kept in recording.kept.items():
        if len(kept) and not 0 <= kept.min() <= kept.max() < rows:
            raise InputError(
                f"{file}: tensor 'kept/{name}': rows must be in [0, {rows}), got {kept.min()} to {kept.max()}"
            )
    return recording


_ABOUT = {
    "engine": str,
    "contract": str,
    "architecture": dict,
    "weights": str,
    "sequences": list,
    "settings": dict,
    "dtypes": dict,
}
"""Fields of ``recording.json`` in addition to the format, with their types; all are arguments of `Recording`."""
_JSON_NAMES = {str: "string", dict: "object", list: "array"}
_TENSORS = {"digest": ("I64",), "seen": ("U8",), "ranks_differ": ("U8",), "kept": ("I64",), "value": tuple(DTYPES)}
"""Kinds of tensors in ``recording.safetensors``, named ``KIND/POINT``, with their dtypes."""


def _load_json(path: Path) -> dict:
    if not path.is_file():
        raise InputError(f"{path}: no such file. A recording is a directory with {JSON} and {TENSORS}.")
    if path.stat().st_size > MAX_JSON:
        raise InputError(f"{path}: file size: must be at most {MAX_JSON} bytes, got {path.stat().st_size} bytes")
    try:
        about = json.loads(path.read_text())
    except (ValueError, RecursionError) as e:
        raise InputError(f"{path}: must be JSON, got invalid JSON ({e!s:.100})") from None
    if not isinstance(about, dict):
        raise InputError(f"{path}: must be a JSON object, got a {type(about).__name__}")
    if about.get("format") != FORMAT:
        raise InputError(f"{path}: format: must be {FORMAT!r}, that of a recording, got {_shown(about, 'format')}")
    if about.get("format_version") != FORMAT_VERSION:
        raise InputError(
            f"{path}: format_version: must be {FORMAT_VERSION!r} for this version of alignkit, "
            f"got {_shown(about, 'format_version')}. Record again with this version."
        )
    for name, kind in _ABOUT.items():
        if name not in about:
            raise InputError(f"{path}: field {name!r} is missing. A recording must be written by alignkit bisect.")
        if not isinstance(about[name], kind):
            raise InputError(f"{path}: {name}: must be a JSON {_JSON_NAMES[kind]}, got {about[name]!r:.50}")
    if not 0 < len(about["contract"]) <= MAX_CONTRACT:
        raise InputError(f"{path}: contract: must have 1 to {MAX_CONTRACT} characters, got {len(about['contract'])}")
    sequences = about["sequences"]
    if not 0 < len(sequences) <= MAX_SEQUENCES:
        raise InputError(f"{path}: sequences: must have 1 to {MAX_SEQUENCES} sequences, got {len(sequences)}")
    for i, sequence in enumerate(sequences):
        if not isinstance(sequence, list):
            raise InputError(f"{path}: sequences[{i}]: must be a list of token ids, got a {type(sequence).__name__}")
        if not sequence:
            raise InputError(f"{path}: sequences[{i}]: must have at least one token id, got none")
    if sum(map(len, sequences)) > MAX_TOKENS:
        raise InputError(
            f"{path}: sequences: must have at most {MAX_TOKENS} tokens in total, got {sum(map(len, sequences))}"
        )
    for i, sequence in enumerate(sequences):
        for j, t in enumerate(sequence):
            if type(t) is not int:
                raise InputError(f"{path}: sequences[{i}][{j}]: a token id must be an int, got a {type(t).__name__}")
            if t < 0:
                raise InputError(f"{path}: sequences[{i}][{j}]: a token id must be at least 0, got {t}")
    return about


def _shown(about: dict, name: str) -> str:
    """Return a field's value for a message."""
    return f"{about[name]!r:.50}" if name in about else "none"


def _architecture(path: Path, fields: dict) -> Architecture:
    try:
        arch = Architecture(**fields)
    except TypeError as e:  # "Architecture.__init__() got an unexpected keyword argument ..."
        reason = str(e).partition("() ")[2]
        raise InputError(
            f"{path}: architecture: fields must be those of this alignkit version: {reason:.200}. Record again with "
            "this version."
        ) from None
    for name in ("layers", "hidden", "heads", "kv_heads", "head_dim", "intermediate", "vocab"):
        size = getattr(arch, name)
        if type(size) is not int or not 0 < size < 2**31:
            raise InputError(f"{path}: architecture: {name}: must be an int in [1, 2^31), got {size!r:.50}")
    if arch.layers > MAX_LAYERS:
        raise InputError(f"{path}: architecture: layers: must be at most {MAX_LAYERS}, got {arch.layers}")
    return arch


def _shape(file: Path, f: safe_open, key: str, known: dict[str, Point], rows: int) -> list[int]:
    """Return the shape of tensor ``KIND/POINT``; raise InputError for an unexpected name, dtype or shape."""
    kind, _, name = key.partition("/")
    header = f.get_slice(key)
    dtype, shape = header.get_dtype(), header.get_shape()
    subject = f"{file}: tensor {key!r:.80}"
    if kind not in _TENSORS:
        raise InputError(f"{subject}: name must be KIND/POINT, where KIND is one of {', '.join(_TENSORS)}")
    point = known.get(name)
    if point is None:
        raise InputError(f"{subject}: POINT must be a point of the architecture in {JSON}, got {name!r:.80}")
    if dtype not in _TENSORS[kind]:
        raise InputError(f"{subject}: must have dtype {' or '.join(_TENSORS[kind])}, got {dtype}")
    columns = {"digest": [point.pieces], "value": [point.width]}.get(kind, [])
    partial = kind in ("kept", "value")  # some of the rows
    if (
        len(shape) != 1 + len(columns)
        or shape[1:] != columns
        or not (shape[0] <= rows if partial else shape[0] == rows)
    ):
        wanted = ", ".join(map(str, ["N" if partial else rows, *columns]))
        raise InputError(
            f"{subject}: must have shape [{wanted}]{f' with N <= {rows} tokens' if partial else ''}, got {shape}"
        )
    return shape


def _check_complete(file: Path, shapes: dict[str, list[int]]) -> None:
    for key, shape in shapes.items():
        kind, _, name = key.partition("/")
        other = {"digest": "seen", "seen": "digest", "ranks_differ": "digest", "kept": "value", "value": "kept"}[kind]
        if f"{other}/{name}" not in shapes:
            raise InputError(f"{file}: tensor {key!r} requires tensor {other + '/' + name!r}, which is missing")
        if kind == "kept" and shape[0] != shapes[f"value/{name}"][0]:
            values = shapes[f"value/{name}"][0]
            raise InputError(
                f"{file}: tensor {key!r}: must have the length of {'value/' + name!r}, {values}, got {shape[0]}"
            )


def weights_digest(model: Path) -> str:
    """Return a digest of a checkpoint's tensors (names, dtypes, shapes, bits), independent of its files."""
    whole = hashlib.blake2b(digest_size=16)
    checkpoint = Checkpoint(model)
    for name in sorted(checkpoint):
        tensor = checkpoint[name].contiguous()
        whole.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        whole.update(tensor.reshape(-1).view(torch.uint8).numpy().data)
    return whole.hexdigest()
