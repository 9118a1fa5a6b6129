"""`alignkit.drift.compare`: metrics against values computed by hand, and rejected inputs."""

import json
import math

import pytest
import torch

from alignkit.drift import Logprobs, compare, compare_tensors
from alignkit.errors import InputError

NAN, INF = math.nan, math.inf


def logprobs(values, tokens=None, prompts=None, contract="stock"):
    tokens = tokens or [[7] * len(v) for v in values]
    return Logprobs(
        prompts=prompts or [[1, 2]] * len(values),
        tokens=tokens,
        logprobs=[torch.tensor(v, dtype=torch.float32) for v in values],
        contract=contract,
    )


def test_metrics_match_values_computed_by_hand():
    rollout = logprobs([[-1.0, -2.0], [-3.0]], tokens=[[5, 6], [9]])
    training = logprobs([[-1.0, -1.5], [-3.25]], tokens=[[5, 6], [9]])
    r = compare(rollout, training)
    up, down = math.exp(0.5), math.exp(-0.25)
    assert (r.tokens, r.sequences, r.bit_equal, r.nonfinite, r.ratio_is_one) == (3, 2, 1, 0, 1)
    assert not r.all_equal
    assert r.max_abs == 0.5
    assert r.mean_abs == pytest.approx(0.25)
    assert r.kl == pytest.approx(-(0.5 - 0.25) / 3)
    assert r.k3_kl == pytest.approx(((up - 1 - 0.5) + (down - 1 + 0.25)) / 3)
    assert r.rollout_is_mean == pytest.approx((1 + up + down) / 3)
    assert (r.rollout_is_min, r.rollout_is_max) == (pytest.approx(down), pytest.approx(up))
    assert r.rollout_is_eff_sample_size == pytest.approx((1 + up + down) ** 2 / (3 * (1 + up**2 + down**2)))
    assert r.rollout_is_seq_eff_sample_size == pytest.approx((up + down) ** 2 / (2 * (up**2 + down**2)))
    assert r.token_mult_prob_error == pytest.approx((1 + up + math.exp(0.25)) / 3)
    assert [(w.sequence, w.position, w.token_id, w.rollout, w.training) for w in r.worst] == [
        (0, 1, 6, -2.0, -1.5),
        (1, 0, 9, -3.0, -3.25),
    ]
    assert r.first_difference == r.worst[0]


def test_equal_sides_have_zero_drift():
    r = compare(logprobs([[-1.0, -2.0], [-3.0]]), logprobs([[-1.0, -2.0], [-3.0]]))
    assert r.all_equal and r.bit_equal == r.ratio_is_one == 3
    assert (r.max_abs, r.mean_abs, r.kl, r.k3_kl) == (0, 0, 0, 0)
    assert (r.rollout_is_min, r.rollout_is_max, r.rollout_is_mean, r.token_mult_prob_error) == (1, 1, 1, 1)
    assert (r.rollout_is_eff_sample_size, r.rollout_is_seq_eff_sample_size) == (1, 1)
    assert r.first_difference is None and r.worst == ()


def test_one_flipped_bit_is_a_difference():
    a = torch.tensor([[-1.0]])
    b = torch.nextafter(a, torch.zeros(()))
    r = compare_tensors(a, b)
    assert r.bit_equal == 0 and r.ratio_is_one == 0 and r.max_abs == 2.0**-24
    assert "0xbf800000" in str(r.first_difference) and "0xbf7fffff" in str(r.first_difference)


def test_negative_zero_is_not_bit_equal_to_zero():
    r = compare(logprobs([[0.0]]), logprobs([[-0.0]]))
    assert (r.bit_equal, r.ratio_is_one, r.max_abs) == (0, 1, 0)


def test_nonfinite_is_counted_and_never_equal():
    rollout = logprobs([[-1.0, NAN, -INF], [-2.0, -3.0]])
    training = logprobs([[-1.0, NAN, -INF], [-2.5, -3.0]])
    r = compare(rollout, training)
    assert (r.tokens, r.bit_equal, r.nonfinite) == (5, 2, 2)
    assert r.max_abs == 0.5 and r.mean_abs == pytest.approx(0.5 / 3)
    assert r.rollout_is_seq_eff_sample_size == 1  # only the finite sequence counts
    assert [(w.sequence, w.position) for w in r.worst] == [(0, 1), (0, 2), (1, 0)]
    assert r.first_difference.position == 1


def test_all_nonfinite_metrics_are_null_in_json():
    r = compare(logprobs([[NAN]]), logprobs([[-1.0]]))
    assert r.bit_equal == 0 and r.nonfinite == 1 and math.isnan(r.max_abs) and math.isnan(r.mean_abs)
    assert json.loads(json.dumps(r.to_json(), allow_nan=False))["max_abs"] is None


