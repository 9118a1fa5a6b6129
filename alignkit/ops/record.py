"""The record of an op: everything that other parts of the package derive from it.

Each op's op.py holds one `Op`. `dispatch` takes its kernels, `library` its custom ops, `golden` its cases, `alignkit
doctor` its self-test, `alignkit explain` its problems in words. The fuzzer and the tests of each
property in tests/ops take its random calls (samples.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from ..runtime.dispatch import Kernel
from ..runtime.families import on_host
from .inputs import Inputs, Normal
from .samples import Sample, Source
from .self_test import row_invariance
from .words import Words

ROWS, WIDTH, VOCAB, EXPERTS = 23, 256, 300, 8
"""Sizes of the self-test's inputs. They may change: no stored result depends on them."""


@dataclass(frozen=True)
class Custom:
    """A custom op ``torch.ops.alignkit.NAME``, forward only."""

    schema: str
    """NAME and the arguments, in the language of torch.library. vLLM's cached graphs contain it."""
    run: Callable
    fake: Callable
    """Function of the same arguments that returns tensors of the results' shapes and dtypes, without values."""

    @property
    def name(self) -> str:
        return self.schema.partition("(")[0]


@dataclass(frozen=True)
class Golden:
    """A case of the golden bits; the name of `function` is a key of golden_*.json."""

    function: Callable[[Inputs], list[torch.Tensor]]
    slow: bool = False
    """True if the reference backend needs minutes; another case then covers the same arithmetic."""
    modelled: bool = False
    """True if linear/model.py computes the case's golden bits of the sm90 family, for which no GPU is needed."""


@dataclass(frozen=True)
class Trial:
    """A run of an operation, by which the self-test compares its kernels (trials.py)."""

    run: Callable[[Inputs, Any], list[torch.Tensor]]
    """Function of the inputs and the problem (None if the operation's kernel does not depend on the problem)."""
    words: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Name of a kernel -> problems that it accepts, in words; "" for kernels without an entry."""

    def of(self, kernel: Kernel) -> tuple[str, ...]:
        """Return the problems of a kernel."""
        return self.words.get(kernel.name) or self.words.get("", ("",))


@dataclass(frozen=True)
class Rows:
    """A row-wise function for the self-test: each row's result must not depend on the other rows."""

    name: str
    function: Callable
    inputs: list[torch.Tensor]

    @property
    def claim(self) -> str:
        return "rows alone, reordered, in chunks" + ", with one thread" * on_host(self.inputs[0].device)

    def run(self) -> str | None:
        """Return the first difference, or None, whatever the caller's default device is."""
        with torch.device("cpu"):
            return row_invariance(self.function, self.inputs)


@dataclass(frozen=True)
class Check:
    """Another test of the self-test."""

    name: str
    claim: str
    test: Callable[[], str | None]

    def run(self) -> str | None:
        """Return the first difference, or None, whatever the caller's default device is."""
        with torch.device("cpu"):
            return self.test()


@dataclass(frozen=True)
class Op:
    """An op and its parts.

    Attributes:
        folder: Folder of alignkit.ops.
        kernels: Operation -> its kernels, fastest first. `dispatch.choose` and `select` take the operation's name.
        described: Operation -> function of a backend and `Words` that returns a problem; for operations whose kernel
            depends on the problem.
        custom: Custom ops.
        golden: Cases of the golden bits.
        self_test: Function that yields the tests of `alignkit doctor`.
        samples: Function that returns the generators of random calls, each with its weight in the fuzzer.
        trials: Operation -> the run by which the self-test compares its kernels.
    """

    folder: str
    kernels: Mapping[str, tuple[Kernel, ...]]
    samples: Callable[[], Mapping[Callable[[Source], Sample], int]]
    described: Mapping[str, Callable[[str, Words], Any]] = field(default_factory=dict)
    custom: tuple[Custom, ...] = ()
    golden: tuple[Golden, ...] = ()
    self_test: Callable[[Normal], Iterator[Rows | Check]] = lambda normal: iter(())
    trials: Mapping[str, Trial] = field(default_factory=dict)


def fake_like(x: torch.Tensor, *_) -> torch.Tensor:
    """Return a tensor of the shape and dtype of x, without values."""
    return x.new_empty(x.shape)
