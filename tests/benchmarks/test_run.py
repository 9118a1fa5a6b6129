"""The entry to the benchmarks, benchmarks/run.py, and its command that renews stale rows."""

import importlib
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from tests.benchmarks import stored

ROOT = Path(__file__).parents[2]


def run(*arguments, **more):
    """Run benchmarks/run.py and return its exit status and output."""
    command = [sys.executable, ROOT / "benchmarks/run.py", *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False, **more)
    return done.returncode, done.stdout + done.stderr


def test_every_benchmark_has_a_target_a_script_and_its_files(module):
    """The Makefile, the registry and benchmarks/results name the same benchmarks."""
    benchmarks = module("run").BENCHMARKS
    makefile = (ROOT / "Makefile").read_text()
    figures, others = (re.search(rf"^{name} = (.*)$", makefile, re.MULTILINE)[1] for name in ("FIGURES", "BENCHMARKS"))
    assert sorted([*figures.split(), *others.split()[1:]]) == sorted(benchmarks) and others.startswith("$(FIGURES) ")
    for benchmark in benchmarks.values():
        source = benchmark.path.read_text()
        assert all(re.search(rf"^{key} = \(", source, re.MULTILINE) for key in benchmark.files.values()), benchmark
    stored = {str(path.relative_to(ROOT / "benchmarks/results")) for path in ROOT.glob("benchmarks/results/**/*.jsonl")}
    stored -= {
        name for name in stored if name.startswith(("cpu/", "h200/grpo", "h200/before_after"))
    }  # tools without a command
    assert stored <= {name for benchmark in benchmarks.values() for name in benchmark.files}


def test_a_benchmark_gets_its_arguments():
    status, text = run("--list")
    assert status == 0 and "rms          RMSNorm" in text and "h200/rms_norm.jsonl" in text
    status, text = run("rms", "--help")
    assert status == 0 and "--widths" in text
    status, text = run("logp", "--shapes", "4096x2048")
    assert status == 2 and "--shapes" in text


@pytest.mark.parametrize("arguments", [(), ("none",)])
def test_an_unknown_benchmark_is_rejected(arguments):
    status, text = run(*arguments)
    assert status == 2 and "NAME" in text


FAKE = """
import os
import sys
import time
from pathlib import Path

import torch
from lib.options import parser as options_parser
from lib.results import distinct, merge, read, run_info, run_name, stale, write

from alignkit.ops import silu_mul

MEASURED_OPS = ("silu_mul",)
KEY = ("rows", "impl")


def main():
    folder = Path(__file__).parent
    options = options_parser("Time of silu_mul.", folder / "fake.jsonl").parse_args()
    old, name, info, rows = read(options.json), run_name(), run_info(ops=MEASURED_OPS), []
    sizes = [1, 2, 3, 4]
    if options.only_stale:
        sizes = [n for (n,) in distinct(stale(old, info["sources"], KEY), "rows")]
    for n in sizes:
        if len(rows) == int(os.environ.get("STOP_AFTER", -1)):
            os._exit(9)
        gate = torch.randn(n, 128)
        started = time.perf_counter()
        silu_mul(gate)
        rows.append({"rows": n, "impl": "alignkit", "us": 1e6 * (time.perf_counter() - started)})
        write(options.json, merge(old, name, info, rows, KEY))
        with open(folder / "measured", "a") as log:
            log.write(f"{n} ")


if __name__ == "__main__":
    main()
"""


@pytest.fixture
def fake(module, tmp_path, monkeypatch):
    """Return run.py with a single registered benchmark, whose script measures a CPU op for 1 to 4 rows."""
    entry = module("run")
    (tmp_path / "fake.py").write_text(FAKE)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT / "benchmarks"), os.environ.get("PYTHONPATH", "")]))
    monkeypatch.setattr(module("lib.results"), "RESULTS", tmp_path)
    benchmark = entry.Benchmark(str(tmp_path / "fake.py"), "time of silu_mul", {"fake.jsonl": "KEY"})
    monkeypatch.setattr(entry, "BENCHMARKS", {"fake": benchmark})
    subprocess.run(benchmark.command(), check=True, env=entry.environment(), timeout=120)
    yield entry
    sys.modules.pop("fake", None)


