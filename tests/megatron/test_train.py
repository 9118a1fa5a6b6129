"""Training jobs of `alignkit check` (alignkit/jobs/train.py), in separate processes with real Megatron-core on a CPU.

Patched jobs must be bit-equal across layouts, and a failing rank must end its job with its traceback.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from alignkit import contract_id
from alignkit.drift.files import Logprobs, load, save
from alignkit.errors import InputError, UnsupportedError
from alignkit.jobs import train
from alignkit.jobs.execute import Progress, WorkerError, execute, prepare
from alignkit.jobs.job import Job
from alignkit.megatron import patch_megatron
from alignkit.testing import assert_bitwise_equal
from tests.megatron import workers


@pytest.fixture
def sampled(rows, tmp_path):
    """Save `rows` as a logprob file with prompts of one to three tokens, and return its content."""
    cut = [min(len(row) - 1, i % 3 + 1) for i, row in enumerate(rows)]
    pairs = [(row[:n], row[n:]) for n, row in zip(cut, rows, strict=True)]
    given = Logprobs(
        [prompt for prompt, _ in pairs],
        [tokens for _, tokens in pairs],
        [torch.zeros(len(tokens)) for _, tokens in pairs],
        "none",
    )
    save(tmp_path / "in", given)
    return given


TE_ON_CPU = os.pathsep.join([str(Path(__file__).parent / "te_on_cpu"), *filter(None, [os.environ.get("PYTHONPATH")])])


def job_of(tmp_path, modes, **spec):
    runs = [{"mode": m, "in": str(tmp_path / "in"), "out": str(tmp_path / m)} for m in modes]
    return Job("job", "alignkit.jobs.train", spec | {"model": str(spec["model"]), "runs": runs})


def run(tmp_path, **spec):
    """Run a job, with TransformerEngine from `te_on_cpu` if its spec is "te"; raises WorkerError if it fails."""
    prepare(tmp_path)
    with pytest.MonkeyPatch.context() as patch:
        if spec.get("spec") == "te":
            patch.setenv("PYTHONPATH", TE_ON_CPU)
        execute([job_of(tmp_path, **spec)], tmp_path, 240, Progress())


def test_patched_job_is_bit_equal_and_stock_job_drifts(checkpoint, sampled, tmp_path, world):
    path = checkpoint("qwen3", torch.bfloat16, vocab=2000)
    with patch_megatron(2000), torch.no_grad():
        expected = train.recompute(workers.build(path, torch.bfloat16), sampled, "one")
    run(
        tmp_path,
        model=path,
        dtype="bfloat16",
        patched=True,
        tp=2,
        sequence_parallel=True,
        modes=["one", "padded", "packed"],
    )
    for mode in ("one", "padded", "packed"):
        got = load(tmp_path / mode)
        assert got.contract == contract_id("cpu") and got.tokens == sampled.tokens
        assert got.meta["mode"] == mode and got.meta["tp"] == "2"
        for a, b in zip(got.logprobs, expected, strict=True):
            assert_bitwise_equal(a, b, mode)

    run(tmp_path, model=path, dtype="bfloat16", patched=False, tp=2, sequence_parallel=True, modes=["padded"])
    stock = load(tmp_path / "padded")
    assert stock.contract == "stock"
    difference = (torch.cat(stock.logprobs) - torch.cat(expected)).abs()
    assert 0 < difference.max() < 0.3


def test_expert_parallel_job_is_bit_equal(checkpoint, sampled, tmp_path, world):
    path = checkpoint("qwen3_moe", torch.bfloat16, intermediate=128, experts=8, top_k=2)
    with patch_megatron(300), torch.no_grad():
        expected = train.recompute(workers.build(path, torch.bfloat16), sampled, "one")
    run(tmp_path, model=path, dtype="bfloat16", patched=True, tp=1, ep=2, modes=["one", "padded"])
    for mode in ("one", "padded"):
        assert load(tmp_path / mode).meta["ep"] == "2"
        for a, b in zip(load(tmp_path / mode).logprobs, expected, strict=True):
            assert_bitwise_equal(a, b, mode)


@pytest.mark.parametrize(
    "layout",
    [
        dict(spec="te", tp=2, sequence_parallel=True, cp=2),
        pytest.param(dict(spec="te", tp=1, pp=2, cp=2), marks=pytest.mark.slow),
    ],
    ids=["te-tp2-sp-cp2", "te-pp2-cp2"],
)
def test_pipeline_and_context_parallel_jobs_are_bit_equal(layout, checkpoint, sampled, tmp_path, world):
    path = checkpoint("qwen3", torch.bfloat16)
    with patch_megatron(300), torch.no_grad():
        expected = train.recompute(workers.build(path, torch.bfloat16), sampled, "one")
    modes = ["one", "padded", "packed"]
    run(tmp_path, model=path, dtype="bfloat16", patched=True, micro_batch=100, modes=modes, **layout)
    for mode in modes:
        got = load(tmp_path / mode)
        facts = dict(tp=1, pp=1, cp=1, spec="local", sequence_parallel=False) | layout
        assert {name: got.meta[name] for name in facts} == {name: str(value) for name, value in facts.items()}
        for a, b in zip(got.logprobs, expected, strict=True):
            assert_bitwise_equal(a, b, mode)


def test_stock_pipeline_job_with_te_spec_runs_padded_and_packed(checkpoint, sampled, tmp_path, world):
    """Stock TransformerEngine attention supports packed sequences, unlike the local spec's."""
    path = checkpoint("qwen3", torch.bfloat16)
    with torch.no_grad():
        expected = torch.cat(train.recompute(workers.build(path, torch.bfloat16), sampled, "padded", patched=False))
    modes = ["padded", "packed"]
    run(tmp_path, model=path, dtype="bfloat16", patched=False, tp=1, pp=2, spec="te", modes=modes)
    for mode in modes:
        got = load(tmp_path / mode)
        assert got.contract == "stock" and got.meta["spec"] == "te"
        assert (torch.cat(got.logprobs) - expected).abs().max() < 0.3, mode


