"""The drift monitor: its metrics, its record and replay files, its sinks, and its `DriftError`.

`verl_by_hand` and `nemo_by_hand` restate the frameworks' formulas, which the metrics must match. Faults are planted in
logprobs. The real wandb and tensorboard run if installed.
"""

import json
import math
import multiprocessing
import os
import pickle
import signal
import subprocess
import sys
import time
import types

import pytest
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

import alignkit
import alignkit.ops
from alignkit import drift
from alignkit.drift import causes
from alignkit.drift.monitor import records, replay
from alignkit.errors import DriftError, InputError, UnsupportedError

ALIGNED = "alignkit-3/cpu/v128/k8/kv32/leaf128"


def batch(rows=5, columns=17, seed=0, noise=0.3):
    """Return differing logprobs and a mask, with NaN outside of the mask and one fully masked row."""
    g = torch.Generator().manual_seed(seed)
    rollout = -3 * torch.rand(rows, columns, generator=g)
    training = rollout + noise * torch.randn(rows, columns, generator=g)
    mask = (torch.rand(rows, columns, generator=g) < 0.7).long()
    mask[-1] = 0
    garbage = torch.full_like(rollout, math.nan)
    return torch.where(mask.bool(), rollout, garbage), torch.where(mask.bool(), training, garbage), mask


def monitor(path, contract=ALIGNED, sinks=(), **options):
    return drift.Monitor(path, contract=contract, sinks=sinks, **options)


def lines(path, rank=0):
    return [json.loads(line) for line in (path / records.records_name(rank)).read_text().splitlines()]


def identity(weights=None, epoch=None):
    return alignkit.identity.Identity(ALIGNED, weights, epoch)


def off_by_one_ulp(x, at):
    """Return `x` with one value moved by one ulp toward zero."""
    y = x.clone()
    y[at] = torch.nextafter(y[at], torch.zeros(()))
    return y


# The frameworks' formulas, token by token in Python floats.


def rows_of(x, mask):
    return [
        [v for v, keep in zip(row, keeps, strict=True) if keep]
        for row, keeps in zip(x.tolist(), mask.tolist(), strict=True)
    ]


def verl_by_hand(rollout, training, mask):
    rows = list(zip(rows_of(rollout, mask), rows_of(training, mask), strict=True))
    pairs = [(r, t) for rs, ts in rows for r, t in zip(rs, ts, strict=True)]
    n = len(pairs)
    diffs = [abs(math.exp(t) - math.exp(r)) for r, t in pairs]
    mean = sum(diffs) / n
    x, y = [math.exp(t) for _, t in pairs], [math.exp(r) for r, _ in pairs]
    mx, my = sum(x) / n, sum(y) / n
    covariance = sum((a - mx) * (b - my) for a, b in zip(x, y, strict=True))
    pearson = covariance / math.sqrt(sum((a - mx) ** 2 for a in x) * sum((b - my) ** 2 for b in y))

    def masked_mean(values):
        return sum(values) / len(values) if values else 0.0

    mean_r, mean_t = [masked_mean(rs) for rs, _ in rows], [masked_mean(ts) for _, ts in rows]
    gaps = [r - t for r, t in zip(mean_r, mean_t, strict=True)]

    def average(values):
        return sum(values) / len(values)

    def rho(x):
        return math.exp(max(-20.0, min(20.0, x)))

    return {
        "training/rollout_probs_diff_valid": 1,
        "training/rollout_probs_diff_max": max(diffs),
        "training/rollout_probs_diff_mean": mean,
        "training/rollout_probs_diff_std": math.sqrt(sum((d - mean) ** 2 for d in diffs) / (n - 1)),
        "training/rollout_actor_probs_pearson_corr": pearson,
        "rollout_corr/training_ppl": average([math.exp(-m) for m in mean_t]),
        "rollout_corr/training_log_ppl": average([-m for m in mean_t]),
        "rollout_corr/rollout_ppl": average([math.exp(-m) for m in mean_r]),
        "rollout_corr/rollout_log_ppl": average([-m for m in mean_r]),
        "rollout_corr/kl": average([r - t for r, t in pairs]),
        "rollout_corr/k3_kl": average([math.exp(t - r) - (t - r) - 1 for r, t in pairs]),
        "rollout_corr/log_ppl_diff": average(gaps),
        "rollout_corr/log_ppl_abs_diff": average([abs(g) for g in gaps]),
        "rollout_corr/log_ppl_diff_max": max(gaps),
        "rollout_corr/log_ppl_diff_min": min(gaps),
        "rollout_corr/ppl_ratio": average([math.exp(g) for g in gaps]),
        "rollout_corr/chi2_token": average([rho(t - r) ** 2 for r, t in pairs]) - 1,
        "rollout_corr/chi2_seq": average([rho(sum(ts) - sum(rs)) ** 2 for rs, ts in rows]) - 1,
    }


