"""`alignkit.drift.compare`: metrics against values computed by hand, identities and causes, and rejected inputs."""

import dataclasses
import importlib.util
import json
import math
import re
from pathlib import Path

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given

from alignkit.drift import Logprobs, causes, compare, compare_tensors
from alignkit.errors import InputError
from alignkit.identity import Identity

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


def test_the_default_device_changes_nothing():
    sides = logprobs([[-1.0, -2.0], [-3.0]]), logprobs([[-1.0, -2.5], [-3.0]])
    x, y = torch.randn(2, 3, 5, device="cpu", generator=torch.Generator().manual_seed(0))
    want = compare(*sides), compare_tensors(x, y)
    with torch.device("meta"):
        found = compare(*sides), compare_tensors(x, y)
    assert [f.to_json() for f in found] == [w.to_json() for w in want]


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


# Identities and causes


A, B = "a" * 24, "b" * 24
UNKNOWN = "unknown: epochs of rollout, weights of rollout and training, temperature of rollout and training"


def known(values, epochs=None, weights=A, temperature=1.0, contract="stock"):
    """Return logprobs of one sequence with all optional parts."""
    epochs = [torch.tensor(epochs if epochs is not None else [5] * len(values))]
    side = logprobs([values], contract=contract)
    return dataclasses.replace(side, weights=weights, epochs=epochs, temperature=temperature)


EQUAL, OTHER = [-1.0, -2.0, -3.0], [-1.0, -2.5, -3.5]


def test_equal_sides_have_an_identity_and_no_cause():
    r = compare(known(EQUAL), known(EQUAL))
    assert r.identity == ("epochs: 5", f"weights: equal ({A})", "temperature: equal (1.0)", "contract: equal (stock)")
    assert r.causes == ()


def test_unknown_facts_are_stated_and_never_equal():
    assert compare(logprobs([EQUAL]), logprobs([EQUAL])).causes == ()
    r = compare(logprobs([EQUAL]), logprobs([OTHER]))
    assert r.identity == (
        "epochs: unknown in rollout",
        "weights: unknown in rollout and training",
        "temperature: unknown in rollout and training",
        "contract: equal (stock)",
    )
    assert r.causes == (UNKNOWN,)
    r = compare(dataclasses.replace(known(EQUAL), weights=None), known(OTHER))
    assert r.identity[1] == f"weights: unknown in rollout (training {A})"
    assert r.causes == ("unknown: weights of rollout",)


def test_a_difference_between_equal_identities_is_numerics():
    assert compare(known(EQUAL), known(OTHER)).causes == (causes.NUMERICS,)


@pytest.mark.parametrize(
    "rollout, training, cause",
    [
        (
            dict(epochs=[3, 4, 5]),
            {},
            "the rollout's tokens have epochs 3 to 5: 1 of 2 differing tokens are of an epoch other than 5",
        ),
        (dict(weights=B), {}, f"different weights: rollout {B}, training {A}"),
        (dict(temperature=0.01), dict(temperature=0.5), "different temperature: rollout 0.01, training 0.5"),
        (dict(contract="x"), {}, "different contract: rollout x, training stock"),
    ],
)
def test_a_known_difference_is_the_cause(rollout, training, cause):
    allow = dict(allow_weights_mismatch=True, allow_contract_mismatch=True)
    assert compare(known(EQUAL, **rollout), known(OTHER, **training), **allow).causes == (cause,)
    equal = compare(known(EQUAL, **rollout), known(EQUAL, **training), **allow)
    assert equal.causes == () and any(re.search("different|other than", line) for line in equal.identity)


def test_causes_are_in_order_and_the_unknown_is_last():
    rollout = known(EQUAL, epochs=[3, 4, 5], weights=B, temperature=0.5, contract="x")
    allow = dict(allow_weights_mismatch=True, allow_contract_mismatch=True)
    found = compare(rollout, known(OTHER), **allow).causes
    assert [cause.split(":")[0] for cause in found] == [
        "the rollout's tokens have epochs 3 to 5",
        "different weights",
        "different temperature",
        "different contract",
    ]
    found = compare(dataclasses.replace(rollout, weights=None), known(OTHER), **allow).causes
    assert [cause.split(":")[0] for cause in found[1:]] == ["different temperature", "different contract", "unknown"]


