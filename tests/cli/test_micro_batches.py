"""Micro-batches of the training jobs of `alignkit check`: their token limit, and invalid values."""

import pytest

from alignkit.errors import InputError
from alignkit.jobs.model import make_checkpoint
from alignkit.jobs.train import _check, _micro_batches


def pairs(*lengths):
    return [([i] * (n - 1), [i]) for i, n in enumerate(lengths)]


@pytest.mark.parametrize(
    "tokens, sizes",
    [
        (None, [5]),
        (1000, [5]),
        (60, [2, 1, 2]),  # 2 * 20, then 3 * 40 would be too many, and 40 + 30 padded too
        (1, [1, 1, 1, 1, 1]),  # sequences are never split
    ],
)
def test_padded_micro_batches_respect_the_token_limit(tokens, sizes):
    given = pairs(10, 20, 40, 30, 5)
    parts = list(_micro_batches(given, tokens))
    assert [len(part) for part in parts] == sizes
    assert [pair for part in parts for pair in part] == given
    for part in parts:
        assert tokens is None or len(part) == 1 or len(part) * max(len(p) + len(s) for p, s in part) <= tokens


@pytest.mark.parametrize("value", [0, -1, 1.5, "8"])
def test_an_invalid_micro_batch_is_rejected(value, tmp_path):
    model = make_checkpoint(
        tmp_path / "m", hidden=64, layers=1, heads=2, kv_heads=2, head_dim=32, intermediate=64, vocab=100
    )
    job = {"model": str(model), "dtype": "bfloat16", "patched": True, "tp": 1, "runs": [], "micro_batch": value}
    with pytest.raises(InputError, match="micro_batch"):
        _check(job)
