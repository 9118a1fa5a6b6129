"""Runs of the self-test's cases with mutated kernels, and the table of what they notice."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from . import build, cpu_kernels, cuda_kernels, triton_kernels
from .mutation import Mutation, copy_package

PROGRAM = Path(__file__).with_name("program.py")
OTHERS = """#include "prelude.h"
namespace alignkit {
const Kernels* avx2_kernels() { return nullptr; }
const Kernels* avx512_kernels() { return nullptr; }
}
"""
"""Source that replaces the kernels of other instruction sets."""
OPTIONS = "-O1 -std=c++17 -ffp-contract=off -fno-strict-aliasing -fopenmp -fPIC -shared -mfma"
SECONDS = 300
"""Limit of one run; a mutated kernel may hang."""
MUTATIONS = (*cpu_kernels.MUTATIONS, *triton_kernels.MUTATIONS, *cuda_kernels.MUTATIONS)
"""All mutations. Those of "reference" and "cpu" run on a CPU, those of "triton" and "cuda" on a GPU."""


def of_device(device: str) -> list[Mutation]:
    return [each for each in MUTATIONS if (each.backend in ("triton", "cuda")) == (device == "cuda")]


def hashes(
    mutation: Mutation | None, backend: str, device: str, wanted: Iterable[str] = (), libraries: Path | None = None
) -> dict[str, list[str]]:
    """Return the results of program.py for the cases `wanted`, with a mutation, in a copy of the package.

    Args:
        mutation: None for the unchanged kernels.
        backend: Backend that computes.
        device: "cpu" or "cuda".
        wanted: Golden functions and trials; empty for all golden cases whose sums round.
        libraries: Folder of the mutated CUDA libraries; None to build the library, as for a missing one.

    Raises:
        RuntimeError: the program fails or exceeds SECONDS.
    """
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        copy_package(folder, without={"cpu": "_cpu.so", "cuda": "_sm90.so"}.get(mutation.backend) if mutation else None)
        if mutation is not None:
            mutation.apply(folder)
        library = ""
        if mutation is not None and mutation.backend == "cpu":
            library = str(folder / "mutated.so")
            (folder / "csrc/cpu/others.cpp").write_text(OTHERS)
            sources = [str(folder / "csrc/cpu" / f"{name}.cpp") for name in ("api", "isa_generic", "others")]
            subprocess.run(["c++", *OPTIONS.split(), f"-I{folder}", *sources, "-o", library], check=True)
        if mutation is not None and mutation.backend == "cuda":
            if libraries is not None and (libraries / mutation.file).exists():
                shutil.copy(libraries / mutation.file, folder / build.LIBRARY)
            else:
                build.compile_library(folder)
        environment = os.environ | {"PYTHONPATH": str(folder), "PYTHONDONTWRITEBYTECODE": "1", "OMP_NUM_THREADS": "1"}
        command = [sys.executable, str(PROGRAM), device, backend, library, *wanted]
        try:
            done = subprocess.run(
                command, cwd=folder, env=environment, capture_output=True, text=True, timeout=SECONDS, check=False
            )
        except subprocess.TimeoutExpired:
            raise RuntimeError(f"exceeded {SECONDS} seconds") from None
    if done.returncode:
        lines = done.stderr.splitlines()
        raise RuntimeError(
            next((line for line in reversed(lines) if "Error" in line), f"exit status {done.returncode}")
        )
    return json.loads(done.stdout)


def changed(before: dict[str, list[str]], after: dict[str, list[str]]) -> dict[str, str]:
    """Return the cases whose tensors differ, each with its number of different tensors."""
    counts = {case: sum(a != b for a, b in zip(after[case], before[case], strict=True)) for case in after}
    return {case: f"{n} of {len(after[case])}" for case, n in counts.items() if n}


def noticed(mutation: Mutation, before: dict[str, list[str]], device: str) -> dict[str, str]:
    """Return the cases that notice a mutation, each with its number of different tensors."""
    return changed(before, hashes(mutation, mutation.backend, device))


def _chosen(mutation: Mutation, only: Iterable[str]) -> bool:
    return not only or any(text in f"{mutation.backend}: {mutation.name}" for text in only)


def table(device: str, libraries: Path | None, only: Iterable[str], jobs: int) -> int:
    """Print the table of a device's mutations; return 1 if a case does not notice a mutation that it must notice.

    Args:
        device: "cpu" or "cuda".
        libraries: Folder of the mutated CUDA libraries; None to build them.
        only: Texts; the backend and name of a mutation must contain one of them. Empty for all mutations.
        jobs: Number of processes at a time.
    """
    mutations = [each for each in of_device(device) if _chosen(each, only)]
    # On a GPU, where time is scarce, a mutation runs the cases that must notice it.
    wanted = {each: each.noticed if device == "cuda" else () for each in mutations}
    union = {
        each.backend: sorted({case for m in mutations if m.backend == each.backend for case in wanted[m]})
        for each in mutations
    }
    failed = False
    print("| backend | mutation | noticed by (different tensors) |\n|---|---|---|", flush=True)
    with ThreadPoolExecutor(jobs) as pool:
        baselines = {backend: pool.submit(hashes, None, backend, device, union[backend]) for backend in union}
        results = [pool.submit(hashes, each, each.backend, device, wanted[each], libraries) for each in mutations]
        for mutation, result in zip(mutations, results, strict=True):
            before = baselines[mutation.backend].result()
            wrong = [case for case, found in before.items() if case.startswith("trial ") and "False" in found]
            assert not wrong, f"the unchanged kernels must pass their trials, but fail {', '.join(wrong)}"
            try:
                found = changed(before, result.result())
            except RuntimeError as e:
                failed = True
                print(f"| {mutation.backend} | {mutation.name} | **FAILED: {e}** |", flush=True)
                continue
            failed |= bool(mutation.missing(found))
            print(mutation.row(found), flush=True)
    return int(failed)
