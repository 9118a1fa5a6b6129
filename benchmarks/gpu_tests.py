"""The tests that need a GPU: ``make gpu-test``, or ``python benchmarks/gpu_tests.py [--suites ...] [for pytest]``.

Each test file is a pytest process of its own, some side by side; so are the lanes, each of some suites. The suites' counts go to
benchmarks/results/h200/gpu_test.json as ``rows``, with ``runs``: by the rows' ``run``, the date, commit, versions and
GPUs. All rows are of one commit: a suite that is run alone joins those of the same commit, and others go; of a checkout
with changes all go. ``not_run`` names the suites that are missing. A row:

``arguments``
    Those for pytest: with any, it may be a part of the suite.
``skips``
    How many tests were skipped for each reason.
``could_have_run``
    Those among them that the GPUs of this machine suffice for.

Exit status 1 if a test failed, none ran, or one was skipped that could have run.
"""

from __future__ import annotations

import importlib.util
import itertools
import os
import re
import subprocess
import sys
import tempfile
import threading
import time
import xml.etree.ElementTree as ET
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from lib.options import parser as options_parser
from lib.results import H200, ROOT, merge, read, run_name, write

from alignkit.check.machine import machine

CUDA = {"ALIGNKIT_TEST_DEVICE": "cuda"}
"""The default device of the whole process is the GPU."""
RANKS = tuple(f"tests/ops/test_{name}_cuda.py" for name in ("tp", "tp_faults", "agreement", "devices"))
"""Of the ops on several GPUs: of files whose ranks wait for each other, one at a time."""
SUITES = {
    "ops": (("tests/ops/test_*.py",), CUDA),
    "ranks": (RANKS, CUDA),
    "vllm": (("tests/vllm/test_cuda.py",), {}),
    "experts": (("tests/vllm/test_experts_cuda.py",), {}),
    "replicas": (("tests/vllm/test_replicas_cuda.py",), {}),
    "megatron": (("tests/megatron/test_cuda.py", "tests/megatron/test_parallel_cuda.py"), {}),
    "bisection": (("tests/bisection/test_cuda.py",), {}),
    "te": (("tests/megatron/test_te_cuda.py",), {}),
    "fuzz": (("tests/fuzz/test_cuda.py",), {}),
}
"""Files, and environment, of each. The files of "ops" are dealt out to the GPUs; those of others have all of them, one file
at a time."""
LANES = (("vllm",), ("experts", "bisection", "replicas"), ("ops", "fuzz"), ("ranks", "te"), ("megatron",))
"""Run side by side, the suites of each one after the other."""
PROCESSES = {"tests/ops/test_moe_cuda.py": 12, "tests/bisection/test_cuda.py": 5}
"""Files whose many kernels take long to compile, or whose tests each start engines: processes of each, where pytest-xdist is
installed."""
NEED_PACKAGES = {"te": "transformer_engine"}
"""Suites that run, if they are not asked for, only where a package is installed."""
NUMBERS = {"a": 1, "one": 1, "two": 2, "four": 4, "eight": 8}
NEEDS = re.compile(rf"needs? (\d+|{'|'.join(NUMBERS)}) GPUs?\b")
NOT_BUILT = "not built"
"""In the reason of a skip: how many GPUs there should be, and that the CUDA kernels are missing, which `make` builds.
Other reasons are of tests that are not for GPUs, or of peers that are not installed."""
RESULT = re.compile(r"(\S+::|\[gw\d+\]).* (PASSED|FAILED|SKIPPED|ERROR)\b")
"""Of a test, as pytest says it, alone or with several processes."""


def could_have_run(reason: str, gpus: int) -> bool:
    """Whether a test that was skipped for `reason` is one for so many GPUs."""
    needs = NEEDS.search(reason)
    if needs is None:
        return NOT_BUILT in reason
    number = needs[1]
    return (int(number) if number.isdigit() else NUMBERS[number]) <= gpus


def counts(junit: str, gpus: int) -> dict:
    """``{"passed", "failed", "skipped", "failures", "skips", "could_have_run"}`` of a junit report, the last two as in
    the file; failures names those that failed, or broke before or after the test itself."""
    cases = list(ET.fromstring(junit).iter("testcase"))
    names = {c: f"{c.get('classname')}.{c.get('name')}" for c in cases}
    bad = [c for c in cases if c.find("failure") is not None or c.find("error") is not None]
    skips = {c: c.find("skipped").get("message", "") for c in cases if c.find("skipped") is not None and c not in bad}
    return {
        "passed": len(cases) - len(bad) - len(skips),
        "failed": len(bad),
        "skipped": len(skips),
        "failures": [names[c] for c in bad],
        "skips": dict(Counter(skips.values())),
        "could_have_run": [names[c] for c, reason in skips.items() if could_have_run(reason, gpus)],
    }


