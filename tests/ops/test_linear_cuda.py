"""Linear on a GPU: all kernels give the same bits, and cuBLASLt runs only algorithms that passed a trial for them.

Tests without `needs_gpu` run on a CPU too, with classes in place of cublaslt.py's `_Product` and `_Trial`.
"""

import logging
import random
import sys

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings

from alignkit import BackendError
from alignkit.ops import linear
from alignkit.ops.linear import cublaslt, matmul
from alignkit.ops.linear.problem import Product
from alignkit.runtime import dispatch, families
from alignkit.testing import assert_bitwise_equal

from .helpers import CPU, by_hopper, hopper_without_gpu, randn, seeds  # noqa: F401 - used by pytest

linear_ops = sys.modules[matmul.__module__]  # the function linear has the module's name
needs_gpu = pytest.mark.skipif(CPU, reason="needs a GPU")
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


@pytest.fixture
def fresh(monkeypatch):
    """Clear all cached decisions."""
    monkeypatch.setattr(linear_ops, "_launches", {})
    monkeypatch.setattr(cublaslt, "_launchers", {})
    monkeypatch.setattr(cublaslt, "_algorithms", {})
    monkeypatch.setattr(cublaslt, "_verdicts", {})


def operands(m, n, k, a_by_k=True, b_by_k=True, pad=0, dtype=BF16):
    """Return a [m, k] and b [n, k], with `pad` elements between rows (or columns)."""
    a, b = (
        randn(rows, k + pad, dtype=dtype)[:, :k] if by_k else randn(k, rows + pad, dtype=dtype)[:, :rows].t()
        for rows, by_k in ((m, a_by_k), (n, b_by_k))
    )
    return a, b


def cublaslt_problem(a, b, bias, out, accumulate):
    """Return the problem for cuBLASLt, or None if cuBLASLt does not support it."""
    p = Product.of(families.TRITON, a, b, 1, bias, out, accumulate)
    return cublaslt.problem(p) if cublaslt.rejects(p) is None else None


def launch_cublaslt(a, b, bias, out, accumulate) -> bool:
    """Compute the product by cuBLASLt; return False if it declines."""
    p = Product.of(families.TRITON, a, b, 1, bias, out, accumulate)
    launch = cublaslt.prepare(p) if cublaslt.rejects(p) is None else None
    if launch is not None:
        launch(a, b, bias, out)
    return launch is not None


def by_triton(a, b, out_dtype=BF16, base=None, bias=None):
    from alignkit.ops.linear.triton_backend import chain

    out = torch.empty(a.shape[0], b.shape[0], dtype=out_dtype) if base is None else base.clone()
    chain(a, b, bias, out, base is not None)
    return out


def by_cublaslt(a, b, out_dtype=BF16, base=None, bias=None):
    """Return cuBLASLt's result, or None if it declines."""
    out = torch.full((a.shape[0], b.shape[0]), float("nan"), dtype=out_dtype) if base is None else base.clone()
    return out if launch_cublaslt(a, b, bias, out, base is not None) else None


@pytest.mark.parametrize("a_by_k,b_by_k", [(True, True), (True, False), (False, False), (False, True)])
def test_problem_describes_operands_and_trial(a_by_k, b_by_k):
    a, b = operands(40, 24, 64, a_by_k, b_by_k, pad=8)
    p = cublaslt_problem(a, b, None, torch.empty(40, 24, dtype=BF16), False)
    assert p[1:] == (
        40,
        24,
        64,
        a_by_k,
        72 if a_by_k else 48,
        b_by_k,
        72 if b_by_k else 32,
        24,
        BF16,
        BF16,
        False,
        False,
    )
    trial = cublaslt._trial_of(p._replace(m=5000, n=151936, k=2**14 + 9))
    assert (trial.m, trial.n, trial.k) == (512, 2048, 2**14 + 9)
    assert trial.lda == (2**14 + 16 if a_by_k else 512) and trial.ldb == (2**14 + 16 if b_by_k else 2048)
    assert cublaslt._trial_of(p)[1:4] == (64, 32, 64)


