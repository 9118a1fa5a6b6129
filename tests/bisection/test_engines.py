"""`alignkit bisect` with real vLLM and Megatron-core on a CPU, with a tiny model of two layers.

Planted faults (`faulty.py`, `faulty_vllm.py`) must be found at their point, and aligned engines must not differ.
`test_cuda.py` imports the helpers.
"""

import json
import subprocess
import sys

import pytest
import torch

from alignkit import bisect, contract_id
from alignkit.bisect import recording
from alignkit.bisect import run as runs
from alignkit.bisect.points import OPS, points
from alignkit.convert import read_architecture
from alignkit.errors import UnsupportedError
from alignkit.jobs.model import make_checkpoint
from tests.forks import preload, start_process

preload("tests.vllm.preload", "tests.megatron.preload")

LENGTHS = (5, 11, 33)
SIZES = {"hidden": 128, "layers": 2, "heads": 4, "kv_heads": 2, "head_dim": 32, "intermediate": 256, "vocab": 300}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    cache = {}

    def make(arch):
        if arch not in cache:
            cache[arch] = make_checkpoint(tmp_path_factory.mktemp(arch), arch, **SIZES)
        return cache[arch]

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


def point_names(path):
    return [p.name for p in points(read_architecture(path))]


@pytest.mark.slow
def test_the_command_finds_the_first_difference_of_stock_engines(tmp_path):
    status, out, err = cli(
        "stock-vllm", "stock-megatron", "--arch", "llama", "--swap", "rms_norm=aligned", "--out", tmp_path / "out"
    )
    assert status == 1, err
    found = json.loads((tmp_path / "out/bisect.json").read_text())
    first = found["first"]
    assert first["point"] == "layers.0.input_norm" and first["op"] == "rms_norm"
    assert first["differing"] == len(first["tokens"]) > 0 and first["values"]["max_ulps"] >= 1
    assert f"The first differing point is {first['point']}" in out and "eagerly" in out
    assert found["missing"] == [] and found["points_compared"] == len(point_names(tmp_path / "out/model"))
    assert found["swap"]["confirmed"] is True and "rms_norm is the cause" in out
    assert next(p for p in found["swap"]["points"] if p["point"] == first["point"])["differing"] == 0
    # Earlier points are equal, later differences grow.
    by_name = {p["point"]: p for p in found["points"]}
    assert by_name["embedding"]["differing"] == 0 < by_name["logprob"]["values"]["max_abs"]
    report = (tmp_path / "out/report.html").read_text()
    assert "layers.0.input_norm" in report and "data:image/svg+xml" in report and "http" not in report


@pytest.fixture(scope="module")
def aligned(model, tmp_path_factory):
    """Compare chunked prefill and decode in vLLM with packed sequences in Megatron."""
    previous, runs.LENGTHS = runs.LENGTHS, LENGTHS
    out = tmp_path_factory.mktemp("aligned") / "out"
    try:
        return out, bisect.bisect(
            bisect.Options("aligned-vllm:chunk=16", "aligned-megatron:mode=packed", out, model=model("qwen3"), decode=3)
        )
    finally:
        runs.LENGTHS = previous


def test_aligned_engines_do_not_differ_at_any_point(aligned, model):
    _, result = aligned
    assert result.comparison.suspect is None and result.comparison.missing == []
    assert [p.point for p in result.comparison.points] == point_names(model("qwen3"))
    sequences, rows = len(LENGTHS), sum(LENGTHS) + 3 * len(LENGTHS)
    # vLLM never runs the last sampled token; the last logprobs belong to that token.
    assert {p.compared for p in result.comparison.points} == {rows - sequences}
    assert result.comparison.compared == (rows - sequences) * len(point_names(model("qwen3")))
    assert result.a.contract == result.b.contract == contract_id("cpu")


