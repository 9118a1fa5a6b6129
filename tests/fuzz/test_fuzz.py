"""A short fuzz run on the CPU, and tests that the fuzzer detects planted errors.

`make test` runs the first cases, `make test-slow` the others, and ``make fuzz`` a long run. ALIGNKIT_FUZZ_SEED sets the
seed; ALIGNKIT_FUZZ_CALLS and ALIGNKIT_FUZZ_FAULTS set the number of calls and faults.
"""

import ctypes
import os
import time

import pytest
import torch

from alignkit.errors import InputError
from alignkit.ops.registry import RECORDS
from alignkit.ops.samples import Sample, Scalar, Tensor
from tests.samples import examples

from . import draw, faults, judge, pair, pool, run

SEED = int(os.environ.get("ALIGNKIT_FUZZ_SEED", "17"))
CALLS = int(os.environ.get("ALIGNKIT_FUZZ_CALLS", "3000"))
FAULTS = int(os.environ.get("ALIGNKIT_FUZZ_FAULTS", "60"))

pytestmark = pytest.mark.skipif(
    os.environ.get("ALIGNKIT_TEST_DEVICE", "cpu") != "cpu", reason="the fuzzer's calls run on the CPU"
)
X = torch.tensor([1.0, -2.0, 3.0])


def verdict(call, must=draw.ANSWER, names=("x",), leaves=(), **changes):
    """Return the verdict on a planted op that should double x."""
    problem = Sample(
        "double", call, {"x": Tensor(X, leaf=True), "by": Scalar(2.0, "positive")}, reference=lambda x, by: x * by
    )
    args, twin = ({"x": X.clone().requires_grad_("x" in leaves), "by": 2.0} for _ in range(2))
    generated = draw.Draw(problem, args, twin, list(leaves), must, names=set(names), **changes)
    return judge._verdict(generated)[0]


def raises(error):
    def call(x, by):
        raise error

    return call


def writes(x, by):
    y = x * by
    x.zero_()
    return y


def sets_threads(x, by):
    torch.set_num_threads(torch.get_num_threads() + 1)
    return x * by


def test_right_results_and_clear_errors_are_accepted():
    assert verdict(lambda x, by: x * by) == "right"
    assert verdict(lambda x, by: x * by, leaves=["x"], backward=["2 threads"]) == "right"
    assert verdict(raises(InputError("x: is odd")), draw.REJECT) == "clear error"
    assert verdict(raises(InputError("x: is odd")), draw.EITHER) == "clear error"


@pytest.mark.parametrize(
    "call, must, expected",
    [
        (lambda x, by: x * by + 2.0**-22, draw.ANSWER, "wrong"),  # one bit
        (lambda x, by: (x * by).double(), draw.ANSWER, "wrong"),
        (lambda x, by: (x * by)[None], draw.EITHER, "wrong"),
        (lambda x, by: x * by, draw.REJECT, "wrong"),
        (raises(InputError("x: is odd")), draw.ANSWER, "wrong"),
        (writes, draw.ANSWER, "wrong"),
        (raises(InputError("hidden: is odd")), draw.REJECT, "obscure"),
        (raises(TypeError("x: is odd")), draw.REJECT, "obscure"),
    ],
)
def test_planted_error_is_detected(call, must, expected):
    assert verdict(call, must) == expected


def test_changed_process_state_is_detected():
    before = torch.get_num_threads()
    try:
        assert verdict(sets_threads) == "wrong"
    finally:
        torch.set_num_threads(before)


def planted(what, number):
    """Run as a job of the pool: die, hang, fail or return `number`."""
    if what == "dies":
        ctypes.string_at(0)
    if what == "hangs":
        time.sleep(60)
    if what == "fails":
        raise KeyError("its own")
    return number


def test_pool_survives_the_death_of_its_workers():
    jobs = [(what, i) for i, what in enumerate(["runs", "dies", "runs", "hangs", "fails", "runs", "dies", "runs"])]
    ended = {
        job: (outcome, value) for job, outcome, value in pool.outcomes("tests.fuzz.test_fuzz:planted", jobs, 2, 10.0)
    }
    assert {job: outcome for job, (outcome, _) in ended.items()} == {
        job: {"runs": "done", "dies": "crashed", "hangs": "hung", "fails": "failed"}[job[0]] for job in jobs
    }
    assert ended["dies", 1][1].startswith("SIGSEGV") and "planted" in ended["dies", 1][1]
    assert "KeyError" in ended["fails", 4][1] and ended["runs", 7][1] == 7


def test_case_depends_only_on_seed_and_index():
    def texts(numbers):
        return [draw.draw(5, i).text() for i in numbers] + [faults.draw(5, i).text() for i in numbers]

    assert texts(range(20)) == texts(range(20)) and len(set(texts(range(20)))) > 30


def test_population_covers_every_op_and_verdict():
    cases = [draw.draw(SEED, i) for i in range(800)]
    names = {sample.op for record in RECORDS for sample in examples(record, 40)}
    assert {d.sample.op for d in cases} >= names
    for must, least in ((draw.ANSWER, 200), (draw.EITHER, 25), (draw.REJECT, 150)):
        assert sum(d.must == must for d in cases) > least, must
    assert sum(bool(d.leaves) for d in cases) > 100


ANSWERS = [("answer", "bits", "own"), ("answer", "bits", "own")]
REJECTIONS = [("raised", "alignkit", "InputError", "x: is odd"), ("raised", "foreign", "KeyError", "its own")]


@pytest.mark.parametrize(
    "must, answers, expected",
    [
        (draw.REJECT, REJECTIONS, "clear error"),
        (draw.REJECT, REJECTIONS[::-1], "obscure"),  # the rank without the fault must raise an alignkit error
        (draw.REJECT, ANSWERS, "wrong"),
        (draw.REJECT, [REJECTIONS[0], ANSWERS[1]], "wrong"),
        (draw.REJECT, [("hung",), REJECTIONS[1]], "hung"),
        (draw.REJECT, [("ended", -6), REJECTIONS[1]], "crashed"),
        (draw.EITHER, ANSWERS, "right"),
        (draw.ANSWER, [("answer", "other", "own")] * 2, "wrong"),
        (draw.ANSWER, REJECTIONS, "wrong"),
    ],
)
def test_verdict_on_the_outcomes_of_two_ranks(must, answers, expected):
    fault = faults.Fault(0, 0, None, rank=1, must=must)
    assert pair._verdict(fault, ANSWERS, answers, "cpu")[0] == expected


def first_and_others(first, total):
    """Parametrize over two ranges of numbers; the second is slow."""
    parts = range(min(first, total)), range(min(first, total), total)
    return pytest.mark.parametrize(
        "numbers", [parts[0], pytest.param(parts[1], marks=pytest.mark.slow)], ids=["first", "others"]
    )


@first_and_others(300, CALLS)
def test_random_calls_give_right_bits_or_a_clear_error(numbers):
    tally = run.calls(SEED, numbers, workers=min(2, os.cpu_count()))
    assert sum(tally.totals().values()) == len(numbers)
    assert not tally.failures, tally.report()


@pytest.mark.skipif(not run.HAS_MEGATRON, reason="needs Megatron-core")
@first_and_others(12, FAULTS)
def test_fault_on_one_rank_raises_on_both(numbers):
    tally = run.rank_faults(SEED, numbers)
    assert sum(tally.totals().values()) == len(numbers)
    assert not tally.failures, tally.report()
