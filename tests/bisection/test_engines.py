"""`alignkit bisect` with the real engines, on a tiny model."""

import json
import subprocess
import sys

import pytest
import torch

from alignkit import contract
from alignkit.check.model import make_checkpoint
from alignkit.convert import read_architecture
from alignkit.drift import bisect
from alignkit.drift.bisect import recording
from alignkit.drift.bisect import run as runs
from alignkit.drift.bisect.points import OPS, points
from alignkit.errors import UnsupportedError
from tests.forks import begin, preload

preload("tests.vllm.preload", "tests.megatron.preload")

LENGTHS = (5, 11, 33)
SIZES = {"hidden": 128, "layers": 2, "heads": 4, "kv_heads": 2, "head_dim": 32, "intermediate": 256, "vocab": 300}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    made = {}

    def make(arch):
        if arch not in made:
            made[arch] = make_checkpoint(tmp_path_factory.mktemp(arch), arch, **SIZES)
        return made[arch]

    return make


@pytest.fixture(autouse=True)
def short_sequences(monkeypatch):
    monkeypatch.setattr(runs, "LENGTHS", LENGTHS)


def cli(*args):
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "alignkit.cli", "bisect", *map(str, args)],
        capture_output=True,
        text=True,
        timeout=400,
    )
    return done.returncode, done.stdout, done.stderr


def names(path, **about):
    return [p.name for p in points(read_architecture(path))]


@pytest.mark.slow
def test_stock_vllm_against_stock_megatron_by_command(tmp_path):
    status, out, err = cli(
        "stock-vllm", "stock-megatron", "--arch", "llama", "--swap", "rms_norm=aligned", "--out", tmp_path / "out"
    )
    assert status == 1, err
    found = json.loads((tmp_path / "out/bisect.json").read_text())
    first = found["first"]
    assert first["point"] == "layers.0.input_norm" and first["op"] == "rms_norm"
    assert first["differing"] == len(first["tokens"]) > 0 and first["values"]["max_ulps"] >= 1
    assert f"The first point that differs is {first['point']}" in out and "eagerly" in out
    assert found["missing"] == [] and found["points_compared"] == len(names(tmp_path / "out/model"))
    assert found["swap"]["confirmed"] is True and "confirmed" in out
    assert next(p for p in found["swap"]["points"] if p["point"] == first["point"])["differing"] == 0
    # It grows from there, and what comes before is equal.
    by_name = {p["point"]: p for p in found["points"]}
    assert by_name["embedding"]["differing"] == 0 < by_name["logprob"]["values"]["max_abs"]
    report = (tmp_path / "out/report.html").read_text()
    assert "layers.0.input_norm" in report and "data:image/svg+xml" in report and "http" not in report


@pytest.fixture(scope="module")
def aligned(model, tmp_path_factory):
    """vLLM decoding and prefilling in chunks, against Megatron packed."""
    previous, runs.LENGTHS = runs.LENGTHS, LENGTHS
    out = tmp_path_factory.mktemp("aligned") / "out"
    try:
        return out, bisect.bisect(
            bisect.Options("aligned-vllm:chunk=16", "aligned-megatron:mode=packed", out, model=model("qwen3"), decode=3)
        )
    finally:
        runs.LENGTHS = previous


def test_aligned_against_aligned_nothing_differs_and_all_was_compared(aligned, model):
    _, result = aligned
    assert result.comparison.suspect is None and result.comparison.missing == []
    assert [p.point for p in result.comparison.points] == names(model("qwen3"))
    sequences, rows = len(LENGTHS), sum(LENGTHS) + 3 * len(LENGTHS)
    # vLLM never runs the token that it sampled last; the last logprobs are of that token.
    assert {p.compared for p in result.comparison.points} == {rows - sequences}
    assert result.comparison.compared == (rows - sequences) * len(names(model("qwen3")))
    assert result.a.contract == result.b.contract == contract.contract_id("cpu")


