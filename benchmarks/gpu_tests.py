"""Runner of the tests that need a GPU: ``make gpu-test``, or ``python benchmarks/gpu_tests.py [--suites ...] [ARGS]``.

Each test file runs in its own pytest process. Lanes of suites run concurrently, and so do some files of a suite.
Failures are printed at once. When ``--minutes`` have passed, running tests are interrupted and no further tests start.
Other arguments are passed to pytest.

The counts of a completed suite are written to benchmarks/results/h200/gpu_test.jsonl (``lib/results.py``). All rows
have the same source digest (``lib.results.sources``): a suite that runs alone keeps the other suites' rows if their
digest is equal, otherwise it removes them. The fields of a row, which ``tables.py`` reads:

``suite``, ``passed``, ``failed``, ``skipped``, ``failures``, ``exit_status``, ``seconds``
    Counts of tests, names of the failed ones, pytest's largest exit status, and the duration.
``arguments``
    Extra arguments for pytest, which may have selected a part of the suite.
``cut``
    Files that were not completed; their counts cover the completed tests.
``skips``
    Number of skipped tests by reason.
``could_have_run``
    Skipped tests that this machine has enough GPUs for.

The exit status is 1 if a test failed, no test ran, a test was skipped that could have run, or time was up.
"""

from __future__ import annotations

import contextlib
import importlib.util
import itertools
import math
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
import xml.etree.ElementTree as ET
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from lib.failures import MARK
from lib.options import parser as options_parser
from lib.results import H200, ROOT, distinct, merge, read, run_name, sources, stale, with_sources, write

from alignkit.jobs.execute import stop
from alignkit.jobs.terminal import interrupted_by_sigterm
from alignkit.runtime.machine import machine

CUDA = {"ALIGNKIT_TEST_DEVICE": "cuda"}
"""Environment that makes the GPU the tests' default device."""
RANKS = tuple(f"tests/ops/test_{name}_cuda.py" for name in ("tp", "tp_faults", "agreement", "devices"))
"""Tests of ops on several GPUs; their ranks synchronize, so the files run one at a time."""
SUITES = {
    "ops": (("tests/ops/test_*.py",), CUDA),
    "ranks": (RANKS, CUDA),
    "vllm": (("tests/vllm/test_cuda.py", "tests/vllm/test_updates_cuda.py"), {}),
    "experts": (("tests/vllm/test_experts_cuda.py",), {}),
    "replicas": (("tests/vllm/test_replicas_cuda.py",), {}),
    "megatron": (tuple(f"tests/megatron/test_{name}cuda.py" for name in ("", "parallel_", "moe_")), {}),
    "bisection": (("tests/bisection/test_cuda.py",), {}),
    "te": (("tests/megatron/test_te_cuda.py",), {}),
    "fuzz": (("tests/fuzz/test_cuda.py",), {}),
}
"""File patterns and environment of each suite.

The files of "ops" are distributed over the GPUs. Other suites use all GPUs, and run `AT_ONCE` files at a time.
"""
KEY = ("suite",)
AT_ONCE = {"megatron": 2}
"""Concurrent files of a suite; default: 1."""
WITHOUT_A_GPU = ("_on_cpu.py", "_interpreted.py")
"""Suffixes of files that run GPU kernels on a CPU; excluded from the suites."""
LANES = (("vllm", "replicas"), ("experts", "bisection"), ("ops", "fuzz"), ("ranks", "te"), ("megatron",))
"""Groups of suites that run concurrently; the suites of a lane run one after the other."""
PROCESSES = {"tests/ops/test_moe_cuda.py": 12, "tests/ops/test_attention_cuda.py": 6, "tests/bisection/test_cuda.py": 5}
"""Processes of files that compile many kernels or start engines in each test; needs pytest-xdist."""
NEED_PACKAGES = {"te": "transformer_engine"}
"""Packages that a suite needs to run by default."""
NUMBERS = {"a": 1, "one": 1, "two": 2, "four": 4, "eight": 8}
NEEDS = re.compile(rf"needs? (\d+|{'|'.join(NUMBERS)}) GPUs?\b")
NOT_BUILT = "not built"
"""Part of a skip's reason if the CUDA kernels are missing, which `make` builds; `NEEDS` matches missing GPUs.

Other reasons are tests for the CPU and peers that are not installed.
"""
RESULT = re.compile(r"(\S+::|\[gw\d+\]).* (PASSED|FAILED|SKIPPED|ERROR)\b")
"""A test's result line in pytest's output, with and without pytest-xdist."""
FAILURE = re.compile(rf"{re.escape(MARK)}(\S+)\.py::(.+), (setup|call|teardown)$")
"""First line of a failure report by `lib.failures`."""
PLUGIN = {"PYTHONPATH": os.pathsep.join(filter(None, [str(Path(__file__).parent), os.environ.get("PYTHONPATH")]))}
"""Environment in which pytest finds lib.failures."""
PATIENCE = 30
"""Seconds for an interrupted pytest to write its report."""
RAN = (0, 1, 5)
"""Exit statuses of a completed pytest: all passed, some failed, no tests."""