def test_a_recording_is_a_side_and_ranks_are_merged(aligned, model, tmp_path):
    out, first = aligned
    again = bisect.bisect(
        bisect.Options(str(out / "recordings/a"), "aligned-megatron:tp=2", tmp_path / "out", model=model("qwen3"))
    )
    assert again.comparison.suspect is None and again.comparison.compared == first.comparison.compared
    assert again.b.settings["tp"] == 2 and again.b.ranks_differ


def test_a_mismatched_recording_is_rejected_before_an_engine_starts(aligned, model, tmp_path):
    recording = str(aligned[0] / "recordings/a")
    other = make_checkpoint(tmp_path / "other", "qwen3", seed=1, **SIZES)
    for options, message in (({"model": other}, "weights"), ({"model": model("llama")}, "architecture"), ({}, "model")):
        with pytest.raises(ValueError, match=message):
            bisect.bisect(bisect.Options(recording, "hf", tmp_path / "out", **options))
    with pytest.raises(ValueError, match="out: must not contain the input recording"):
        bisect.bisect(bisect.Options(recording, "hf", aligned[0], model=model("qwen3")))
    assert (aligned[0] / "recordings/a/recording.json").exists()


def write_job(path, folder, lengths=LENGTHS, **job):
    """Write the job file for recording a model in `folder`; return its path."""
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
        "runs": [{"out": str(folder / "good/recording.json")}],
    } | job
    folder.mkdir(exist_ok=True)
    (folder / "job.json").write_text(json.dumps(job))
    return folder / "job.json"


def run_faulty(path, tmp_path, script="faulty", *arguments, **job):
    start_process(f"tests.bisection.{script}", str(write_job(path, tmp_path, **job)), *arguments, fork_workers=True)()
    return tmp_path


def compare_recordings(a, b, tmp_path):
    return bisect.bisect(bisect.Options(str(a), str(b), tmp_path / "out")).comparison


def test_planted_faults_are_found_at_the_right_point(model, tmp_path):
    folder = run_faulty(model("qwen3"), tmp_path, engine="megatron", patched=True, tp=2)
    expected = {"norm-weight": "layers.1.post_norm", "rope-base": "layers.0.q_rope", "stale-shard": "layers.1.q"}
    found = {name: compare_recordings(folder / "good", folder / name, tmp_path) for name in expected}
    assert {name: c.suspect.point for name, c in found.items()} == expected
    rope = found["rope-base"].suspect
    # RoPE does not rotate position 0.
    assert (0, 0) not in found["rope-base"].tokens and rope.differing == rope.compared - len(LENGTHS)
    assert found["stale-shard"].suspect.pieces == [1]  # the second rank's KV head
    assert compare_recordings(folder / "stale-shard", folder / "lost-patch", tmp_path).suspect is None


def test_moe_faults_are_found_at_the_right_point(model, tmp_path):
    """Both aligned engines agree at all points, routing included. Changed router and expert weights are found."""
    path = model("qwen3_moe")
    weights = recording.weights_digest(path)
    folder = run_faulty(path, tmp_path, engine="megatron", patched=True, tp=2, what="experts", weights=weights)
    result = bisect.bisect(bisect.Options("aligned-vllm:chunk=16", str(folder / "good"), tmp_path / "vllm", model=path))
    assert result.comparison.suspect is None and result.comparison.missing == []
    assert [p.point for p in result.comparison.points] == point_names(path)
    chosen = result.a.values["layers.1.router_choice"]
    assert chosen.unique().tolist() == [0.0, 1.0] and chosen.sum(1).unique().tolist() == [4.0]
    router, expert = (
        compare_recordings(folder / "good", folder / name, tmp_path / name) for name in ("router", "expert")
    )
    assert router.suspect.point == "layers.1.router_choice" and 0 < router.suspect.differing <= router.suspect.compared
    assert expert.suspect.point == "layers.1.experts" and expert.suspect.differing < expert.suspect.compared


