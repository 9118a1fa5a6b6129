"""Op tests under NVIDIA's compute-sanitizer: ``make gpu-sanitize``, or ``python benchmarks/sanitize.py``.

The tools are memcheck (out-of-bounds accesses), racecheck (shared-memory races) and initcheck (reads of uninitialized
memory). Each runs over the op tests with one random example per test, and over a faulty kernel whose error it must
find. The tests of a file are divided into parts, which run on all GPUs. Each completed part is a row of
benchmarks/results/h200/sanitize.jsonl, whose rows all have the same source digest; rows of other sources are removed.
``--resume`` skips the parts that are clean in the file. The exit status is 1 unless all parts are clean: no tool
reports an error, each finds the faulty kernel's, and all tests pass in time.

Excluded from all tools:
    Tests that capture CUDA graphs, because the caching allocator is off and cudaMalloc cannot be captured. Tests of
    large tensors, or with thousands of small kernels of torch or a peer, which take minutes.
Excluded from memcheck and racecheck:
    torch's own kernels, and its CUTLASS GEMMs.
Excluded from racecheck and initcheck:
    cuBLAS's kernels and hopper.py's. racecheck does not recognize cuBLAS's synchronization, and reports the compiler's
    transfer of arguments to warp-specialized partitions in hopper.py. initcheck does not see TMA writes. The gated
    delta rule's CUDA kernels are excluded for the reasons below and for their TMA writes.
Excluded from racecheck:
    The largest tests of attention and MoE. Attention's CUDA kernels, where one lane arrives at an mbarrier for its
    warp: racecheck orders this lane's accesses but not those of the other 31, and reports their reads against the next
    write. docs/gpu.md states what orders them. The tests of attention still run and check Triton's kernels.

Decode attention loads some record fields that it does not use; lib/sanitize_plugin.py initializes them.
"""

from __future__ import annotations

import argparse
import math
import os
import queue
import re
import shutil
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path

from lib.options import parser as options_parser
from lib.results import H200, ROOT, distinct, merge, read, row_keys, run_name, sources, stale, with_sources, write

from alignkit.jobs.execute import stop
from alignkit.jobs.terminal import interrupted_by_sigterm
from alignkit.runtime import dispatch
from alignkit.runtime.machine import gpus, machine

MEASURED_OPS = tuple(sorted({*dispatch.OPS.values()}))
KEY = ("tool", "tests", "part")
TOOLS = ("racecheck", "memcheck", "initcheck")
"""Tools, slowest first."""
TESTS = [
    f"tests/ops/test_{name}.py"
    for name in (
        "accuracy",
        "invariance",
        "linear_cuda",
        "linear_logp_cuda",
        "linear_logp_sm90",
        "attention_cuda",
        "attention_forward_cuda",
        "attention_backward_cuda",
        "gated_delta_rule",
        "moe_sm90",
        "rms_norm_cuda",
        "qk_norm_rope",
        "qk_norm_rope_cuda",
    )
]
_WITHOUT = {
    "memcheck": "",
    "racecheck": "cublaslt hopper gated_delta_rule",
    "initcheck": "cublaslt hopper gated_delta_rule",
}
"""``ALIGNKIT_WITHOUT`` by tool: excluded kernels, and op folders whose CUDA kernels are excluded."""
_OTHER_KERNELS = ("at6native", "_ZN7cutlass")
_EXCLUDED = {
    "memcheck": _OTHER_KERNELS,
    "racecheck": (*_OTHER_KERNELS, "attention_forwardI", "attention_backwardI"),
    "initcheck": (),
}
"""Substrings of the mangled names of excluded kernels, by tool.

torch's and CUTLASS's kernels generate inputs or compare results, and take longer than the tested kernels. initcheck
must see their writes.
"""
_SKIPPED = (
    "graph or capture or beyond or far or 2_31 or current_stream or gradients_of_the_whole_rule "
    "or flash_linear_attention or tried_at_the_k or long_contexts"
)
_SLOW = (
    "many_sequences or waits_for_its_inputs or scores_that_grow or sequence_alone or (tiles and leaves) "
    "or (attention_cuda and accuracy) or (rollout_equals_training and (lengths0 or lengths1 or lengths3)) "
    "or (non_finite_value and inf) or (moe_sm90 and the_op and (1500 or 8000)) or (projections_rows and 16384) "
    "or (linear_logp_sm90 and (8892 or kwargs1 or kwargs4)) or schedules_change_no_bit or (earlier_products and 256) "
    "or (rms_norm_cuda and lambda and 3)"
)
"""Tests that take minutes under racecheck; the others run the same kernels with fewer CTAs."""
_ABOUT_EXCLUDED = (
    "computes_common_products or rejected_and_logged or rejected_there or many_rows or adds_the_bias or test_error "
    "or does_not_depend_on_other_rows or more_states_than_fit or share_a_state or many_packed or (more_work and cuda)"
)
"""Tests about kernels that are excluded."""
_START = "120"
"""Launch timeout of compute-sanitizer, in seconds: the time until the process uses the GPU.

The default of 10 is too short for several concurrent pytest processes, and a timeout deadlocks tool and process.
"""
_FOUND, _NO_TESTS = 99, 5
"""compute-sanitizer's exit status for reported errors, and pytest's for a part without tests."""
_ENV = {
    "ALIGNKIT_TEST_DEVICE": "cuda",
    "PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), *filter(None, [os.environ.get("PYTHONPATH")])]),
    "PYTORCH_NO_CUDA_MEMORY_CACHING": "1",  # one allocation per tensor, so that memcheck sees its bounds
}
_running: set[subprocess.Popen] = set()


