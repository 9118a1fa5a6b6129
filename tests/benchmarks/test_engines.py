"""Scripts of benchmarks/ with real engines on a CPU, at their size "small". All tests are slow (`make test-slow`).

The result files must have the fields that benchmarks/tables.py reads, and aligned rows must be bit-equal.
"""

import itertools
import os
import statistics
import subprocess
import sys
from pathlib import Path

import pytest

from tests.benchmarks import stored

ROOT = Path(__file__).parents[2]
TE_ON_CPU = {
    "PYTHONPATH": os.pathsep.join(
        [str(ROOT / "tests/megatron/te_on_cpu"), *filter(None, [os.environ.get("PYTHONPATH")])]
    ),
    "TORCHDYNAMO_DISABLE": "1",  # compiling the stock fusions would dominate the run time
}


def benchmark(script, *arguments, env=None):
    """Run a benchmark script and return its output; `env` extends the environment."""
    done = subprocess.run(
        [sys.executable, ROOT / "benchmarks" / script, "--size", "small", *map(str, arguments)],
        env=os.environ | (env or {}),
        text=True,
        capture_output=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_e2e_benchmark_is_bit_equal_in_every_pairing(tmp_path):
    """Covers packed micro-batches, and PP and CP with TransformerEngine's layer spec from `te_on_cpu`."""
    result = tmp_path / "e2e.jsonl"
    layouts = ("tp1-te-pp2-padded", "tp1-te-cp2-packed")
    for models, more in ((("qwen3", "qwen3-moe"), ()), (("llama-tied",), layouts)):  # two runs write to one file
        out = benchmark(
            "e2e.py",
            "--models",
            *models,
            "--parts",
            "modes",
            "layouts",
            "--tp",
            2,
            "--rollouts",
            "batch",
            "prompt_logprobs",
            "--trainings",
            "tp1-one",
            "tp1-padded",
            "tp1-packed",
            *more,
            "--prompts",
            6,
            "--longest",
            100,
            "--max-tokens",
            8,
            "--json",
            result,
            "--out",
            tmp_path / models[0],
            env=TE_ON_CPU,
        )
        count = 6 * len(models) + len(more)
        assert f"{48 * count} of {48 * count} logprobs are bit-equal, in {count} of {count} rows" in out
    rows = stored(result)["rows"]
    pairs = set(
        itertools.product(
            ("qwen3", "qwen3-moe", "llama-tied"), ("batch", "prompt_logprobs"), ("tp1-one", "tp1-padded", "tp1-packed")
        )
    )
    pairs |= {("llama-tied", "batch", training) for training in layouts}
    sizes = {r["training"]: (r["spec"], r["pp"], r["cp"]) for r in rows}
    assert [sizes[name] for name in ("tp1-one", *layouts)] == [("local", 1, 1), ("te", 2, 1), ("te", 1, 2)]
    assert {(r["model"], r["rollout"], r["training"]) for r in rows} == pairs and len(rows) == len(pairs)
    assert all(r["bit_equal"] == r["tokens"] == 48 for r in rows)
    assert all(("routed" in r) == (r["model"] == "qwen3-moe") for r in rows)
    assert all(
        r["rerouted"] == 0 and r["routed"] > 48 for r in rows if r["model"] == "qwen3-moe"
    )  # includes prompt tokens


@pytest.mark.matrix
def test_cost_benchmark_reports_every_engine(tmp_path):
    """TransformerEngine is `te_on_cpu`."""
    benchmark(
        "cost.py",
        "--engines",
        "stock",
        "hf_compiled",
        "aligned",
        "aligned_keeping",
        "stock_te",
        "aligned_te",
        "--concurrency",
        2,
        "--longest",
        40,
        "--max-tokens",
        4,
        "--shapes",
        "2x32",
        "--repeats",
        1,
        "--json",
        tmp_path,
        "--out",
        tmp_path / "out",
        env=TE_ON_CPU,
    )
    cost = stored(tmp_path / "cost.jsonl")["rows"]
    both = set(itertools.product(("rollout", "training"), ("stock", "aligned")))
    both |= {("training", engine) for engine in ("hf_compiled", "aligned_keeping", "stock_te", "aligned_te")}
    assert {(r["what"], r["engine"]) for r in cost} == both
    timed = [r for r in cost if r["unit"] != "GiB, peak"]
    assert all(r["value"] > 0 and r["ratio_to_stock"] > 0 for r in timed)
    assert all(r["x"] > 0 for r in timed if r["what"] == "training")
    profile = stored(tmp_path / "profile.jsonl")["rows"]
    assert {(r["what"], r["engine"]) for r in profile} == both
    assert all(r["kernels"] and r["gpu_ms"] > 0 for r in profile)


@pytest.mark.matrix
def test_cost_benchmark_reports_a_moe_model(tmp_path):
    small = ["--concurrency", 1, "--longest", 40, "--max-tokens", 4, "--shapes", "2x32", "--repeats", 1]
    selection = ["--size", "small-moe", "--engines", "aligned", "--only", "rollout", "training"]
    eager = {"TORCHDYNAMO_DISABLE": "1"}  # compiling vLLM would dominate the run time
    benchmark("cost.py", *selection, *small, "--json", tmp_path, "--out", tmp_path / "out", env=eager)
    cost = stored(tmp_path / "cost.jsonl")
    cases = [*(f"1 request{more}" for more in ("", ", short prompts", ", prefill")), "2 x 32 tokens"]
    assert {r["case"] for r in cost["rows"]} == {f"small-moe: {case}" for case in cases}
    assert all(r["value"] > 0 for r in cost["rows"] if r["unit"] != "GiB, peak")
    (run,) = cost["runs"].values()
    assert run["engines"]["training aligned"] == {"experts": "SequentialMLP"}


def test_cost_benchmark_profiles_training_alone(tmp_path):
    small = ["--size", "small", "--engines", "aligned", "--shapes", "2x32", "--repeats", 1]
    benchmark("cost.py", "--only", "training", "profile", *small, "--json", tmp_path, "--out", tmp_path / "out")
    for name in ("cost", "profile"):
        rows = stored(tmp_path / f"{name}.jsonl")["rows"]
        assert {(r["what"], r["engine"]) for r in rows} == {("training", "aligned")}


@pytest.mark.matrix
def test_long_context_benchmark_interleaves_two_engines(tmp_path):
    """Each engine starts once; the benchmark fails unless the repeated prompts hit the prefix cache."""
    result, eager = tmp_path / "long.jsonl", {"TORCHDYNAMO_DISABLE": "1"}
    cells = ["--engines", "aligned", "stock", "--cells", "3x300x33", "1x800x33", "--repeats", 1, "--side-by-side", 2]
    out = benchmark("long.py", *cells, "--json", result, "--out", tmp_path / "out", env=eager)
    assert out.count("startup took") == 2
    results = stored(result)
    rows = {(r["engine"], r["requests"], r["prompt"]): r for r in results["rows"]}
    assert rows.keys() == {(engine, *cell) for engine in ("aligned", "stock") for cell in ((3, 300), (1, 800))}
    for r in rows.values():  # cells with few tokens have more repeats
        assert len(r["prefill_seconds"]) == len(r["decode_seconds"]) == 5 and (r["tp"], r["out"]) == (1, 33)
        assert r["prefill_s"] > 0 and r["x_prefill"] > 0
        decoding = statistics.median(r["decode_seconds"])  # can be 0 for so few tokens on a busy machine
        assert r["decode_tok_s"] == (pytest.approx(r["requests"] * 28 / decoding) if decoding > 0 else None)
        stock = rows["stock", r["requests"], r["prompt"]]["decode_tok_s"]
        assert r["x_decode"] == (r["decode_tok_s"] / stock if stock and r["decode_tok_s"] else None)
    assert {r["x_prefill"] for r in rows.values() if r["engine"] == "stock"} == {1.0}
    (run,) = results["runs"].values()
    assert {tuple(engine["side_by_side"]) for engine in run["engines"].values()} == {("aligned", "stock")}
    assert run["engines"]["aligned TP 1"]["status"]["patched"] and not run["engines"]["stock TP 1"]["status"]["patched"]


def test_where_drift_benchmark_finds_the_first_op_that_differs(tmp_path):
    result = tmp_path / "where_drift.jsonl"
    benchmark(
        "where_drift.py", "--device", "cpu", "--quick", "--ops", "rms_norm", "--json", result, "--out", tmp_path / "out"
    )
    rows = {(r["case"], r["op"]): r for r in stored(result)["rows"]}
    assert rows.keys() == {("stock", ""), ("aligned", ""), ("exchanged", "rms_norm")}
    assert {r["failure"] for r in rows.values()} == {None}
    stock, aligned, exchanged = rows.values()
    assert aligned["first"] is None and aligned["bit_equal"] == aligned["tokens"] and aligned["max_abs"] == 0
    # All points cover every token, except logprobs, which the last token of each of the 8 sequences lacks.
    points, logprob = aligned["points"], aligned["points"][-1]
    assert aligned["missing"] == [] and len(points) == 38
    assert {p["compared"] for p in points[:-1]} == {logprob["compared"] + 8} and logprob["compared"] == aligned[
        "tokens"
    ]
    assert stock["first"]["point"] == "layers.0.input_norm" and stock["mean_abs"] > 0
    by_name = {p["point"]: p for p in stock["points"]}
    assert by_name["layers.0.input_norm"] == stock["first"] and stock["first"]["median_ulps"] == 1
    assert 0 < stock["first"]["relative"] < by_name["layers.1.residual"]["relative"]
    assert exchanged["first"]["point"] != "layers.0.input_norm"
    assert exchanged["a"]["swap"] == exchanged["b"]["swap"] == "rms_norm" and len(exchanged["points"]) == 6