def test_a_recording_is_a_side_and_ranks_are_put_together(aligned, model, tmp_path):
    out, first = aligned
    again = bisect.bisect(
        bisect.Options(str(out / "recordings/a"), "aligned-megatron:tp=2", tmp_path / "out", model=model("qwen3"))
    )
    assert again.comparison.suspect is None and again.comparison.compared == first.comparison.compared
    assert again.b.settings["tp"] == 2 and again.b.ranks_differ


def test_a_recording_of_another_model_or_other_tokens_is_refused_before_an_engine_starts(aligned, model, tmp_path):
    recording = str(aligned[0] / "recordings/a")
    other = make_checkpoint(tmp_path / "other", "qwen3", seed=1, **SIZES)
    for options, said in (({"model": other}, "weights"), ({"model": model("llama")}, "architecture"), ({}, "model")):
        with pytest.raises(ValueError, match=said):
            bisect.bisect(bisect.Options(recording, "hf", tmp_path / "out", **options))
    with pytest.raises(ValueError, match="would be deleted"):
        bisect.bisect(bisect.Options(recording, "hf", aligned[0], model=model("qwen3")))
    assert (aligned[0] / "recordings/a/recording.json").exists()


def job_of(path, at, lengths=LENGTHS, **job):
    """A file with the job to record this model at `at`."""
    job = {
        "weights": "w",
        "model": str(path),
        "dtype": "bfloat16",
        "tp": 1,
        "mode": "padded",
        "chunk": None,
        "decode": 0,
        "seed": 0,
        "swap": [],
        "keep": None,
        "what": "faults",
        "sequences": [list(range(3, 3 + n)) for n in lengths],
        "runs": [{"out": str(at / "good/recording.json")}],
    } | job
    at.mkdir(exist_ok=True)
    (at / "job.json").write_text(json.dumps(job))
    return at / "job.json"


def run_faulty(path, tmp_path, script="faulty", *arguments, **job):
    begin(f"tests.bisection.{script}", str(job_of(path, tmp_path, **job)), *arguments, fork_workers=True)()
    return tmp_path


def between(a, b, tmp_path):
    return bisect.bisect(bisect.Options(str(a), str(b), tmp_path / "out")).comparison


def test_planted_faults_are_found_at_the_right_point(model, tmp_path):
    at = run_faulty(model("qwen3"), tmp_path, engine="megatron", patched=True, tp=2)
    expected = {"norm-weight": "layers.1.post_norm", "rope-base": "layers.0.q_rope", "stale-shard": "layers.1.q"}
    found = {name: between(at / "good", at / name, tmp_path) for name in expected}
    assert {name: c.suspect.point for name, c in found.items()} == expected
    rope = found["rope-base"].suspect
    # Position 0 turns by nothing.
    assert (0, 0) not in found["rope-base"].tokens and rope.differing == rope.compared - len(LENGTHS)
    assert found["stale-shard"].suspect.pieces == [1]  # the second rank's KV head
    assert between(at / "stale-shard", at / "lost-patch", tmp_path).suspect is None


def test_a_mixture_of_experts(model, tmp_path):
    """Both engines' points are equal, the experts of each token among them; a router and an expert of other weights are found."""
    path = model("qwen3_moe")
    weights = recording.weights_digest(path)
    at = run_faulty(path, tmp_path, engine="megatron", patched=True, tp=2, what="experts", weights=weights)
    result = bisect.bisect(bisect.Options("aligned-vllm:chunk=16", str(at / "good"), tmp_path / "vllm", model=path))
    assert result.comparison.suspect is None and result.comparison.missing == []
    assert [p.point for p in result.comparison.points] == names(path)
    chosen = result.a.values["layers.1.router_choice"]
    assert chosen.unique().tolist() == [0.0, 1.0] and chosen.sum(1).unique().tolist() == [4.0]
    router, expert = (between(at / "good", at / name, tmp_path / name) for name in ("router", "expert"))
    assert router.suspect.point == "layers.1.router_choice" and 0 < router.suspect.differing <= router.suspect.compared
    assert expert.suspect.point == "layers.1.experts" and expert.suspect.differing < expert.suspect.compared