@pytest.mark.parametrize(
    "k,m,n",
    [
        (1, 512, 2048),
        (1088, 512, 2048),
        (26214, 512, 2048),
        (26215, 256, 1024),
        (52429, 128, 512),
        (151936, 128, 512),
        (2**20, 128, 512),
    ],
)
def test_trial_has_the_problems_k_and_bounded_memory(k, m, n):
    """A trial with a long k has fewer outputs, but always more than one tile."""
    a, b = operands(1, 8, 8)
    p = cublaslt_problem(a, b, None, torch.empty(1, 8), False)._replace(m=5000, n=6144, k=k)
    trial = cublaslt._trial_of(p)
    assert (trial.m, trial.n, trial.k) == (m, n, k)
    assert (m + n) * k <= 2**26 or (m, n) == (128, 512)
    assert cublaslt._trial_of(p._replace(m=3, n=40))[1:4] == (4, 64, k)


def test_single_row_may_have_any_stride():
    a, b = operands(1, 24, 64)
    p = cublaslt_problem(a.as_strided((1, 64), (3, 1)), b, None, torch.empty(1, 24), True)
    assert (p.lda, p.ldc) == (64, 24) and p.accumulate


@pytest.mark.parametrize(
    "case",
    [
        "fp32",
        "mixed",
        "no k",
        "odd rows",
        "odd out",
        "address",
        "expanded",
        "overlapping",
        "both strided",
        "out by column",
        "other out",
        "bias's type",
        "bias's stride",
        "bias's address",
    ],
)
def test_unsupported_operands_are_left_to_triton(case):
    a, b = operands(40, 24, 64)
    out, bias = torch.zeros(40, 24), None
    if case == "fp32":
        a, b = a.float(), b.float()
    elif case == "mixed":
        a = a.float()
    elif case == "no k":
        a, b = a[:, :0], b[:, :0]
    elif case == "odd rows":
        a = operands(40, 24, 64, pad=4)[0]
    elif case == "odd out":
        out = torch.empty(40, 28)[:, :24]
    elif case == "address":
        a = operands(40, 24, 64, pad=8)[0].as_strided((40, 64), (72, 1), 4)
    elif case == "expanded":
        a = a[:1].expand(40, 64)
    elif case == "overlapping":
        a = a.as_strided((40, 64), (8, 1))
    elif case == "both strided":
        a = randn(40, 64, 2, dtype=BF16)[..., 0]
    elif case == "out by column":
        out = torch.empty(24, 40).t()
    elif case == "other out":
        out = out.half()
    elif case == "bias's type":
        bias = randn(24, dtype=BF16)
    elif case == "bias's stride":
        bias = randn(24, 2)[:, 0]
    elif case == "bias's address":
        bias = randn(25)[1:]
    assert cublaslt_problem(a, b, bias, out, False) is None


@pytest.mark.parametrize("dtype", [BF16, FP16])
@pytest.mark.parametrize("out_dtype", [FP32, None])
def test_bias_is_supported_without_accumulation(dtype, out_dtype):
    a, b = operands(40, 24, 64, dtype=dtype)
    out = torch.empty(40, 24, dtype=out_dtype or dtype)
    p = cublaslt_problem(a, b, randn(24, dtype=out.dtype), out, False)
    assert p.bias and (p.dtype, p.out_dtype) == (dtype, out.dtype)
    assert cublaslt_problem(a, b, randn(24, dtype=out.dtype), out, True) is None


def test_decision_is_deferred_and_made_once(fresh, monkeypatch):
    """A new problem is not decided during graph capture; later it is decided once, and a rejection is cached too."""
    a, b = operands(40, 24, 64)
    out = torch.zeros(40, 24)
    capturing, decided, calls = [True], [], []
    monkeypatch.setattr(cublaslt, "_library", lambda: object())
    monkeypatch.setattr(cublaslt, "stream", lambda device: 7)
    monkeypatch.setattr(cublaslt, "_chain", lambda: None)
    monkeypatch.setattr(torch.cuda, "current_device", a.get_device)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: capturing[0])
    answers = [None, lambda *addresses: calls.append(addresses)]
    monkeypatch.setattr(cublaslt, "_decide", lambda p, chain: decided.append(p) or answers[p.accumulate])
    for accumulate in (False, True):
        assert not launch_cublaslt(a, b, None, out, accumulate)
    assert not decided
    capturing[0] = False
    for _ in range(2):
        assert not launch_cublaslt(a, b, None, out, False)
        assert launch_cublaslt(a, b, None, out, True)
    capturing[0] = True
    assert launch_cublaslt(a, b, None, out, True)
    assert [p.accumulate for p in decided] == [False, True]
    assert calls == [(a.data_ptr(), b.data_ptr(), 0, out.data_ptr(), 7)] * 3


