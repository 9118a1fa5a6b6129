"""`alignkit check` with real vLLM and Megatron-core on a CPU: every pairing of a rollout and a training layout.

Aligned rows must be bit-equal, and stock rows must drift, or equality would prove nothing. `make check` compares
most pairings too, `make test` a part, `make test-slow` the routing, and `make test-matrix` everything.
"""

import itertools
import json

import pytest
import torch

from alignkit.check import plan, run
from alignkit.cli import main
from alignkit.jobs.execute import Progress
from alignkit.jobs.model import make_checkpoint

ROLLOUTS = {"batch", "one", "chunked", "prefix", "prompt_logprobs", "tp2"}
TRAININGS = {f"{tp}-{mode}" for tp in ("tp1", "tp2", "tp2-sp") for mode in ("one", "padded")}
STOCK = set(itertools.product(["bfloat16"], ("batch", "one"), ("tp1-one", "tp1-padded")))
"""Stock pairings that show that the model drifts; without drift, equal bits would prove nothing.

tests/vllm/test_invariance.py compares stock engines in fp32.
"""
TOKENS = 16
"""Tokens sampled per prompt; prompts of 17, 64 and 190 tokens reach a new KV cache block."""
SMALL = {"hidden": 256, "layers": 2, "heads": 4, "intermediate": 512}
"""Small sizes at which row-parallel layers still have all eight k-tree leaves."""


@pytest.mark.matrix
def test_every_pairing_is_bit_equal(tmp_path, monkeypatch, capfd):
    all_rows, out = plan.rows, tmp_path / "results"
    monkeypatch.setattr(
        plan,
        "rows",
        lambda *args: [
            row for row in all_rows(*args) if row.patched or (row.dtype, row.rollout, row.training) in STOCK
        ],
    )
    model = make_checkpoint(tmp_path / "model", dtype=torch.bfloat16, **SMALL)
    command = ["check", "--full", "--tp", "2", "--max-tokens", str(TOKENS), "--model", str(model), "--out", str(out)]
    with pytest.raises(SystemExit) as status:
        main(command)
    assert status.value.code == 0, capfd.readouterr()
    rows = json.loads((out / "check.json").read_text())
    seen = {
        patched: {(r["dtype"], r["rollout"], r["training"]) for r in rows if r["patched"] is patched}
        for patched in (True, False)
    }
    dtypes = ("bfloat16", "float32")
    expected = set(itertools.product(dtypes, ROLLOUTS, TRAININGS))
    assert seen[True] == expected and len(rows) == len(expected) + len(STOCK)
    assert seen[False] == STOCK
    for row in rows:
        assert row["tokens"] == 8 * TOKENS, row
        if row["patched"]:
            assert row["bit_equal"] == row["tokens"] and row["max_abs"] == row["mean_abs"] == 0.0, row
        else:
            assert row["bit_equal"] < row["tokens"] and row["max_abs"] > 0.0, row
    html = (out / "report.html").read_text()
    assert f"{8 * TOKENS * len(expected)} of {8 * TOKENS * len(expected)}" in html
    assert "http" not in html.replace("http://www.w3.org", "")


def test_some_pairings_are_bit_equal(tmp_path, monkeypatch):
    """Fast subset: two rollouts and two trainings of a dense model."""
    pairs = (("batch", "tp1-padded"), ("chunked", "tp2-sp-one"))
    rows = [plan.Row("bfloat16", *pair, True) for pair in pairs]
    monkeypatch.setattr(plan, "rows", lambda *args: rows)
    model = make_checkpoint(tmp_path / "model", dtype=torch.bfloat16, **SMALL)
    options = run.Options(out=tmp_path / "out", model=model, dtypes=["bfloat16"], tp=2, max_tokens=TOKENS)
    compared = run.run(options, Progress()).compared
    assert all(c.report.all_equal and c.report.tokens == 8 * TOKENS for c in compared) and len(compared) == len(pairs)


@pytest.mark.slow
def test_routing_is_equal_when_aligned_and_differs_when_stock(tmp_path, monkeypatch):
    rows = [plan.Row("bfloat16", "batch", "tp1-padded", patched) for patched in (False, True)]
    monkeypatch.setattr(plan, "rows", lambda *args: rows)
    model = make_checkpoint(tmp_path / "model", "qwen3_moe", torch.bfloat16, **SMALL | {"intermediate": 128})
    options = run.Options(out=tmp_path / "out", model=model, dtypes=["bfloat16"], tp=1, max_tokens=TOKENS)
    stock, patched = run.run(options, Progress()).compared
    tokens = sum(plan.PROMPT_LENGTHS) + 8 * (TOKENS - 1)
    assert patched.report.all_equal and patched.routing == (0, tokens)
    assert not stock.report.all_equal and 0 < stock.routing[0] < stock.routing[1] == tokens
