"""Rollout, recomputation, a training step and the new weights in the running engine: the ratio stays exactly 1."""
import json
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLE = Path(__file__).parents[2] / "examples" / "on_policy.py"


def run(tmp_path, *arguments):
    out = tmp_path / "steps.jsonl"
    done = subprocess.run([sys.executable, EXAMPLE, "--json", out, *arguments], capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
    return [json.loads(line) for line in out.read_text().splitlines()]


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_aligned(tmp_path, dtype):
    steps = run(tmp_path, "--dtype", dtype)
    assert len(steps) == 3
    for step in steps:
        assert step["bit_equal"] == step["tokens"] > 0, step
        assert step["ratio_min"] == step["ratio_max"] == 1.0 and step["kl"] == 0.0, step
        assert step["weights_moved"] > 1000, step  # so step 1 and 2 compare weights that travelled


def test_stock_engines_drift(tmp_path):
    (step,) = run(tmp_path, "--stock")
    assert step["bit_equal"] < step["tokens"] and step["ratio_max"] > 1.0, step
