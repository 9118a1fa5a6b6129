"""The bits of the engines' ops, forward and backward, as they were when the contract's id was last changed."""
import os

import pytest

from alignkit import backends, golden

DEVICE = os.environ.get("ALIGNKIT_TEST_DEVICE", "cpu")


@pytest.fixture(scope="module")
def kept() -> dict:
    return golden.load(backends.family(DEVICE))


def test_every_case_is_kept(kept):
    assert kept.keys() == golden.CASES.keys()


@pytest.mark.parametrize("case", golden.CASES)
def test_bits_are_those_of_the_contract(kept, case):
    assert golden.hashes(case, DEVICE) == kept[case]
