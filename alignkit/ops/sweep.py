"""Comparison of all kernels on the GEMMs, attention and norms of one model, for `alignkit prove --model`.

The trials (trials.py) run a few small problems. Here, each kernel that accepts a problem of the model is forced, and
its bytes must equal those of the last kernel of the op's order.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch

from ..runtime import dispatch
from . import trials
from .inputs import Inputs
from .registry import RECORDS

Problems = Mapping[str, Sequence[str]]
"""Operation -> problems in words."""


class _Random(Inputs):
    """Random inputs from the device's generator: a model's weights take too long on the host."""

    def integers(self, *shape: int, seed: int, below: int) -> torch.Tensor:
        generator = torch.Generator(self.device).manual_seed(seed)
        return torch.randint(below, shape, generator=generator, device=self.device)


def compare(device: torch.device, backend: str, wanted: Problems) -> Iterator[tuple[str, dict[str, str | None]]]:
    """Compare the kernels on problems.

    Yields:
        An operation with other kernels that accept one of its problems, and its comparisons: name -> None or failure.
    """
    for record in RECORDS:
        for op in record.trials:
            found: dict[str, str | None] = {}
            *others, last = dispatch.kernels(op, backend)
            for words in wanted.get(op, ()):
                case = words, torch.bfloat16
                problem = trials.problem(record, op, backend, words)
                accepting = [kernel for kernel in others if kernel.rejects(problem) is None]
                if accepting:
                    expected = trials.run(record, op, last, case, device, backend, _Random)
                    assert expected is not None, f"{op} {words}: does not call the operation"
                    for kernel in accepting:
                        why = trials.failure(record, op, kernel, case, device, backend, expected, _Random)
                        found[f"{kernel.name}, {words}"] = why
            if found:
                yield op, found