class Clock:
    """Processes that are stopped at a time limit."""

    def __init__(self, minutes: float) -> None:
        self._lock, self._running, self.up = threading.Lock(), set(), False
        if math.isfinite(minutes):
            timer = threading.Timer(60 * minutes, self.stop)
            timer.daemon = True
            timer.start()

    def start(self, command: list[str], env: dict[str, str]) -> subprocess.Popen | None:
        """Start a process in its own session, with a pipe for its output; return None if time is up."""
        with self._lock:
            if self.up:
                return None
            process = subprocess.Popen(
                command,
                cwd=ROOT,
                env=os.environ | env,
                text=True,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            self._running.add(process)
            return process

    def end(self, process: subprocess.Popen) -> int:
        """Wait for a process, kill its remaining children, and return its exit status."""
        process.wait()
        with self._lock:
            self._running.discard(process)
        stop(process)
        return process.returncode

    def stop(self) -> None:
        """Interrupt all processes, kill them after `PATIENCE` seconds, and start no others."""
        with self._lock:
            self.up, running = True, list(self._running)
        for process in running:
            process.send_signal(signal.SIGINT)
        end = time.monotonic() + PATIENCE
        for process in running:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(max(end - time.monotonic(), 0))
            stop(process)


def could_have_run(reason: str, gpus: int) -> bool:
    """Return whether a test that was skipped for `reason` can run on this many GPUs."""
    needs = NEEDS.search(reason)
    if needs is None:
        return NOT_BUILT in reason
    number = needs[1]
    return (int(number) if number.isdigit() else NUMBERS[number]) <= gpus


def counts(junit: str, gpus: int) -> dict:
    """Return the counts of a JUnit report, which are fields of a row.

    ``failures`` names the tests that failed or whose setup or teardown failed.
    """
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


def add_counts(rows: list[dict]) -> dict:
    """Return the sum of several `counts`."""
    added = {key: sum((row[key] for row in rows), type(rows[0][key])()) for key in rows[0] if key != "skips"}
    return added | {"skips": dict(sum((Counter(row["skips"]) for row in rows), Counter()))}


def run(file: str, env: dict[str, str], arguments: list[str], gpus: int, clock: Clock) -> dict | None:
    """Run a test file and return its counts; None if time is up.

    Results and failures of tests are printed at once, other output at the end.
    """
    if file in PROCESSES and importlib.util.find_spec("xdist"):
        arguments = ["-n", str(PROCESSES[file]), "--dist", "worksteal", *arguments]
    command = [sys.executable, "-m", "pytest", "-v", "-p", "lib.failures", "-p", "no:cacheprovider", file]
    with tempfile.TemporaryDirectory() as folder:
        report, output, results, failed = Path(folder) / "junit.xml", [], Counter(), []
        process = clock.start([*command, f"--junitxml={report}", *arguments], env | PLUGIN)
        if process is None:
            return None
        for line in process.stdout:
            result = RESULT.match(line)
            if result is not None:
                results[result[2]] += 1
            if failure := FAILURE.match(line):
                failed.append(f"{failure[1].replace('/', '.')}.{failure[2]}")
            if result is not None or line.startswith(MARK):
                print(line, end="", flush=True)
            else:
                output.append(line)
        status = clock.end(process)
        print(f"== {file}\n{''.join(output)}", flush=True)
        try:
            row = counts(report.read_text(), gpus)
        except (FileNotFoundError, ET.ParseError):  # pytest was killed before it wrote the report
            row = counts("<testsuites/>", gpus)
    cut = clock.up and status not in RAN
    if cut:  # the report lists the interrupted test as passed, or is missing
        row["passed"], row["failed"] = results["PASSED"], results["FAILED"] + results["ERROR"]
        row["failures"] = list(dict.fromkeys([*row["failures"], *failed]))
    return {"exit_status": status, "cut": [file] if cut else []} | row


def visible(gpus: int) -> list[str]:
    """Return the CUDA_VISIBLE_DEVICES names of this process's GPUs."""
    return (os.environ.get("CUDA_VISIBLE_DEVICES") or ",".join(map(str, range(gpus)))).split(",")


def run_suite(suite: str, at_once: int, arguments: list[str], gpus: int, clock: Clock) -> dict | None:
    """Run a suite and return its row; None if time was up before its first file."""
    patterns, env = SUITES[suite]
    started = time.monotonic()
    found = (f for pattern in patterns for f in ROOT.glob(pattern) if not f.name.endswith(WITHOUT_A_GPU))
    files = sorted(str(f.relative_to(ROOT)) for f in found)
    if suite == "ops":
        files = [file for file in files if file not in RANKS]
        environments = [env | {"CUDA_VISIBLE_DEVICES": gpu} for gpu in visible(gpus)]
    else:
        at_once, environments = AT_ONCE.get(suite, 1), [env]
    with ThreadPoolExecutor(at_once) as pool:
        done = list(
            pool.map(
                lambda file, environment: run(file, environment, arguments, 1 if suite == "ops" else gpus, clock),
                files,
                itertools.islice(itertools.cycle(environments), len(files)),
            )
        )
    rows = [row for row in done if row is not None]
    if files and not rows:
        return None
    added = add_counts(rows)
    return (
        {"suite": suite, "arguments": arguments}
        | added
        | {
            "cut": added["cut"] + [file for file, row in zip(files, done, strict=True) if row is None],
            "exit_status": max(abs(row["exit_status"]) for row in rows),
            "seconds": round(time.monotonic() - started, 1),
        }
    )


def missing(contents: dict) -> list[str]:
    """Return the suites that a result file has no row of."""
    return [suite for suite in SUITES if suite not in {row["suite"] for row in contents["rows"]}]


def main(arguments: list[str] | None = None) -> int:
    parser = options_parser(__doc__, H200 / "gpu_test.jsonl")
    installed = [s for s in SUITES if s not in NEED_PACKAGES or importlib.util.find_spec(NEED_PACKAGES[s])]
    parser.add_argument(
        "--suites", nargs="+", choices=SUITES, default=installed, help="default: all with installed packages"
    )
    parser.add_argument("--at-once", type=int, default=10, help="concurrent test files of the suite ops")
    parser.add_argument("--minutes", type=float, default=math.inf, help="time limit, after which all tests are stopped")
    options, rest = parser.parse_known_args(arguments)
    name, info, rows = run_name(), machine() | {"sources": sources()}, []
    if options.only_stale:
        found = distinct(stale(read(options.json), info["sources"], KEY), *KEY)
        options.suites = [suite for suite in options.suites if (suite,) in found]
    old = with_sources(read(options.json), info["sources"])
    contents, lock, clock = old, threading.Lock(), Clock(options.minutes)

    def run_lane(lane: tuple[str, ...]) -> None:
        nonlocal contents
        for suite in (suite for suite in lane if suite in options.suites):
            row = run_suite(suite, options.at_once, rest, len(info["gpus"]), clock)
            if row is None:
                continue
            with lock:
                rows.append(row)
                contents = merge(old, name, info, rows, KEY)
                write(options.json, contents)

    pool = ThreadPoolExecutor(len(LANES))
    try:
        with interrupted_by_sigterm():
            list(pool.map(run_lane, LANES))
    finally:  # also on Ctrl-C
        clock.stop()
        pool.shutdown()
        for row in rows:
            print_row(row)
        print(
            f"commit {info['commit']}; {len(info['gpus'])} GPUs; "
            f"suites not run: {', '.join(missing(contents)) or 'none'}"
        )
    bad = [row for row in rows if row["exit_status"] or not row["passed"] or row["could_have_run"] or row["cut"]]
    return int(bool(bad) or len(rows) < len(set(options.suites)))


def print_row(row: dict) -> None:
    """Print the results of a suite."""
    print(
        f"{row['suite']:<10} {row['passed']} passed, {row['failed']} failed, {row['skipped']} skipped, "
        f"{row['seconds']:.0f} s" + (f", exit status {row['exit_status']}" if row["exit_status"] else "")
    )
    for test in row["failures"]:
        print(f"{'':<10} failed: {test}")
    for reason, count in row["skips"].items():
        print(f"{'':<10} {count} skipped: {reason}")
    for test in row["could_have_run"]:
        print(f"{'':<10} skipped although the GPUs suffice: {test}")
    for file in row["cut"]:
        print(f"{'':<10} not completed: {file}")


if __name__ == "__main__":
    sys.exit(main())
