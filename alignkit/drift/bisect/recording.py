"""Recordings: what the points of a model put out, token by token, as digests and, of some, as tensors.

A row is digested as its values in fp32, which holds those of bf16 and fp16 exactly: sides of different types compare by
value. It is digested where it is, so that of a GPU's tensors only digests and chosen rows are copied. Rows are numbered over all sequences, end to end: a row is a (sequence, position), however the engine had batched
it. A directory holds ``recording.json`` and ``recording.safetensors``.
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

from ...convert import Architecture, Checkpoint
from ...errors import InputError
from .. import bounded
from ..files import MAX_CONTRACT, MAX_SEQUENCES, MAX_TOKENS
from .points import Point, points

FORMAT = "alignkit-recording"
FORMAT_VERSION = 2
JSON, TENSORS = "recording.json", "recording.safetensors"
MAX_JSON = 2**28
"""Bytes: the ids of `MAX_TOKENS` tokens would take more, but no recording is of so many."""
MAX_HEADER = 2**24
MAX_LAYERS = 4096
DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}


class Recorder:
    """Takes what the points of one rank put out; `index` says which row each token of the running step is.

    keep: by point, the rows whose values are kept, and nothing else is recorded then; None: digests of all, and values
    of the logprobs and, of all points, of the rows `sample`. Nothing of a tensor is held but digests and the rows to
    keep.
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
        self._place: dict[str, np.ndarray] = {}
        self.dtypes: dict[str, str] = {}
        self.index = np.zeros(0, dtype=np.int64)

    def wants(self, name: str) -> bool:
        return name in self._points and (self._only is None or name in self._only)

    def put(self, name: str, value: torch.Tensor, index: np.ndarray | None = None) -> None:
        """value: the rows of `index`, by default of the running step, in its order, over any leading dimensions."""
        if not self.wants(name):
            return
        point = self._points[name]
        index = self.index if index is None else index
        parts = self._tp if point.sharded else 1
        width, pieces = point.width // parts, point.pieces // parts
        if value.numel() != len(index) * width:
            raise InputError(f"{name}: {tuple(value.shape)} is not {len(index)} rows of {width} values")
        wanted = index >= 0
        if self._only is not None:
            wanted &= self._place_of(name)[index] >= 0  # -1 looks at the last entry; it is not wanted already
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
            place = self._place_of(name)[rows]
            if name not in self._values:
                self._values[name] = torch.zeros(len(self._keep[name]), width, dtype=chosen.dtype)
            here = np.flatnonzero(place >= 0)
            kept = chosen if len(here) == len(rows) else chosen[torch.from_numpy(here).to(chosen.device)]
            self._values[name][torch.from_numpy(place[here])] = kept.cpu()

    def _place_of(self, name: str) -> np.ndarray:
        """By row, its place among those that are kept; -1 for others."""
        if name not in self._place:
            place = np.full(self._rows + 1, -1, dtype=np.int64)
            place[self._keep[name]] = np.arange(len(self._keep[name]))
            self._place[name] = place
        return self._place[name]

    def save(self, path: Path) -> None:
        """This rank's part, for `merge`."""
        tensors = {f"digest/{n}": torch.from_numpy(d) for n, d in self._digests.items()}
        tensors |= {f"seen/{n}": torch.from_numpy(s) for n, s in self._seen.items()}
        tensors |= {f"value/{n}": v.contiguous() for n, v in self._values.items()}
        tensors |= {f"kept/{n}": torch.tensor(list(self._keep[n]), dtype=torch.int64) for n in self._values}
        save_file(tensors, path, metadata={"dtypes": json.dumps(self.dtypes)})


