"""The faults of `test_fuzz.py` on two GPUs: a wrong value may end in an assertion on the device, and the process."""

import os

import pytest

from . import run

FAULTS = int(os.environ.get("ALIGNKIT_FUZZ_FAULTS", "24"))
SEED = int(os.environ.get("ALIGNKIT_FUZZ_SEED", "17"))


@pytest.mark.skipif(not (run.MEGATRON and run.two_gpus()), reason="needs Megatron-core and two GPUs")
def test_rank_faults():
    tally = run.rank_faults(SEED, range(FAULTS), "cuda")
    assert sum(tally.totals().values()) == FAULTS
    assert not tally.failures, tally.told()
