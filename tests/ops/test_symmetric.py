"""What is set about sums in symmetric memory; without a GPU. tests/ops/test_tp_cuda.py has the sums."""

import datetime
import random
import re
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from alignkit.dist import symmetric

DEVICE = torch.device("cpu")


def group(**options):
    return SimpleNamespace(_get_backend=lambda device: SimpleNamespace(**options))


def test_a_wait_is_as_long_as_the_groups(monkeypatch):
    monkeypatch.delenv("ALIGNKIT_SYMMETRIC_TIMEOUT", raising=False)
    given = SimpleNamespace(_timeout=datetime.timedelta(minutes=30))
    assert symmetric._timeout(group(options=given), DEVICE) == 1800
    assert symmetric._timeout(group(), DEVICE) == symmetric._timeout(group(options=None), DEVICE) == 600
    monkeypatch.setenv("ALIGNKIT_SYMMETRIC_TIMEOUT", "2.5")
    assert symmetric._timeout(group(options=given), DEVICE) == 2.5


@pytest.mark.parametrize("value", ["soon", "", "0", "-1", "nan", "inf"])
def test_a_wait_that_is_no_time(monkeypatch, value):
    """It is said on all ranks, which then do without symmetric memory: a rank that failed alone would leave others waiting."""
    monkeypatch.setenv("ALIGNKIT_SYMMETRIC_TIMEOUT", value)
    with pytest.raises(ValueError, match=f"ALIGNKIT_SYMMETRIC_TIMEOUT: {value!r}"):
        symmetric._timeout(group(), DEVICE)
    monkeypatch.setattr(symmetric, "_told", lambda group, value: [None, value])
    with pytest.warns(UserWarning, match="ALIGNKIT_SYMMETRIC_TIMEOUT"):
        assert symmetric._together(None, lambda: symmetric._timeout(group(), DEVICE)) is None


@pytest.mark.parametrize("columns", [1, 96, 4096, 5 * 8192, symmetric.PIECE // 8])
def test_pieces_are_about_as_large(columns):
    draw = random.Random(columns)
    most = symmetric.PIECE // columns
    for height in [1, most, most + 1, *(draw.randint(1, 20 * most) for _ in range(20))]:
        pieces = symmetric._pieces(height, columns)
        assert [begin for begin, _ in pieces] == [0, *(end for _, end in pieces[:-1])] and pieces[-1][1] == height
        heights = [end - begin for begin, end in pieces]
        assert min(heights) > 0 and max(heights) * columns <= symmetric.PIECE
        assert all(begin % 8 == 0 for begin, _ in pieces) and len(set(heights[:-1])) <= 1
        if len(pieces) > 1:  # no more than there must be
            assert len(pieces) == -(-height // (most // 8 * 8)) or heights[0] == 8 * -(-height // (8 * len(pieces)))


def test_the_head_is_that_of_the_kernel():
    source = (Path(symmetric.__file__).parents[2] / "csrc/sm90/rank_sum/all_reduce.cu").read_text()
    assert int(re.search(r"kHeadBytes = (\d+);", source)[1]) == symmetric.HEAD
    assert int(re.search(r"kMostBlocks = (\d+);", source)[1]) == symmetric.BLOCKS > symmetric.BESIDE
    assert (
        1 << int(re.search(r"kMostOnce = 1 << (\d+);", source)[1]) == symmetric.ONCE >= max(symmetric.SHARED.values())
    )
