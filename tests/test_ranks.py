"""`alignkit.testing.Ranks`, which starts the ranks of most tests, reports a dead process at once."""

import os
import time

from alignkit.testing import Failed, Ranks


def _rank_1_aborts(tp):
    if tp.rank == 1:
        os.abort()
    return tp.rank


def test_aborted_rank_is_reported_without_a_timeout():
    with Ranks(2) as ranks:
        ranks.run(2, str)
        started = time.monotonic()
        answered, ended = ranks.outcomes(2, _rank_1_aborts)
        assert time.monotonic() - started < 60
    assert answered == 0
    assert isinstance(ended, Failed) and ended.kind is ChildProcessError and ended.message == "exit code -6"