def nemo_by_hand(rollout, training, mask):
    pairs = [
        (r, t)
        for rs, ts in zip(rows_of(rollout, mask), rows_of(training, mask), strict=True)
        for r, t in zip(rs, ts, strict=True)
    ]

    def mean(values):
        return sum(values) / len(pairs)

    def divergence(p, q):
        mixture = math.log(0.5 * math.exp(p) + 0.5 * math.exp(q))
        return sum(0.5 * (math.exp(x - mixture) - (x - mixture) - 1) for x in (p, q))

    return {
        "train/token_mult_prob_error": mean([math.exp(abs(r - t)) for r, t in pairs]),
        "train/gen_kl_error": mean([math.exp(t - r) - 1 - (t - r) for r, t in pairs]),
        "train/policy_kl_error": mean([math.exp(r - t) - 1 - (r - t) for r, t in pairs]),
        "train/js_divergence_error": mean([divergence(t, r) for r, t in pairs]),
        "train/sampling_importance_ratio": mean([math.exp(t - r) for r, t in pairs]),
    }


@pytest.mark.parametrize("names,formulas", [("verl", verl_by_hand), ("nemo-rl", nemo_by_hand)])
@pytest.mark.parametrize("noise", [0.3, 15.0])  # verl clamps the second
def test_metrics_match_the_frameworks_formulas(tmp_path, names, formulas, noise):
    rollout, training, mask = batch(noise=noise)
    got = monitor(tmp_path, "stock", names=names).log(3, rollout, training, mask)
    expected = formulas(rollout, training, mask)
    assert set(got) == set(expected) | {f"drift/{name}" for name in ("tokens", "bit_equal", "nonfinite", "max_abs")}
    for name, value in expected.items():
        assert got[name] == pytest.approx(value, rel=1e-9, abs=1e-12), name
    assert got["drift/tokens"] == int(mask.sum())
    assert lines(tmp_path)[0]["metrics"] == got


@pytest.mark.parametrize("names", ["plain", "verl", "nemo-rl"])
def test_the_default_device_changes_nothing(tmp_path, names):
    given = batch()
    want = monitor(tmp_path / "a", "stock", names=names).log(0, *given)
    with torch.device("meta"):
        assert monitor(tmp_path / "b", "stock", names=names).log(0, *given) == want


def test_plain_metrics_match_compare_tensors(tmp_path):
    rollout, training, mask = batch()
    got = monitor(tmp_path, "stock").log(0, rollout, training, mask)
    assert got == drift.compare_tensors(rollout, training, mask).metrics("drift/")


@pytest.mark.parametrize("names", ["plain", "verl", "nemo-rl"])
def test_equal_sides_give_zero_and_one_bit_does_not(tmp_path, names):
    rollout, _, mask = batch()
    equal = monitor(tmp_path / "equal", "stock", names=names).log(0, rollout, rollout, mask)
    assert equal["drift/bit_equal"] == equal["drift/tokens"] and equal["drift/max_abs"] == 0
    assert all(value == 0 for name, value in equal.items() if "kl" in name or "diff_m" in name or "chi2" in name)
    at = tuple(mask.nonzero()[4].tolist())
    one = monitor(tmp_path / "one", "stock", names=names).log(0, rollout, off_by_one_ulp(rollout, at), mask)
    assert one["drift/bit_equal"] == one["drift/tokens"] - 1 and one["drift/max_abs"] > 0
    kl = {"plain": "drift/k3_kl", "verl": "rollout_corr/k3_kl", "nemo-rl": "train/gen_kl_error"}[names]
    assert 0 < one[kl] < 1e-12  # floating-point exp(d) - 1 - d would be 0


def test_a_nonfinite_logprob_raises_and_is_null_in_the_record(tmp_path):
    rollout = torch.tensor([[-1.0, math.nan]])
    with pytest.raises(DriftError):
        monitor(tmp_path, names="verl").log(0, rollout, rollout)
    record = lines(tmp_path)[0]
    assert record["metrics"]["rollout_corr/kl"] is None and record["drift"]["nonfinite"] == 1
    worst = record["worst"][0]
    assert worst["rollout"] is None and worst["rollout_bits"].startswith("0x7fc")


def test_a_single_token_has_nan_spread(tmp_path, recwarn):
    got = monitor(tmp_path, "stock", names="verl").log(0, torch.tensor([[-1.0]]), torch.tensor([[-1.5]]))
    assert math.isnan(got["training/rollout_probs_diff_std"])
    assert math.isnan(got["training/rollout_actor_probs_pearson_corr"]) and not recwarn.list


# A planted fault: one token's logprob is off by one ulp, beginning at some step.


def train(path, faulty_from, at, steps=8, **options):
    """Run an aligned training loop; return the steps that ended without an error."""
    done = []
    weights = torch.nn.Linear(4, 3)
    with monitor(path, names="verl", meta={"model": "toy"}, **options) as drift_monitor:
        for step in range(steps):
            rollout, _, mask = batch(seed=step)
            training = off_by_one_ulp(rollout, at) if step >= faulty_from else rollout
            tokens = torch.arange(rollout.numel()).reshape(rollout.shape)
            drift_monitor.log(
                step,
                rollout,
                training,
                mask,
                tokens=tokens,
                context={"prompts": torch.full((5, 2), step)},
                weights=weights,
            )
            done.append(step)
    return done


