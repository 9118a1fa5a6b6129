"""Random valid calls of an op, with a description of each argument, for the tests that follow from the records.

Each op has generators of samples, named in its record (record.py). From the samples follow the fuzzer's calls
(tests/fuzz) and the tests of each property in tests/ops: rows, gradients, arguments, modes and bits. Nothing outside of
the tests imports this module or an op's samples.py.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch

from ..dist import TP
from ._sequences import INTS as INTS

FLOATS = (torch.float32, torch.bfloat16)
HALVES = (*FLOATS, torch.float16)


@dataclass
class Tensor:
    """A tensor argument."""

    value: torch.Tensor | None
    bound: tuple[int, ...] = ()
    """Dimensions whose size must match other arguments."""
    dtypes: tuple[torch.dtype, ...] = FLOATS
    group: str = "x"
    """Arguments of one group share a dtype."""
    ndim: bool = False
    """True if the number of dimensions is fixed."""
    rows: bool = False
    """True if the first dimension is that of the rows: a row of each result depends on this row alone."""
    optional: bool = False
    leaf: bool = False
    """True if the op computes its gradient."""
    written: bool = False
    """True if the op writes to it."""
    finite: bool = False
    """True if all values must be finite."""


@dataclass
class Scalar:
    """A non-tensor argument, of a kind in `tests.fuzz.draw.KINDS`."""

    value: Any
    kind: str
    optional: bool = False
    bad: tuple = ()
    """Values out of range, in addition to those of its kind."""


Fault = tuple[str, Callable[[dict], None], tuple[str, ...]]
"""Description, function that applies the fault to the arguments, and names that an error may begin with."""


@dataclass
class Sample:
    """A call `call(**values)` within the documented range."""

    op: str
    call: Callable
    given: dict[str, Any]
    """Name of each argument -> `Tensor` or `Scalar`."""
    faults: list[Fault] = field(default_factory=list)
    """Faults of this op, in addition to those that follow from the descriptions of the arguments."""
    reference: Callable | None = None
    """Function that gives the expected result; None for `call`."""
    exact: Callable | None = None
    """Formula of the tensor arguments in float64, differentiable, for the test of accuracy."""
    terms: int = 8
    """Length of the longest chain of roundings of a result or a gradient, for the error bound of that test."""
    linear: bool = False
    """True if no gradient depends on an argument."""
    forward_only: bool = False
    schema: str = ""
    """Qualified name of a torch custom op, with which the dispatcher's argument errors begin."""

    def tensors(self) -> dict[str, Tensor]:
        """Return the tensor arguments that are not None."""
        return {n: a for n, a in self.given.items() if isinstance(a, Tensor) and a.value is not None}


class Source:
    """Random values of one sample: numbers from `rng`, tensor values from a torch generator."""

    def __init__(self, rng: random.Random, style: str | None = None, rows: int | None = None, scale: int = 1):
        """Start a sample of values of `style` and with `rows` rows, None for random ones; `scale` multiplies sizes."""
        self.rng = rng
        self.generator = torch.Generator(device="cpu").manual_seed(rng.getrandbits(62))
        styles = ("normal", "large", "tiny", "extreme", "special", "zeros")
        self.style = style or rng.choices(styles, (60, 8, 10, 6, 10, 6))[0]
        self.rows, self.scale = rows, scale

    def chance(self, p: float) -> bool:
        return self.rng.random() < p

    def size(self, most: int, least: int = 1) -> int:
        """Return a size, more often a small one; 0 only if `least` is 0."""
        if least == 0 and self.chance(0.05):
            return 0
        most *= self.scale
        return min(most, int(self.rng.expovariate(3 / most)) + 1)

    def lead(self, least: int = 0) -> list[int]:
        """Return leading dimensions."""
        if self.rows is not None:
            return [self.rows]
        n = max(least, self.rng.choice((0, 1, 1, 1, 2, 2, 3)))
        return [self.size(5, 0) for _ in range(n)]

    def tokens(self, most: int = 6) -> int:
        """Return a number of rows, for an op with one leading dimension."""
        return self.size(most, 0) if self.rows is None else self.rows

    def floats(self, *shape: int, dtype: torch.dtype = torch.float32, finite: bool = False) -> torch.Tensor:
        """Return values in this sample's style."""
        t = torch.randn(shape, generator=self.generator, device="cpu", dtype=torch.float32)
        if self.style == "large":
            t *= 1e4
        elif self.style == "tiny":
            t *= 2.0 ** torch.randint(-149, -118, shape, generator=self.generator, device="cpu")
        elif self.style == "extreme":
            top = torch.finfo(dtype).max if not finite else 1e15
            t = torch.where(self.some(shape, 0.2), t.sign() * top, t)
        elif self.style == "special" and not finite:
            for value in (float("nan"), float("inf"), float("-inf"), -0.0):
                t = torch.where(self.some(shape, 0.03), value, t)
        elif self.style == "zeros":
            t = torch.where(self.some(shape, 0.7), t * 0.0, t)
        return t.to(dtype)

    def some(self, shape, p: float) -> torch.Tensor:
        """Return a mask that is True with probability p."""
        return torch.rand(shape, generator=self.generator, device="cpu") < p

    def ints(self, shape, low: int, high: int, dtype: torch.dtype = torch.int64) -> torch.Tensor:
        """Return integers in [low, high)."""
        return torch.randint(low, high, tuple(shape), generator=self.generator, device="cpu", dtype=dtype)

    def dtype(self, dtypes=FLOATS) -> torch.dtype:
        return self.rng.choice(dtypes)

    def starts(self, rows: int, sequences: int) -> list[int]:
        """Return cu_seqlens of `sequences` sequences, some of them empty, that share `rows` rows."""
        return [0, *sorted(self.rng.randint(0, rows) for _ in range(sequences - 1)), rows]

    def group(self) -> Scalar:
        """Return a `TP` or None, both of one rank."""
        return Scalar(self.rng.choice((None, TP(None))), "tp")