def digests(rows: torch.Tensor, pieces: int) -> np.ndarray:
    """int64 [rows, pieces] of rows [rows, width]: in whole numbers, which are the same on every device.

    The sum over a piece of each value's bits, mixed with its place. A row with one other value never has the same
    digest, one with several has it by chance: one in 2^64.
    """
    size = rows.shape[1] // pieces
    places = _mix(torch.arange(1, size + 1, device=rows.device) * _GOLDEN)
    at_once = max(1, (_AT_ONCE_GPU if rows.is_cuda else _AT_ONCE) // rows.shape[1])
    parts = []
    for part in rows.split(at_once):
        bits = part.to(torch.float32).contiguous().view(torch.int32).view(-1, pieces, size)
        parts.append(_mix(bits.long().mul_(_GOLDEN).add_(places)).sum(-1))
    return torch.cat(parts).cpu().numpy()


_AT_ONCE, _AT_ONCE_GPU = 2**16, 2**25
"""Values that are digested at once: what a core's cache holds, and what a GPU has memory for beside an engine."""
_GOLDEN = 0x9E3779B97F4A7C15 - 2**64
_MIX = ((30, 0xBF58476D1CE4E5B9 - 2**64), (27, 0x94D049BB133111EB - 2**64))


def _mix(x: torch.Tensor) -> torch.Tensor:
    """SplitMix64's mixing, in place: one to one, and a change of any bit changes half of them."""
    for shift, factor in _MIX:
        x.bitwise_xor_((x >> shift).bitwise_and_(2 ** (64 - shift) - 1)).mul_(factor)
    return x.bitwise_xor_((x >> 31).bitwise_and_(2**33 - 1))


@dataclass
class Recording:
    """What one side put out.

    sequences: token ids. digests: by point, int64 [rows, pieces]; seen: which rows were recorded; ranks_differ: the
    rows that tensor-parallel ranks, which should all hold the same, did not agree on. values: by point, of the rows in
    `kept`. dtypes: by point, as the engine had them. contract: "stock", or of aligned engines their own word.
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
        self.architecture = json.loads(json.dumps(self.architecture))  # as a file has it: lists, no tuples

    @property
    def rows(self) -> int:
        return sum(map(len, self.sequences))

    def token(self, row: int) -> tuple[int, int]:
        """(sequence, position) of a row."""
        for i, sequence in enumerate(self.sequences):
            if row < len(sequence):
                return i, row
            row -= len(sequence)
        raise InputError(f"row: {row} is beyond the last")

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
        # Last, and whole: a directory with it is a recording.
        temporary = path / f".{JSON}"
        temporary.write_text(json.dumps(about) + "\n")
        os.replace(temporary, path / JSON)


def merge(parts: list[Path], extra: Path | None, arch: Architecture, **about) -> Recording:
    """The ranks' parts as one recording; extra: a part of points that are no rank's. `about`: the fields of `Recording`
    that no part holds."""
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
            raise InputError(f"{point.name}: {len(holders)} of {len(ranks)} ranks recorded it")
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
    """Reads what `Recording.save` wrote. Raises InputError naming the file and what is wrong with it; what a file says
    of its sizes is checked before anything of that size is read."""
    path = Path(path)
    about = _load_json(path / JSON)
    known = {p.name: p for p in points(_architecture(path / JSON, about["architecture"]))}
    recording = Recording(digests={}, seen={}, **{k: about[k] for k in _ABOUT})
    rows = recording.rows
    file = path / TENSORS
    with bounded.opened(file, "a recording", MAX_HEADER) as (f, _):
        # All of it by the header alone, before anything is read.
        shapes = {key: _shape(file, f, key, known, rows) for key in f.keys()}
        _complete(file, shapes)
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
            raise InputError(f"{file}: kept/{name} names rows that are not there")
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


def _load_json(path: Path) -> dict:
    if not path.is_file():
        raise InputError(f"{path}: no such file; a recording is a directory with {JSON} and {TENSORS}")
    if path.stat().st_size > MAX_JSON:
        raise InputError(f"{path}: {path.stat().st_size} bytes, more than {MAX_JSON}")
    try:
        about = json.loads(path.read_text())
    except (ValueError, RecursionError) as e:
        raise InputError(f"{path}: truncated, or not JSON ({e!s:.100})") from None
    if not isinstance(about, dict) or about.get("format") != FORMAT:
        raise InputError(f"{path}: not a recording (format={FORMAT!r} is missing)")
    if about.get("format_version") != FORMAT_VERSION:
        raise InputError(
            f"{path}: format version {about.get('format_version')!r:.50}; this alignkit reads {FORMAT_VERSION}"
        )
    for name, kind in _ABOUT.items():
        if not isinstance(about.get(name), kind):
            raise InputError(f"{path}: {name} is missing, or not a {kind.__name__}")
    if not 0 < len(about["contract"]) <= MAX_CONTRACT:
        raise InputError(f"{path}: contract is empty or too long")
    sequences = about["sequences"]
    if not 0 < len(sequences) <= MAX_SEQUENCES or not all(isinstance(s, list) and s for s in sequences):
        raise InputError(f"{path}: sequences: lists of token ids are needed, none of them empty")
    if sum(map(len, sequences)) > MAX_TOKENS:
        raise InputError(f"{path}: sequences: more than {MAX_TOKENS} tokens")
    if any(type(t) is not int or t < 0 for s in sequences for t in s):
        raise InputError(f"{path}: sequences: something is not a token id")
    return about


def _architecture(path: Path, fields: dict) -> Architecture:
    try:
        arch = Architecture(**fields)
    except TypeError as e:
        raise InputError(f"{path}: architecture: {e}") from None
    sizes = (arch.layers, arch.hidden, arch.heads, arch.kv_heads, arch.head_dim, arch.intermediate, arch.vocab)
    if any(type(size) is not int or not 0 < size < 2**31 for size in sizes) or arch.layers > MAX_LAYERS:
        raise InputError(f"{path}: architecture: sizes {sizes} are not a model's")
    return arch


def _shape(file: Path, f: safe_open, key: str, known: dict[str, Point], rows: int) -> list[int]:
    kind, _, name = key.partition("/")
    header = f.get_slice(key)
    dtype, shape = header.get_dtype(), header.get_shape()
    point = known.get(name)
    fits = point is not None and {
        "digest": dtype == "I64" and shape == [rows, point.pieces],
        "seen": dtype == "U8" and shape == [rows],
        "ranks_differ": dtype == "U8" and shape == [rows],
        "kept": dtype == "I64" and len(shape) == 1 and shape[0] <= rows,
        "value": dtype in DTYPES and len(shape) == 2 and shape[0] <= rows and shape[1] == point.width,
    }.get(kind, False)
    if not fits:
        raise InputError(
            f"{file}: {key!r:.80} is {dtype} of shape {shape}, which no recording of {rows} tokens of "
            "this architecture holds"
        )
    return shape


def _complete(file: Path, shapes: dict[str, list[int]]) -> None:
    for key, shape in shapes.items():
        kind, _, name = key.partition("/")
        other = {"digest": "seen", "seen": "digest", "ranks_differ": "digest", "kept": "value", "value": "kept"}[kind]
        if f"{other}/{name}" not in shapes:
            raise InputError(f"{file}: {key!r} is there, {other + '/' + name!r} is not")
        if kind == "kept" and shape[0] != shapes[f"value/{name}"][0]:
            raise InputError(f"{file}: {key!r} and its values are of different lengths")


def weights_digest(model: Path) -> str:
    """Of names, types and bits of a checkpoint's tensors, a tensor at a time: however they are spread over files."""
    whole = hashlib.blake2b(digest_size=16)
    checkpoint = Checkpoint(model)
    for name in sorted(checkpoint):
        tensor = checkpoint[name].contiguous()
        whole.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        whole.update(tensor.reshape(-1).view(torch.uint8).numpy().data)
    return whole.hexdigest()
