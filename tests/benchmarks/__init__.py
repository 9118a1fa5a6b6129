"""Tests of benchmarks/."""

import json
from pathlib import Path


def stored(path: Path) -> dict:
    """Return the runs and rows of a result file."""
    runs, rows = {}, []
    for record in map(json.loads, path.read_text().splitlines()):
        if record["run"] in runs:
            rows.append(record)
        else:
            runs[record["run"]] = record
    return {"runs": runs, "rows": rows}