@pytest.mark.parametrize(
    "a, options, said", [("hf", {}, "^hf: a mixture"), ("stock-vllm", {"swap": "linear"}, "^swap: ")]
)
def test_what_is_not_recorded_of_a_mixture(a, options, said, model, tmp_path):
    for given in ({"model": model("qwen3_moe")}, {"arch": "qwen3_moe"}):
        with pytest.raises(UnsupportedError, match=said):
            bisect.bisect(bisect.Options(a, "stock-megatron", tmp_path / "out", **given, **options))


@pytest.mark.parametrize("arch, more", [("qwen3_moe", {"dense_layers": (0,)}), ("glm4_moe", {})])
def test_mixtures_that_are_not_recorded(arch, more, tmp_path):
    path = make_checkpoint(tmp_path / "model", arch, **SIZES, **more)
    with pytest.raises(UnsupportedError, match=f"^model: {arch} with such layers or routers"):
        bisect.bisect(bisect.Options("stock-vllm", "stock-megatron", tmp_path / "out", model=path))


def test_keys_and_values_of_old_weights_are_found_in_the_attention_that_reads_them(model, tmp_path):
    """Tokens that are found in the prefix cache are not computed again; those after them, in their blocks' company, are."""
    at = run_faulty(model("qwen3"), tmp_path, "faulty_vllm", "stale-cache", engine="vllm", patched=True)
    c = between(at / "good", at / "stale", tmp_path)
    assert c.suspect.point == "layers.0.attention"
    assert c.tokens == [(1, 8), (1, 9), (1, 10), (2, 32)]  # of 11 and 33 tokens, in blocks of 8


@pytest.fixture(scope="module")
def reference(model, tmp_path_factory):
    """Where an aligned Megatron's recording of an architecture is, each made once."""
    made = {}

    def record(arch):
        if arch not in made:
            made[arch] = (
                run_faulty(model(arch), tmp_path_factory.mktemp(arch), engine="megatron", patched=True) / "good"
            )
        return made[arch]

    return record


@pytest.mark.slow
def test_a_stock_layer_in_one_worker_is_found_there(model, reference, tmp_path):
    faulty = run_faulty(model("qwen3"), tmp_path, "faulty_vllm", "stock-layer", engine="vllm", patched=True, tp=2)
    result = bisect.bisect(bisect.Options(str(reference("qwen3")), str(faulty / "good"), tmp_path / "out"))
    assert result.comparison.suspect.point in ("layers.1.gate", "layers.1.up")
    assert result.b.settings["replaced"].startswith("worker 1: ") and "gate_up_proj" in result.b.settings["replaced"]


def test_another_way_to_one_layers_product_is_found_there(model, tmp_path):
    at = run_faulty(model("qwen2"), tmp_path, engine="megatron", patched=False, what="products")
    assert between(at / "good", at / "split", tmp_path).suspect.point == "layers.1.down"


def every_op_exchanged(path, tmp_path, lengths=LENGTHS):
    """In stock vLLM all at once, against aligned Megatron: only the logprob's own arithmetic may differ."""
    jobs = {
        "vllm": job_of(path, tmp_path / "a", lengths, engine="vllm", patched=False, swap=list(OPS)),
        "megatron": job_of(path, tmp_path / "b", lengths, engine="megatron", patched=True),
    }
    for end in [begin(runs.module_of(engine), [str(job)]) for engine, job in jobs.items()]:
        end()
    c = between(tmp_path / "a/good", tmp_path / "b/good", tmp_path)
    assert c.missing == [] and (c.suspect is None or c.suspect.point == "logprob")


