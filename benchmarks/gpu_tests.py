"""The tests that need a GPU: ``make gpu-test``, or ``python benchmarks/gpu_tests.py [--suites ...] [for pytest]``.

Each test file is a pytest process of its own, some side by side; so are the lanes, each of some suites. What a test fails of
is printed at once. With ``--minutes`` a run has an end: tests that run then are interrupted, and no other begins.

When a suite has ended its counts go to benchmarks/results/h200/gpu_test.json as ``rows``, with ``runs``: by the rows' ``run``,
the date, commit, versions and GPUs. All rows are of the same sources (``lib.results.sources``): a suite that is run alone joins those
that are, and others go. ``not_run`` names the suites that are missing. A row:

``arguments``
    Those for pytest: with any, it may be a part of the suite.
``cut``
    Files that were not run to their end; the counts of those that had begun are of what had been run.
``skips``
    How many tests were skipped for each reason.
``could_have_run``
    Those among them that the GPUs of this machine suffice for.

Exit status 1 if a test failed, none ran, one was skipped that could have run, or time was up before all had run.
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
from lib.results import H200, ROOT, merge, of_sources, read, run_name, sources, write

from alignkit.check.machine import machine
from alignkit.check.run import stop
from alignkit.check.terminal import interrupted_by_sigterm

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
    "megatron": (tuple(f"tests/megatron/test_{name}cuda.py" for name in ("", "parallel_", "moe_")), {}),
    "bisection": (("tests/bisection/test_cuda.py",), {}),
    "te": (("tests/megatron/test_te_cuda.py",), {}),
    "fuzz": (("tests/fuzz/test_cuda.py",), {}),
}
"""Files, and environment, of each. The files of "ops" are dealt out to the GPUs; those of others have all of them, one file
at a time, or as many as AT_ONCE says."""
AT_ONCE = {"megatron": 2}
WITHOUT_A_GPU = ("_on_cpu.py", "_interpreted.py")
"""Ends of the names of files that run a GPU's kernels on a CPU: left out of the suites."""
LANES = (("vllm", "replicas"), ("experts", "bisection"), ("ops", "fuzz"), ("ranks", "te"), ("megatron",))
"""Run side by side, the suites of each one after the other."""
PROCESSES = {"tests/ops/test_moe_cuda.py": 12, "tests/ops/test_attention_cuda.py": 6, "tests/bisection/test_cuda.py": 5}
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
FAILURE = re.compile(rf"{re.escape(MARK)}(\S+)\.py::(.+), (setup|call|teardown)$")
"""What `lib.failures` says first of one."""
PLUGIN = {"PYTHONPATH": os.pathsep.join(filter(None, [str(Path(__file__).parent), os.environ.get("PYTHONPATH")]))}
"""For pytest to find lib.failures."""
PATIENCE = 30
"""Seconds that an interrupted pytest has to write its report."""
RAN = (0, 1, 5)
"""Exit statuses of pytest where all was run: tests passed, failed, or there were none."""


class Clock:
    """Processes that run until time is up."""

    def __init__(self, minutes: float) -> None:
        self._lock, self._running, self.up = threading.Lock(), set(), False
        if math.isfinite(minutes):
            timer = threading.Timer(60 * minutes, self.stop)
            timer.daemon = True
            timer.start()

    def start(self, command: list[str], env: dict[str, str]) -> subprocess.Popen | None:
        """A process in a session of its own, whose output is to be read; None if time is up."""
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
        """Waits for its end, and ends what it has left. Returns its exit status."""
        process.wait()
        with self._lock:
            self._running.discard(process)
        stop(process)
        return process.returncode

    def stop(self) -> None:
        """Time is up."""
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


def run(file: str, env: dict[str, str], arguments: list[str], gpus: int, clock: Clock) -> dict | None:
    """Runs a test file; None if time is up. Prints a line when a test has ended, with what it failed of, and all that was
    said at the end."""
    if file in PROCESSES and importlib.util.find_spec("xdist"):
        arguments = ["-n", str(PROCESSES[file]), "--dist", "worksteal", *arguments]
    command = [sys.executable, "-m", "pytest", "-v", "-p", "lib.failures", "-p", "no:cacheprovider", file]
    with tempfile.TemporaryDirectory() as folder:
        report, said, results, failed = Path(folder) / "junit.xml", [], Counter(), []
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
                said.append(line)
        status = clock.end(process)
        print(f"== {file}\n{''.join(said)}", flush=True)
        try:
            row = counts(report.read_text(), gpus)
        except (FileNotFoundError, ET.ParseError):  # it was ended before it had written it
            row = counts("<testsuites/>", gpus)
    cut = clock.up and status not in RAN
    if cut:  # the report has the one that was interrupted as passed, or was not written in time
        row["passed"], row["failed"] = results["PASSED"], results["FAILED"] + results["ERROR"]
        row["failures"] = list(dict.fromkeys([*row["failures"], *failed]))
    return {"exit_status": status, "cut": [file] if cut else []} | row


