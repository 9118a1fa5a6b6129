"""The tensor-core model against exact fractions, and as the source of golden hashes of `linear` on Hopper GPUs."""

import math
from fractions import Fraction

import pytest
import torch

from alignkit.ops import golden, tensor_core
from alignkit.ops.inputs import Inputs
from alignkit.ops.linear import model
from alignkit.runtime import families
from alignkit.testing import assert_bitwise_equal

from .helpers import CPU

pytestmark = pytest.mark.skipif(not CPU, reason="the model runs on the CPU")
CASES = [case for case in golden.CASES if golden.CASES[case][0].modelled]


def stored(case: str) -> list[str]:
    """Return the golden hashes of Hopper GPUs."""
    hashes = golden.load(families.SM90)[case]
    assert hashes
    return hashes


def exponent(x: float) -> int:
    """Return the exponent of a bf16 or fp32 value, by docs/contract.md."""
    return max(math.frexp(x)[1] - 1, -126)


def cut(x: Fraction, last: int) -> Fraction:
    """Cut x toward zero to a multiple of 2^last."""
    return Fraction(math.trunc(x / Fraction(2) ** last)) * Fraction(2) ** last


def exact_chain(a: list[float], b: list[float], acc: float, step: tensor_core.Step) -> float:
    """Compute one sum of docs/contract.md, "On Hopper GPUs", in fractions."""
    for k in range(0, len(a), step.terms):
        pairs = list(zip(a[k : k + step.terms], b[k : k + step.terms], strict=True))
        terms = [(Fraction(x) * Fraction(w), exponent(x) + exponent(w)) for x, w in pairs if x and w]
        terms += [(Fraction(acc), exponent(acc))] if acc else []
        if not terms:
            continue
        top = max(e for _, e in terms)
        total = sum(cut(value, top - step.bits) for value, _ in terms)
        if not total:
            acc = 0.0
            continue
        e = next(e for e in range(-126, 300) if abs(total) < Fraction(2) ** (e + 1))
        total = cut(total, e - 23)
        acc = float(total) if abs(total) < Fraction(2) ** 128 else math.copysign(math.inf, total)
        if math.isinf(acc):
            return acc
    return acc


@pytest.mark.parametrize("step", tensor_core.STEPS.values(), ids=tensor_core.STEPS)
@pytest.mark.parametrize(("low", "high"), [(-8, 0), (-40, 40), (-140, -50), (-70, -60), (55, 63), (-3, 0)])
def test_model_is_exact(step, low, high):
    """Compare random values of narrow and wide exponents, with subnormals, zeros, cancellation and overflow."""
    given = Inputs("cpu", torch.bfloat16)
    a, b = given.rough(9, 53, seed=1, low=low, high=high), given.rough(11, 53, seed=2, low=low, high=high)
    a[given.integers(9, 53, seed=3, below=4) == 0] = 0.0
    a[:, 30:40], b[::2, 30:40] = a[:, 10:20], -b[::2, 10:20]
    acc = given.rough(9, 11, seed=4, low=2 * low, high=min(2 * high, 120), dtype=torch.float32)
    acc[::3] = 0.0
    got = tensor_core.chain(a, b, acc, step)
    want = [
        [exact_chain(x, w, c, step) for w, c in zip(b.tolist(), row, strict=True)]
        for x, row in zip(a.tolist(), acc.tolist(), strict=True)
    ]
    assert_bitwise_equal(got + 0.0, torch.tensor(want) + 0.0)  # the model's zeros are positive or negative
    assert (got.isinf().any() if high == 63 else got.isfinite().all()) and got.count_nonzero() > 50


def test_inf_and_nan_follow_ieee():
    a = torch.ones(5, 20, dtype=torch.bfloat16)
    a[1, 3], a[2, 5], a[3, 7], a[3, 8] = math.inf, math.nan, math.inf, -math.inf
    b = torch.tensor([[1.0], [0.0]]).expand(2, 20).bfloat16()
    acc = torch.zeros(5, 2)
    acc[4] = -math.inf
    got = tensor_core.chain(a, b, acc)
    nan = math.nan
    want = [[20.0, 0.0], [math.inf, nan], [nan, nan], [nan, nan], [-math.inf, -math.inf]]
    torch.testing.assert_close(got, torch.tensor(want), rtol=0, atol=0, equal_nan=True)


def test_steps_are_told_apart():
    a, b = (torch.randn(64, 1024, generator=torch.Generator().manual_seed(i)).bfloat16() for i in range(2))
    hopper, ampere = (tensor_core.chain(a, b, step=step) for step in tensor_core.STEPS.values())
    assert (hopper != ampere).float().mean() > 0.8


@pytest.mark.parametrize("case", CASES)
def test_model_gives_the_golden_bits_of_hopper(case):
    """The hashes of `linears` come from an H200, those of `rounding_linears` from the model."""
    assert golden.predicted(case) == stored(case)


def test_other_steps_change_every_tensor_of_the_rounding_case(monkeypatch):
    chain = tensor_core.chain
    case = "rounding_linears bfloat16"
    for mutated in (
        lambda a, b: chain(a, b, step=tensor_core.STEPS["Ampere"]),
        lambda a, b: chain(a.flip(1), b.flip(1)),
        lambda a, b: a.float() @ b.float().T,
    ):
        monkeypatch.setattr(tensor_core, "chain", mutated)
        assert all(a != b for a, b in zip(golden.predicted(case) or (), stored(case), strict=True))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_other_trees_change_the_rounding_case(dtype, monkeypatch):
    matmul, case = model.matmul, f"rounding_linears {str(dtype).removeprefix('torch.')}"
    for leaves in (1, 4):
        monkeypatch.setattr(model, "matmul", lambda a, b, given, *rest, n=leaves: matmul(a, b, min(n, given), *rest))
        row_parallel = 4  # the first tensor of the second layer
        predicted = golden.predicted(case)
        assert predicted and predicted[row_parallel] != stored(case)[row_parallel]


def test_identification_names_the_step(monkeypatch):
    assert model.identify(tensor_core.chain) == "Hopper"
    assert model.identify(lambda a, b: tensor_core.chain(a, b, step=tensor_core.STEPS["Ampere"])) == "Ampere"
    assert model.identify(lambda a, b: a.float() @ b.float().T) is None