@pytest.mark.slow
def test_with_every_op_exchanged_stock_vllm_is_aligned_up_to_the_logprob(model, tmp_path):
    every_op_exchanged(model("llama"), tmp_path)


@pytest.mark.parametrize("engine, arch", [("megatron", "qwen3"), pytest.param("hf", "llama", marks=pytest.mark.slow)])
def test_exchanging_op_after_op_makes_a_stock_side_aligned(engine, arch, model, reference, tmp_path):
    """Each moves the first difference on, and with all of them only the logprob's own arithmetic is stock."""
    at = run_faulty(model(arch), tmp_path, engine=engine, patched=False, what="swaps")
    firsts = []
    for name in ["good", *(f"swapped-{op}" for op in OPS)]:
        c = between(reference(arch), at / name, tmp_path)
        firsts.append(len(c.points) if c.first is None else c.first)
    assert firsts == sorted(firsts), firsts
    assert 0 < firsts[0] < firsts[-1]
    assert firsts[-1] >= len(c.points) - 1, c.suspect


@pytest.mark.slow
def test_values_are_recorded_in_a_second_run_when_they_are_many(model, tmp_path):
    result = bisect.bisect(
        bisect.Options("stock-megatron", "hf", tmp_path / "out", model=model("llama"), budget=2**17, swap="silu_mul")
    )
    recorded = {p.point for p in result.comparison.points if p.values}
    assert (tmp_path / "out/values/a/recording.json").exists()
    assert result.comparison.suspect.point in recorded and len(recorded) < len(result.comparison.points)
    held = sum(v.numel() * 4 for name, v in result.a.values.items() if name != "logprob")
    assert 0 < held <= 2**17
    assert result.confirmed is False  # it is not what differs first


@pytest.mark.parametrize(
    "change, said",
    [
        ({"a": "stock-tensorrt"}, "side"),
        ({"a": "hf:tp=2"}, "no setting"),
        ({"a": "stock-megatron:mode=packed"}, "mode"),
        ({"a": "stock-vllm:chunk=0"}, "chunk"),
        ({"a": "aligned-vllm:batch_invariant=1"}, "no setting"),
        ({"a": "stock-vllm:batch_invariant=yes"}, "batch_invariant"),
        ({"dtype": "float16"}, "dtype"),
        ({"swap": "softmax"}, "swap"),
        ({"a": "aligned-vllm", "swap": "linear"}, "neither side is a stock"),
        ({"decode": 4, "swap": "linear"}, "decode"),
        ({"a": "hf", "decode": 4}, "decode"),
        ({"budget": 1}, "budget"),
        ({"timeout": 0}, "timeout"),
    ],
)
def test_what_cannot_be_is_refused_by_name(change, said, tmp_path):
    options = {"a": "stock-vllm", "b": "aligned-megatron", "out": tmp_path / "out"} | change
    with pytest.raises((ValueError, NotImplementedError), match=said):
        bisect.bisect(bisect.Options(**options))
    assert not (tmp_path / "out").exists()


@pytest.mark.skipif(torch.cuda.is_available(), reason="on a GPU vLLM has that mode")
def test_vllms_batch_invariance_is_refused_on_a_cpu(tmp_path):
    with pytest.raises(NotImplementedError, match="batch_invariant: .* on GPUs only"):
        bisect.bisect(bisect.Options("stock-vllm:batch_invariant=1", "hf", tmp_path / "out"))


def test_tokens_that_the_model_cannot_take_are_refused(model, tmp_path):
    from alignkit.drift import Logprobs, save

    for sequences, said in (([[1, 2], [1, 2]], "the same"), ([[1, 300]], "vocabulary")):
        save(tmp_path / "t", Logprobs(sequences, [[] for _ in sequences], [torch.zeros(0)] * len(sequences), "none"))
        with pytest.raises(ValueError, match=said):
            bisect.bisect(bisect.Options("hf", "hf", tmp_path / "out", model=model("qwen3"), tokens=tmp_path / "t"))