@pytest.mark.parametrize(
    "a, options, message",
    [("hf", {}, "^model: must be dense for side hf"), ("stock-vllm", {"swap": "linear"}, "^swap: ")],
)
def test_unsupported_moe_sides_are_rejected(a, options, message, model, tmp_path):
    for given in ({"model": model("qwen3_moe")}, {"arch": "qwen3_moe"}):
        with pytest.raises(UnsupportedError, match=message):
            bisect.bisect(bisect.Options(a, "stock-megatron", tmp_path / "out", **given, **options))


@pytest.mark.parametrize(
    "arch, more, requirement",
    [
        ("qwen3_moe", {"dense_layers": (0,)}, "experts in all layers for bisect, got dense layers 0"),
        ("glm4_moe", {}, "a softmax router for bisect, got sigmoid"),
    ],
)
def test_unsupported_moe_models_are_rejected(arch, more, requirement, tmp_path):
    path = make_checkpoint(tmp_path / "model", arch, **SIZES, **more)
    with pytest.raises(UnsupportedError, match=f"^model: an MoE model must have {requirement} .{arch}.$"):
        bisect.bisect(bisect.Options("stock-vllm", "stock-megatron", tmp_path / "out", model=path))


def test_a_stale_prefix_cache_is_found_in_attention(model, tmp_path):
    """Only tokens after the cached blocks are recomputed; their attention reads the stale keys and values."""
    folder = run_faulty(model("qwen3"), tmp_path, "faulty_vllm", "stale-cache", engine="vllm", patched=True)
    c = compare_recordings(folder / "good", folder / "stale", tmp_path)
    assert c.suspect.point == "layers.0.attention"
    assert c.tokens == [(1, 8), (1, 9), (1, 10), (2, 32)]  # sequences of 11 and 33 tokens in blocks of 8


@pytest.fixture(scope="module")
def reference(model, tmp_path_factory):
    """Return a function that gives the aligned Megatron recording of an architecture. Recordings are cached."""
    cache = {}

    def record(arch):
        if arch not in cache:
            cache[arch] = (
                run_faulty(model(arch), tmp_path_factory.mktemp(arch), engine="megatron", patched=True) / "good"
            )
        return cache[arch]

    return record


@pytest.mark.slow
def test_a_stock_layer_in_one_worker_is_found_in_its_layer(model, reference, tmp_path):
    faulty = run_faulty(model("qwen3"), tmp_path, "faulty_vllm", "stock-layer", engine="vllm", patched=True, tp=2)
    result = bisect.bisect(bisect.Options(str(reference("qwen3")), str(faulty / "good"), tmp_path / "out"))
    assert result.comparison.suspect.point in ("layers.1.gate", "layers.1.up")
    assert result.b.settings["replaced"].startswith("worker 1: ") and "gate_up_proj" in result.b.settings["replaced"]


def test_another_gemm_algorithm_is_found_in_its_layer(model, tmp_path):
    folder = run_faulty(model("qwen2"), tmp_path, engine="megatron", patched=False, what="gemms")
    assert compare_recordings(folder / "good", folder / "split", tmp_path).suspect.point == "layers.1.down"


def assert_aligned_with_all_ops_swapped(path, tmp_path, lengths=LENGTHS):
    """Assert that stock vLLM with all ops swapped differs from aligned Megatron at most in the logprob."""
    jobs = {
        "vllm": write_job(path, tmp_path / "a", lengths, engine="vllm", patched=False, swap=list(OPS)),
        "megatron": write_job(path, tmp_path / "b", lengths, engine="megatron", patched=True),
    }
    for end in [start_process(runs.module_of(engine), [str(job)]) for engine, job in jobs.items()]:
        end()
    c = compare_recordings(tmp_path / "a/good", tmp_path / "b/good", tmp_path)
    assert c.missing == [] and (c.suspect is None or c.suspect.point == "logprob")


@pytest.mark.slow
def test_stock_vllm_with_all_ops_swapped_is_aligned_up_to_the_logprob(model, tmp_path):
    assert_aligned_with_all_ops_swapped(model("llama"), tmp_path)