def test_large_sequence_differences_do_not_overflow():
    r = compare(logprobs([[-900.0], [-1.0]]), logprobs([[-0.5], [-1.0]]))
    assert r.rollout_is_seq_eff_sample_size == pytest.approx(0.5)


@pytest.mark.parametrize(
    "kwargs, message",
    [
        (
            dict(values=[[-1.0, -2.0]], tokens=[[5, 8]]),
            "tokens: sequence 0, position 1: token ids must be equal, got 6 in rollout and 8",
        ),
        (
            dict(values=[[-1.0]], tokens=[[5]]),
            "tokens: sequence 0: rollout and training must have the same length, got 2 and 1",
        ),
        (
            dict(values=[[-1.0, -2.0]] * 2, tokens=[[5, 6]] * 2),
            "prompts: rollout and training must have the same number of sequences, got 1 and 2",
        ),
        (dict(values=[[-1.0, -2.0]], tokens=[[5, 6]], prompts=[[1, 3]]), "prompts: sequence 0, position 1"),
        (
            dict(values=[[-1.0, -2.0]], tokens=[[5, 6]], contract="alignkit-1/cpu"),
            "contract: rollout and training must have the same contract id, got 'stock'",
        ),
    ],
)
def test_mismatched_sides_are_rejected(kwargs, message):
    with pytest.raises(InputError, match=message):
        compare(logprobs([[-1.0, -2.0]], tokens=[[5, 6]]), logprobs(**kwargs))


def test_a_contract_mismatch_can_be_allowed():
    r = compare(logprobs([[-1.0]]), logprobs([[-1.0]], contract="x"), allow_contract_mismatch=True)
    assert r.bit_equal == 1


@pytest.mark.parametrize("values", [[], [[]]])
def test_empty_sides_are_rejected(values):
    with pytest.raises(InputError, match="tokens: rollout and training must have at least one sampled token"):
        compare(logprobs(values), logprobs(values))


@pytest.mark.parametrize("mask", [[[1, 1, 0], [0, 1, 0]], [[True, True, False], [False, True, False]]])
def test_compare_tensors_matches_compare(mask):
    a = torch.tensor([[-1.0, -2.0, NAN], [NAN, -4.0, 9.0]])
    b = torch.tensor([[-1.0, -2.5, 3.0], [NAN, -4.0, NAN]])
    r = compare_tensors(a, b, torch.tensor(mask))
    want = compare(logprobs([[-1.0, -2.0], [-4.0]]), logprobs([[-1.0, -2.5], [-4.0]]))
    assert r.metrics() == want.metrics()
    assert [(w.sequence, w.position, w.token_id) for w in r.worst] == [(0, 1, None)]


def test_compare_tensors_accepts_bf16_and_detaches():
    a = torch.randn(2, 3, dtype=torch.bfloat16, requires_grad=True)
    r = compare_tensors(a, a.detach().clone())
    assert r.all_equal and all(isinstance(v, (int, float)) for v in r.metrics("train/").values())


@pytest.mark.parametrize(
    "a, b, mask, message",
    [
        (torch.zeros(3), torch.zeros(3), None, r"rollout_logp: expected shape \[B, S\]"),
        ([[0.0]], torch.zeros(1, 1), None, r"rollout_logp: expected a torch.Tensor \[B, S\], got list"),
        (torch.zeros(1, 1), torch.zeros(1, 1), [[True]], "mask: expected a torch.Tensor .*, got list"),
        (
            torch.zeros(1, 3),
            torch.zeros(1, 2),
            None,
            r"train_logp: expected rollout_logp's shape \[1, 3\], got \[1, 2\]",
        ),
        (torch.zeros(1, 3), torch.zeros(1, 3).double(), None, "train_logp: expected .*, got torch.float64"),
        (
            torch.zeros(1, 3),
            torch.zeros(1, 3).bfloat16(),
            None,
            "train_logp: expected rollout_logp's dtype torch.float32, got torch.bfloat16",
        ),
        (torch.zeros(1, 3), torch.zeros(1, 3), torch.ones(3), "mask: expected shape"),
        (
            torch.zeros(1, 3),
            torch.zeros(1, 3),
            torch.full((1, 3), 0.5),
            r"mask: expected only the values 0 and 1, got 0.5 at \[0, 0\]",
        ),
        (torch.zeros(1, 3), torch.zeros(1, 3), torch.zeros(1, 3), "mask: must select at least one token"),
        (torch.zeros(0, 3), torch.zeros(0, 3), None, "rollout_logp: must have at least one value"),
    ],
)
def test_invalid_tensors_are_rejected(a, b, mask, message):
    with pytest.raises(InputError, match=message):
        compare_tensors(a, b, mask)
