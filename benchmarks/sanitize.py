"""The op tests under NVIDIA's compute-sanitizer: ``make gpu-sanitize``, or ``python benchmarks/sanitize.py``.

memcheck (accesses outside of an allocation), racecheck (races in shared memory) and initcheck (reads of memory that
nothing wrote), each over the tests with a drawn example of each, and over a kernel with an error that it must find. The
counts go to benchmarks/results/h200/sanitize.json. Exit status 1 if a tool found something, or not what was planted, or
if a test failed or none ran.

Left out: tests that capture graphs, because memory comes from no cache here and its allocation is no part of a graph;
those of large tensors or of thousands of small kernels of torch's or a peer's, where the tools take minutes; from
racecheck cuBLAS's kernels, whose synchronisation it takes for none, and those of hopper.py, where it reports the
compiler's own handing of arguments to the groups of warps; from initcheck both too. From these two also the gated delta
rule's CUDA kernels: initcheck does not see what the copy engine writes, and where a lane arrives at a barrier for its
warp, racecheck orders what that lane did and not what the 31 others did.
"""
from __future__ import annotations

import argparse
import datetime
import json
import math
import os
import re
import shutil
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from e2e import ROOT, merge

from alignkit.check.machine import machine
from alignkit.check.run import stop, write_json

TOOLS = ("racecheck", "memcheck", "initcheck")
"""The slowest first."""
TESTS = [f"tests/ops/test_{name}.py" for name in ("accuracy", "invariance", "linear_cuda", "linear_logp_cuda",
                                                  "linear_logp_sm90", "attention_cuda", "gated_delta_rule", "rms_norm_cuda")]
_WITHOUT = {"memcheck": "", "racecheck": "cublaslt hopper gated_delta_rule", "initcheck": "cublaslt hopper gated_delta_rule"}
"""Providers of products, and ops whose CUDA kernels are left out, by tool."""
_SKIPPED = ("graph or capture or beyond or far or 2_31 or current_stream or gradients_of_the_whole_rule "
            "or flash_linear_attention")
_ABOUT_THEM = "takes_the_usual or refused_and_named or many_rows or adds_the_bias or test_error or a_row_is_its_own"
_FOUND, _NO_TESTS = 99, 5
"""The exit status that compute-sanitizer is asked for when it found something; pytest's, of a part without tests."""
_ENV = {
    "ALIGNKIT_TEST_DEVICE": "cuda",
    "PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), *filter(None, [os.environ.get("PYTHONPATH")])]),
    "PYTORCH_NO_CUDA_MEMORY_CACHING": "1",  # one allocation for each tensor, so that its borders are seen
}


def summary(log: str) -> tuple[int, str]:
    """(Number of errors, the summary line) in a tool's log; (-1, "") if it has none."""
    lines = re.findall(r"^=+ ((?:ERROR|RACECHECK) SUMMARY: .*)$", log, re.MULTILINE)
    if not lines:
        return -1, ""
    return int(re.search(r"(\d+) (?:error|hazard)", lines[-1])[1]), lines[-1]


def check(tool: str, log: Path, command: list[str], timeout: float, env: dict[str, str]) -> tuple[int | None, int, str]:
    """Python with the arguments `command` under a tool: its exit status, None if it was stopped, and the log's summary."""
    log.unlink(missing_ok=True)
    command = ["compute-sanitizer", "--tool", tool, "--target-processes", "application-only",
               "--error-exitcode", str(_FOUND), "--log-file", str(log), sys.executable, *command]
    print(" ".join(command), flush=True)
    process = subprocess.Popen(command, cwd=ROOT, start_new_session=True, env=os.environ | _ENV | env)
    try:
        status = process.wait(timeout)
    except subprocess.TimeoutExpired:
        status = None
        print(f"stopped after {timeout:.0f} s")
    finally:
        stop(process)  # the tests too
    return status, *summary(log.read_text(errors="replace") if log.exists() else "")


def planted(tool: str, timeout: float, out: Path) -> dict:
    """A row of sanitize.json: what a tool finds in a kernel that has an error for it."""
    status, errors, line = check(tool, out / f"{tool}-planted.log", ["benchmarks/planted.py", tool], timeout, {})
    print(f"{tool}, the planted error: {line or 'no summary'}", flush=True)
    return {"tool": tool, "tests": "planted", "errors": errors, "summary": line, "exit_status": status, "clean": errors > 0}