@pytest.mark.parametrize(
    "epochs, line, cause",
    [
        ([-1, 4, 5], "4 to 5 and mixed; 2 of 3 tokens are of an epoch other than 5", "4 to 5 and mixed: 1 of 2 "),
        ([-1, -1, -1], "mixed; 3 of 3 tokens are mixed", "mixed: 2 of 2 differing tokens are mixed"),
        ([5, -1, 5], "5 and mixed; 1 of 3 tokens are of an epoch other than 5", "5 and mixed: 1 of 2 "),
    ],
)
def test_mixed_tokens_are_of_another_epoch(epochs, line, cause):
    """No single model has the logprob of a token whose KV cache has entries of several epochs."""
    r = compare(known(EQUAL, epochs=epochs), known(OTHER))
    assert r.identity[0] == f"epochs: {line}"
    assert len(r.causes) == 1 and r.causes[0].startswith(f"the rollout's tokens have epochs {cause}")


def test_the_epoch_of_the_identity_is_the_current_one():
    """All tokens have one epoch, but the fingerprint is of a later one."""
    training = torch.tensor([[-1.0, -2.0]])
    r = compare_tensors(
        training,
        training - 1,
        identity=(Identity("stock", A, 6), None),
        epochs=torch.full((1, 2), 5, dtype=torch.int32),
    )
    assert r.causes[0] == ("the rollout's tokens have epochs 5: 2 of 2 differing tokens are of an epoch other than 6")


def test_the_epochs_of_training_are_not_used():
    assert compare(known(EQUAL), known(OTHER, epochs=[1, 2, 3])).causes == (causes.NUMERICS,)


@pytest.mark.parametrize(
    "pair, cause",
    [
        ((0.7, torch.tensor(0.7).item()), ""),  # equal in fp32
        ((0.01, torch.tensor(0.01).item()), ""),
        ((0.7, 0.7000001), "different temperature: rollout 0.7, training 0.7000001"),
        ((0.01, 0.005), "different temperature: rollout 0.01, training 0.005; vLLM replaces a temperature in"),
        ((0.005, 0.005), "temperature: equal (0.005); vLLM replaces a temperature in (0, 0.01) by 0.01"),
        ((0.005, None), "temperature: unknown in training (rollout 0.005); vLLM replaces"),
    ],
)
def test_temperatures_are_compared_in_fp32(pair, cause):
    r = compare(known(EQUAL, temperature=pair[0]), known(OTHER, temperature=pair[1]))
    assert r.causes[0].startswith(cause or causes.NUMERICS)


def test_the_smallest_temperature_is_vllms():
    """Read vLLM's source: its import takes seconds."""
    spec = importlib.util.find_spec("vllm")
    if spec is None:
        pytest.skip("needs vLLM")
    source = (Path(spec.submodule_search_locations[0]) / "sampling_params.py").read_text()
    assert float(re.search(r"^_MAX_TEMP = (.*)$", source, re.MULTILINE)[1]) == causes.VLLM_TEMPERATURE


def test_different_weights_are_rejected_unless_allowed():
    message = (
        f"^weights: rollout and training must have the same weights, got the digests '{A}' and '{B}'. Pass "
        r"allow_weights_mismatch=True \(alignkit compare: --allow-weights-mismatch\)"
    )
    with pytest.raises(InputError, match=message):
        compare(known(EQUAL), known(EQUAL, weights=B), allow_contract_mismatch=True)
    assert compare(known(EQUAL), known(EQUAL, weights=B), allow_weights_mismatch=True).all_equal
    assert compare(known(EQUAL), logprobs([EQUAL])).all_equal


