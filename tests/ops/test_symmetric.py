"""What is set about sums in symmetric memory; without a GPU. tests/ops/test_tp_cuda.py has the sums."""

import datetime
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


def test_the_head_is_that_of_the_kernel():
    source = (Path(symmetric.__file__).parents[2] / "csrc/sm90/rank_sum/all_reduce.cu").read_text()
    assert int(re.search(r"kHeadBytes = (\d+);", source)[1]) == symmetric.HEAD
    assert (
        1 << int(re.search(r"kMostOnce = 1 << (\d+);", source)[1]) == symmetric.ONCE >= max(symmetric.SHARED.values())
    )