def together(rows: list[dict]) -> dict:
    """Several such counts as one."""
    added = {key: sum((row[key] for row in rows), type(rows[0][key])()) for key in rows[0] if key != "skips"}
    return added | {"skips": dict(sum((Counter(row["skips"]) for row in rows), Counter()))}


def of_commit(old: dict, commit: str) -> dict:
    """What of a result file is of `commit`; nothing if that does not say which sources they were."""
    runs = {
        name: info
        for name, info in old.get("runs", {}).items()
        if info["commit"] == commit != "unknown" and not commit.endswith("-dirty")
    }
    return {"runs": runs, "rows": [row for row in old.get("rows", []) if row["run"] in runs]}


def run(file: str, env: dict[str, str], arguments: list[str], gpus: int) -> dict:
    """Runs a test file. Prints a line when a test has ended, and all that was said at the end."""
    if file in PROCESSES and importlib.util.find_spec("xdist"):
        arguments = ["-n", str(PROCESSES[file]), "--dist", "worksteal", *arguments]
    with tempfile.TemporaryDirectory() as folder:
        report, said = Path(folder) / "junit.xml", []
        with subprocess.Popen(
            [sys.executable, "-m", "pytest", "-v", "-p", "no:cacheprovider", file, f"--junitxml={report}", *arguments],
            cwd=ROOT,
            env=os.environ | env,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        ) as process:
            for line in process.stdout:
                if RESULT.match(line):
                    print(line, end="", flush=True)
                else:
                    said.append(line)
        print(f"== {file}\n{''.join(said)}", flush=True)
        row = counts(report.read_text() if report.exists() else "<testsuites/>", gpus)
    return {"exit_status": process.returncode} | row


def visible(gpus: int) -> list[str]:
    """The GPUs of this process, each as CUDA_VISIBLE_DEVICES names it."""
    return (os.environ.get("CUDA_VISIBLE_DEVICES") or ",".join(map(str, range(gpus)))).split(",")


def run_suite(suite: str, at_once: int, arguments: list[str], gpus: int) -> dict:
    """A row of gpu_test.json."""
    patterns, env = SUITES[suite]
    started = time.monotonic()
    files = sorted(str(f.relative_to(ROOT)) for pattern in patterns for f in ROOT.glob(pattern))
    if suite == "ops":
        files = [file for file in files if file not in RANKS]
        places = [env | {"CUDA_VISIBLE_DEVICES": gpu} for gpu in visible(gpus)]
    else:
        at_once, places = 1, [env]
    with ThreadPoolExecutor(at_once) as pool:
        done = list(
            pool.map(
                lambda file, place: run(file, place, arguments, 1 if suite == "ops" else gpus),
                files,
                itertools.islice(itertools.cycle(places), len(files)),
            )
        )
    return (
        {"suite": suite, "arguments": arguments}
        | together(done)
        | {"exit_status": max(abs(d["exit_status"]) for d in done), "seconds": round(time.monotonic() - started, 1)}
    )


def main(arguments: list[str] | None = None) -> int:
    parser = options_parser(__doc__, H200 / "gpu_test.json")
    installed = [s for s in SUITES if s not in NEED_PACKAGES or importlib.util.find_spec(NEED_PACKAGES[s])]
    parser.add_argument("--suites", nargs="+", choices=SUITES, default=installed)
    parser.add_argument("--at-once", type=int, default=10, help="test files of the ops at a time")
    options, rest = parser.parse_known_args(arguments)
    name, info, rows = run_name(), machine(), []
    old = of_commit(read(options.json), info["commit"])
    made, lock = old, threading.Lock()

    def run_lane(lane: tuple[str, ...]) -> None:
        nonlocal made
        for suite in (suite for suite in lane if suite in options.suites):
            row = run_suite(suite, options.at_once, rest, len(info["gpus"]))
            with lock:
                rows.append(row)
                made = merge(old, name, info, rows, ("suite",))
                made["not_run"] = [suite for suite in SUITES if suite not in {row["suite"] for row in made["rows"]}]
                write(options.json, made)

    with ThreadPoolExecutor(len(LANES)) as pool:
        list(pool.map(run_lane, LANES))
    for row in rows:
        print(
            f"{row['suite']:<10} {row['passed']} passed, {row['failed']} failed, {row['skipped']} skipped, "
            f"{row['seconds']:.0f} s" + (f", exit status {row['exit_status']}" if row["exit_status"] else "")
        )
        for reason, count in row["skips"].items():
            print(f"{'':<10} {count} skipped: {reason}")
        for test in row["could_have_run"]:
            print(f"{'':<10} could have run: {test}")
    print(f"commit {info['commit']}; {len(info['gpus'])} GPUs; not run: {', '.join(made['not_run']) or 'none'}")
    return int(any(row["exit_status"] or not row["passed"] or row["could_have_run"] for row in rows))


if __name__ == "__main__":
    sys.exit(main())
