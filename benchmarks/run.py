"""Entry to all benchmarks: ``python benchmarks/run.py NAME [ARGS]``; ``--list`` lists them.

``python benchmarks/run.py renew --minutes N`` measures stale rows again, for N minutes at most; ``--dry-run`` lists
them. A row is stale if the sources of its run differ from today's (``lib.results.sources``). The command may be
interrupted and repeated: each script has ``--only-stale``, which selects the stale cases of its file, and stores each
case once it is measured. A script's constant ``MEASURED_OPS`` names the ops whose sources decide its rows; without it,
the engines' sources do. Rows of a peer that is not installed, and cases that a script cannot select, remain stale.

``make gpu-NAME NAME_ARGS="ARGS"`` builds the kernels first. A benchmark runs in a process of its own. Its script
documents its result files, which lie in benchmarks/results.
"""

from __future__ import annotations

import argparse
import functools
import importlib.util
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

FOLDER = Path(__file__).parent
RENEW = "renew"
STOPPING = 60.0
"""Seconds in which a stopped benchmark may end its engines."""


@dataclass
class Benchmark:
    """A script of this folder, with the fields that identify a row of each result file."""

    script: str
    about: str
    files: dict[str, str]
    """Names of result files in benchmarks/results, each with the script's constant that names a row's key fields."""

    @property
    def path(self) -> Path:
        return FOLDER / self.script

    def command(self, *arguments: str) -> list[str]:
        return [sys.executable, str(self.path), *arguments]

    @functools.cached_property
    def module(self) -> ModuleType:
        """The imported script."""
        spec = importlib.util.spec_from_file_location(self.path.stem, self.path)
        assert spec and spec.loader, self.path
        module = importlib.util.module_from_spec(spec)
        sys.modules[spec.name] = module  # dataclasses look their module up
        spec.loader.exec_module(module)
        return module

    def rows(self) -> dict[str, tuple[list[dict], list[dict]]]:
        """Return the stale and all rows of each result file, without the rows of other benchmarks."""
        from lib import results

        found = {}
        digest = results.sources(*getattr(self.module, "MEASURED_OPS", ()))
        for file, key in self.files.items():
            contents, fields = results.read(results.RESULTS / file), getattr(self.module, key)
            mine = [row for row in contents.get("rows", []) if row.keys() >= {*fields}]
            found[file] = results.stale(contents, digest, fields), mine
        return found

    def on_gpus(self, stale: dict[str, list[dict]]) -> set[bool]:
        """Return whether stale rows, by file, were measured on GPUs: both values if some were and some were not."""
        from lib import results

        runs = {file: results.read(results.RESULTS / file).get("runs", {}) for file in stale}
        return {bool(runs[file][row["run"]].get("gpus")) for file, rows in stale.items() for row in rows}


def _h200(*names: str) -> dict[str, str]:
    return {f"h200/{name}.jsonl": "KEY" for name in names}


BENCHMARKS = {
    "rms": Benchmark("rms_norm.py", "RMSNorm, compared with peers and with a copy", _h200("rms_norm")),
    "qk": Benchmark(
        "qk_norm_rope.py", "QK norm with RoPE, compared with separate ops and peers", _h200("qk_norm_rope")
    ),
    "attention": Benchmark("attention.py", "attention, compared with FlashAttention 3 and cuDNN", _h200("attention")),
    "matmul": Benchmark("matmul.py", "GEMMs of linear layers, compared with cuBLAS and others", _h200("matmul")),
    "logp": Benchmark("linear_logp.py", "linear_logp, compared with peers and the bare GEMM", _h200("linear_logp")),
    "moe": Benchmark("moe.py", "MoE experts, compared with peers", _h200("moe")),
    "gdn": Benchmark(
        "gated_delta_rule.py", "gated delta rule, compared with flash-linear-attention", _h200("gdn_bwd_dhu")
    ),
    "tree-sum": Benchmark("tree_sum.py", "sums over tensor-parallel ranks, compared with NCCL", _h200("tree_sum")),
    "where-drift": Benchmark("where_drift.py", "origin of the drift of stock engines, by op", _h200("where_drift")),
    "cost": Benchmark(
        "cost.py",
        "rollout throughput and training step time, stock and aligned, with a profile",
        {"h200/cost.jsonl": "KEY", "h200/profile.jsonl": "PROFILE_KEY"},
    ),
    "identity": Benchmark("identity.py", "cost of fingerprints and epochs in vLLM engines", _h200("identity")),
    "long": Benchmark("long.py", "prefill and decode of engines by prompt length", _h200("long", "moe")),
    "e2e": Benchmark("e2e.py", "bits of rollout against training, at a realistic size", _h200("e2e")),
    "versions": Benchmark(
        "versions.py", "bits of the installed engines, with a small model", {"versions.jsonl": "KEY"}
    ),
    "verl": Benchmark("verl_grpo.py", "verl's GRPO with and without alignkit", _h200("verl")),
    "test": Benchmark("gpu_tests.py", "tests of the ops and of both engines on GPUs", _h200("gpu_test")),
    "sanitize": Benchmark("sanitize.py", "tests of the ops under compute-sanitizer", _h200("sanitize")),
}
"""Benchmarks by name, in the order in which their stale rows are renewed: ops first, then engines, then tests."""


