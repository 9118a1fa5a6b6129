"""Settings and piece sizes of sums in symmetric memory (alignkit/dist/symmetric.py), without a GPU.

test_tp_cuda.py tests the sums over GPUs, test_symmetric_cuda.py the kernel.
"""

import datetime
import random
from types import SimpleNamespace

import pytest
import torch

from alignkit.dist import symmetric

DEVICE = torch.device("cpu")


def group(**options):
    return SimpleNamespace(_get_backend=lambda device: SimpleNamespace(**options))


def test_timeout_defaults_to_that_of_the_group(monkeypatch):
    monkeypatch.delenv("ALIGNKIT_SYMMETRIC_TIMEOUT", raising=False)
    given = SimpleNamespace(_timeout=datetime.timedelta(minutes=30))
    assert symmetric._timeout(group(options=given), DEVICE) == 1800
    assert symmetric._timeout(group(), DEVICE) == symmetric._timeout(group(options=None), DEVICE) == 600
    monkeypatch.setenv("ALIGNKIT_SYMMETRIC_TIMEOUT", "2.5")
    assert symmetric._timeout(group(options=given), DEVICE) == 2.5


@pytest.mark.parametrize("value", ["soon", "", "0", "-1", "nan", "inf"])
def test_invalid_timeout_disables_symmetric_memory_on_all_ranks(monkeypatch, value):
    """All ranks warn and continue without symmetric memory; one rank alone would leave the others waiting."""
    monkeypatch.setenv("ALIGNKIT_SYMMETRIC_TIMEOUT", value)
    with pytest.raises(ValueError, match=f"ALIGNKIT_SYMMETRIC_TIMEOUT: must be .* seconds .*, got {value!r}"):
        symmetric._timeout(group(), DEVICE)
    monkeypatch.setattr(symmetric, "_all_gather_objects", lambda group, value: [None, value])
    with pytest.warns(UserWarning, match="ALIGNKIT_SYMMETRIC_TIMEOUT"):
        assert symmetric._together(None, lambda: symmetric._timeout(group(), DEVICE)) is None


@pytest.mark.parametrize("columns", [1, 96, 4096, 5 * 8192, symmetric.PIECE // 8])
def test_pieces_have_about_equal_sizes(columns):
    rng = random.Random(columns)
    most = symmetric.PIECE // columns
    for height in [1, most, most + 1, *(rng.randint(1, 20 * most) for _ in range(20))]:
        pieces = symmetric._pieces(height, columns)
        assert [begin for begin, _ in pieces] == [0, *(end for _, end in pieces[:-1])] and pieces[-1][1] == height
        heights = [end - begin for begin, end in pieces]
        assert min(heights) > 0 and max(heights) * columns <= symmetric.PIECE
        assert all(begin % 8 == 0 for begin, _ in pieces) and len(set(heights[:-1])) <= 1
        if len(pieces) > 1:  # the smallest possible number
            assert len(pieces) == -(-height // (most // 8 * 8)) or heights[0] == 8 * -(-height // (8 * len(pieces)))


def test_schedules_are_within_the_limits_of_the_kernel():
    assert symmetric.OVERLAP_BLOCKS < symmetric.BLOCKS
    assert max(symmetric.ONE_SHOT_MAX.values()) <= symmetric.ONE_BARRIER
