"""The comparison of two checkouts, benchmarks/before_after.py, on this CPU."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import torch

from alignkit import ops

ROOT = Path(__file__).parents[2]
COUNTS = ("--cases", "1", "--rounds", "5", "--calls", "3", "--longest", "16")


def run(before: Path, out: Path, *arguments: str) -> str:
    """Compare `before` with this checkout and return the output."""
    command = [sys.executable, ROOT / "benchmarks/before_after.py", "--before", before, "--json", out]
    done = subprocess.run([*map(str, command), *COUNTS, *arguments], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_slower_checkout_is_found(tmp_path):
    """A call of 20 ms in the old checkout gives a ratio far below 1; an op that the old one lacks is reported."""
    old = tmp_path / "old"
    for folder in ("alignkit", "csrc"):  # a library knows its sources
        shutil.copytree(ROOT / folder, old / folder, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "setup.py", old)
    file = old / "alignkit/ops/__init__.py"
    file.write_text(
        file.read_text()
        + "import time\n_fast = silu_mul\ndef silu_mul(*a):\n    time.sleep(0.02)\n    return _fast(*a)\ndel rope\n"
    )
    text = run(old, tmp_path / "rows.jsonl", "--ops", "silu_mul", "rope")
    rows = [json.loads(line) for line in (tmp_path / "rows.jsonl").read_text().splitlines()][1:]
    found = {row["case"].split()[0] for row in rows}
    assert found == {"silu_mul"} and "rope forward 0.0: not measured: AttributeError" in text, text
    assert all(row["ratio"] < 0.5 and row["before_us"] > 2e4 for row in rows) and len(rows) == 2


def test_the_summary_names_slower_cases(module):
    """A ratio above the slack plus its spread is named, one within it is not."""
    row = {"of": "host", "before_us": 1.0, "control": 1.0}
    rows = [row | {"case": "a", "ratio": 1.05, "spread": 0.01}, row | {"case": "b", "ratio": 1.05, "spread": 0.04}]
    text = module("before_after").summary(rows)
    assert "slower: a: 1.050" in text and "slower: b" not in text and "1 above 1.02" in text


def test_every_public_op_has_cases(module):
    """Every op of alignkit.ops with tensors is timed; the same name gives the same problem."""
    module("before_after")
    sys.path.insert(0, str(ROOT / "benchmarks/lib"))
    try:
        paired = module("paired")
    finally:
        sys.path.remove(str(ROOT / "benchmarks/lib"))
    assert {*paired.FORWARD} == {*ops.__all__} - {"rope_table", "delta_page_words"}
    device = torch.device("cpu")
    drawn = []
    for name in ("linear forward 0.0", "linear forward 0.0", "linear forward 0.1"):
        draw = paired.Draw(name, device, 64)
        drawn.append((draw.rows(), draw.floats(4).tolist()))
    assert drawn[0] == drawn[1] != drawn[2]
