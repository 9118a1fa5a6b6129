"""Random calls of all ops, from the samples of their records, for the fuzzer and the tests of tests/ops."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from alignkit.ops import library
from alignkit.ops.record import Op
from alignkit.ops.registry import RECORDS
from alignkit.ops.samples import Sample, Scalar, Source, Tensor, custom
from alignkit.runtime import dispatch

GENERATORS: dict[Callable[[Source], Sample], int] = {
    generator: weight for record in RECORDS for generator, weight in record.samples().items()
}
"""Generator of each record -> its weight."""
CUSTOM = {c.name for record in RECORDS for c in record.custom}


def sample(s: Source) -> Sample:
    """Return a sample of a random op; sometimes that of the custom op with the same name."""
    found = s.rng.choices(list(GENERATORS), list(GENERATORS.values()))[0](s)
    return (as_custom(found) if s.chance(0.3) else None) or found


def as_custom(sample: Sample) -> Sample | None:
    """Return the call of the custom op with the same name, without the arguments that it lacks.

    Returns None if there is no such op, or if `sample` lacks a tensor that the op requires.
    """
    if sample.op not in CUSTOM:
        return None
    given: dict[str, Tensor | Scalar] = {}
    for argument in getattr(library, sample.op)._schema.arguments:
        a = sample.given.get(argument.name)
        if isinstance(argument.type, torch.StringType) and (a is None or a.kind == "tp"):
            given[argument.name] = Scalar("", "group")
        elif a is None or (a.value is None and not isinstance(argument.type, torch.OptionalType)):
            return None
        else:
            given[argument.name] = replace(a, optional=isinstance(argument.type, torch.OptionalType))
    faults = [fault for fault in sample.faults if not set(fault[2]) - given.keys()]
    reference = sample.reference or sample.call

    def without_groups(**args):
        return reference(**{n: v for n, v in args.items() if getattr(given[n], "kind", "") != "group"})

    return custom(sample.op, given, without_groups, faults)


def expected(sample: Sample, args: dict[str, Any]) -> Any:
    """Return the reference backend's result for `args`."""
    with dispatch.use("reference"):
        return (sample.reference or sample.call)(**args)


def examples(record: Op, count: int = 1, rows: int | None = None, style: str | None = "normal") -> list[Sample]:
    """Return `count` fixed samples of each of a record's generators."""
    return [
        generator(Source(random.Random(f"{generator.__name__}:{seed}"), style, rows))
        for generator in record.samples()
        for seed in range(count)
    ]
