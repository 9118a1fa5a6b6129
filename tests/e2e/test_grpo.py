"""The GRPO example (examples/grpo.py) with real engines on a CPU.

Each step is a rollout, the training logprobs, an optimizer step and a weight update of the running engine. The
importance ratio must stay exactly 1 if aligned, and must not if stock.
"""

import json
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLE = Path(__file__).parents[2] / "examples" / "grpo.py"


def run(tmp_path, *arguments):
    out = tmp_path / "rows.jsonl"
    done = subprocess.run(
        [sys.executable, EXAMPLE, "--json", out, *arguments], capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return [json.loads(line) for line in out.read_text().splitlines()]


@pytest.mark.parametrize(
    "dtype, family, steps",
    [
        ("bfloat16", "qwen3", 4),
        pytest.param("float32", "qwen3", 4, marks=pytest.mark.matrix),
        pytest.param("bfloat16", "qwen3-moe", 2, marks=pytest.mark.slow),
    ],
)
def test_aligned_engines_keep_the_ratio_at_exactly_1(tmp_path, dtype, family, steps):
    rows = run(tmp_path, "--dtype", dtype, "--model-family", family, "--steps", str(steps))
    assert [row["step"] for row in rows] == list(range(steps))
    for row in rows:
        assert row["bit_equal"] == row["tokens"] > 0, row
        assert row["ratio_min"] == row["ratio_max"] == 1.0 and row["kl"] == 0.0, row
        assert row["weights_moved"] > 1000, row  # later steps compare updated weights
    assert rows[-1]["reward"] > rows[0]["reward"]  # the gradients increase the reward


FAULT = """
import runpy
import sys

from alignkit.megatron import build

hf_weights = build.hf_weights
build.hf_weights = lambda *args: (w for w in hf_weights(*args) if w[0] != "model.layers.1.mlp.up_proj.weight")
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def test_an_update_that_skips_a_tensor_is_named():
    command = [sys.executable, "-c", FAULT, EXAMPLE, "--steps", "2"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    message = "AlignkitError: weight update: model.layers.1.mlp.up_proj.weight: the weights differ"
    assert done.returncode and message in done.stderr and "step 0" not in done.stdout, done.stdout + done.stderr


@pytest.mark.slow
def test_stock_engines_drift(tmp_path):
    (row,) = run(tmp_path, "--stock")
    assert row["bit_equal"] < row["tokens"] and row["ratio_max"] > 1.0 and row["kl"] > 0.0, row


def test_plot_writes_a_png(tmp_path):
    pytest.importorskip("matplotlib")
    row = {"engines": "stock", "ratio_min": 0.9, "ratio_max": 1.1, "kl": 1e-3, "reward": 0.5}
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row | {"step": i}) + "\n" for i in range(3)))
    plot = tmp_path / "a.png"
    subprocess.run([sys.executable, EXAMPLE, "--rows", tmp_path / "a.jsonl", "--plot", plot], check=True, timeout=120)
    assert plot.read_bytes().startswith(b"\x89PNG")
