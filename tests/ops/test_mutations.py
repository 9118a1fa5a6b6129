"""The self-test notices mutated kernels (mutations.py): a few in `make test`, the others in `make test-slow`."""

import functools

import pytest

from .helpers import CPU
from .mutations import CPP, MUTATIONS, hashes, missing, noticed, of_device

pytestmark = pytest.mark.skipif(not CPU, reason="`make gpu-mutations` mutates the kernels of a GPU")
FIRST = ("k reversed", "leaves added in order", "lanes added by neighbors")
"""Mutations of `make test`."""


@functools.cache
def baseline(backend: str) -> dict[str, list[str]]:
    return hashes(None, backend, "cpu")


@pytest.mark.parametrize(
    "mutation",
    [
        pytest.param(each, marks=() if each.file == CPP and each.name in FIRST else pytest.mark.slow)
        for each in of_device("cpu")
    ],
    ids=lambda each: f"{each.backend}: {each.name}",
)
def test_golden_bits_notice_a_mutation(mutation):
    found = noticed(mutation, baseline(mutation.backend), "cpu")
    assert not missing(mutation, found), found


def test_every_mutation_names_the_cases_that_notice_it():
    assert all(each.noticed for each in MUTATIONS)
    assert len({(each.backend, each.name) for each in MUTATIONS}) == len(MUTATIONS)