@pytest.mark.parametrize("engine, arch", [("megatron", "qwen3"), pytest.param("hf", "llama", marks=pytest.mark.slow)])
def test_swapping_op_by_op_aligns_a_stock_side(engine, arch, model, reference, tmp_path):
    """No swap moves the first difference earlier. After all swaps only the logprob may differ."""
    folder = run_faulty(model(arch), tmp_path, engine=engine, patched=False, what="swaps")
    first_points = []
    for name in ["good", *(f"swapped-{op}" for op in OPS)]:
        c = compare_recordings(reference(arch), folder / name, tmp_path)
        first_points.append(len(c.points) if c.first is None else c.first)
    assert first_points == sorted(first_points), first_points
    assert 0 < first_points[0] < first_points[-1]
    assert first_points[-1] >= len(c.points) - 1, c.suspect


@pytest.mark.slow
def test_values_over_the_budget_are_recorded_in_a_second_run(model, tmp_path):
    result = bisect.bisect(
        bisect.Options("stock-megatron", "hf", tmp_path / "out", model=model("llama"), budget=2**17, swap="silu_mul")
    )
    recorded = {p.point for p in result.comparison.points if p.values}
    assert (tmp_path / "out/values/a/recording.json").exists()
    assert result.comparison.suspect.point in recorded and len(recorded) < len(result.comparison.points)
    held = sum(v.numel() * 4 for name, v in result.a.values.items() if name != "logprob")
    assert 0 < held <= 2**17
    assert result.confirmed is False  # another op differs first


@pytest.mark.parametrize(
    "change, message",
    [
        ({"a": "stock-tensorrt"}, "side"),
        ({"a": "hf:tp=2"}, "no setting"),
        ({"a": "stock-megatron:mode=packed"}, "mode"),
        ({"a": "stock-vllm:chunk=0"}, "chunk"),
        ({"a": "aligned-vllm:batch_invariant=1"}, "no setting"),
        ({"a": "stock-vllm:batch_invariant=yes"}, "batch_invariant"),
        ({"dtype": "float16"}, "dtype"),
        ({"swap": "softmax"}, "swap"),
        (
            {"a": "aligned-vllm", "swap": "linear"},
            "swap: at least one side must be a stock engine .*, got aligned-vllm and aligned-megatron",
        ),
        ({"decode": 4, "swap": "linear"}, "decode"),
        ({"a": "hf", "decode": 4}, "decode"),
        ({"budget": 1}, "budget"),
        ({"timeout": 0}, "timeout"),
    ],
)
def test_invalid_options_are_rejected_by_name(change, message, tmp_path):
    options = {"a": "stock-vllm", "b": "aligned-megatron", "out": tmp_path / "out"} | change
    with pytest.raises((ValueError, NotImplementedError), match=message):
        bisect.bisect(bisect.Options(**options))
    assert not (tmp_path / "out").exists()


@pytest.mark.skipif(torch.cuda.is_available(), reason="GPUs support this mode")
def test_vllms_batch_invariance_is_rejected_on_a_cpu(tmp_path):
    with pytest.raises(NotImplementedError, match="batch_invariant: requires a GPU, got none"):
        bisect.bisect(bisect.Options("stock-vllm:batch_invariant=1", "hf", tmp_path / "out"))


def test_tokens_that_the_model_cannot_take_are_rejected(model, tmp_path):
    from alignkit.drift import Logprobs, save

    for sequences, message in (([[1, 2], [1, 2]], "must be distinct"), ([[1, 300]], "vocabulary")):
        save(tmp_path / "t", Logprobs(sequences, [[] for _ in sequences], [torch.zeros(0)] * len(sequences), "none"))
        with pytest.raises(ValueError, match=message):
            bisect.bisect(bisect.Options("hf", "hf", tmp_path / "out", model=model("qwen3"), tokens=tmp_path / "t"))