def trials(monkeypatch, passes):
    """Replace trials by `passes(algorithm, problem)`, without operands."""

    class Trial:
        def __init__(self, p, chain):
            self.passes = lambda algorithm: passes(algorithm, p)

    monkeypatch.setattr(cublaslt, "_Trial", Trial)


def test_failed_algorithm_is_logged_once_and_skipped(fresh, monkeypatch, caplog):
    """Algorithms that split k are not tried; after a failure, the next suggestion is tried."""
    caplog.set_level(logging.INFO, cublaslt.__name__)
    a, b = operands(40, 24, 64)
    p = cublaslt_problem(a, b, None, torch.empty(40, 24), False)
    configurations = {
        b"split": {"split_k": 4, "reduction": 0},
        b"reduces": {"split_k": 1, "reduction": 2},
        b"wrong": {"id": 11, "split_k": 1, "reduction": 0},
        b"right": {"id": 12, "split_k": 1, "reduction": 0},
    }
    tried = []
    monkeypatch.setattr(cublaslt, "configuration", configurations.__getitem__)
    trials(monkeypatch, lambda algorithm, _: tried.append(algorithm) or algorithm == b"right")
    for _ in range(2):
        assert list(cublaslt._admitted(p, list(configurations), None)) == [b"right"]
    assert tried == [b"wrong", b"right"]
    messages = [r.getMessage() for r in caplog.records]
    assert len(messages) == 1 and "'id': 11" in messages[0] and "failed the trial" in messages[0]


def test_algorithm_is_tried_once_per_k(fresh, monkeypatch):
    """Values of k that agree modulo 64 need separate trials too. The number of cached verdicts is bounded."""
    a, b = operands(40, 24, 64)
    p = cublaslt_problem(a, b, None, torch.empty(40, 24), False)
    tried = []
    monkeypatch.setattr(cublaslt, "configuration", lambda algorithm: {"split_k": 1, "reduction": 0})
    trials(monkeypatch, lambda algorithm, p: tried.append(p.k) or p.k < 5000)
    for k in (1024, 4096, 4096 + 64, 8192, 4096, 1024, 8192):
        assert list(cublaslt._admitted(p._replace(k=k), [b"one"], None)) == ([b"one"] if k < 5000 else [])
    assert tried == [1024, 4096, 4096 + 64, 8192]
    monkeypatch.setattr(cublaslt, "_CACHE_SIZE", 3)
    list(cublaslt._admitted(p._replace(k=16), [b"one"], None))
    assert len(cublaslt._verdicts) == 1


@pytest.mark.parametrize("most", [1, 8, 257, 5000])
def test_warmup_rows_cover_all_row_counts(most):
    rows = range(1, most + 1)
    assert all(m <= cublaslt.round_up_rows(m) < m + (8 if m <= 512 else m / 32) for m in rows)
    counts = cublaslt.warmup_rows(most)
    assert counts[0] == 1 and counts[-1] == most and len(set(counts)) == len(counts) <= 32 * most.bit_length()
    assert {cublaslt.round_up_rows(m) for m in counts} == {cublaslt.round_up_rows(m) for m in rows}


@pytest.mark.parametrize("a_by_k", [True, False])
def test_algorithms_are_tried_only_at_rounded_row_counts(fresh, monkeypatch, a_by_k):
    """A product's own suggestions are not tried: the first one without a failure is used if it has passed."""
    tried = []

    class Product:
        def __init__(self, p):
            self.problem = p

        def suggestions(self):
            return [b"failing", b"%d" % self.problem.m, b"last"]

        def supports(self, algorithm):
            return self.problem.m != 4999

        def launcher(self, algorithm):
            return self.problem.m, algorithm

    def passes(algorithm, p):
        tried.append(algorithm)
        return algorithm != b"failing"

    monkeypatch.setattr(cublaslt, "_Product", Product)
    monkeypatch.setattr(cublaslt, "configuration", lambda algorithm: {"split_k": 1, "reduction": 0})
    trials(monkeypatch, passes)
    a, b = operands(8, 24, 64, a_by_k)
    p = cublaslt_problem(a, b, None, torch.empty(8, 24), False)
    ld = 64 if a_by_k else 5120

    def decide(m):
        return cublaslt._decide(p._replace(m=m, lda=ld), None)

    assert [decide(m) for m in (4997, 4998, 5120)] == [(m, b"5120") for m in (4997, 4998, 5120)]
    assert tried == [b"failing", b"5120"]
    like = p._replace(m=4998, lda=ld)
    list(cublaslt._admitted(like, [b"4998"], None))
    assert decide(4998) == (4998, b"4998") and decide(4997) == (4997, b"5120")
    assert tried == [b"failing", b"5120", b"4998"]
    assert decide(4999) == (4999, b"4999"), "the algorithm found at the rounded rows does not support these rows"
    assert tried[3:] == [b"4999"]


