"""Trials of the self-test: each kernel computes its problems, and its bytes must equal those of the last kernel.

The last kernel of an op's order accepts every problem, and the golden bits validate it. A kernel that raises or differs
is passed over in this process, with a warning. The records (ops/<op>/op.py) hold the problems, in words.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from ..runtime import dispatch, prover
from ..runtime.dispatch import Kernel
from .inputs import Inputs
from .record import Op
from .registry import RECORDS
from .words import Words

Case = tuple[str, torch.dtype]
"""A problem in words, and the dtype of its inputs."""


def compare(device: torch.device, backend: str) -> str | None:
    """Compare all kernels of `backend` on `device`, and pass over those that fail.

    Returns:
        The failure of a kernel that is the last of its order; None if there is none.
    """
    for record in RECORDS:
        for op in record.kernels:
            *others, last = dispatch.kernels(op, backend)
            expected: dict[Case, list[torch.Tensor] | None] = {}
            for kernel in others:
                for case in cases(record, op, kernel):
                    try:
                        want = expected[case] = expected.get(case) or run(record, op, last, case, device, backend)
                    except Exception as e:  # e.g. a compiler failure
                        return f"{op}: the kernel {last.name} raised {type(e).__name__}: {e}"
                    if want is None:
                        return f"{op}: the trial {case[0]!r} does not call the operation"
                    why = failure(record, op, kernel, case, device, backend, want)
                    if why is not None:
                        prover.pass_over(op, kernel.name, kernel.backend, why)
                        break
    return None


def cases(record: Op, op: str, kernel: Kernel) -> Iterator[Case]:
    """Yield the problems of a kernel."""
    for words in record.trials[op].of(kernel):
        given = Words(words.split())
        for dtype in [given.dtype("dtype")] if op in record.described else (torch.float32, torch.bfloat16):
            yield words, dtype


def problem(record: Op, op: str, backend: str, words: str):
    """Return the problem that `words` describe; None for operations whose kernel does not depend on the problem."""
    return record.described[op](backend, Words(words.split())) if op in record.described else None


def run(
    record: Op, op: str, kernel: Kernel, case: Case, device: torch.device, backend: str, inputs: type[Inputs] = Inputs
) -> list[torch.Tensor] | None:
    """Return the results of a case by a forced kernel; None if the kernel was not selected."""
    words, dtype = case
    with dispatch.forced(op, kernel) as used:
        found = record.trials[op].run(inputs(device, dtype), problem(record, op, backend, words))
    return found if used else None


def failure(
    record: Op,
    op: str,
    kernel: Kernel,
    case: Case,
    device: torch.device,
    backend: str,
    expected: list[torch.Tensor],
    inputs: type[Inputs] = Inputs,
) -> str | None:
    """Return how a kernel fails a case, or None."""
    try:
        found = run(record, op, kernel, case, device, backend, inputs)
    except Exception as e:
        return f"{type(e).__name__}: {e}"
    if found is None:
        return None if kernel.declines else f"not selected for {case[0]!r}"
    for i, (a, b) in enumerate(zip(found, expected, strict=True), 1):
        if not torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8)):
            return f"tensor {i} of {len(found)} differs from that of the last kernel for {case[0]!r}"
    return None