def summary(log: str) -> tuple[int, str]:
    """Return the number of errors and the summary line of a tool's log; (-1, "") if it has none."""
    lines = re.findall(r"^=+ ((?:ERROR|RACECHECK) SUMMARY: .*)$", log, re.MULTILINE)
    if not lines:
        return -1, ""
    return int(re.search(r"(\d+) (?:error|hazard)", lines[0])[1]), lines[0]


def check(tool: str, log: Path, command: list[str], timeout: float, env: dict[str, str]) -> tuple[int | None, int, str]:
    """Run Python with arguments `command` under a tool; return the exit status, None on timeout, and `summary`."""
    log.unlink(missing_ok=True)
    command = [
        "compute-sanitizer",
        "--tool",
        tool,
        *(word for name in _EXCLUDED[tool] for word in ("--kernel-name-exclude", f"kns={name}")),
        "--target-processes",
        "application-only",
        "--launch-timeout",
        _START,
        "--error-exitcode",
        str(_FOUND),
        "--log-file",
        str(log),
        sys.executable,
        *command,
    ]
    process = subprocess.Popen(
        command,
        cwd=ROOT,
        env=os.environ | _ENV | env,
        start_new_session=True,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    _running.add(process)
    try:
        output, status = process.communicate(timeout=timeout)[0], process.returncode
    except subprocess.TimeoutExpired:
        stop(process)
        output, status = process.communicate()[0], None
    finally:
        _running.discard(process)
        stop(process)  # and the tests that it started
    if status not in (0, _NO_TESTS):
        print(output)
    return status, *summary(log.read_text(errors="replace") if log.exists() else "")


@dataclass(frozen=True)
class Job:
    """A tool and a part of a test file; without a part, the faulty kernel of lib/planted.py."""

    tool: str
    tests: str = "planted"
    part: str = ""

    def run(self, options: argparse.Namespace, end: float, gpu: str) -> dict:
        """Run the job until time `end` at the latest, and return its row of sanitize.jsonl."""
        started = time.monotonic()
        without, env = _WITHOUT[self.tool], {"CUDA_VISIBLE_DEVICES": gpu}
        log = options.out / f"{self.tool}-{Path(self.tests).stem}-{self.part.replace('/', '-')}.log"
        if self.part:
            skipped = " or ".join([_SKIPPED, *[_ABOUT_EXCLUDED] * bool(without), *[_SLOW] * (self.tool == "racecheck")])
            command = [
                "-m",
                "pytest",
                "-v",
                "-x",
                "-p",
                "no:cacheprovider",
                "-p",
                "lib.sanitize_plugin",
                "-k",
                f"not ({skipped})",
                self.tests,
            ]
            env |= {
                "ALIGNKIT_TEST_EXAMPLES": str(options.examples),
                "ALIGNKIT_WITHOUT": without,
                "ALIGNKIT_PART": self.part,
            }
        else:
            command = ["benchmarks/lib/planted.py", self.tool]
        status, errors, line = check(self.tool, log, command, max(min(options.timeout, end - started), 0.0), env)
        clean = errors > 0 if not self.part else status == _NO_TESTS or (status == 0 and errors == 0)
        if self.part and errors > 0:
            found = log.read_text(errors="replace").splitlines()
            print("\n".join(line for line in found if "Host Frame" not in line or ".py:" in line))
        seconds = round(time.monotonic() - started, 1)
        print(
            f"{self}: {'clean' if clean else 'NOT clean'}, {line or 'no summary'}, "
            f"{'timed out' if status is None else f'exit status {status}'}; {seconds} s; {log}",
            flush=True,
        )
        return {
            "tool": self.tool,
            "tests": self.tests,
            "part": self.part,
            "clean": clean,
            "errors": errors,
            "summary": line,
            "exit_status": status,
            "seconds": seconds,
        }

    def __str__(self) -> str:
        return f"{self.tool}, {self.tests} {self.part}".strip()


def jobs(options: argparse.Namespace) -> list[Job]:
    """Return the jobs in their order of execution."""
    parts = [f"{i}/{options.parts}" for i in range(options.parts)]
    return [
        *(Job(tool) for tool in options.tools),
        *(Job(tool, tests, part) for tool in options.tools for tests in reversed(options.tests) for part in parts),
    ]


def not_clean(rows: list[dict], requested: list[Job]) -> list[str]:
    """Return the requested parts that are not clean, and the files without a test under a tool."""
    rows = [row for row in rows if Job(row["tool"], row["tests"], row["part"]) in requested]
    tested = {(row["tool"], row["tests"]) for row in rows if row["exit_status"] != _NO_TESTS}
    return [f"{row['tool']}, {row['tests']} {row['part']}".strip() for row in rows if not row["clean"]] + sorted(
        {f"{job.tool}, {job.tests}: no test" for job in requested if (job.tool, job.tests) not in tested}
    )


def main(arguments: list[str] | None = None) -> int:
    parser = options_parser(__doc__, H200 / "sanitize.jsonl")
    parser.add_argument("--tools", nargs="+", choices=TOOLS, default=list(TOOLS), help="default: all")
    parser.add_argument("--examples", type=int, default=1, help="random examples per test")
    parser.add_argument("--timeout", type=float, default=600.0, help="time limit of a part, in seconds")
    parser.add_argument("--minutes", type=float, default=math.inf, help="time limit, after which all parts are stopped")
    parser.add_argument("--resume", action="store_true", help="skip parts that are clean in the file")
    parser.add_argument("--at-once", type=int, default=6, help="concurrent processes per GPU")
    parser.add_argument("--parts", type=int, default=4, help="parts per test file")
    parser.add_argument("--out", type=Path, default=Path("check-results/sanitize"), help="folder for logs")
    parser.add_argument("tests", nargs="*", default=TESTS, help="test files; default: those of the ops")
    options = parser.parse_args(arguments)
    if shutil.which("compute-sanitizer") is None:
        print("compute-sanitizer: not found on the PATH. It is part of the CUDA toolkit.", file=sys.stderr)
        return 2
    devices = gpus()
    if not devices:
        print("no GPU found: torch sees none. Check nvidia-smi and CUDA_VISIBLE_DEVICES.", file=sys.stderr)
        return 2
    options.out = options.out.resolve()
    options.out.mkdir(parents=True, exist_ok=True)
    name, info = run_name(), machine() | {"sources": sources(*MEASURED_OPS), "examples": options.examples}
    contents = with_sources(read(options.json), info["sources"])
    clean = [row for row in contents.get("rows", []) if row["clean"]]
    done_keys = row_keys({"rows": clean}, KEY) if options.resume else set()
    waiting = [job for job in jobs(options) if (job.tool, job.tests, job.part) not in done_keys]
    if options.only_stale:
        found = distinct(stale(read(options.json), info["sources"], KEY), *KEY)
        waiting = [job for job in waiting if (job.tool, job.tests, job.part) in found]
    end, rows = time.monotonic() + 60 * options.minutes, []
    free: queue.SimpleQueue[str] = queue.SimpleQueue()
    for gpu in devices * options.at_once:
        free.put(gpu)

    def run(job: Job) -> dict:
        gpu = free.get()
        try:
            return job.run(options, end, gpu)
        finally:
            free.put(gpu)

    pool = ThreadPoolExecutor(len(devices) * options.at_once)
    try:
        with interrupted_by_sigterm():
            for done in as_completed([pool.submit(run, job) for job in waiting]):
                rows.append(done.result())
                write(options.json, merge(contents, name, info, rows, KEY))
    finally:
        pool.shutdown(wait=False, cancel_futures=True)
        for process in list(_running):
            stop(process)
    unclean = not_clean(merge(contents, name, info, rows, KEY)["rows"], jobs(options))
    print("\n".join(f"not clean: {each}" for each in unclean) or "clean")
    return int(bool(unclean))


if __name__ == "__main__":
    sys.exit(main())