def test_tile_ids_match_cublaslt():
    from alignkit.ops.linear import waves

    some = {1: (8, 8), 29: (128, 160), 35: (256, 32), 36: (8, 128), 133: (72, 640), 164: (112, 64), 209: (192, 192)}
    some |= {248: (320, 128), 311: (768, 64), 312: (64, 16), 321: (64, 112), 398: (128, 56), 421: (128, 288)}
    some |= {447: (128, 512), 467: (192, 176), 502: (256, 160), 548: (384, 104), 630: (768, 80)}
    assert {i: waves.tiles()[i - 1] for i in some} == some and len(waves.tiles()) == 630
    # 448 x 64 is one wave for 698 rows by 5120 outputs, but a narrow tile: it took twice the time of 192 x 192.
    assert waves.microseconds(698, 5120, 6912, 272) > waves.microseconds(698, 5120, 6912, 209)  # pyright: ignore[reportOptionalOperand]
    assert waves.microseconds(300, 64, 64, 0) is None and waves.microseconds(300, 64, 64, 631) is None


def test_suggestions_for_many_rows_are_ordered_by_waves(fresh, monkeypatch):
    """Fuller tiles win: 299 rows by 13824 outputs are one wave of 44 x 3 tiles of 320 x 128, partly out of range.

    54 x 2 tiles of 256 x 152 take less time.
    """
    monkeypatch.setattr(cublaslt, "configuration", lambda algorithm: {"tile": int(algorithm)})
    p = cublaslt_problem(*operands(299, 8, 5120), None, torch.empty(299, 8, dtype=BF16), False)._replace(n=13824)
    suggested = [b"248", b"502", b"501"]
    assert cublaslt._ordered(p, suggested) == [b"501", b"502", b"248"]
    for other in (p._replace(m=256), p._replace(a_by_k=False), p._replace(out_dtype=FP32)):
        assert cublaslt._ordered(other, suggested) == suggested
    assert cublaslt._ordered(p, [*suggested, b"0"]) == [*suggested, b"0"], (
        "the order must not change if a tile id is unknown"
    )

    class Product:
        def __init__(self, p):
            self.problem = p

        def suggestions(self):
            return suggested

        def supports(self, algorithm):
            return True

        def launcher(self, algorithm):
            return algorithm

    says = {"split_k": 1, "reduction": 0}
    monkeypatch.setattr(cublaslt, "configuration", lambda algorithm: says | {"tile": int(algorithm)})
    monkeypatch.setattr(cublaslt, "_Product", Product)
    failing, tried = {b"501", b"502"}, []
    trials(monkeypatch, lambda algorithm, _: tried.append(algorithm) or algorithm not in failing)
    assert cublaslt._decide(p._replace(m=cublaslt.round_up_rows(299)), None) == b"248"
    assert tried == [b"501", b"502", b"248"]
    assert cublaslt._decide(p, None) == b"248" and tried[3:] == [], "the rows of the problem itself must need no trial"
    cublaslt._verdicts[b"502", cublaslt._trial_of(p)] = True
    assert cublaslt._decide(p._replace(m=298), None) == b"502", "the first suggestion that passed must be used"


@pytest.mark.parametrize("verdicts", [{}, {b"failing": False}, {b"passed": True}, {b"failing": False, b"passed": True}])
@pytest.mark.parametrize("rows", range(1, 1100, 61))
def test_only_algorithms_that_passed_are_used(fresh, monkeypatch, verdicts, rows):
    """This holds for any suggestions, rows and earlier trials, so bits do not depend on the algorithm."""
    rng = random.Random(rows)
    names = [b"failing", b"passed", b"also failing", b"also passed"]

    class Product:
        def __init__(self, p):
            self.problem = p

        def suggestions(self):
            return rng.sample(names, rng.randint(0, len(names)))

        def supports(self, algorithm):
            return rng.random() < 0.5

        def launcher(self, algorithm):
            return algorithm

    monkeypatch.setattr(cublaslt, "_Product", Product)
    monkeypatch.setattr(cublaslt, "configuration", lambda algorithm: {"split_k": 1, "reduction": 0})
    trials(monkeypatch, lambda algorithm, _: b"passed" in algorithm)
    a, b = operands(8, 24, 64)
    p = cublaslt_problem(a, b, None, torch.empty(8, 24), False)._replace(m=rows)
    cublaslt._verdicts.update({(name, cublaslt._trial_of(p)): said for name, said in verdicts.items()})
    for m in range(rows, rows + 20):
        assert cublaslt._decide(p._replace(m=m), None) in (None, b"passed", b"also passed")


