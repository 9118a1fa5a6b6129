"""The op tests under NVIDIA's compute-sanitizer: ``make gpu-sanitize``, or ``python benchmarks/sanitize.py``.

memcheck (accesses outside of an allocation), racecheck (races in shared memory) and initcheck (reads of memory that
nothing wrote), each over the tests with a drawn example of each, and over a kernel with an error that it must find. The
tests of a file are dealt out to parts, and these to all GPUs. Each part is a row of benchmarks/results/h200/sanitize.json
as soon as it has ended. All rows are of the same sources of the ops: those of others go. ``--resume`` runs only the
parts that the file does not have as clean. Exit status 1 unless all are: if a tool found something, or not what was planted, or if a test
failed or did not end.

Left out: tests that capture graphs, because memory comes from no cache here and its allocation is no part of a graph; those of large
tensors or of thousands of small kernels of torch's or a peer's, where the tools take minutes; from memcheck and racecheck torch's own
kernels and those of its products that are CUTLASS's; from racecheck the largest tests of attention and of mixtures, cuBLAS's kernels,
whose synchronisation it takes for none, and those of hopper.py, where it reports the compiler's own handing of arguments to the groups of
warps; from initcheck the last two too, and the gated delta rule's CUDA kernels, as it does not see what the copy engine writes. Attention of
few queries reads some numbers that it does not use, for speed: they are written first (lib/own_kernels.py).

From racecheck also the CUDA kernels of attention and of the gated delta rule, where one lane arrives at a barrier for its warp: the tool
orders what that lane did, not what the 31 others did, and reports each of their reads against the next write to the same place.
docs/gpu.md says what orders them. The tests of attention run all the same: what they compare with is Triton's.
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
from lib.results import H200, ROOT, keys, merge, of_sources, read, run_name, sources, write

from alignkit.check.machine import gpus, machine
from alignkit.check.run import stop
from alignkit.check.terminal import interrupted_by_sigterm
from alignkit.runtime import dispatch

KEY = ("tool", "tests", "part")
TOOLS = ("racecheck", "memcheck", "initcheck")
"""The slowest first."""
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
"""Providers of products, and ops whose CUDA kernels are left out, by tool."""
_OTHERS = ("at6native", "_ZN7cutlass")
_EXCLUDED = {"memcheck": _OTHERS, "racecheck": (*_OTHERS, "attention_forwardI", "attention_backwardI"), "initcheck": ()}
"""By tool, what the mangled names of kernels contain that it leaves alone. The others' kernels make inputs, or compare results, and take
longer than what is tested; only initcheck has to see what they write."""
_SKIPPED = (
    "graph or capture or beyond or far or 2_31 or current_stream or gradients_of_the_whole_rule "
    "or flash_linear_attention or tried_at_the_k or long_contexts"
)
_SLOW = (
    "many_sequences or another_stream or scores_that_grow or sequence_alone or (tiles and leaves) "
    "or (attention_cuda and accuracy) or (rollout_is_training and (lengths0 or lengths1 or lengths3)) "
    "or (what_is_not_finite and inf) or (moe_sm90 and the_op and (1500 or 8000)) or (projections_rows and 16384) "
    "or (linear_logp_sm90 and (8892 or kwargs1 or kwargs4)) or schedules_change_no_bit or (those_before and 256) "
    "or (rms_norm_cuda and lambda and 3)"
)
"""What takes minutes under racecheck; what it sees in the others is the same kernels, of fewer blocks."""
_ABOUT_THEM = (
    "takes_the_usual or refused_and_named or refused_there or many_rows or adds_the_bias or test_error "
    "or a_row_is_its_own or take_states_in_turn or share_a_state or many_packed or (more_work and cuda)"
)
_START = "120"
"""Seconds in which a process must begin to use the GPU. The tool's own 10 are few for pytest where many start at once, and
when they are over the tool waits for the process, and the process for it."""
_FOUND, _NO_TESTS = 99, 5
"""The exit status that compute-sanitizer is asked for when it found something; pytest's, of a part without tests."""
_ENV = {
    "ALIGNKIT_TEST_DEVICE": "cuda",
    "PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), *filter(None, [os.environ.get("PYTHONPATH")])]),
    "PYTORCH_NO_CUDA_MEMORY_CACHING": "1",  # one allocation for each tensor, so that its borders are seen
}
_running: set[subprocess.Popen] = set()


def summary(log: str) -> tuple[int, str]:
    """(Number of errors, the summary line) in a tool's log; (-1, "") if it has none."""
    lines = re.findall(r"^=+ ((?:ERROR|RACECHECK) SUMMARY: .*)$", log, re.MULTILINE)
    if not lines:
        return -1, ""
    return int(re.search(r"(\d+) (?:error|hazard)", lines[0])[1]), lines[0]


