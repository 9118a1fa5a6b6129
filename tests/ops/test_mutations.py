"""The self-test notices mutated kernels (mutations/).

`make test` runs a few of them, `make test-slow` a third of the others, `make test-matrix` the rest.
"""

import functools

import pytest

from .helpers import CPU
from .mutations.mutation import ROOT
from .mutations.run import MUTATIONS, hashes, noticed, of_device

pytestmark = pytest.mark.skipif(not CPU, reason="`make gpu-mutations` mutates the kernels of a GPU")
FIRST = ("k reversed",)
"""Mutation of the C++ kernels in `make test`."""


def params():
    for i, each in enumerate(of_device("cpu")):
        in_test = each.backend == "cpu" and each.name in FIRST
        yield pytest.param(each, marks=() if in_test else pytest.mark.slow if i % 3 == 0 else pytest.mark.matrix)


@functools.cache
def baseline(backend: str) -> dict[str, list[str]]:
    return hashes(None, backend, "cpu")


@pytest.mark.parametrize("mutation", list(params()), ids=lambda each: f"{each.backend}: {each.name}")
def test_golden_bits_notice_a_mutation(mutation):
    found = noticed(mutation, baseline(mutation.backend), "cpu")
    assert not mutation.missing(found), found


def test_every_mutation_names_the_cases_that_notice_it():
    assert all(each.noticed for each in MUTATIONS)
    assert len({(each.backend, each.name) for each in MUTATIONS}) == len(MUTATIONS)


@pytest.mark.parametrize("backend", ["cpu", "reference", "triton", "cuda"])
def test_mutations_match_the_sources(backend):
    for each in (each for each in MUTATIONS if each.backend == backend):
        for change in each.changes:
            assert (ROOT / change.file).read_text().count(change.old) == change.times, (each.name, change.old)


def test_every_trial_of_a_mutation_exists():
    from alignkit.ops.registry import RECORDS

    kernels = {f"{op}/{kernel.name}" for record in RECORDS for op in record.kernels for kernel in record.kernels[op]}
    trials = {case.removeprefix("trial ") for each in MUTATIONS for case in each.noticed if case.startswith("trial ")}
    assert trials <= kernels