def visible(gpus: int) -> list[str]:
    """The GPUs of this process, each as CUDA_VISIBLE_DEVICES names it."""
    return (os.environ.get("CUDA_VISIBLE_DEVICES") or ",".join(map(str, range(gpus)))).split(",")


def run_suite(suite: str, at_once: int, arguments: list[str], gpus: int, clock: Clock) -> dict | None:
    """A row of gpu_test.json; None if time was up before its first file."""
    patterns, env = SUITES[suite]
    started = time.monotonic()
    found = (f for pattern in patterns for f in ROOT.glob(pattern) if not f.name.endswith(WITHOUT_A_GPU))
    files = sorted(str(f.relative_to(ROOT)) for f in found)
    if suite == "ops":
        files = [file for file in files if file not in RANKS]
        places = [env | {"CUDA_VISIBLE_DEVICES": gpu} for gpu in visible(gpus)]
    else:
        at_once, places = AT_ONCE.get(suite, 1), [env]
    with ThreadPoolExecutor(at_once) as pool:
        done = list(
            pool.map(
                lambda file, place: run(file, place, arguments, 1 if suite == "ops" else gpus, clock),
                files,
                itertools.islice(itertools.cycle(places), len(files)),
            )
        )
    rows = [row for row in done if row is not None]
    if files and not rows:
        return None
    added = together(rows)
    return (
        {"suite": suite, "arguments": arguments}
        | added
        | {
            "cut": added["cut"] + [file for file, row in zip(files, done, strict=True) if row is None],
            "exit_status": max(abs(row["exit_status"]) for row in rows),
            "seconds": round(time.monotonic() - started, 1),
        }
    )


def missing(made: dict) -> list[str]:
    """The suites that a result file has no row of."""
    return [suite for suite in SUITES if suite not in {row["suite"] for row in made["rows"]}]


def main(arguments: list[str] | None = None) -> int:
    parser = options_parser(__doc__, H200 / "gpu_test.json")
    installed = [s for s in SUITES if s not in NEED_PACKAGES or importlib.util.find_spec(NEED_PACKAGES[s])]
    parser.add_argument("--suites", nargs="+", choices=SUITES, default=installed)
    parser.add_argument("--at-once", type=int, default=10, help="test files of the ops at a time")
    parser.add_argument("--minutes", type=float, default=math.inf, help="after which everything is stopped")
    options, rest = parser.parse_known_args(arguments)
    name, info, rows = run_name(), machine() | {"sources": sources()}, []
    old = of_sources(read(options.json), info["sources"])
    made, lock, clock = old, threading.Lock(), Clock(options.minutes)

    def run_lane(lane: tuple[str, ...]) -> None:
        nonlocal made
        for suite in (suite for suite in lane if suite in options.suites):
            row = run_suite(suite, options.at_once, rest, len(info["gpus"]), clock)
            if row is None:
                continue
            with lock:
                rows.append(row)
                made = merge(old, name, info, rows, ("suite",))
                made["not_run"] = missing(made)
                write(options.json, made)

    pool = ThreadPoolExecutor(len(LANES))
    try:
        with interrupted_by_sigterm():
            list(pool.map(run_lane, LANES))
    finally:  # by Ctrl-C too, time is up
        clock.stop()
        pool.shutdown()
        for row in rows:
            print_row(row)
        print(f"commit {info['commit']}; {len(info['gpus'])} GPUs; not run: {', '.join(missing(made)) or 'none'}")
    bad = [row for row in rows if row["exit_status"] or not row["passed"] or row["could_have_run"] or row["cut"]]
    return int(bool(bad) or len(rows) < len(set(options.suites)))


def print_row(row: dict) -> None:
    """What came of a suite."""
    print(
        f"{row['suite']:<10} {row['passed']} passed, {row['failed']} failed, {row['skipped']} skipped, "
        f"{row['seconds']:.0f} s" + (f", exit status {row['exit_status']}" if row["exit_status"] else "")
    )
    for test in row["failures"]:
        print(f"{'':<10} failed: {test}")
    for reason, count in row["skips"].items():
        print(f"{'':<10} {count} skipped: {reason}")
    for test in row["could_have_run"]:
        print(f"{'':<10} could have run: {test}")
    for file in row["cut"]:
        print(f"{'':<10} not run to its end: {file}")


if __name__ == "__main__":
    sys.exit(main())