def test_an_invalid_identity_is_rejected_by_compare():
    for name, value in (("weights", "A"), ("epochs", [torch.zeros(2).long()]), ("temperature", -1.0)):
        with pytest.raises(InputError, match=f"^{name}: "):
            compare(dataclasses.replace(known(EQUAL), **{name: value}), known(EQUAL))


def test_a_report_with_causes_is_json_and_its_metrics_are_numbers():
    r = compare(known(EQUAL, epochs=[3, 4, 5]), known(OTHER))
    assert all(isinstance(value, (int, float)) for value in r.metrics().values())
    found = json.loads(json.dumps(r.to_json(), allow_nan=False))
    assert found["causes"] == list(r.causes) and found["identity"] == list(r.identity)


@given(
    epochs=st.lists(st.integers(-1, 3), min_size=6, max_size=6),
    differ=st.lists(st.booleans(), min_size=6, max_size=6),
    selected=st.lists(st.booleans(), min_size=6, max_size=6).filter(any),
    engine=st.none() | st.integers(0, 3),
    weights=st.tuples(*[st.sampled_from([None, A, B])] * 2),
)
def test_compare_tensors_counts_tokens_of_other_epochs(epochs, differ, selected, engine, weights):
    """Random epochs, differences and masks, counted token by token; epochs outside of the mask are not read."""
    rollout = torch.full((2, 3), -1.0)
    training = torch.where(torch.tensor(differ).view(2, 3), rollout.nextafter(torch.zeros(())), rollout)
    mask = torch.tensor(selected).view(2, 3)
    given_epochs = torch.where(mask, torch.tensor(epochs).view(2, 3), torch.tensor(-7))
    identity = Identity("stock", weights[0], engine), Identity("stock", weights[1])
    r = compare_tensors(rollout, training, mask, identity=identity, epochs=given_epochs, temperature=(1.0, 1.0))
    tokens = [(e, d) for e, d, keep in zip(epochs, differ, selected, strict=True) if keep]
    current = max(e for e, _ in tokens) if engine is None else engine
    current, words = (None, "mixed") if current == -1 else (current, f"of an epoch other than {current}")
    other = sum(e != current for e, _ in tokens)
    differing = [e for e, d in tokens if d]
    assert r.tokens - r.bit_equal == len(differing)
    assert (f"{other} of {len(tokens)} tokens are {words}" in r.identity[0]) == (other > 0)
    want = []
    if other:
        stale = sum(e != current for e in differing)
        want.append(f"{stale} of {len(differing)} differing tokens are {words}")
    if None in weights:
        want.append("unknown: weights of ")
    elif weights[0] != weights[1]:
        want.append("different weights: ")
    assert len(r.causes) == (len(want) or 1 if differing else 0)
    for cause, part in zip(r.causes, want or [causes.NUMERICS], strict=bool(differing)):
        assert part in cause


@pytest.mark.parametrize(
    "change, message",
    [
        (dict(identity=Identity("stock")), r"identity: expected a pair \(rollout, training\)"),
        (dict(identity=(None,)), "identity: expected a pair"),
        (dict(identity=(None, A)), "identity: expected an alignkit.identity.Identity or None, got 'aaa"),
        (dict(epochs=[[0]]), r"epochs: expected a torch.Tensor \[B, S\] or None, got list"),
        (dict(epochs=torch.zeros(1, 2)), "epochs: expected torch.int64 or torch.int32, got torch.float32"),
        (dict(epochs=torch.zeros(2, 1).long()), r"epochs: expected shape \[1, 2\], got \[2, 1\]"),
        (dict(epochs=torch.tensor([[0, -2]])), r"epochs: must be at least -1 \(mixed\) where the mask .*, got -2"),
        (dict(temperature=1.0), "temperature: expected a pair"),
        (dict(temperature=(1.0, 0.0)), "temperature: must be positive and finite in fp32, got 0.0"),
    ],
)
def test_invalid_facts_are_rejected(change, message):
    with pytest.raises(InputError, match=f"^{message}"):
        compare_tensors(torch.zeros(1, 2), torch.zeros(1, 2), **change)