def test_a_one_ulp_fault_is_found_named_and_saved(tmp_path):
    at = (2, 9)
    faulty = next(step for step in range(3, 8) if batch(seed=step)[2][at])
    with pytest.raises(DriftError) as caught:
        train(tmp_path, faulty, at)
    rollout, _, mask = batch(seed=faulty)
    error, value = caught.value, rollout[at]
    assert (error.step, error.rank, error.token.sequence, error.token.position) == (faulty, 0, *at)
    assert (error.token.rollout, error.token.training) == (value.item(), off_by_one_ulp(rollout, at)[at].item())
    for part in (
        f"step {faulty}, rank 0: 1 of {int(mask.sum())} logprobs",
        "sequence 2, position 9, token 43",
        f"(0x{value.view(torch.int32).item() & 0xFFFFFFFF:08x})",
        ALIGNED,
        str(error.replay),
    ):
        assert part in str(error)
    assert [r["drift"]["bit_equal"] == r["drift"]["tokens"] for r in lines(tmp_path)] == [True] * faulty + [False]
    assert lines(tmp_path)[-1]["replay"] == error.replay.name

    saved = drift.load_replay(error.replay)
    report = saved.report()
    assert (report.first_difference.sequence, report.first_difference.position) == at
    assert (report.tokens, report.bit_equal) == (int(mask.sum()), int(mask.sum()) - 1)
    assert torch.equal(saved.rollout_logp.view(torch.int32), rollout.view(torch.int32))
    assert torch.equal(saved.mask, mask.bool()) and saved.tokens[at] == 43
    assert torch.equal(saved.context["prompts"], torch.full((5, 2), faulty))
    info = saved.info
    assert (info["step"], info["rank"], info["contract"], info["meta"]) == (faulty, 0, ALIGNED, {"model": "toy"})
    assert info["first_difference"] == lines(tmp_path)[-1]["first_difference"]
    assert info["machine"]["versions"]["torch"] == torch.__version__ and info["weights"]["tensors"] == 2


def test_a_stale_weight_shard_is_found_at_its_step(tmp_path):
    """A bf16 loop on real ops stops sending one weight shard to the rollout after step 3.

    Each step changes only one row of the shard, by one ulp.
    """
    g = torch.Generator().manual_seed(0)
    hidden = torch.randn(4, 16, 64, generator=g).bfloat16()
    training = (torch.randn(96, 64, generator=g) / 8).bfloat16()
    rollout, tokens = training.clone(), torch.randint(0, 96, (4, 16), generator=g)
    with monitor(tmp_path, alignkit.contract_id("cpu")) as drift_monitor, pytest.raises(DriftError) as caught:  # noqa: PT012
        for step in range(6):
            logps = [alignkit.ops.linear_logp(hidden, weight, tokens) for weight in (rollout, training)]
            drift_monitor.log(step, *logps, tokens=tokens, context={"hidden": hidden}, weights={"head": training})
            training = off_by_one_ulp(training, step)
            rollout = training.clone() if step < 3 else torch.cat([rollout[:48], training[48:]])
    error = caught.value
    assert error.step == 4 and len(lines(tmp_path)) == 5
    saved = drift.load_replay(error.replay)
    recomputed = [
        alignkit.ops.linear_logp(saved.context["hidden"], weight, saved.tokens) for weight in (rollout, training)
    ]
    assert torch.equal(recomputed[0], saved.rollout_logp) and torch.equal(recomputed[1], saved.train_logp)
    assert saved.info["weights"] == drift.weights_digest({"head": training})  # the rollout's digest differs
    assert saved.info["weights"] != drift.weights_digest({"head": rollout})


def test_later_differences_are_reported_but_not_saved(tmp_path):
    reported = []
    done = train(tmp_path, 3, (0, 0), on_difference=reported.append)
    differing = [step for step in range(3, 8) if batch(seed=step)[2][0, 0]]
    assert done == list(range(8)) and [e.step for e in reported] == differing and len(differing) > 1
    assert [p.name for p in tmp_path.glob("replay*")] == [records.replay_name(0, differing[0])]
    assert {e.replay.name for e in reported} == {records.replay_name(0, differing[0])}


def test_on_difference_can_warn_or_ignore(tmp_path):
    rollout, _, _ = batch()
    rollout = rollout.nan_to_num(-1.0)
    other = off_by_one_ulp(rollout, (0, 1))
    with pytest.warns(RuntimeWarning, match="step 5, rank 0: 1 of 85"):
        monitor(tmp_path / "warn", on_difference="warn").log(5, rollout, other)
    monitor(tmp_path / "none", on_difference=None).log(5, rollout, other)
    assert not list((tmp_path / "none").glob("replay*")) and len(list((tmp_path / "warn").glob("replay*"))) == 1


def test_a_stock_run_never_raises(tmp_path):
    monitor(tmp_path, "stock").log(0, *batch())
    assert lines(tmp_path)[0]["contract"] == "stock" and not list(tmp_path.glob("replay*"))


