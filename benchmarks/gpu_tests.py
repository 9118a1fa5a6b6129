"""The tests that need a GPU: ``make gpu-test``, or ``python benchmarks/gpu_tests.py [--suites ...] [for pytest]``.

Each test file is a pytest process of its own, some side by side. The suites' counts go to
benchmarks/results/h200/gpu_test.json as ``rows``, with ``runs``: by the rows' ``run``, the date, commit, versions and
GPUs. Exit status 1 if a test failed or none ran.
"""
from __future__ import annotations

import argparse
import datetime
import json
import os
import re
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ET
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from e2e import ROOT, merge

from alignkit.check.machine import machine
from alignkit.check.run import write_json

SUITES = {
    "ops": ("tests/ops/test_*.py", {"ALIGNKIT_TEST_DEVICE": "cuda"}),  # the default device of the whole process
    "vllm": ("tests/vllm/test_cuda.py", {}),
    "megatron": ("tests/megatron/test_cuda.py", {}),
    "fuzz": ("tests/fuzz/test_cuda.py", {}),
}
"""Files, and environment, of each."""
RESULT = re.compile(r"\S+::.* (PASSED|FAILED|SKIPPED|ERROR)\b")
"""Of a test, as pytest says it."""


def counts(junit: str) -> dict:
    """``{"passed", "failed", "skipped", "failures"}`` of a junit report; failures names those that failed, or broke
    before or after the test itself."""
    cases = list(ET.fromstring(junit).iter("testcase"))
    bad = [c for c in cases if c.find("failure") is not None or c.find("error") is not None]
    skipped = [c for c in cases if c.find("skipped") is not None]
    return {"passed": len(cases) - len(bad) - len(skipped), "failed": len(bad), "skipped": len(skipped),
            "failures": [f"{c.get('classname')}.{c.get('name')}" for c in bad]}


def run(file: str, env: dict[str, str], arguments: list[str]) -> dict:
    """Runs a test file. Prints a line when a test has ended, and all that was said at the end."""
    with tempfile.TemporaryDirectory() as folder:
        report, said = Path(folder) / "junit.xml", []
        with subprocess.Popen([sys.executable, "-m", "pytest", "-v", "-p", "no:cacheprovider", file, f"--junitxml={report}",
                               *arguments], cwd=ROOT, env=os.environ | env, text=True, stdout=subprocess.PIPE,
                              stderr=subprocess.STDOUT) as process:
            for line in process.stdout:
                if RESULT.match(line):
                    print(line, end="", flush=True)
                else:
                    said.append(line)
        print(f"== {file}\n{''.join(said)}", flush=True)
        row = counts(report.read_text()) if report.exists() else counts("<testsuites/>")
    return {"exit_status": process.returncode} | row


def run_suite(suite: str, at_once: int, arguments: list[str]) -> dict:
    """A row of gpu_test.json."""
    path, env = SUITES[suite]
    started = time.monotonic()
    files = sorted(str(f.relative_to(ROOT)) for f in (ROOT / path).parent.glob(Path(path).name))
    with ThreadPoolExecutor(at_once) as pool:
        done = list(pool.map(lambda file: run(file, env, arguments), files))
    row = {key: sum((d[key] for d in done), [] if key == "failures" else 0)
           for key in ("passed", "failed", "skipped", "failures")}
    return {"suite": suite, "exit_status": max(d["exit_status"] for d in done)} | row | {
        "seconds": round(time.monotonic() - started, 1)}


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--suites", nargs="+", choices=SUITES, default=list(SUITES))
    parser.add_argument("--at-once", type=int, default=6, help="test files at a time")
    parser.add_argument("--json", type=Path, default=ROOT / "benchmarks/results/h200/gpu_test.json")
    options, rest = parser.parse_known_args(arguments)
    name = datetime.datetime.now().isoformat(timespec="seconds")
    rows = []
    for suite in options.suites:
        rows.append(run_suite(suite, options.at_once, rest))
        old = json.loads(options.json.read_text()) if options.json.exists() else {}
        options.json.parent.mkdir(parents=True, exist_ok=True)
        write_json(options.json, merge(old, name, machine(), rows, ("suite",)))
    for row in rows:
        print(f"{row['suite']:<10} {row['passed']} passed, {row['failed']} failed, {row['skipped']} skipped, "
              f"{row['seconds']:.0f} s" + (f", exit status {row['exit_status']}" if row["exit_status"] else ""))
    return int(any(row["exit_status"] or not row["passed"] for row in rows))


if __name__ == "__main__":
    sys.exit(main())
