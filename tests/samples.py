"""Random calls of all ops, from the samples of their records, for the fuzzer and the tests of tests/ops."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import torch

from alignkit.ops import library
from alignkit.ops.record import Op
from alignkit.ops.registry import RECORDS
from alignkit.ops.samples import Sample, Scalar, Source, Tensor, custom
from alignkit.runtime import dispatch
from alignkit.testing import assert_bitwise_equal

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


def generate(generator: Callable[[Source], Sample], seed: object, style: str | None = "normal", **more) -> Sample:
    """Return the sample of a generator for `seed`; `more` are further arguments of `Source`."""
    with torch.device("cpu"):
        return generator(Source(random.Random(f"{generator.__name__}:{seed}"), style, **more))


def examples(record: Op, count: int = 1, **more) -> list[Sample]:
    """Return `count` fixed samples of each of a record's generators."""
    return [generate(generator, seed, **more) for generator in record.samples() for seed in range(count)]


def example(generator: Callable[[Source], Sample], **more) -> Sample:
    """Return the first sample of a generator that has values in each tensor."""
    samples = (generate(generator, seed, **more) for seed in range(100))
    return next(s for s in samples if all(t.value is not None and t.value.numel() for t in s.tensors().values()))


def arguments(sample: Sample) -> dict[str, Any]:
    """Return the arguments of a sample on the device of the tests.

    A tensor that the op writes to is None if it is optional, else a copy.
    """
    device = torch.get_default_device()

    def argument(a: Tensor | Scalar) -> Any:
        if not isinstance(a, Tensor) or a.value is None:
            return a.value
        if a.written:
            return None if a.optional else a.value.to(device, copy=True)
        return a.value.to(device)

    return {name: argument(a) for name, a in sample.given.items()}


def leaves_of(sample: Sample) -> list[str]:
    """Return the names of the arguments whose gradients the op computes."""
    return [] if sample.forward_only else [name for name, t in sample.tensors().items() if t.leaf]


def written_by(sample: Sample) -> list[str]:
    """Return the names of the required arguments that the op writes to."""
    return [name for name, t in sample.tensors().items() if t.written and not t.optional]


def random_gradient(i: int, result: torch.Tensor) -> torch.Tensor:
    """Return a gradient of result number `i`."""
    generator = torch.Generator(device="cpu").manual_seed(i)
    return torch.randn(result.shape, generator=generator, device="cpu").to(result)


def results(
    call: Callable,
    args: dict[str, Any],
    leaves: Iterable[str] = (),
    gradient: Callable[[int, torch.Tensor], torch.Tensor] = random_gradient,
    written: Iterable[str] = (),
) -> dict[str, torch.Tensor]:
    """Return the results of a call, the gradients of `leaves` and the arguments `written`, by name."""
    args = args | {name: args[name].detach().clone().requires_grad_() for name in leaves}
    out = call(**args)
    found = {f"result {i}": t for i, t in enumerate(out if isinstance(out, tuple) else (out,)) if t is not None}
    roots = [(i, t) for i, t in enumerate(found.values()) if t.requires_grad]
    if roots:
        gradients = [gradient(i, t) for i, t in roots]
        torch.autograd.backward([t for _, t in roots], gradients)
    found |= {f"gradient of {name}": args[name].grad for name in leaves if args[name].grad is not None}
    found |= {f"what is in {name}": args[name] for name in written}
    return {name: t.detach() for name, t in found.items()}


def assert_same(got: dict[str, torch.Tensor], want: dict[str, torch.Tensor], what: str = "") -> None:
    """Check that results have equal names and bits."""
    assert got.keys() == want.keys(), what
    for name, t in want.items():
        assert_bitwise_equal(got[name], t, f"{what}: {name}")