@needs_gpu
@settings(max_examples=10)  # each example may compile several kernels
@given(
    m=st.integers(1, 700),
    n=st.sampled_from([8, 37, 208]),
    k=st.sampled_from([1, 72, 77, 264]),
    a_by_k=st.booleans(),
    b_by_k=st.booleans(),
    pad=st.integers(0, 3),
    dtype=st.sampled_from([BF16, FP16]),
    fp32_out=st.booleans(),
    with_bias=st.booleans(),
    seed=seeds,
)
def test_providers_have_the_same_bits(m, n, k, a_by_k, b_by_k, pad, dtype, fp32_out, with_bias, seed):
    torch.manual_seed(seed)
    if not a_by_k and pad % 2 == 0:  # strides that cuBLASLt supports
        m *= 8
    a, b = operands(m, n, k, a_by_k, b_by_k, pad=4 * pad, dtype=dtype)
    out_dtype = FP32 if fp32_out else dtype
    bias = randn(n, dtype=out_dtype) if with_bias else None
    want = by_triton(a, b, out_dtype, bias=bias)
    got = by_cublaslt(a, b, out_dtype, bias=bias)
    if got is not None:
        assert_bitwise_equal(got, want, "cuBLASLt")
    assert_bitwise_equal(matmul(a, b, bias=bias, out_dtype=out_dtype), want, "the choice")
    base = randn(m, n)
    want = by_triton(a, b, base=base)
    assert_bitwise_equal(want, base + by_triton(a, b, FP32), "out + chain")
    got = by_cublaslt(a, b, base=base)
    if got is not None:
        assert_bitwise_equal(got, want, "cuBLASLt, accumulating")
    assert_bitwise_equal(matmul(a, b, out=base), want, "the choice, accumulating")


@needs_gpu
@pytest.mark.parametrize("k", [1, 16, 64])
def test_additions_are_not_fused_into_the_product(k):
    """`x + (0 + p)` differs from `x + p` for a product p of several roundings.

    A compiler may fuse the addition if the chain has a single step.
    """
    from alignkit.ops.linear.triton_backend import tiles

    a, b = operands(48, 40, k)
    chain, base, bias = by_triton(a, b, FP32), randn(48, 40), randn(40, dtype=BF16)
    assert_bitwise_equal(by_triton(a, b, base=base), base + chain, "out")
    got = torch.empty(48, 40)
    tiles(a, b, 1, bias, got, False)
    assert_bitwise_equal(got, chain + bias.float(), "bias")
    if k > 1:
        a, b = operands(48, 40, 8 * k)
        want = [by_triton(x, y, FP32) for x, y in zip(a.chunk(8, dim=1), b.chunk(8, dim=1), strict=True)]
        while len(want) > 1:
            want = [left + right for left, right in zip(want[::2], want[1::2], strict=True)]
        for parts in (1, 4, 8):
            tiles(a, b, 8, bias, got, False, parts=parts)
            assert_bitwise_equal(got, want[0] + bias.float(), f"leaves of {k}, {parts} parts")


@needs_gpu
@pytest.mark.parametrize(
    "m,n,k,a_by_k,b_by_k",
    [
        (1, 4096, 1024, True, True),
        (16, 4096, 1024, True, True),
        (256, 4096, 1024, True, True),
        (4096, 6144, 1024, True, True),
        (4096, 1024, 6144, True, False),
        (6144, 1024, 4096, False, False),
        (1024, 3072, 8192, False, False),
        (512, 151936, 1024, True, True),
    ],
)
@pytest.mark.parametrize("out_dtype", [FP32, BF16])
def test_cublaslt_computes_common_products(m, n, k, a_by_k, b_by_k, out_dtype):
    a, b = operands(m, n, k, a_by_k, b_by_k)
    got = by_cublaslt(a, b, out_dtype)
    assert got is not None, "no suggested algorithm passed its trial"
    assert_bitwise_equal(got, by_triton(a, b, out_dtype))