@pytest.mark.parametrize(
    "error", [OSError(28, "No space left on device"), SafetensorError("I/O error: No space left on device")]
)
def test_a_difference_raises_even_if_the_replay_cannot_be_written(tmp_path, monkeypatch, error):
    def full(*_args, **_options):
        raise error

    monkeypatch.setattr(replay, "save_file", full)
    with pytest.raises(DriftError, match="could not be written: .*No space left") as caught:
        monitor(tmp_path).log(0, *batch())
    assert caught.value.replay is None and lines(tmp_path)[0]["replay"] is None
    assert os.listdir(tmp_path) == [records.records_name(0)]


def test_a_failing_weights_function_keeps_the_replay(tmp_path):
    def weights():
        raise RuntimeError("sharded")

    with pytest.raises(DriftError) as caught:
        monitor(tmp_path).log(0, *batch(), weights=weights)
    assert drift.load_replay(caught.value.replay).info["weights"] == {"error": "RuntimeError: sharded"}


def test_the_error_can_be_pickled(tmp_path):
    with pytest.raises(DriftError) as caught:
        monitor(tmp_path).log(0, *batch())
    again = pickle.loads(pickle.dumps(caught.value))
    assert str(again) == str(caught.value) and again.token == caught.value.token and again.step == 0
    assert isinstance(again, alignkit.AlignkitError)


# Identities, epochs and temperatures


A, B = "a" * 24, "b" * 24
SAME = (identity(A, 5), identity(A))
KNOWN = dict(identity=SAME, epochs=torch.full((2, 3), 5), temperature=(1.0, 1.0))
ROLLOUT = torch.full((2, 3), -1.0)


def test_a_record_has_identities_epochs_and_causes(tmp_path):
    epochs = torch.tensor([[3, -1, 5], [5, 5, -9]])
    mask = epochs >= -1
    with pytest.raises(DriftError) as caught, monitor(tmp_path) as drift_monitor:  # noqa: PT012
        drift_monitor.log(0, ROLLOUT, ROLLOUT, mask, **{**KNOWN, "epochs": epochs})
        drift_monitor.log(
            1,
            ROLLOUT,
            off_by_one_ulp(ROLLOUT, (0, 1)),
            mask,
            identity=(identity(B, 5), SAME[1]),
            epochs=epochs,
            temperature=(0.01, 0.5),
        )
    equal, different = lines(tmp_path)
    assert equal["epochs"] == different["epochs"] == {"first": 3, "last": 5, "mixed": 1, "other": 2}
    assert equal["causes"] == [] and equal["identity"][1] == f"weights: equal ({A})"
    assert different["sides"] == {
        "rollout": {"contract": ALIGNED, "weights": B, "epoch": 5, "temperature": 0.01},
        "training": {"contract": ALIGNED, "weights": A, "epoch": None, "temperature": 0.5},
    }
    first, second, third = different["causes"]
    assert (
        first
        == "the rollout's tokens have epochs 3 to 5 and mixed: 1 of 1 differing tokens are of an epoch other than 5"
    )
    assert second.startswith("different weights: ") and third.startswith("different temperature: ")
    assert f"; causes: {first}; {second}; {third}; first: sequence 0, position 1" in str(caught.value)
    info = drift.load_replay(caught.value.replay).info
    assert all(info[key] == different[key] for key in ("sides", "epochs", "identity", "causes"))


def test_masking_older_epochs_removes_their_tokens(tmp_path):
    epochs = torch.tensor([[3, -1, 5], [5, 5, 9]])
    mask = torch.tensor([[True] * 3, [True, True, False]])
    training = off_by_one_ulp(ROLLOUT, (0, 1))
    with monitor(tmp_path) as drift_monitor:
        drift_monitor.log(0, ROLLOUT, training, mask & (epochs == SAME[0].epoch), **{**KNOWN, "epochs": epochs})
    (record,) = lines(tmp_path)
    assert record["drift"]["tokens"] == 3 and record["epochs"] == {"first": 5, "last": 5, "mixed": 0, "other": 0}


def test_different_weights_raise_no_alarm_while_the_bits_are_equal(tmp_path):
    with monitor(tmp_path) as drift_monitor:
        drift_monitor.log(0, ROLLOUT, ROLLOUT, identity=(identity(A), identity(B)))
    (record,) = lines(tmp_path)
    assert record["identity"][1] == f"weights: different (rollout {A}, training {B})" and record["causes"] == []
    assert record["replay"] is None and record["epochs"] is None


@pytest.mark.parametrize(
    "options, cause",
    [
        (KNOWN, f"cause: {causes.NUMERICS}"),
        ({}, "cause: unknown: epochs of rollout, weights of rollout and training, temperature of rollout and training"),
        ({**KNOWN, "identity": (None, SAME[1])}, "cause: unknown: weights of rollout"),
    ],
)
def test_the_alarm_names_numerics_only_if_nothing_is_unknown(tmp_path, options, cause):
    with pytest.raises(DriftError, match=f"under contract {ALIGNED}; {cause}; first: "):
        monitor(tmp_path).log(0, ROLLOUT, off_by_one_ulp(ROLLOUT, (0, 1)), **options)