def custom(name: str, given: dict[str, Any], reference: Callable, faults: Iterable[Fault] = ()) -> Sample:
    """Return a call of the custom op torch.ops.alignkit.`name`."""
    call, schema = getattr(torch.ops.alignkit, name), f"alignkit::{name}"
    return Sample(schema, call, given, list(faults), reference, forward_only=True, schema=schema)


def replaced(name: str, value: Callable[[torch.Tensor], Any]) -> Callable[[dict], None]:
    """Return a fault that replaces argument `name` by `value(argument)`."""

    def put(args):
        args[name] = value(args[name])

    return put


def poked(name: str, value, s: Source) -> Callable[[dict], None]:
    """Return a fault that writes `value` to a random element of argument `name`."""

    def put(args):
        t = args[name] = args[name].clone()
        at = tuple(s.rng.randrange(n) for n in t.shape)
        t[at] = value

    return put


@dataclass
class Cached:
    """New rows of cached sequences, each with a slot of its own."""

    lens: list[int]
    """Tokens of each sequence, the new ones included."""
    queries: list[int]
    """New tokens of each sequence."""
    slots: list[int]
    slot_count: int
    rows: int
    """Rows of all sequences, and of padding behind them."""
    given: dict[str, Tensor]
    """The arguments slots, query_start_loc and seq_lens."""
    faults: list[Fault]


def cached(s: Source, longest: int) -> Cached:
    """Return random sequences of at most `longest` tokens; a slot may be unused."""
    batch = s.size(4)
    lens = [s.size(longest) for _ in range(batch)]
    queries = [s.rng.choice((0, 1, s.rng.randint(0, n))) for n in lens]
    count, starts = batch + s.rng.choice((0, 2)), [0, *itertools.accumulate(queries)]
    rows, slots = starts[-1] + s.rng.choice((0, 0, 3)), s.rng.sample(range(count), batch)

    def ints(values: list[int], group: str) -> Tensor:
        return Tensor(torch.tensor(values, dtype=s.dtype(INTS), device="cpu"), (0,), INTS, group, ndim=True)

    given = {"slots": ints(slots, "slots"), "query_start_loc": ints(starts, "starts"), "seq_lens": ints(lens, "lens")}
    faults = [
        *wrong_starts(s, "query_start_loc", rows),
        ("a slot too high", poked("slots", count + s.size(9), s), ("slots",)),
        ("a negative slot", poked("slots", -s.size(9), s), ("slots",)),
        ("a negative length", poked("seq_lens", -s.size(9), s), ("seq_lens",)),
        *short_length(s, queries),
    ]
    return Cached(lens, queries, slots, count, rows, given, faults)


def short_length(s: Source, queries: list[int]) -> list[Fault]:
    """Return the fault of a sequence with fewer tokens than new ones, or nothing if the drawn sequence has none."""
    at = s.rng.randrange(len(queries))

    def short(lens: torch.Tensor) -> torch.Tensor:
        lens = lens.clone()
        lens[at] = queries[at] - 1
        return lens

    return [("a length below its queries", replaced("seq_lens", short), ("seq_lens",))] if queries[at] else []


def wrong_starts(s: Source, name: str, rows: int) -> list[Fault]:
    """Return faults of cu_seqlens `name`, which end at `rows`."""

    def starts(values):
        return replaced(name, lambda t: torch.tensor(values(t.tolist()), dtype=t.dtype))

    others = (name, "seq_lens", "block_table")
    return [
        (f"{name} ends late", starts(lambda v: [*v[:-1], rows + 1 + s.size(5)]), (name,)),
        (f"{name} begins late", starts(lambda v: [1 + s.size(3), *v[1:]]), (name,)),
        (f"{name} begins before 0", starts(lambda v: [-s.size(9), *v[1:]]), (name,)),
        (f"{name} decreases", starts(lambda v: [0, rows + s.size(3), *v[1:]]), (*others, "dht")),
        (f"{name} is empty", replaced(name, lambda t: t[:0]), others),
    ]