@needs_gpu
@pytest.mark.parametrize("m", [1, 16, 256, 4096])
@pytest.mark.parametrize("dtype", [BF16, FP16])
def test_cublaslt_adds_the_bias(m, dtype):
    a, b = operands(m, 4608, 3584, dtype=dtype)
    for bias in (randn(4608, dtype=dtype), 1e-4 * randn(4608, dtype=dtype), None):
        got = by_cublaslt(a, b, dtype, bias=bias)
        assert got is not None, "no suggested algorithm passed its trial"
        assert_bitwise_equal(got, by_triton(a, b, dtype, bias=bias))


@needs_gpu
@pytest.mark.parametrize("k", [1088, 4096, 12288, 26216, 151936])
@pytest.mark.parametrize("by_k", [True, False])
def test_algorithm_is_tried_at_the_k_of_its_product(fresh, k, by_k):
    a, b = operands(600, 2056, k, by_k, by_k)
    torch.cuda.synchronize()
    allocated, _ = torch.cuda.memory_allocated(), torch.cuda.reset_peak_memory_stats()
    out = torch.empty(600, 2056, dtype=BF16)
    assert launch_cublaslt(a, b, None, out, False), "no suggested algorithm passed its trial"
    assert {trial.k for _, trial in cublaslt._verdicts} == {k}
    assert torch.cuda.max_memory_allocated() - allocated < 2**29
    assert_bitwise_equal(out, by_triton(a, b))


@needs_gpu
def test_algorithm_that_fails_at_a_long_k_is_rejected_there(fresh, monkeypatch):
    """An algorithm that splits only a long k would fail this way."""
    launcher = cublaslt._Product.launcher
    split = split_in_two(launcher)
    monkeypatch.setattr(
        cublaslt._Product,
        "launcher",
        lambda self, algorithm: (split if self.problem.k > 2000 else launcher)(self, algorithm),
    )
    for k in (1024, 4096):
        a, b = operands(300, 1024, k)
        got = by_cublaslt(a, b)
        assert (got is None) == (k > 2000)
        assert_bitwise_equal(matmul(a, b, out_dtype=BF16), by_triton(a, b))


def split_in_two(launcher):
    """Return a launcher that adds two chains over half of k, as an algorithm that splits k does."""

    def planted(self, algorithm):
        half = self.problem.k // 2
        first, second = (
            launcher(q, q.suggestions()[0])
            for q in (
                cublaslt._Product(self.problem._replace(k=half)),
                cublaslt._Product(self.problem._replace(k=self.problem.k - half, accumulate=True)),
            )
        )
        return lambda a, b, bias, out, stream: (
            first(a, b, bias, out, stream) or second(a + 2 * half, b + 2 * half, bias, out, stream)
        )

    return planted


@needs_gpu
@pytest.mark.parametrize("m", [1, 300])
@pytest.mark.parametrize("out_dtype", [FP32, BF16])
def test_algorithm_with_other_bits_is_rejected_and_logged(fresh, monkeypatch, caplog, m, out_dtype):
    caplog.set_level(logging.INFO, cublaslt.__name__)
    a, b = operands(m, 1024, 1024)
    with monkeypatch.context() as patch:
        patch.setattr(cublaslt._Product, "launcher", split_in_two(cublaslt._Product.launcher))
        assert by_cublaslt(a, b, out_dtype) is None
        assert_bitwise_equal(matmul(a, b, out_dtype=out_dtype), by_triton(a, b, out_dtype))
    assert cublaslt._verdicts and not any(cublaslt._verdicts.values())
    assert len(caplog.records) == len(cublaslt._verdicts)
    assert all("'split_k'" in r.getMessage() and "failed the trial" in r.getMessage() for r in caplog.records)


@needs_gpu
@pytest.mark.parametrize("m", [8, 256])
@pytest.mark.parametrize("known", [True, False])
def test_graph_replays_the_same_bits(fresh, m, known):
    """The problem may be decided before the capture or not."""
    from alignkit.ops.linear.triton_backend import tiles

    a, b = operands(m, 1024, 1024)
    want, out = by_triton(a, b), torch.zeros(m, 1024, dtype=BF16)
    if known:
        matmul(a, b, out_dtype=BF16)
    else:
        tiles(a, b, 1, None, out, False)  # compiles the captured kernel
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out.copy_(matmul(a, b, out_dtype=BF16))
    assert bool(cublaslt._launchers) == known
    for _ in range(2):
        out.zero_()
        graph.replay()
        assert_bitwise_equal(out, want)