def test_facts_change_no_metric(tmp_path):
    rollout, training, mask = batch()
    plain = monitor(tmp_path / "a", "stock").log(0, rollout, training, mask)
    epochs = torch.arange(mask.numel()).view(mask.shape)
    assert monitor(tmp_path / "b", "stock").log(0, rollout, training, mask, **{**KNOWN, "epochs": epochs}) == plain


def test_a_stock_monitor_accepts_identities_of_other_contracts(tmp_path):
    other = alignkit.identity.Identity("alignkit-6/sm90/v128/k8/kv128/leaf512")
    with pytest.raises(InputError, match=f"^identity: must have the monitor's contract '{ALIGNED}', got 'alignkit-6"):
        monitor(tmp_path / "a").log(0, ROLLOUT, ROLLOUT, identity=(other, None))
    monitor(tmp_path / "b", "stock").log(0, ROLLOUT, off_by_one_ulp(ROLLOUT, (0, 1)), identity=(other, None))
    (record,) = lines(tmp_path / "b")
    assert record["causes"][0] == f"different contract: rollout {other.contract}, training stock"


# Files


def test_worst_tokens_are_bounded_and_named(tmp_path):
    rollout, training, mask = batch()
    monitor(tmp_path, "stock", keep_worst=3).log(0, rollout, training, mask, tokens=torch.full(mask.shape, -7))
    worst = next(records.read_records(tmp_path / records.records_name(0)))["worst"]
    expected = drift.compare_tensors(rollout, training, mask, worst=3).worst
    assert [(w["sequence"], w["position"], w["token"], w["rollout"]) for w in worst] == [
        (w.sequence, w.position, -7, w.rollout) for w in expected
    ]


def test_bf16_and_two_calls_per_step_are_accepted(tmp_path):
    rollout, training, mask = (x if x.dtype == torch.int64 else x.bfloat16() for x in batch())
    with monitor(tmp_path, "stock") as drift_monitor:
        for _ in range(2):
            drift_monitor.log(4, rollout, training, mask)
    assert [r["step"] for r in lines(tmp_path)] == [4, 4]


def test_a_torn_line_is_skipped_by_readers_and_writers(tmp_path):
    rollout, _, mask = batch()
    with monitor(tmp_path) as drift_monitor:
        drift_monitor.log(0, rollout, rollout, mask)
        drift_monitor.log(1, rollout, rollout, mask)
    path = tmp_path / records.records_name(0)
    path.write_bytes(path.read_bytes()[:-40])
    assert [r["step"] for r in records.read_records(path)] == [0]
    with monitor(tmp_path) as drift_monitor:
        drift_monitor.log(2, rollout, rollout, mask)
    assert [r["step"] for r in records.read_records(path)] == [0, 2]
    assert len(path.read_bytes().splitlines()) == 3


@pytest.mark.parametrize(
    "line",
    [
        b"",
        b"{}",
        b"[1]",
        b"null",
        b"\xff\xfe",
        b"[" * 5000,
        b'{"version": 1, "step": -1}',
        b'{"version": 1, "step": 1e999}',
        b"9" * 5000,
        b"x" * (3 * records.MAX_LINE),
    ],
)
def test_invalid_lines_are_skipped(tmp_path, line):
    rollout, _, mask = batch()
    path = tmp_path / records.records_name(0)
    path.write_bytes(line + b"\n")
    with monitor(tmp_path) as drift_monitor:
        drift_monitor.log(2, rollout, rollout, mask)
    assert [r["step"] for r in records.read_records(path)] == [2]


@pytest.mark.parametrize(
    "field,value",
    [
        ("step", True),
        ("step", 2**70),
        ("drift", []),
        ("worst", [{}]),
        ("time", "1"),
        ("metrics", {"a": "b"}),
        ("version", 2),
        ("contract", 5),
        ("causes", "numerics"),
        ("causes", [1]),
    ],
)
def test_records_with_wrong_types_are_skipped(tmp_path, field, value):
    monitor(tmp_path, "stock").log(0, *batch())
    record = lines(tmp_path)[0]
    assert records.parse(json.dumps(record).encode()) is not None
    assert records.parse(json.dumps({**record, field: value}).encode()) is None


def test_records_without_causes_are_read(tmp_path):
    """Version 0.2 wrote no facts about the sides."""
    monitor(tmp_path, "stock").log(0, *batch())
    old = {k: v for k, v in lines(tmp_path)[0].items() if k not in ("sides", "epochs", "identity", "causes")}
    assert records.parse(json.dumps(old).encode()) == old


def test_lines_are_read_in_bounded_pieces_and_resume(tmp_path):
    path = tmp_path / "file"
    path.write_bytes(b"a\nb\n" + b"x" * (2 * records.MAX_LINE + 5) + b"\nc\nto")
    reader, got = records.Lines(), []
    with open(path, "rb") as file:
        for _ in range(8):
            got += reader.read(file, 1)
        assert got == [b"a\n", b"b\n", None, b"c\n"]
    with open(path, "ab") as file:
        file.write(b"rn\n")
    with open(path, "rb") as file:
        assert list(reader.read(file, 100)) == [b"torn\n"]


