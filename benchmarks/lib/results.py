"""Result files: ``{"runs": {...}, "rows": [...]}``. A row names the run that made it, a run says what it was made on."""

from __future__ import annotations

import datetime
import json
import re
from collections.abc import Iterable, Iterator
from pathlib import Path

import torch

from alignkit import _sources
from alignkit.check.machine import family, machine, version
from alignkit.check.run import write_json
from alignkit.runtime import dispatch

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks/results"
H200 = RESULTS / "h200"
COMPUTING = ("contract", "runtime", "dist", "ops", "models", "engines", "megatron", "vllm")
"""Folders of the package that what an engine computes goes through. The others look on: checks, reports, tests' helpers."""
SHARED = ("contract", "runtime", "dist")
"""Those of them that every op goes through."""
OTHER_OP = re.compile(r"^ *from \.\.([a-z]\w*)", re.MULTILINE)
"""How a file of an op names another op."""
WRITTEN = (*_sources.SUFFIXES, ".py", ".json")
"""Ends of the names of sources."""


def run_name() -> str:
    return datetime.datetime.now().isoformat(timespec="seconds")


def made_on(*, packages: Iterable[str] = (), ops: Iterable[str] = (), **more) -> dict:
    """What rows are made on: date, commit, `sources` (`ops`: which ones are measured, if no engine is), machine, versions
    (`packages`: more of them), contract, and `more`."""
    info = machine() | {"contract": family().contract_id, "sources": sources(*ops)} | more
    info["versions"] |= {package: version(package) for package in packages}
    return info


def sources(*ops: str) -> str:
    """A digest of what computes: the same for commits that differ in tests, benchmarks or pages alone. Of the adapters, the ops and
    their kernels, or, if ops are named, of these ops, those that they are made of, and what all ops share."""
    package = _sources.ROOT / "alignkit"
    found = {*_written(_sources.ROOT / "csrc")}
    for name in SHARED if ops else COMPUTING:
        found |= {*_written(package / name)}
    for op in ops:
        found |= _of_op(package / "ops" / op)
    found |= {file for file in (package / "ops").glob("*") if file.suffix in WRITTEN}
    return _sources.digest(sorted(found))[:12]


def _written(folder: Path) -> Iterator[Path]:
    return (file for file in folder.rglob("*") if file.suffix in WRITTEN)


def _of_op(folder: Path) -> set[Path]:
    """The sources of an op and of the ops that it is made of."""
    found = {*_written(folder)}
    assert found, f"{folder.name}: no op"
    for file in list(found):
        for other in OTHER_OP.findall(file.read_text()):
            found |= _of_op(folder.parent / other)
    return found


def backend(device: torch.device) -> str:
    """The backend that ops on `device` run on: ``cuda``, ``triton``, ..."""
    return dispatch.name(device)


def read(path: Path) -> dict:
    """The contents of a result file, empty before the first run."""
    return json.loads(path.read_text()) if path.exists() else {}


def keys(old: dict, key: tuple[str, ...]) -> set[tuple]:
    """Of the rows that are there."""
    return {_of(row, key) for row in old.get("rows", [])}


def of_sources(old: dict, digest: str) -> dict:
    """What of a result file was made of the `sources` of this digest."""
    runs = {name: info for name, info in old.get("runs", {}).items() if info.get("sources") == digest}
    return {"runs": runs, "rows": [row for row in old.get("rows", []) if row["run"] in runs]}


def _of(row: dict, key: tuple[str, ...]) -> tuple:
    """What tells a row from others; None for what rows of another kind, in the same file, do not have."""
    return tuple(row.get(k) for k in key)


def merge(old: dict, name: str, info: dict, new: list[dict], key: tuple[str, ...]) -> dict:
    """The contents of a result file after run `name` made the rows `new`; `key`: what tells rows apart."""
    made = [row | {"run": name} for row in new]
    anew = {_of(row, key) for row in made}
    kept = [row for row in old.get("rows", []) if _of(row, key) not in anew]
    merged = kept + made
    runs = old.get("runs", {}) | {name: info}
    used = {row["run"] for row in merged}
    return {"runs": {k: v for k, v in runs.items() if k in used}, "rows": merged}


def write(path: Path, contents: dict) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    write_json(path, contents)