def cuda_kernels():
    if dispatch.backend_of("cuda") != "cuda":
        pytest.skip("the CUDA kernels are not built")
    from alignkit.ops.linear import cuda_backend

    return cuda_backend


@needs_gpu
@given(
    m=st.integers(1, 600),
    n=st.integers(1, 700),
    leaf=st.integers(1, 24).map(lambda i: 16 * i),
    leaves=st.sampled_from([2, 4, 8]),
    pad=st.sampled_from([0, 8]),
    has_bias=st.booleans(),
    out_dtype=st.sampled_from([FP32, BF16]),
    seed=seeds,
)
def test_small_m_trees_have_the_same_bits_for_every_split(m, n, leaf, leaves, pad, has_bias, out_dtype, seed):
    kernels = cuda_kernels()
    from alignkit.ops.linear.triton_backend import tiles

    torch.manual_seed(seed)
    (a, b), bias = operands(m, n, leaf * leaves, pad=pad), randn(n, dtype=BF16) if has_bias else None
    want = torch.empty(m, n, dtype=out_dtype)
    tiles(a, b, leaves, bias, want, False)
    for split in kernels.splits(m, leaves):
        got = torch.full((m, n + 3), float("nan"), dtype=out_dtype)[:, :n]
        kernels.tree(leaves, split, a, b, bias, got)
        assert_bitwise_equal(got, want, str(split))
    assert_bitwise_equal(matmul(a, b, leaves=leaves, bias=bias, out_dtype=out_dtype), want, "by choice")


@needs_gpu
@given(
    m=st.integers(1, 32),
    n=st.integers(1, 2112),
    k=st.integers(256, 600).map(lambda n: 8 * n),
    pad=st.sampled_from([0, 8]),
    has_bias=st.booleans(),
    out_dtype=st.sampled_from([FP32, BF16]),
    seed=seeds,
)
def test_narrow_chains_have_tritons_bits(m, n, k, pad, has_bias, out_dtype, seed):
    kernels = cuda_kernels()
    torch.manual_seed(seed)
    (a, b), bias = operands(m, n, k, pad=pad), randn(n, dtype=BF16) if has_bias else None
    got = torch.full((m, n + 3), float("nan"), dtype=out_dtype)[:, :n]
    assert kernels.narrow_rejects(Product.of(families.CUDA, a, b, 1, bias, got, False)) is None
    kernels.narrow(a, b, bias, got)
    assert_bitwise_equal(got, by_triton(a, b, out_dtype, bias=bias))


@needs_gpu
@pytest.mark.parametrize("case", ["leaf", "rows", "address", "bias", "fp32"])
def test_unsupported_trees_are_left_to_triton(case):
    kernels = cuda_kernels()
    m, n, leaves = 40, 64, 8
    a, b = operands(300 if case == "rows" else m, n, 8 * (40 if case == "leaf" else 64), pad=8 * (case == "address"))
    bias = randn(n) if case == "bias" else None
    if case == "address":
        a = a.as_strided(a.shape, a.stride(), 4)
    elif case == "fp32":
        a, b = a.float(), b.float()
    out = torch.empty(len(a), n)
    assert kernels.tree_rejects(Product.of(families.CUDA, a, b, leaves, bias, out, False))


@needs_gpu
@pytest.mark.parametrize(
    "m,leaves,split",
    [(65, 8, (1,)), (40, 2, (1,)), (40, 8, (3,)), (40, 4, (8,)), (40, 8, (8, 80)), (40, 8, (8, 64, True))],
)
def test_invalid_split_of_a_tree_raises(m, leaves, split):
    kernels = cuda_kernels()
    a, b = operands(m, 64, 64 * leaves)
    with pytest.raises(BackendError, match="alignkit_few_tree: .*invalid argument"):
        kernels.tree(leaves, kernels.Split(*split), a, b, None, torch.empty(m, 64))


@needs_gpu
@pytest.mark.parametrize("leaves,has_bias", [(8, False), (4, True), (1, True)])
def test_many_rows_have_the_same_bits_by_hopper_and_by_tiles(leaves, has_bias):
    from alignkit.ops.linear.triton_backend import tiles

    (a, b), bias = operands(300, 200, 512), randn(200, dtype=BF16) if has_bias else None
    got, want = (torch.empty(300, 200, dtype=BF16) for _ in range(2))
    assert by_hopper(a, b, leaves, bias, got)
    tiles(a, b, leaves, bias, want, False)
    assert_bitwise_equal(got, want)