def _rank(path, rank, steps):
    rollout, _, mask = batch(seed=rank)
    with monitor(path, rank=rank, on_difference="warn") as drift_monitor:
        for step in range(steps):
            drift_monitor.log(
                step,
                rollout,
                off_by_one_ulp(rollout, tuple(mask.nonzero()[rank].tolist())) if rank and step == 2 else rollout,
                mask,
            )


def test_each_rank_writes_its_own_file(tmp_path):
    context = multiprocessing.get_context("spawn")
    ranks = [context.Process(target=_rank, args=(tmp_path, rank, 4)) for rank in range(2)]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join(300)
        assert process.exitcode == 0
    equal = [[r["drift"]["bit_equal"] == r["drift"]["tokens"] for r in lines(tmp_path, rank)] for rank in range(2)]
    assert equal == [[True] * 4, [True, True, False, True]]
    assert [p.name for p in tmp_path.glob("replay*")] == [records.replay_name(1, 2)]


def test_a_duplicate_rank_is_rejected(tmp_path):
    first = monitor(tmp_path, rank=3)
    with pytest.raises(InputError, match="rank: .*monitor-rank00003.jsonl is open in another Monitor"):
        monitor(tmp_path, rank=3)
    first.close()
    first.close()
    monitor(tmp_path, rank=3).close()


def _endless(path):
    rollout, _, mask = batch()
    drift_monitor = monitor(path)
    for step in range(10**9):
        drift_monitor.log(step, rollout, rollout, mask)


def test_a_killed_process_leaves_whole_records(tmp_path):
    process = multiprocessing.get_context("spawn").Process(target=_endless, args=(tmp_path,))
    process.start()
    path, deadline = tmp_path / records.records_name(0), time.monotonic() + 300
    while not (path.exists() and path.stat().st_size > 20000) and time.monotonic() < deadline:
        time.sleep(0.05)
    os.kill(process.pid, signal.SIGKILL)
    process.join()
    steps = [r["step"] for r in records.read_records(path)]
    assert steps == list(range(len(steps))) and len(steps) > 5
    with monitor(tmp_path) as drift_monitor:  # the killed process's lock is released
        drift_monitor.log(0, *batch()[:1] * 2, batch()[2])


def test_a_symlink_is_not_written_through(tmp_path):
    (tmp_path / "elsewhere").write_text("precious")
    (tmp_path / records.records_name(0)).symlink_to(tmp_path / "elsewhere")
    with pytest.raises(OSError, match="elsewhere|link|exist"):
        monitor(tmp_path)
    assert (tmp_path / "elsewhere").read_text() == "precious"


# Sinks


def test_function_wandb_and_tensorboard_sinks_receive_metrics(tmp_path, monkeypatch):
    logged, written, called = [], [], []

    class SummaryWriter:
        def __init__(self, path):
            self.path = path

        def add_scalar(self, name, value, step):
            written.append((self.path, name, value, step))

        def flush(self):
            written.append("flushed")

    run = types.SimpleNamespace(log=lambda metrics, step: logged.append((metrics, step)), step=0)
    wandb = types.SimpleNamespace(run=None)
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", types.SimpleNamespace(SummaryWriter=SummaryWriter))
    rollout, _, mask = batch()
    with monitor(tmp_path, sinks=None, rank=2) as drift_monitor:
        drift_monitor.log(1, rollout, rollout, mask)
        assert not logged  # wandb is imported but has no active run; the monitor starts none
        wandb.run = run
        metrics = drift_monitor.log(2, rollout, rollout, mask)
    assert logged == [(metrics | {"drift/step": 2}, 2)]
    assert (str(tmp_path / "tensorboard" / "rank00002"), "drift/max_abs", 0.0, 2) in written
    assert written[-1] == "flushed"
    with monitor(tmp_path, sinks=[lambda step, m: called.append((step, m))]) as drift_monitor:
        metrics = drift_monitor.log(3, rollout, rollout, mask)
    assert called == [(3, metrics)] and len(logged) == 1


REAL = """
import sys
import torch, wandb
from alignkit import contract_id
from alignkit.drift import Monitor

wandb.init(project="drift", dir=sys.argv[1])
rollout = torch.zeros(2, 3)
with Monitor(sys.argv[1], sinks=["tensorboard", "wandb"], contract=contract_id("cpu"), on_difference=None) as monitor:
    for step in range(3):
        monitor.log(step, rollout, rollout + step / 4, torch.ones(2, 3, dtype=torch.bool))
        if step == 1:
            for other in range(3):  # the training loop's own logging, which advances wandb's step
                wandb.log({"loss": other})
wandb.log({})  # commit the last step
summary = dict(wandb.run.summary)
assert (summary["drift/max_abs"], summary["drift/step"], summary["loss"]) == (0.5, 2, 2), summary
wandb.finish()
"""


