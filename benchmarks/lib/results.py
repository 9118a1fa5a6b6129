"""Result files, ``NAME.jsonl``: JSON Lines, first the runs, then the rows.

A run is a line ``{"run": NAME, ...}`` with the environment; a row names its run in ``run``. In memory, a file is
``{"runs": {NAME: {...}}, "rows": [...]}``. A new row takes the place of the row that it replaces, so that a diff has
the changed rows alone. ``tables.py`` reads the keys of `run_info`.
"""

from __future__ import annotations

import datetime
import json
import os
import re
from collections.abc import Iterable, Iterator
from pathlib import Path

import torch

from alignkit import _sources
from alignkit.drift.compare import finite_or_none
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
SOURCE_SUFFIXES = (*_sources.SUFFIXES, ".py")
"""Suffixes of code; golden hashes (JSON) compute nothing."""
SAMPLES = "samples.py"
"""Files of alignkit/ops with random calls for the tests, which no computation reads."""


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
    found |= {file for file in (package / "ops").glob("*") if file.suffix in SOURCE_SUFFIXES and file.name != SAMPLES}
    return code.digest(sorted(found), _sources.ROOT)[:12]


def _source_files(folder: Path) -> Iterator[Path]:
    return (file for file in folder.rglob("*") if file.suffix in SOURCE_SUFFIXES and file.name != SAMPLES)


def _op_files(folder: Path) -> set[Path]:
    """Return the source files of an op and of the ops that it uses."""
    found = {*_source_files(folder)}
    assert found, f"ops: must be folders of alignkit/ops, got {folder.name!r}"
    for file in list(found):
        for other in OTHER_OP.findall(file.read_text()):
            if (folder.parent / other).is_dir():  # otherwise a module of alignkit/ops, which every op depends on
                found |= _op_files(folder.parent / other)
    return found


def backend(device: torch.device) -> str:
    """Return the backend that ops use on `device`: ``cuda``, ``triton``, ..."""
    return dispatch.backend_of(device)


def read(path: Path) -> dict:
    """Return the runs and rows of a result file, or an empty dictionary if it does not exist.

    The first line that has a name in ``run`` is the run of this name; the others with this name are its rows.

    Raises:
        ValueError: for a line that is not JSON, and for a row without its run.
    """
    if not path.exists():
        return {}
    runs: dict[str, dict] = {}
    rows: list[dict] = []
    for number, line in enumerate(path.read_text().splitlines(), 1):
        try:
            record = json.loads(line)
            name = record["run"]
        except (ValueError, KeyError, TypeError) as e:
            raise ValueError(f"{path}, line {number}: must be a JSON object with a run, got {line[:80]!r}") from e
        if name in runs:
            rows.append(record)
        elif rows:
            raise ValueError(f"{path}, line {number}: run must be the name of one of the first lines, got {name!r}")
        else:
            runs[name] = {key: value for key, value in record.items() if key != "run"}
    return {"runs": runs, "rows": rows}


def row_keys(old: dict, key: tuple[str, ...]) -> set[tuple]:
    """Return the keys of the rows of a result file."""
    return {_row_key(row, key) for row in old.get("rows", [])}


def with_sources(old: dict, digest: str) -> dict:
    """Return the runs of a result file that have this source digest, and their rows."""
    runs = {name: info for name, info in old.get("runs", {}).items() if info.get("sources") == digest}
    return {"runs": runs, "rows": [row for row in old.get("rows", []) if row["run"] in runs]}


def stale(contents: dict, digest: str, key: tuple[str, ...]) -> list[dict]:
    """Return the rows with these key fields that were measured with other sources than `digest`."""
    runs = contents.get("runs", {})
    rows = (row for row in contents.get("rows", []) if row.keys() >= {*key})
    return [row for row in rows if runs[row["run"]].get("sources") != digest]


def distinct(rows: Iterable[dict], *fields: str) -> list[tuple]:
    """Return the distinct values of these fields, in the rows' order."""
    return list(dict.fromkeys(tuple(row[field] for field in fields) for row in rows))


def _row_key(row: dict, key: tuple[str, ...]) -> tuple:
    """Return the values of a row's key fields; None for fields that the row lacks."""
    return tuple(row.get(k) for k in key)


def merge(old: dict, name: str, info: dict, new: list[dict], key: tuple[str, ...]) -> dict:
    """Return the contents of a result file after run `name` added the rows `new`.

    A new row takes the place of the row with equal `key`. Rows with other keys follow at the end.
    """
    added = {_row_key(row, key): row | {"run": name} for row in new}
    merged, placed = [], set()
    for row in old.get("rows", []):
        if (found := _row_key(row, key)) not in added:
            merged.append(row)
        elif found not in placed:
            placed.add(found)
            merged.append(added[found])
    merged += [row for found, row in added.items() if found not in placed]
    runs = old.get("runs", {}) | {name: info}
    used = {row["run"] for row in merged}
    return {"runs": {k: v for k, v in runs.items() if k in used}, "rows": merged}


def write(path: Path, contents: dict) -> None:
    """Write a result file; an interrupted call leaves the old file."""
    records = [{"run": name} | info for name, info in contents["runs"].items()] + contents["rows"]
    path.parent.mkdir(parents=True, exist_ok=True)
    new = path.with_name(f".{path.name}.{os.getpid()}")
    new.write_text("".join(json.dumps(finite_or_none(record), allow_nan=False) + "\n" for record in records))
    new.replace(path)
