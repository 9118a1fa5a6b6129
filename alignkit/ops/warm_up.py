"""Parallel compilation of the self-test's kernels: ``python -m alignkit.ops.warm_up DEVICE BACKEND RANK COUNT``.

With an empty cache, Triton compiles some 400 kernels during a self-test, one after the other, which takes minutes.
`ahead` starts processes that run the calls of the self-test from its end, so that the self-test finds most kernels in
Triton's cache on disk. Nothing depends on the processes: their results and errors are dropped.
"""

from __future__ import annotations

import contextlib
import functools
import os
import subprocess
import sys
from collections.abc import Callable, Iterator

import torch

from ..runtime import dispatch, families, validated
from . import golden, trials
from .inputs import Normal
from .registry import RECORDS

PROCESSES = 12
"""schedule: largest number of processes."""
MEMORY = 2 << 30
"""schedule: bytes of free GPU memory that a process may need."""


@contextlib.contextmanager
def ahead(device: torch.device, backend: str) -> Iterator[None]:
    """Compile the kernels of the self-test in other processes while the block runs. On a CPU, do nothing."""
    count = 0
    if not families.on_host(device):
        cores = len(os.sched_getaffinity(0)) - 1
        count = min(PROCESSES, cores, torch.cuda.mem_get_info(device)[0] // MEMORY)
    command = [sys.executable, "-m", __name__, str(device), backend]
    processes = [
        subprocess.Popen([*command, str(rank), str(count)], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        for rank in range(count)
    ]
    try:
        yield
    finally:
        for process in processes:
            process.kill()
        for process in processes:
            process.wait()


def calls(device: torch.device, backend: str) -> list[Callable[[], object]]:
    """Return the calls of the self-test in its order: trials, golden cases, invariances."""
    found: list[Callable[[], object]] = [
        functools.partial(trials.run, record, op, kernel, case, device, backend)
        for record in RECORDS
        for op in record.kernels
        for kernel in dispatch.kernels(op, backend)
        for case in trials.cases(record, op, kernel)
    ]
    found += [functools.partial(golden.hashes, case, device) for case in golden.CASES]
    found += [
        test.run
        for dtype in golden.DTYPES
        for record in RECORDS
        for test in record.self_test(Normal(dtype, str(device)))
    ]
    return found


def main(device: torch.device, backend: str, rank: int, count: int) -> None:
    """Run every `count`-th call from the end."""
    with validated.unchecked(), dispatch.use(backend):
        for call in calls(device, backend)[::-1][rank::count]:
            with contextlib.suppress(Exception):  # the self-test reports it
                call()


if __name__ == "__main__":
    main(torch.device(sys.argv[1]), sys.argv[2], int(sys.argv[3]), int(sys.argv[4]))