def age(path, *sizes, **more):
    """Move the rows of these sizes to a run of other sources."""
    results = importlib.import_module("lib.results")
    contents = results.read(path)
    (info,) = contents["runs"].values()
    contents["runs"]["old"] = info | {"sources": "0" * 12} | more
    contents["rows"] = [row | ({"run": "old"} if row["rows"] in sizes else {}) for row in contents["rows"]]
    results.write(path, contents)


def test_stale_rows_are_renewed(fake, tmp_path, monkeypatch, capsys):
    """An interrupted command loses the case that it was measuring; the next one continues. Fresh rows remain."""
    path, log = tmp_path / "fake.jsonl", tmp_path / "measured"
    assert fake.main(["renew", "--dry-run"]) == 0 and "    0 of     4 rows are stale" in capsys.readouterr().out
    age(path, 1, 3, 4)
    before = stored(path)["rows"]
    assert fake.main(["renew", "--dry-run"]) == 1 and "    3 of     4 rows are stale" in capsys.readouterr().out
    assert fake.main(["renew", "--minutes", "0"]) == 1
    assert stored(path)["rows"] == before and log.read_text() == "1 2 3 4 "

    monkeypatch.setenv("STOP_AFTER", "2")
    assert fake.main(["renew", "--minutes", "5"]) == 1
    out = capsys.readouterr().out
    assert "fake: exit status 9" in out and out.endswith("    1 of     4 rows are stale\n")
    assert log.read_text() == "1 2 3 4 1 3 "
    rows = stored(path)["rows"]
    assert [row["rows"] for row in rows] == [1, 2, 3, 4] and [row["run"] == "old" for row in rows] == [False] * 3 + [
        True
    ]

    monkeypatch.delenv("STOP_AFTER")
    assert fake.main(["renew", "--minutes", "5"]) == 0
    assert log.read_text() == "1 2 3 4 1 3 4 "
    made = stored(path)
    assert made["rows"][1] == before[1] and made["rows"][:3] == rows[:3] and "old" not in made["runs"]
    assert fake.main(["renew", "--minutes", "5", "fake"]) == 0 and log.read_text() == "1 2 3 4 1 3 4 "


def test_rows_of_another_kind_of_machine_are_skipped(fake, tmp_path, capsys):
    age(tmp_path / "fake.jsonl", 2, gpus=["NVIDIA H200"])
    assert fake.main(["renew", "--minutes", "5"]) == 1
    assert "fake: its stale rows were measured on GPUs; skipped" in capsys.readouterr().out
    assert (tmp_path / "measured").read_text() == "1 2 3 4 "


def test_a_benchmark_is_stopped_when_time_is_up(module):
    entry, started = module("run"), time.monotonic()
    assert entry.run_until([sys.executable, "-c", "import time; time.sleep(600)"], started + 0.5) is None
    assert entry.run_until([sys.executable, "-c", "raise SystemExit(3)"], time.monotonic() + 60) == 3
    assert time.monotonic() - started < 60


def test_a_benchmark_is_stopped_on_sigterm(tmp_path):
    """The signal reaches the command alone, as from a job scheduler, and its benchmark ends too."""
    write = f"import os, pathlib; pathlib.Path({str(tmp_path / 'pid')!r}).write_text(str(os.getpid()))"
    child = f"{write}; import time; time.sleep(600)"
    code = f"import sys, time, run; run.run_until([sys.executable, '-c', {child!r}], time.monotonic() + 600)"
    path = os.pathsep.join([str(ROOT / "benchmarks"), str(ROOT), os.environ.get("PYTHONPATH", "")])
    process = subprocess.Popen([sys.executable, "-c", code], env=os.environ | {"PYTHONPATH": path})
    end = time.monotonic() + 60
    while not ((tmp_path / "pid").exists() and (tmp_path / "pid").read_text()) and time.monotonic() < end:
        time.sleep(0.05)
    process.terminate()
    assert process.wait(60) != 0 and not psutil.pid_exists(int((tmp_path / "pid").read_text()))


@pytest.mark.parametrize("arguments", [(), ("--minutes", "1", "none")])
def test_renew_rejects_wrong_arguments(module, arguments, capsys):
    with pytest.raises(SystemExit):
        module("run").main(["renew", *arguments])
    assert (
        "--minutes: required" if not arguments else "NAME: must be one of --list, got none"
    ) in capsys.readouterr().err