def environment() -> dict[str, str]:
    """Return the environment of a benchmark, which finds the package in a checkout that is not installed."""
    path = filter(None, [str(FOLDER.parent), os.environ.get("PYTHONPATH")])
    return os.environ | {"PYTHONPATH": os.pathsep.join(path)}


def stale_rows(benchmarks: dict[str, Benchmark]) -> dict[str, dict[str, list[dict]]]:
    """Print the counts of stale rows, and return the stale rows by benchmark and file, without empty entries."""
    found: dict[str, dict[str, list[dict]]] = {}
    for name, benchmark in benchmarks.items():
        for file, (stale, rows) in benchmark.rows().items():
            print(f"{name:<12} {file:<26} {len(stale):>5} of {len(rows):>5} rows are stale", flush=True)
            if stale:
                found.setdefault(name, {})[file] = stale
    return found


def renew(arguments: list[str]) -> int:
    """Measure stale rows again; return 0 if none is left, else 1."""
    parser = argparse.ArgumentParser(prog="run.py renew", description="Measure stale rows again.")
    parser.add_argument("--minutes", type=float, help="time limit, after which the running benchmark is stopped")
    parser.add_argument("--dry-run", action="store_true", help="list the stale rows and measure nothing")
    parser.add_argument("names", nargs="*", metavar="NAME", help="benchmarks to renew; default: all")
    options = parser.parse_args(arguments)
    if unknown := [name for name in options.names if name not in BENCHMARKS]:
        parser.error(f"NAME: must be one of --list, got {', '.join(unknown)}")
    if options.minutes is None and not options.dry_run:
        parser.error("--minutes: required without --dry-run")
    from alignkit.runtime.machine import gpus

    chosen = {name: each for name, each in BENCHMARKS.items() if name in (options.names or BENCHMARKS)}
    end = time.monotonic() + 60 * (options.minutes or 0)
    found = stale_rows(chosen)
    if options.dry_run:
        return int(bool(found))
    for name, stale in found.items():
        if time.monotonic() >= end:
            break
        benchmark = chosen[name]
        if bool(gpus()) not in benchmark.on_gpus(stale):
            print(f"{name}: its stale rows were measured {'without' if gpus() else 'on'} GPUs; skipped", flush=True)
            continue
        status = run_until(benchmark.command("--only-stale"), end)
        print(f"{name}: {'time is up' if status is None else f'exit status {status}'}", flush=True)
    return int(bool(stale_rows(chosen)))


def run_until(command: list[str], end: float) -> int | None:
    """Return the exit status of a command, or None if it was stopped at time `end`; stop it on SIGTERM too."""
    from alignkit.jobs.terminal import interrupted_by_sigterm

    with interrupted_by_sigterm():
        process = subprocess.Popen(command, env=environment())
        try:
            return process.wait(max(0.0, end - time.monotonic()))
        except subprocess.TimeoutExpired:
            return None
        finally:
            if process.poll() is None:
                process.send_signal(signal.SIGTERM)
                try:
                    process.wait(STOPPING)
                except subprocess.TimeoutExpired:
                    process.kill()
                    process.wait()


def main(arguments: list[str] | None = None) -> int:
    """Return the exit status, or become the benchmark's process."""
    parser = argparse.ArgumentParser(prog="run.py", description=__doc__.partition("\n")[0])
    parser.add_argument("--list", action="store_true", help="list the benchmarks and their result files")
    parser.add_argument(
        "name", nargs="?", choices=[*BENCHMARKS, RENEW], metavar="NAME", help="name of a benchmark, or renew"
    )
    parser.add_argument("arguments", nargs=argparse.REMAINDER, metavar="ARGS", help="arguments of its script")
    options = parser.parse_args(arguments)
    if options.name == RENEW:
        sys.path.insert(0, str(FOLDER.parent))  # the package of this checkout, also if another one is installed
        return renew(options.arguments)
    if options.list:
        for name, benchmark in BENCHMARKS.items():
            print(f"{name:<12} {benchmark.about}: {', '.join(benchmark.files)}")
        return 0
    if options.name is None:
        parser.error("NAME: must be one of --list")
    command = BENCHMARKS[options.name].command(*options.arguments)
    os.execve(command[0], command, environment())  # signals reach the benchmark itself


if __name__ == "__main__":
    sys.exit(main())
