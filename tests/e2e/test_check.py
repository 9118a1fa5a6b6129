"""`alignkit check --full`: every pairing of rollout and training, on real engines."""
import itertools
import json
import subprocess
import sys
from pathlib import Path

ROLLOUTS = {"batch", "one", "chunked", "prefix", "prompt_logprobs", "tp2"}
TRAININGS = {f"{tp}-{mode}" for tp in ("tp1", "tp2", "tp2-sp") for mode in ("one", "padded")}


def test_every_pairing_is_bit_equal(tmp_path):
    out = tmp_path / "results"
    done = subprocess.run([Path(sys.executable).with_name("alignkit"), "check", "--full", "--out", out], text=True,
                          capture_output=True, timeout=2400)
    assert done.returncode == 0, done.stdout + done.stderr
    rows = json.loads((out / "check.json").read_text())
    seen = {patched: [(r["dtype"], r["rollout"], r["training"]) for r in rows if r["patched"] is patched]
            for patched in (True, False)}
    expected = sorted(itertools.product(("bfloat16", "float32"), ROLLOUTS, TRAININGS))
    assert sorted(seen[True]) == sorted(seen[False]) == expected
    for row in rows:
        assert row["tokens"] == 8 * 64, row
        if row["patched"]:
            assert row["bit_equal"] == row["tokens"] and row["max_abs"] == row["mean_abs"] == 0.0, row
        else:  # a model on which nothing drifts would prove nothing
            assert row["bit_equal"] < row["tokens"] and row["max_abs"] > 0.0, row
    html = (out / "report.html").read_text()
    assert f"{512 * len(expected)} of {512 * len(expected)}" in html and "http" not in html.replace("http://www.w3.org", "")