def test_the_real_tensorboard_and_wandb(tmp_path):
    """Run the real libraries offline in a separate process."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    env = os.environ | {"WANDB_MODE": "offline", "WANDB_SILENT": "true"}
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", REAL, tmp_path], env=env, capture_output=True, text=True, timeout=200
    )
    assert done.returncode == 0, done.stderr
    events = EventAccumulator(str(tmp_path / "tensorboard/rank00000"))
    events.Reload()
    assert [(e.step, e.value) for e in events.Scalars("drift/max_abs")] == [(0, 0.0), (1, 0.25), (2, 0.5)]


def test_missing_wandb_and_tensorboard_are_skipped_unless_requested(tmp_path, monkeypatch):
    monkeypatch.delitem(sys.modules, "wandb", raising=False)
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    rollout, _, mask = batch()
    monitor(tmp_path, sinks=None).log(1, rollout, rollout, mask)
    assert "wandb" not in sys.modules
    with pytest.raises(UnsupportedError, match="sinks: 'tensorboard' requires"):
        monitor(tmp_path / "b", sinks=["tensorboard"])


# The digest


def test_a_weights_digest_covers_names_types_shapes_and_bits():
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4))
    before = drift.weights_digest(model)
    state = {**dict(model.named_parameters()), **dict(model.named_buffers()), "_extra_state": None}
    assert before == drift.weights_digest(state) == drift.weights_digest(lambda: reversed(list(state.items())))
    assert before["tensors"] == 7 and before["bytes"] == 4 * (12 + 4 * 5) + 8
    x = torch.arange(6.0)
    digests = {
        drift.weights_digest(weights)["sha256"]
        for weights in (
            {"a": x},
            {"b": x},
            {"a": x.view(2, 3)},
            {"a": x.bfloat16()},
            {"a": off_by_one_ulp(x, 3)},
            {},
            {"a": x, "b": x},
        )
    }
    assert len(digests) == 7


def test_a_weights_digest_streams_noncontiguous_tensors(monkeypatch):
    x = torch.randn(7, 50, 3)
    views = [x.transpose(0, 2), x[:, ::2], x[::3], x.permute(1, 2, 0), x.reshape(-1)[::5]]
    whole = [drift.weights_digest({"a": v.contiguous()}) for v in views]
    monkeypatch.setattr(replay, "_CHUNK", 64)
    sizes = []
    monkeypatch.setattr(
        replay, "_chunks", lambda t, chunks=replay._chunks: (sizes.append(c.nbytes) or c for c in chunks(t))
    )
    assert [drift.weights_digest({"a": v}) for v in views] == whole
    assert max(sizes) <= 64 and sum(sizes) >= sum(v.nbytes for v in views)


# Rejections


@pytest.mark.parametrize(
    "options,name",
    [
        ({"names": "trl"}, "names"),
        ({"on_difference": "ignore"}, "on_difference"),
        ({"keep_worst": -1}, "keep_worst"),
        ({"keep_worst": 10**6}, "keep_worst"),
        ({"rank": -1}, "rank"),
        ({"rank": True}, "rank"),
        ({"rank": 10**5}, "rank"),
        ({"contract": "mine"}, "contract"),
        ({"contract": None}, "contract"),
        ({"contract": (ALIGNED,) * 3}, "contract"),
        ({"contract": (ALIGNED, "alignkit-6/sm90/v128/k8/kv128/leaf512")}, "contract"),
        ({"sinks": "wandb"}, "sinks"),
        ({"sinks": ["mlflow"]}, "sinks"),
        ({"meta": {"a": 1}}, "meta"),
        ({"meta": {"a": "x" * 10**6}}, "meta"),
    ],
)
def test_invalid_options_are_rejected(tmp_path, options, name):
    with pytest.raises(InputError, match=f"^{name}: "):
        monitor(tmp_path, **options)
    assert not list(tmp_path.glob("monitor*"))


@pytest.mark.parametrize(
    "change,name",
    [
        ({"step": -1}, "step"),
        ({"step": 1.0}, "step"),
        ({"step": True}, "step"),
        ({"rollout_logp": [[-1.0]]}, "rollout_logp"),
        ({"train_logp": torch.zeros(1, 3)}, "train_logp"),
        ({"train_logp": torch.zeros(1, 2, dtype=torch.bfloat16)}, "train_logp"),
        ({"mask": torch.full((1, 2), 2)}, "mask"),
        ({"mask": [[1, 1]]}, "mask"),
        ({"mask": torch.zeros(1, 2)}, "mask"),
        ({"tokens": torch.zeros(1, 2)}, "tokens"),
        ({"tokens": torch.zeros(2, 2, dtype=torch.int64)}, "tokens"),
        ({"context": {"a/b": torch.zeros(1)}}, "context"),
        ({"context": {f"c{i}": torch.zeros(1) for i in range(97)}}, "context: must have at most 96 tensors, got 97"),
        ({"context": {"a": [1]}}, "context"),
        ({"train_logp": torch.zeros(1, 2, device="meta")}, "device|contract"),
        ({"identity": (None,)}, "identity: expected a pair"),
        ({"identity": (None, "a")}, "identity: expected an alignkit.identity.Identity"),
        ({"epochs": torch.full((1, 2), -2)}, "epochs: must be at least -1"),
        ({"epochs": torch.zeros(1, 3).long()}, "epochs: expected shape"),
        ({"temperature": (0.0, 1.0)}, "temperature: must be positive"),
    ],
)
def test_invalid_arguments_are_rejected(tmp_path, change, name):
    arguments = {"step": 0, "rollout_logp": torch.zeros(1, 2), "train_logp": torch.zeros(1, 2), **change}
    with pytest.raises(alignkit.AlignkitError, match=f"^({name})"):
        monitor(tmp_path).log(**arguments)
    assert not lines(tmp_path)


def test_a_closed_monitor_rejects_log(tmp_path):
    drift_monitor = monitor(tmp_path)
    drift_monitor.close()
    with pytest.raises(InputError, match="closed"):
        drift_monitor.log(0, *batch())


def test_two_equal_contracts_are_accepted(tmp_path):
    assert monitor(tmp_path, (ALIGNED, ALIGNED)).contract == ALIGNED


def test_invalid_replays_are_rejected(tmp_path):
    with pytest.raises(DriftError) as caught:
        monitor(tmp_path).log(0, *batch())
    good = caught.value.replay.read_bytes()
    with safe_open(caught.value.replay, framework="pt") as file:
        metadata, tensors = file.metadata(), {name: file.get_tensor(name) for name in file.keys()}
    path = tmp_path / "bad.safetensors"

    def assert_rejected(match):
        with pytest.raises(InputError, match=match):
            drift.load_replay(path)

    assert_rejected("no such file, expected a replay")
    for cut in (0, 7, 100, len(good) - 1):
        path.write_bytes(good[:cut])
        assert_rejected("cannot be read as a safetensors file")
    path.write_bytes((2**30).to_bytes(8, "little") + good[8:])
    assert_rejected("cannot be read as a safetensors file")
    with open(path, "wb") as file:  # a sparse header of 512 MiB
        file.write((2**29).to_bytes(8, "little"))
        file.truncate(2**29 + 8)
    assert_rejected("header of a replay must have at most")
    for change, match in (
        ({"format": "other"}, "expected a replay with .*, got 'other'"),
        ({"format_version": "9"}, "format_version: .*, got '9'"),
        ({"info": "{"}, "info: must be JSON"),
        ({"info": "[]"}, "info: must be a JSON object"),
    ):
        save_file(tensors, path, metadata={**metadata, **change})
        assert_rejected(match)
    save_file(tensors, path, metadata={k: v for k, v in metadata.items() if k != "info"})
    assert_rejected("info is missing from the metadata. A replay must be written by alignkit.drift.Monitor")
    for change, match in (
        ({"mask": tensors["mask"][:2].clone()}, "'mask': must have the shape of 'rollout_logp', "),
        ({"train_logp": tensors["train_logp"].double()}, "'train_logp': must have dtype F32 or BF16, got F64"),
        ({f"context.{i}": torch.zeros(1) for i in range(200)}, "at most 100 tensors, got 203"),
    ):
        save_file({**tensors, **change}, path, metadata=metadata)
        assert_rejected(match)
    save_file({k: v for k, v in tensors.items() if k != "mask"}, path, metadata=metadata)
    assert_rejected("'mask' is missing")


def test_a_too_large_replay_is_rejected_by_its_header(tmp_path, monkeypatch):
    with pytest.raises(DriftError) as caught:
        monitor(tmp_path).log(0, *batch(), context={"big": torch.zeros(1000)})
    monkeypatch.setattr(replay, "MAX_VALUES", 999)
    with pytest.raises(InputError, match="'context.big': at most 999 values are supported, got 1000"):
        drift.load_replay(caught.value.replay)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_gpu_tensors_give_the_same_records(tmp_path):
    rollout, training, mask = batch()
    tokens = torch.arange(rollout.numel()).reshape(rollout.shape)
    for device in ("cpu", "cuda"):
        monitor(tmp_path / device, "stock").log(
            0, *(x.to(device) for x in (rollout, training, mask)), tokens=tokens.to(device)
        )
    host, card = (lines(tmp_path / device)[0] for device in ("cpu", "cuda"))
    assert {**host, "time": 0} == {**card, "time": 0}
    with pytest.raises(InputError, match="contract: rollout_logp is on cuda"):
        monitor(tmp_path / "other").log(0, rollout.cuda(), rollout.cuda(), mask)
    with pytest.raises(DriftError) as caught:
        monitor(tmp_path / "aligned", alignkit.contract_id("cuda")).log(
            0, rollout.cuda(), training.cuda(), mask.cuda(), tokens=tokens.cuda(), weights={"a": rollout.cuda()}
        )
    saved = drift.load_replay(caught.value.replay)
    assert torch.equal(saved.train_logp.view(torch.int32), training.view(torch.int32))
    assert saved.info["weights"] == drift.weights_digest({"a": rollout})