def test_failing_rank_ends_the_job_with_its_traceback(checkpoint, sampled, tmp_path):
    """Rank 0 cannot write its first result while rank 1 continues with the next run."""
    (tmp_path / "one").mkdir()
    with pytest.raises(WorkerError, match="exit status") as raised:
        run(tmp_path, model=checkpoint(), dtype="bfloat16", patched=True, tp=2, modes=["one", "padded"])
    message = str(raised.value)
    assert "IsADirectoryError" in message and "train.py" in message
    assert not (tmp_path / "padded").exists()


@pytest.mark.slow
def test_command_reports_a_truncated_input(checkpoint, sampled, tmp_path):
    """The command is the one that reruns a job by hand."""
    (tmp_path / "in").write_bytes((tmp_path / "in").read_bytes()[:100])
    job = job_of(tmp_path, model=checkpoint(), dtype="bfloat16", patched=True, tp=2, modes=["one"])
    job.write(tmp_path / "job.json")
    command = [sys.executable, "-W", "ignore", "-m", job.module, str(tmp_path / "job.json")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240)
    assert done.returncode != 0 and "cannot be read as a safetensors file" in done.stderr


@pytest.mark.parametrize("mode", ["one", "padded", "packed"])
def test_sequences_without_sampled_tokens_have_no_logprobs(mode, checkpoint, rows, world):
    given = Logprobs([rows[1], rows[2][:1], [7]], [[], rows[2][1:], []], [torch.zeros(0)] * 3, "none")
    with patch_megatron(300), torch.no_grad():
        model = workers.build(checkpoint(), torch.bfloat16)
        got = train.recompute(model, given, mode)
        alone = train.recompute(model, workers.as_logprobs(rows[2:3]), "one")[0]
        assert [len(x) for x in got] == [0, len(rows[2]) - 1, 0]
        assert_bitwise_equal(got[1], alone)
        given.prompts[2] = []
        with pytest.raises(InputError, match=r"given: prompts\[2\]: must have at least one token id"):
            train.recompute(model, given, mode)


@pytest.mark.parametrize(
    "change, error, named",
    [
        ({"dtype": "float16"}, InputError, "float16"),
        ({"tp": 3}, UnsupportedError, "num_key_value_heads"),
        ({"tp": "2"}, InputError, "tp"),
        ({"ep": "2"}, InputError, "ep"),
        ({"ep": 2}, UnsupportedError, "ep: must be 1 for a dense model, got 2"),
        ({"pp": 4}, InputError, "pp: must divide the model's 2 layers, got 4"),
        ({"pp": 0}, InputError, "pp: must divide the model's 2 layers, got 0"),
        ({"cp": 0}, InputError, "cp: must be positive, got 0"),
        ({"cp": 3}, InputError, "cp: must divide the 4 query heads, got 3"),
        (
            {"cp": 2, "patched": False},
            UnsupportedError,
            "cp: must be 1 for stock Megatron-core in alignkit check, got 2",
        ),
        ({"spec": "apex"}, InputError, "spec: expected one of local, te, got 'apex'"),
        ({"spec": "te"}, UnsupportedError, "spec: te requires TransformerEngine"),
        ({"extra": 1}, InputError, "extra"),
        ({"runs": [{"mode": "chunked", "in": "a", "out": "b"}]}, InputError, "chunked"),
        ({"patched": False, "runs": [{"mode": "packed", "in": "a", "out": "b"}]}, UnsupportedError, "packed"),
        ({"patched": False, "temperature": 0.7}, UnsupportedError, "temperature"),
        ({"model": "nowhere"}, InputError, "nowhere"),
    ],
)
def test_invalid_job_is_rejected(change, error, named, checkpoint, monkeypatch):
    monkeypatch.setattr(train, "installed", lambda name: False)
    job = {"model": str(checkpoint()), "dtype": "bfloat16", "patched": True, "tp": 1, "runs": []}
    with pytest.raises(error, match=named):
        train.run_job(job | change)