def run(tool: str, tests: str, part: str, examples: int, timeout: float, end: float, out: Path) -> dict:
    """What a tool finds in a part of a file of tests, as a row of sanitize.json. It is stopped at `end`, of the clock."""
    started = time.monotonic()
    timeout = max(min(timeout, end - started), 0.0)
    log, without = out / f"{tool}-{Path(tests).stem}-{part.replace('/', '-')}.log", _WITHOUT[tool]
    skipped = f"{_SKIPPED} or {_ABOUT_THEM}" if without else _SKIPPED
    status, errors, line = check(tool, log, ["-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "-p", "own_kernels",
                                            "-k", f"not ({skipped})", tests], timeout,
                                 {"ALIGNKIT_TEST_EXAMPLES": str(examples), "ALIGNKIT_WITHOUT": without,
                                  "ALIGNKIT_PART": part})
    if errors and log.exists():
        lines = log.read_text(errors="replace").splitlines()
        print("\n".join(line for line in lines if "Host Frame" not in line or ".py:" in line))
    seconds = round(time.monotonic() - started, 1)
    print(f"{tool}, {tests} {part}: {line or 'no summary'}, exit status {status}; {seconds} s", flush=True)
    return {"tool": tool, "tests": tests, "errors": errors, "summary": line, "exit_status": status, "seconds": seconds}


def joined(parts: list[dict]) -> dict:
    """The row of a file from those of its parts: clean if all parts that have tests are, and one has."""
    tested = [part for part in parts if part["exit_status"] != _NO_TESTS]
    bad = [part for part in tested if part["exit_status"] != 0 or part["errors"]]
    row = (bad or tested or parts)[0]
    errors = [part["errors"] for part in tested]
    return row | {"errors": sum(errors) if errors and min(errors) >= 0 else -1, "parts": len(parts),
                  "seconds": max(part["seconds"] for part in parts), "clean": bool(tested) and not bad}


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--tools", nargs="+", choices=TOOLS, default=list(TOOLS))
    parser.add_argument("--examples", type=int, default=1, help="drawn for each test")
    parser.add_argument("--timeout", type=float, default=600.0, help="seconds for a tool and a file of tests")
    parser.add_argument("--minutes", type=float, default=math.inf, help="after which everything is stopped")
    parser.add_argument("--at-once", type=int, default=os.cpu_count(), help="processes")
    parser.add_argument("--parts", type=int, default=4, help="that the tests of a file are dealt out to")
    parser.add_argument("--json", type=Path, default=ROOT / "benchmarks/results/h200/sanitize.json")
    parser.add_argument("--out", type=Path, default=Path("check-results/sanitize"), help="logs")
    parser.add_argument("tests", nargs="*", default=TESTS)
    options = parser.parse_args(arguments)
    if shutil.which("compute-sanitizer") is None:
        print("compute-sanitizer, a part of the CUDA toolkit, is not on the PATH", file=sys.stderr)
        return 2
    options.out.mkdir(parents=True, exist_ok=True)
    out, name = options.out.resolve(), datetime.datetime.now().isoformat(timespec="seconds")
    end = time.monotonic() + 60 * options.minutes
    with ThreadPoolExecutor(options.at_once) as pool:
        waits = [pool.submit(planted, tool, options.timeout, out) for tool in options.tools]
        files = [[pool.submit(run, tool, tests, f"{part}/{options.parts}", options.examples, options.timeout,
                              end, out) for part in range(options.parts)]
                 for tool in options.tools for tests in reversed(options.tests)]
    rows = [*(wait.result() for wait in waits), *(joined([wait.result() for wait in parts]) for parts in files)]
    old = json.loads(options.json.read_text()) if options.json.exists() else {}
    options.json.parent.mkdir(parents=True, exist_ok=True)
    write_json(options.json, merge(old, name, machine() | {"examples": options.examples}, rows, ("tool", "tests")))
    unclean = [f"{row['tool']}, {row['tests']}" for row in rows if not row["clean"]]
    print("\n".join(f"not clean: {what}" for what in unclean) or "clean")
    return int(bool(unclean))


if __name__ == "__main__":
    sys.exit(main())
