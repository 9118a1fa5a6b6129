"""Result files: ``{"runs": {...}, "rows": [...]}``; each row names its run, which records the environment.

``tables.py`` reads the keys of `run_info`.
"""

from __future__ import annotations

import datetime
import json
import re
from collections.abc import Iterable, Iterator
from pathlib import Path

import torch

from alignkit import _sources
from alignkit.jobs.execute import write_json
from alignkit.runtime import dispatch
from alignkit.runtime.machine import family, machine, version

from . import code

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks/results"
H200 = RESULTS / "h200"
COMPUTING = ("contract", "runtime", "dist", "ops", "models", "engines", "megatron", "vllm")
"""Folders of the package whose code affects an engine's numbers; the others are checks, reports and test helpers."""
SHARED = ("contract", "runtime", "dist")
"""Folders of `COMPUTING` that every op depends on."""
OTHER_OP = re.compile(r"^ *from \.\.([a-z]\w*)", re.MULTILINE)
"""An op's import of another op."""
SOURCE_SUFFIXES = (*_sources.SUFFIXES, ".py", ".json")


def run_name() -> str:
    return datetime.datetime.now().isoformat(timespec="seconds")


def run_info(*, packages: Iterable[str] = (), ops: Iterable[str] = (), **more) -> dict:
    """Return the record of a run: date, commit, source digest, machine, package versions, contract id.

    Args:
        packages: further packages to record the versions of.
        ops: ops to limit the source digest to, for benchmarks without an engine.
        **more: further fields.
    """
    info = machine() | {"contract": family().contract_id, "sources": sources(*ops)} | more
    info["versions"] |= {package: version(package) for package in packages}
    return info


def sources(*ops: str) -> str:
    """Return a digest of the code that decides a measurement.

    Comments, docstrings and formatting do not change it, nor do tests, benchmarks and pages. Without `ops` it covers
    the adapters, the ops and their kernels; with `ops`, these ops, the ops that they call, and the code all ops share.
    """
    package = _sources.ROOT / "alignkit"
    found = {*_source_files(_sources.ROOT / "csrc")}
    for name in SHARED if ops else COMPUTING:
        found |= {*_source_files(package / name)}
    for op in ops:
        found |= _op_files(package / "ops" / op)
    found |= {file for file in (package / "ops").glob("*") if file.suffix in SOURCE_SUFFIXES}
    return code.digest(sorted(found), _sources.ROOT)[:12]


def _source_files(folder: Path) -> Iterator[Path]:
    return (file for file in folder.rglob("*") if file.suffix in SOURCE_SUFFIXES)


def _op_files(folder: Path) -> set[Path]:
    """Return the source files of an op and of the ops that it uses."""
    found = {*_source_files(folder)}
    assert found, f"ops: must be folders of alignkit/ops, got {folder.name!r}"
    for file in list(found):
        for other in OTHER_OP.findall(file.read_text()):
            if (folder.parent / other).is_dir():
                found |= _op_files(folder.parent / other)
    return found


def backend(device: torch.device) -> str:
    """Return the backend that ops use on `device`: ``cuda``, ``triton``, ..."""
    return dispatch.backend_of(device)


def read(path: Path) -> dict:
    """Return the contents of a result file; empty if it does not exist."""
    return json.loads(path.read_text()) if path.exists() else {}


def row_keys(old: dict, key: tuple[str, ...]) -> set[tuple]:
    """Return the keys of the rows of a result file."""
    return {_row_key(row, key) for row in old.get("rows", [])}


def with_sources(old: dict, digest: str) -> dict:
    """Return the runs of a result file that have this source digest, and their rows."""
    runs = {name: info for name, info in old.get("runs", {}).items() if info.get("sources") == digest}
    return {"runs": runs, "rows": [row for row in old.get("rows", []) if row["run"] in runs]}


def _row_key(row: dict, key: tuple[str, ...]) -> tuple:
    """Return the values of a row's key fields; None for fields that the row lacks."""
    return tuple(row.get(k) for k in key)


def merge(old: dict, name: str, info: dict, new: list[dict], key: tuple[str, ...]) -> dict:
    """Return the contents of a result file after run `name` added the rows `new`, which replace rows of equal `key`."""
    added = [row | {"run": name} for row in new]
    replaced = {_row_key(row, key) for row in added}
    kept = [row for row in old.get("rows", []) if _row_key(row, key) not in replaced]
    merged = kept + added
    runs = old.get("runs", {}) | {name: info}
    used = {row["run"] for row in merged}
    return {"runs": {k: v for k, v in runs.items() if k in used}, "rows": merged}


def write(path: Path, contents: dict) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    write_json(path, contents)
