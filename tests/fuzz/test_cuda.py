"""Rank faults of `test_fuzz.py` on two GPUs over NCCL, part of `make gpu-test`.

A wrong value in device memory may end the process by a device assertion instead of an exception.
"""

import os

import pytest

from . import run

FAULTS = int(os.environ.get("ALIGNKIT_FUZZ_FAULTS", "24"))
SEED = int(os.environ.get("ALIGNKIT_FUZZ_SEED", "17"))


@pytest.mark.skipif(not (run.HAS_MEGATRON and run.two_gpus()), reason="needs Megatron-core and two GPUs")
def test_fault_on_one_rank_raises_on_both():
    tally = run.rank_faults(SEED, range(FAULTS), "cuda")
    assert sum(tally.totals().values()) == FAULTS
    assert not tally.failures, tally.report()