def check(tool: str, log: Path, command: list[str], timeout: float, env: dict[str, str]) -> tuple[int | None, int, str]:
    """Python with the arguments `command` under a tool: its exit status, None if it was stopped, and the log's summary."""
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
        said, status = process.communicate(timeout=timeout)[0], process.returncode
    except subprocess.TimeoutExpired:
        stop(process)
        said, status = process.communicate()[0], None
    finally:
        _running.discard(process)
        stop(process)  # the tests too
    if status not in (0, _NO_TESTS):
        print(said)
    return status, *summary(log.read_text(errors="replace") if log.exists() else "")


@dataclass(frozen=True)
class Job:
    """A tool over a part of a file of tests; without a file, over the planted error."""

    tool: str
    tests: str = "planted"
    part: str = ""

    def run(self, options: argparse.Namespace, end: float, gpu: str) -> dict:
        """What the tool finds, as a row of sanitize.json. It is stopped at `end`, of the clock."""
        started = time.monotonic()
        without, env = _WITHOUT[self.tool], {"CUDA_VISIBLE_DEVICES": gpu}
        log = options.out / f"{self.tool}-{Path(self.tests).stem}-{self.part.replace('/', '-')}.log"
        if self.part:
            skipped = " or ".join([_SKIPPED, *[_ABOUT_THEM] * bool(without), *[_SLOW] * (self.tool == "racecheck")])
            command = [
                "-m",
                "pytest",
                "-v",
                "-x",
                "-p",
                "no:cacheprovider",
                "-p",
                "lib.own_kernels",
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
            f"{self}: {'clean' if clean else 'NOT clean'}, {line or 'no summary'}, exit status {status}; {seconds} s",
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
    """In the order in which they begin."""
    parts = [f"{i}/{options.parts}" for i in range(options.parts)]
    return [
        *(Job(tool) for tool in options.tools),
        *(Job(tool, tests, part) for tool in options.tools for tests in reversed(options.tests) for part in parts),
    ]


def not_clean(rows: list[dict], asked: list[Job]) -> list[str]:
    """Of what was asked for: the parts that are not clean, and the files of which a tool ran no test."""
    rows = [row for row in rows if Job(row["tool"], row["tests"], row["part"]) in asked]
    tested = {(row["tool"], row["tests"]) for row in rows if row["exit_status"] != _NO_TESTS}
    return [f"{row['tool']}, {row['tests']} {row['part']}".strip() for row in rows if not row["clean"]] + sorted(
        {f"{job.tool}, {job.tests}: no test" for job in asked if (job.tool, job.tests) not in tested}
    )


def main(arguments: list[str] | None = None) -> int:
    parser = options_parser(__doc__, H200 / "sanitize.json")
    parser.add_argument("--tools", nargs="+", choices=TOOLS, default=list(TOOLS))
    parser.add_argument("--examples", type=int, default=1, help="drawn for each test")
    parser.add_argument("--timeout", type=float, default=600.0, help="seconds for a tool and a part of a file of tests")
    parser.add_argument("--minutes", type=float, default=math.inf, help="after which everything is stopped")
    parser.add_argument("--resume", action="store_true", help="only what the file does not have as clean")
    parser.add_argument("--at-once", type=int, default=6, help="processes for each GPU")
    parser.add_argument("--parts", type=int, default=4, help="that the tests of a file are dealt out to")
    parser.add_argument("--out", type=Path, default=Path("check-results/sanitize"), help="logs")
    parser.add_argument("tests", nargs="*", default=TESTS)
    options = parser.parse_args(arguments)
    if shutil.which("compute-sanitizer") is None:
        print("compute-sanitizer, a part of the CUDA toolkit, is not on the PATH", file=sys.stderr)
        return 2
    devices = gpus()
    if not devices:
        print("no GPU", file=sys.stderr)
        return 2
    options.out = options.out.resolve()
    options.out.mkdir(parents=True, exist_ok=True)
    name, info = run_name(), machine() | {"sources": sources(*{*dispatch.OPS.values()}), "examples": options.examples}
    contents = of_sources(read(options.json), info["sources"])
    clean = [row for row in contents.get("rows", []) if row["clean"]]
    had = keys({"rows": clean}, KEY) if options.resume else set()
    waiting = [job for job in jobs(options) if (job.tool, job.tests, job.part) not in had]
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
    print("\n".join(f"not clean: {what}" for what in unclean) or "clean")
    return int(bool(unclean))


if __name__ == "__main__":
    sys.exit(main())