@needs_gpu
@pytest.mark.parametrize("m", [64, 256, 1000])
@pytest.mark.parametrize("leaves,has_bias", [(8, False), (8, True), (1, True)])
def test_graph_of_products_without_cublaslt(m, leaves, has_bias):
    """The graph's input changes before each replay."""
    from alignkit.ops.linear.triton_backend import tiles

    (a, b), bias = operands(m, 1024, 1024), randn(1024, dtype=BF16) if has_bias else None
    matmul(a, b, leaves=leaves, bias=bias, out_dtype=BF16)
    out = torch.zeros(m, 1024, dtype=BF16)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out.copy_(matmul(a, b, leaves=leaves, bias=bias, out_dtype=BF16))
    for _ in range(2):
        a.copy_(randn(m, 1024, dtype=BF16))
        graph.replay()
        want = torch.empty_like(out)
        tiles(a, b, leaves, bias, want, False)
        assert_bitwise_equal(out, want)


def dependent_products(m, n, leaves):
    """Return a function that runs twelve dependent products, the buffer of its result, and the expected result.

    Each product reads the previous one's result and overwrites the previous one's input.
    """
    from alignkit.ops.linear.triton_backend import tiles

    x, weights = randn(m, n, dtype=BF16), [(randn(n, n) * n**-0.5).to(BF16) for _ in range(3)] * 4
    want = x
    for weight in weights:
        before, want = want, torch.empty_like(x)
        tiles(before, weight, leaves, None, want, False)
    buffers = [x.clone(), torch.empty_like(x)]

    def run():
        buffers[0].copy_(x)
        for i, weight in enumerate(weights):
            matmul(buffers[i % 2], weight, leaves=leaves, to=buffers[1 - i % 2])

    return run, buffers[0], want


dependent_sizes = pytest.mark.parametrize(
    "m,n,leaves",
    [(8, 2048, 1), (32, 2048, 1), (40, 4096, 8), (128, 4096, 8), (256, 4096, 8), (256, 4096, 2), (100, 5120, 8)],
)


@needs_gpu
@dependent_sizes
def test_products_wait_for_earlier_products(m, n, leaves):
    """Programmatic dependent launch starts them early."""
    run, out, want = dependent_products(m, n, leaves)
    run()
    assert_bitwise_equal(out, want)


@needs_gpu
@dependent_sizes
def test_products_in_a_graph_wait_for_earlier_products(m, n, leaves):
    run, out, want = dependent_products(m, n, leaves)
    run()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    for _ in range(8):
        out.zero_()
        graph.replay()
        assert_bitwise_equal(out, want)


@needs_gpu
@pytest.mark.parametrize("leaves", [1, 8])
def test_current_stream_is_used(leaves):
    from alignkit.ops.linear.triton_backend import tiles

    (a, b), want = operands(4096, 4096, 1024), torch.empty(4096, 4096, dtype=BF16)
    tiles(a, b, leaves, None, want, False)
    matmul(a, b, leaves=leaves, out_dtype=BF16)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        late = torch.zeros_like(a)
        torch.cuda._sleep(50_000_000)
        late.copy_(a)
        got = matmul(late, b, leaves=leaves, out_dtype=BF16)
    stream.synchronize()
    assert_bitwise_equal(got, want)


@needs_gpu
def test_more_than_2_31_outputs():
    m, n = 2**14 + 8, 2**17 + 64
    a, b = operands(m, n, 64)
    got = matmul(a, b, out_dtype=BF16)
    for rows in (slice(0, 100), slice(m - 100, m)):
        assert_bitwise_equal(got[rows], by_triton(a[rows], b), f"cuBLASLt or the choice, rows {rows}")
    del got
    got = by_triton(a, b)
    for rows in (slice(0, 100), slice(m - 100, m)):
        assert_bitwise_equal(got[rows], by_triton(a[rows], b), f"Triton, rows {rows}")


@needs_gpu
def test_gradients_of_a_layer_are_chains():
    x, w = (t.requires_grad_() for t in (randn(3, 100, 64, dtype=BF16), randn(256, 64, dtype=BF16)))
    dy = randn(3, 100, 256, dtype=BF16)
    dx, dw = torch.autograd.grad(linear(x, w), (x, w), dy)
    x, w, dy = x.detach().reshape(300, 64), w.detach(), dy.reshape(300, 256)
    assert_bitwise_equal(dx.reshape(300, 64), by_triton(dy, w.t()), "dx")
    assert_bitwise_equal(dw, by_triton(dy.t(), x.t()), "dw")
