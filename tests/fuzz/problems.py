"""Random well-formed calls of each public op, with a description of every argument.

draw.py changes them into unusual or invalid calls. Every public op and custom op needs a generator in PROBLEMS, which
test_fuzz.py checks. Any change to the random choices changes the calls that SEED:INDEX names.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from alignkit import ops
from alignkit.dist import TP
from alignkit.ops import gated_delta_rule as gdr
from alignkit.ops import library
from alignkit.ops.linear_logp import token_logp
from alignkit.runtime import dispatch

FLOATS = (torch.float32, torch.bfloat16)
HALVES = (*FLOATS, torch.float16)
INTS = (torch.int32, torch.int64)


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
    optional: bool = False
    leaf: bool = False
    """True if the op computes its gradient."""
    written: bool = False
    """True if the op writes to it."""
    finite: bool = False
    """True if all values must be finite."""


@dataclass
class Scalar:
    """A non-tensor argument, of a kind in `draw.KINDS`."""

    value: Any
    kind: str
    optional: bool = False
    bad: tuple = ()
    """Values out of range, in addition to those of its kind."""


@dataclass
class Problem:
    """A call `call(**values)` within the documented range."""

    op: str
    call: Callable
    given: dict[str, Tensor | Scalar]
    faults: list[tuple[str, Callable[[dict], None], tuple[str, ...]]] = field(default_factory=list)
    """Faults of this op: description, function that applies it to the arguments, and names an error may begin with."""
    reference: Callable | None = None
    """Function that gives the expected result; None for `call`."""
    forward_only: bool = False
    schema: str = ""
    """Qualified name of a torch custom op, with which the dispatcher's argument errors begin."""

    def tensors(self) -> dict[str, Tensor]:
        """Return the tensor arguments that are not None."""
        return {n: a for n, a in self.given.items() if isinstance(a, Tensor) and a.value is not None}


class Source:
    """Random values of one call: numbers from `rng`, tensor values from a torch generator."""

    def __init__(self, rng: random.Random):
        self.rng = rng
        self.generator = torch.Generator(device="cpu").manual_seed(rng.getrandbits(62))
        self.style = rng.choices(("normal", "large", "tiny", "extreme", "special", "zeros"), (60, 8, 10, 6, 10, 6))[0]

    def chance(self, p: float) -> bool:
        return self.rng.random() < p

    def size(self, most: int, least: int = 1) -> int:
        """Return a size, more often a small one; 0 only if `least` is 0."""
        if least == 0 and self.chance(0.05):
            return 0
        return min(most, int(self.rng.expovariate(3 / most)) + 1)

    def lead(self, least: int = 0) -> list[int]:
        """Return leading dimensions."""
        n = max(least, self.rng.choice((0, 1, 1, 1, 2, 2, 3)))
        return [self.size(5, 0) for _ in range(n)]

    def floats(self, *shape: int, dtype: torch.dtype = torch.float32, finite: bool = False) -> torch.Tensor:
        """Return values in this call's style."""
        t = torch.randn(shape, generator=self.generator, device="cpu", dtype=torch.float32)
        if self.style == "large":
            t *= 1e4
        elif self.style == "tiny":
            t *= 2.0 ** torch.randint(-149, -118, shape, generator=self.generator, device="cpu")
        elif self.style == "extreme":
            top = torch.finfo(dtype).max if not finite else 1e15
            t = torch.where(self._some(shape, 0.2), t.sign() * top, t)
        elif self.style == "special" and not finite:
            for value in (float("nan"), float("inf"), float("-inf"), -0.0):
                t = torch.where(self._some(shape, 0.03), value, t)
        elif self.style == "zeros":
            t = torch.where(self._some(shape, 0.7), t * 0.0, t)
        return t.to(dtype)

    def _some(self, shape, p: float) -> torch.Tensor:
        return torch.rand(shape, generator=self.generator, device="cpu") < p

    def ints(self, shape, low: int, high: int, dtype: torch.dtype = torch.int64) -> torch.Tensor:
        """Return integers in [low, high)."""
        return torch.randint(low, high, tuple(shape), generator=self.generator, device="cpu", dtype=dtype)

    def dtype(self, dtypes=FLOATS) -> torch.dtype:
        return self.rng.choice(dtypes)

    def starts(self, rows: int, sequences: int) -> list[int]:
        """Return cu_seqlens of `sequences` sequences, some of them empty, that share `rows` rows."""
        return [0, *sorted(self.rng.randint(0, rows) for _ in range(sequences - 1)), rows]


def _set(name: str, value: Callable[[torch.Tensor], Any]):
    """Return a fault that replaces argument `name` by `value(argument)`."""

    def put(args):
        args[name] = value(args[name])

    return put


def _poke(name: str, value, s: Source):
    """Return a fault that writes `value` to a random element of argument `name`."""

    def put(args):
        t = args[name] = args[name].clone()
        at = tuple(s.rng.randrange(n) for n in t.shape)
        t[at] = value

    return put


def _parallel(s: Source, x_ndim: int) -> dict[str, Scalar]:
    return {
        "tp": Scalar(s.rng.choice((None, TP(None))), "tp"),
        "sequence_parallel": Scalar(x_ndim >= 2 and s.chance(0.3), "flag"),
    }


def _layer(s: Source, row: bool) -> dict[str, Tensor]:
    dtype, lead = s.dtype(HALVES), s.lead()
    k = s.rng.choice((s.size(40), 16 * s.size(6))) if row else s.size(40)
    n = s.size(24)
    return {
        "x": Tensor(s.floats(*lead, k, dtype=dtype), (len(lead),), HALVES, leaf=True),
        "weight": Tensor(s.floats(n, k, dtype=dtype), (1,), HALVES, ndim=True, leaf=True),
        "bias": Tensor(
            s.floats(n, dtype=dtype) if s.chance(0.5) else None, (0,), HALVES, ndim=True, optional=True, leaf=True
        ),
    }


def _empty_weight(args):
    args["weight"] = args["weight"][:, :0]
    args["x"] = args["x"][..., :0]


def linear(s: Source) -> Problem:
    row = s.chance(0.4)
    given: dict = _layer(s, row)
    x = given["x"].value
    given |= _parallel(s, x.ndim)
    given["out_dtype"] = Scalar(
        s.rng.choice((None, x.dtype, torch.float32)),
        "dtype",
        bad=tuple({torch.float16, torch.bfloat16, torch.float64} - {x.dtype}),
    )
    faults = [
        ("empty weight", _empty_weight, ("weight", "x")),
        ("no rows of weight", _set("weight", lambda w: w[:0]), ("weight", "bias")),
    ]
    name = "row_parallel_linear" if row else "linear"
    return Problem(name, getattr(ops, name), given, faults)


def rms_norm(s: Source) -> Problem:
    dtype, lead, h = s.dtype(), s.lead(), s.size(48)
    last = len(lead)
    given = {
        "x": Tensor(s.floats(*lead, h, dtype=dtype), (last,), leaf=True),
        "weight": Tensor(s.floats(h, dtype=dtype), (0,), ndim=True, leaf=True),
        "eps": Scalar(10 ** s.rng.uniform(-12, 0), "positive"),
        "residual": Tensor(
            s.floats(*lead, h, dtype=dtype) if s.chance(0.4) else None, tuple(range(last + 1)), optional=True, leaf=True
        ),
        "zero_centered": Scalar(s.chance(0.3), "flag"),
    }

    def empty(args):
        for name in ("x", "weight", "residual"):
            if args[name] is not None:
                args[name] = args[name][..., :0]

    return Problem("rms_norm", ops.rms_norm, given, [("no columns", empty, ("x", "weight"))])


def rope_table(s: Source) -> Problem:
    """Use a random base, so that calls do not share an entry of the op's cache."""
    given = {
        "head_dim": Scalar(2 * s.size(16), "positive int", bad=(7, 3)),
        "max_position": Scalar(s.size(40), "positive int"),
        "base": Scalar(s.rng.uniform(1.1, 1e6), "positive"),
        "device": Scalar(s.rng.choice(("cpu", torch.device("cpu"))), "device"),
    }
    return Problem("rope_table", ops.rope_table, given)


def _rotation(s: Source, names: tuple[str, ...]) -> dict[str, Tensor]:
    dtype, t, d, positions = s.dtype(), s.size(6, 0), 2 * s.size(12), s.size(20)
    table = ops.rope_table(d, positions, 10000.0).clone() if s.chance(0.7) else s.floats(positions, d)
    given = {
        name: Tensor(s.floats(t, s.size(4), d, dtype=dtype), (0, 2), ndim=True, leaf=True, group=name) for name in names
    }
    return given | {
        "positions": Tensor(s.ints([t], 0, positions), (0,), (torch.int64,), "positions", ndim=True),
        "table": Tensor(table, (1,), (torch.float32,), "table", ndim=True),
    }


def _rotation_faults(s: Source, given, names: tuple[str, ...]) -> list:
    table, faults = given["table"].value, []
    if given["positions"].value.numel():
        for value in (-1, len(table), 2**40, -(2**62)):
            faults.append((f"position {value}", _poke("positions", value, s), ("positions",)))

    def odd(args):
        for name in (*names, "table"):
            args[name] = args[name][..., :-1]

    return [*faults, ("odd head_dim", odd, (*names, "table", "head_dim"))]


def rope(s: Source) -> Problem:
    given = _rotation(s, ("x",))
    return Problem("rope", ops.rope, given, _rotation_faults(s, given, ("x",)))


def _norm_then_rope(q, k, q_weight, k_weight, eps, positions, table, rotary_dim=None, zero_centered=False):
    normed = (ops.rms_norm(x, w, eps, zero_centered=zero_centered) for x, w in ((q, q_weight), (k, k_weight)))
    return tuple(ops.rope(x, positions, table, rotary_dim=rotary_dim) for x in normed)


def qk_norm_rope(s: Source) -> Problem:
    dtype, t, d, positions = s.dtype(), s.size(6, 0), 2 * s.size(12), s.size(20)
    rotary = s.rng.choice((None, 2 * s.rng.randint(1, d // 2)))
    given = {name: Tensor(s.floats(t, s.size(4), d, dtype=dtype), (0, 2), ndim=True, leaf=True) for name in ("q", "k")}
    given |= {name: Tensor(s.floats(d, dtype=dtype), (0,), ndim=True, leaf=True) for name in ("q_weight", "k_weight")}
    given |= {
        "eps": Scalar(10 ** s.rng.uniform(-12, 0), "positive"),
        "positions": Tensor(s.ints([t], 0, positions), (0,), (torch.int64,), "positions", ndim=True),
        "table": Tensor(s.floats(positions, rotary or d), (1,), (torch.float32,), "table", ndim=True),
        "rotary_dim": Scalar(rotary, "positive int", optional=True, bad=(d + 2, 3)),
        "zero_centered": Scalar(s.chance(0.3), "flag"),
    }
    faults = _rotation_faults(s, given, ("q", "k"))
    return Problem("qk_norm_rope", ops.qk_norm_rope, given, faults)


def rope_of_table(s: Source) -> Problem:
    """Use a table that `rope_table` makes and caches under the call's modes."""
    t, d, positions = s.size(6, 0), 2 * s.size(12), s.size(20)

    def call(x, positions, head_dim, max_position, base):
        return ops.rope(x, positions, ops.rope_table(head_dim, max_position, base))

    given = {
        "x": Tensor(s.floats(t, s.size(4), d, dtype=s.dtype()), (0, 2), ndim=True, leaf=True),
        "positions": Tensor(s.ints([t], 0, positions), (0,), (torch.int64,), "positions", ndim=True),
        "head_dim": Scalar(d, "positive int", bad=(d + 2, 7)),
        "max_position": Scalar(positions, "positive int"),
        "base": Scalar(s.rng.uniform(1.1, 1e6), "positive"),
    }
    return Problem("rope", call, given)


def silu_mul(s: Source) -> Problem:
    dtype, shape = s.dtype(), [*s.lead(), s.size(40, 0)]
    given = {
        name: Tensor(s.floats(*shape, dtype=dtype), tuple(range(len(shape))), leaf=True, optional=name == "up")
        for name in ("gate", "up")
    }
    return Problem("silu_mul", ops.silu_mul, given)


def joint_silu_mul(s: Source) -> Problem:
    """Pass gate and up as one tensor."""
    shape = [*s.lead(1), 2 * s.size(20, 0)]
    given = {"gate": Tensor(s.floats(*shape, dtype=s.dtype()), leaf=True)}
    faults = [("no two halves", _set("gate", lambda t: t[..., 1:]), ("gate",))] if shape[-1] else []
    return Problem("silu_mul", ops.silu_mul, given, faults, lambda gate: ops.silu_mul(*gate.chunk(2, -1)))


def moe_router(s: Source) -> Problem:
    lead, sigmoid = s.lead(), s.chance(0.5)
    groups = s.size(4) if sigmoid else 1
    top_groups = s.rng.randint(1, groups)
    n = groups * s.size(8)
    most = n // groups * top_groups
    given = {
        "logits": Tensor(s.floats(*lead, n), (), (torch.float32,), "logits", leaf=True),
        "top_k": Scalar(s.rng.randint(1, most), "positive int", bad=(most + 1,)),
        "score": Scalar("sigmoid" if sigmoid else "softmax", "score"),
        "normalize": Scalar(s.chance(0.6), "flag"),
        "bias": Tensor(
            s.floats(n, finite=True) if sigmoid and s.chance(0.6) else None,
            (0,),
            (torch.float32,),
            "bias",
            ndim=True,
            optional=True,
            finite=True,
        ),
        "groups": Scalar(groups, "positive int", bad=(n + 1, 2 * n)),
        "top_groups": Scalar(top_groups, "positive int", bad=(groups + 1,)),
        "scale": Scalar(s.rng.choice((1.0, s.rng.uniform(0.1, 5))), "positive finite"),
    }
    faults = []
    if given["bias"].value is not None:
        given["logits"].bound = (len(lead),)
        for value in (float("nan"), float("inf")):
            faults.append((f"bias with {value}", _poke("bias", value, s), ("bias",)))
        faults.append(("bias of the choice by softmax", _set("score", lambda _: "softmax"), ("bias", "groups")))
    return Problem("moe_router", ops.moe_router, given, faults)


def moe_experts(s: Source) -> Problem:
    """Use one rank, and the experts' matrices stacked or as a sequence."""
    dtype, lead, experts, h = s.dtype(), s.lead(), s.size(7), s.size(20)
    f = s.rng.choice((s.size(20), 16 * s.size(3)))
    k = s.rng.randint(1, experts)
    tokens = math.prod(lead)
    ids = [[e if s.chance(0.9) else -1 for e in s.rng.sample(range(experts), k)] for _ in range(tokens)]
    listed = s.chance(0.4)

    def call(gate_up, down, **others):
        if listed:
            gate_up, down = _unstacked(gate_up), _unstacked(down)
        return ops.moe_experts(gate_up=gate_up, down=down, **others)

    whole = tuple(range(len(lead) + 1))
    given = {
        "x": Tensor(s.floats(*lead, h, dtype=dtype), whole, leaf=True),
        "ids": Tensor(torch.tensor(ids, dtype=s.dtype(INTS)).view(*lead, k), whole, INTS, "ids"),
        "weights": Tensor(s.floats(*lead, k), whole, (torch.float32,), "weights", leaf=True),
        "gate_up": Tensor(s.floats(experts, 2 * f, h, dtype=dtype), (0, 1, 2), ndim=True, leaf=True),
        "down": Tensor(s.floats(experts, h, f, dtype=dtype), (0, 1, 2), ndim=True, leaf=True),
        "num_experts": Scalar(s.rng.choice((None, experts)), "positive int", optional=True, bad=(experts + 1,)),
        "first_expert": Scalar(0, "int", bad=(1, -1, experts)),
        "tp": Scalar(s.rng.choice((None, TP(None))), "tp"),
        "ep": Scalar(s.rng.choice((None, TP(None))), "tp"),
        "gather": Scalar(s.chance(0.3), "flag"),
    }
    return Problem("moe_experts", call, given, _choice_faults(s, given))


def _unstacked(matrices):
    """Return stacked matrices as a list of tensors where possible."""
    if type(matrices) is torch.Tensor and matrices.layout == torch.strided and matrices.ndim == 3 and len(matrices):
        with contextlib.suppress(RuntimeError):  # torch makes no views of tensors without memory
            return [matrices[i] for i in range(len(matrices))]  # the gradient of `unbind` depends on autocast
    return matrices


def _choice_faults(s: Source, given) -> list:
    experts, ids = len(given["gate_up"].value), given["ids"].value
    faults = [
        ("no features", lambda a: a.update(gate_up=a["gate_up"][:, :0], down=a["down"][..., :0]), ("gate_up", "down")),
        ("no experts", lambda a: a.update(gate_up=a["gate_up"][:0], down=a["down"][:0]), ("gate_up", "down")),
        ("odd rows", _set("gate_up", lambda w: w[:, :-1]), ("gate_up", "down")),
    ]
    if ids.numel():
        faults += [(f"expert {e}", _poke("ids", e, s), ("ids",)) for e in (experts, -2, 2**31 - 1)]
        if ids.shape[-1] > 1:
            faults.append(("an expert twice", _set("ids", lambda t: torch.zeros_like(t)), ("ids",)))
    return faults


def sigmoid_mul(s: Source) -> Problem:
    lead = s.lead()
    given = {
        "gate": Tensor(s.floats(*lead, 1), tuple(range(len(lead) + 1)), (torch.float32,), "gate", leaf=True),
        "x": Tensor(s.floats(*lead, s.size(40, 0), dtype=s.dtype()), tuple(range(len(lead))), leaf=True),
    }
    return Problem("sigmoid_mul", ops.sigmoid_mul, given)


def _starts_faults(s: Source, name: str, rows: int) -> list:
    def replaced(values):
        return lambda t: torch.tensor(values(t.tolist()), dtype=t.dtype)

    return [
        (f"{name} ends late", _set(name, replaced(lambda v: [*v[:-1], rows + 1 + s.size(5)])), (name,)),
        (f"{name} begins late", _set(name, replaced(lambda v: [1 + s.size(3), *v[1:]])), (name,)),
        (f"{name} begins before 0", _set(name, replaced(lambda v: [-s.size(9), *v[1:]])), (name,)),
        (
            f"{name} decreases",
            _set(name, replaced(lambda v: [0, rows + s.size(3), *v[1:]])),
            (name, "seq_lens", "block_table", "dht"),
        ),
        (f"{name} is empty", _set(name, lambda t: t[:0]), (name, "seq_lens", "block_table")),
    ]


def attention(s: Source) -> Problem:
    longest = 150 if s.chance(0.1) else 70  # longer than a CPU leaf
    dtype, t, d, kv = s.dtype(), s.rng.choice((s.size(12, 0), s.size(longest))), s.size(16), s.size(3)
    hq = kv * s.size(3)
    if t > 16:
        d, kv, hq = min(d, 4), 1, 1
    starts = torch.tensor(s.starts(t, s.size(4)), dtype=s.dtype(INTS), device="cpu")
    if t == 0 and s.chance(0.3):
        starts = starts[:1]
    given = {
        "q": Tensor(s.floats(t, hq, d, dtype=dtype), (0, 2), ndim=True, leaf=True),
        "k": Tensor(s.floats(t, kv, d, dtype=dtype), (0, 1, 2), ndim=True, leaf=True),
        "v": Tensor(s.floats(t, kv, d, dtype=dtype), (0, 1, 2), ndim=True, leaf=True),
        "cu_seqlens": Tensor(starts, (), INTS, "starts", ndim=True),
        "scale": Scalar(s.rng.choice((None, s.rng.uniform(0.01, 3))), "positive", optional=True),
    }
    faults = [
        *_starts_faults(s, "cu_seqlens", t),
        ("cu_seqlens ends early", _set("cu_seqlens", lambda c: torch.tensor([0, t - 1])), ("cu_seqlens",)),
        ("no head_dim", lambda a: a.update({n: a[n][..., :0] for n in "qkv"}), ("q", "k", "v")),
        ("no kv heads", lambda a: a.update({n: a[n][:, :0] for n in "kv"}), ("k", "v")),
    ]
    return Problem("attention", ops.attention, given, faults)


def paged_attention(s: Source) -> Problem:
    dtype, d, kv, batch, block = s.dtype(), s.size(12), s.size(3), s.size(4), s.size(5)
    hq = kv * s.size(3)
    lens = [s.size(9) for _ in range(batch)]
    queries = [s.rng.choice((0, 1, s.rng.randint(0, n))) for n in lens]
    needed = [-(-n // block) for n in lens]
    width, blocks = max(needed) + s.rng.choice((0, 2)), sum(needed) + s.rng.choice((0, 2))
    order = s.rng.sample(range(blocks), blocks)
    table = torch.full((batch, width), s.rng.choice((0, -1, 10**6)), dtype=s.dtype(INTS), device="cpu")
    for row, n in enumerate(needed):
        table[row, :n] = torch.tensor([order.pop() for _ in range(n)])
    rows, used = sum(queries) + s.rng.choice((0, 0, 3)), sum(queries)
    starts = [0]
    for n in queries:
        starts.append(starts[-1] + n)
    out = torch.zeros(rows, hq, d, dtype=dtype, device="cpu") if s.chance(0.4) else None
    given = {
        "q": Tensor(s.floats(rows, hq, d, dtype=dtype), (2,), ndim=True),
        "k_cache": Tensor(s.floats(blocks, block, kv, d, dtype=dtype), (0, 1, 2, 3), ndim=True),
        "v_cache": Tensor(s.floats(blocks, block, kv, d, dtype=dtype), (0, 1, 2, 3), ndim=True),
        "block_table": Tensor(table, (0,), INTS, "table", ndim=True),
        "query_start_loc": Tensor(
            torch.tensor(starts, dtype=s.dtype(INTS), device="cpu"), (0,), INTS, "starts", ndim=True
        ),
        "seq_lens": Tensor(torch.tensor(lens, dtype=s.dtype(INTS), device="cpu"), (0,), INTS, "lens", ndim=True),
        "scale": Scalar(s.rng.choice((None, s.rng.uniform(0.01, 3))), "positive", optional=True),
        "out": Tensor(out, (0, 1, 2), ndim=True, optional=True, written=True),
    }
    at = s.rng.randrange(batch)

    def block_of(value):
        def put(args):
            args["block_table"] = args["block_table"].clone()
            args["block_table"][at, 0] = value

        return put

    faults = [
        *_starts_faults(s, "query_start_loc", rows),
        ("a block too high", block_of(blocks + s.size(9)), ("block_table",)),
        ("a negative block", block_of(-s.size(9)), ("block_table",)),
        ("a long sequence", _poke("seq_lens", width * block + s.size(9), s), ("seq_lens",)),
        ("a huge sequence", _poke("seq_lens", 2**31 - 1, s), ("seq_lens",)),
        ("a negative length", _poke("seq_lens", -s.size(9), s), ("seq_lens",)),
    ]
    if queries[at]:

        def short(args):
            args["seq_lens"] = args["seq_lens"].clone()
            args["seq_lens"][at] = queries[at] - 1

        faults.append(("a length below its queries", short, ("seq_lens",)))
    if used and out is not None:
        for what, alias in (
            ("q", lambda a: a["q"].detach()),
            ("k_cache", lambda a: a["k_cache"].flatten()[: out.numel()]),
        ):
            if what == "q" or given["k_cache"].value.numel() >= out.numel():
                faults.append(
                    (f"out shares memory with {what}", lambda a, f=alias: a.update(out=f(a).view(out.shape)), ("out",))
                )
        if out.numel() > 1:
            faults.append(
                (
                    "out overlaps itself",
                    lambda a: a.update(out=torch.zeros((), dtype=dtype).expand(out.shape)),
                    ("out",),
                )
            )
    return Problem("paged_attention", ops.paged_attention, given, faults)


def _temperature(s: Source, rows) -> Tensor | Scalar:
    """Return a temperature: 1, another number, a 0-dim tensor, or one value per row."""
    kind = s.rng.choice(("one", "one", "number", "number", "0-dim", "rows"))
    if kind == "one":
        return Scalar(1.0, "positive finite")
    if kind == "number":
        return Scalar(10 ** s.rng.uniform(-1, 1), "positive finite")
    t = torch.rand(() if kind == "0-dim" else tuple(rows), generator=s.generator, device="cpu") + 0.3
    return Tensor(t, tuple(range(len(rows))), (torch.float32,), "temperature", finite=True)


def _target(s: Source, rows, vocab: int, ignore: int) -> torch.Tensor:
    t = s.ints(rows, 0, vocab)
    return torch.where(s._some(tuple(rows), 0.2), ignore, t)


def _value_faults(s: Source, given, vocab: int) -> list:
    faults = []
    if "target" in given and given["target"].value.numel():
        ignore = given["ignore_index"].value
        for value in (vocab, vocab + s.size(1000), -1 if ignore != -1 else -2, 2**62, -(2**63)):
            value += value == ignore  # ignore_index itself is valid
            faults.append((f"target {value}", _poke("target", value, s), ("target",)))
    t = given["temperature"]
    if isinstance(t, Tensor) and t.value.numel():
        for value in (0.0, -1.0, float("nan"), float("inf")):
            faults.append((f"temperature {value} in a tensor", _poke("temperature", value, s), ("temperature",)))
    return faults


def _given_rows(s: Source, rows, vocab: int) -> dict:
    """Return the per-row and vocabulary arguments of linear_logp and logp_from_logits."""
    ignore = s.rng.choice((-100, -100, -1, vocab + 5, s.rng.randrange(vocab)))
    size = s.rng.choice((None, vocab, s.rng.randint(1, vocab)))
    target = _target(s, rows, size or vocab, ignore)
    return {
        "target": Tensor(target, tuple(range(len(rows))), (torch.int64,), "target"),
        "temperature": _temperature(s, rows),
        "ignore_index": Scalar(ignore, "int"),
        "vocab_size": Scalar(size, "positive int", optional=True, bad=(vocab + 1, 6.5)),
        "vocab_start": Scalar(0, "int", bad=(1, -1, 128)),
        "tp": Scalar(s.rng.choice((None, TP(None))), "tp"),
        "return_entropy": Scalar(s.chance(0.5), "flag"),
    }


def _vocab(s: Source) -> int:
    return s.rng.choice((s.size(40), s.size(130), 128, 129, s.size(300)))


def linear_logp(s: Source) -> Problem:
    dtype, lead, d, vocab = s.dtype(), s.lead(), s.size(16), _vocab(s)
    per_row = _given_rows(s, lead, vocab)
    main_grad = s.floats(vocab, d, finite=True) if s.chance(0.25) else None
    given = {
        "hidden": Tensor(s.floats(*lead, d, dtype=dtype, finite=True), (len(lead),), leaf=True, finite=True),
        "weight": Tensor(s.floats(vocab, d, dtype=dtype), (1,), ndim=True, leaf=True),
        "bias": Tensor(
            s.floats(vocab, dtype=dtype) if s.chance(0.4) else None, (0,), ndim=True, optional=True, leaf=True
        ),
        "soft_cap": Scalar(s.rng.choice((None, None, s.rng.uniform(1, 50))), "positive", optional=True),
        "logit_scale": Scalar(s.rng.choice((1.0, 1.0, s.rng.uniform(-2, 2))), "finite"),
        "keep_logits": Scalar(s.chance(0.3), "flag"),
        "main_grad": Tensor(main_grad, (0, 1), (torch.float32,), "main_grad", ndim=True, optional=True, written=True),
        "workspace": Scalar(s.rng.choice((None, None, s.rng.randint(1, 10**5))), "positive int", optional=True),
        **per_row,
    }
    limit = per_row["vocab_size"].value or vocab
    faults = _value_faults(s, given, limit)
    if given["hidden"].value.numel():
        for value in (float("nan"), float("inf")):
            faults.append((f"hidden {value}", _poke("hidden", value, s), ("hidden",)))
    if main_grad is not None:
        faults.append(("main_grad is weight", lambda a: a.update(main_grad=a["weight"].detach()), ("main_grad",)))
        if main_grad.numel() > 1:
            faults.append(
                (
                    "main_grad overlaps itself",
                    lambda a: a.update(main_grad=torch.zeros(1, 1).expand(vocab, d)),
                    ("main_grad",),
                )
            )
        if min(main_grad.shape) > 1:  # otherwise the transposed tensor is contiguous too
            faults.append(
                ("main_grad is transposed", lambda a: a.update(main_grad=torch.zeros(d, vocab).t()), ("main_grad",))
            )
    return Problem("linear_logp", ops.linear_logp, given, faults)


def logp_from_logits(s: Source) -> Problem:
    dtype, lead, vocab = s.dtype(), s.lead(), _vocab(s)
    per_row = _given_rows(s, lead, vocab)
    given = {"logits": Tensor(s.floats(*lead, vocab, dtype=dtype), tuple(range(len(lead))), leaf=True), **per_row}
    return Problem(
        "logp_from_logits", ops.logp_from_logits, given, _value_faults(s, given, per_row["vocab_size"].value or vocab)
    )


def head_logits(s: Source) -> Problem:
    dtype, lead, d, vocab = s.dtype(), s.lead(), s.size(24), _vocab(s)
    given = {
        "hidden": Tensor(s.floats(*lead, d, dtype=dtype), (len(lead),)),
        "weight": Tensor(s.floats(vocab, d, dtype=dtype), (1,), ndim=True),
        "bias": Tensor(s.floats(vocab, dtype=dtype) if s.chance(0.4) else None, (0,), ndim=True, optional=True),
        "soft_cap": Scalar(s.rng.choice((None, None, s.rng.uniform(1, 50))), "positive", optional=True),
        "logit_scale": Scalar(s.rng.choice((1.0, 1.0, s.rng.uniform(-2, 2))), "finite"),
    }
    return Problem("head_logits", ops.head_logits, given)


def log_softmax(s: Source) -> Problem:
    lead, vocab = s.lead(), _vocab(s)
    given = {
        "logits": Tensor(s.floats(*lead, vocab, dtype=s.dtype())),
        "temperature": _temperature(s, lead),
        "vocab_size": Scalar(
            s.rng.choice((None, s.rng.randint(1, vocab))), "positive int", optional=True, bad=(vocab + 1, 6.5)
        ),
    }
    if isinstance(given["temperature"], Tensor) and given["temperature"].value.ndim:
        given["logits"].bound = tuple(range(len(lead)))
    return Problem("log_softmax", ops.log_softmax, given, _value_faults(s, given, vocab))


def token_logp_(s: Source) -> Problem:
    lead, vocab = s.lead(), _vocab(s)
    ids = s.ints([*lead, s.size(6, 0)], 0, vocab, s.dtype(INTS))
    given = {
        "logits": Tensor(s.floats(*lead, vocab, dtype=s.dtype()), tuple(range(len(lead)))),
        "token_ids": Tensor(ids, tuple(range(len(lead))), INTS, "ids", ndim=True),
        "temperature": _temperature(s, lead),
    }
    faults = _value_faults(s, given, vocab)
    if ids.numel():
        for value in (-1, vocab, 2**31 - 1):
            faults.append((f"id {value}", _poke("token_ids", value, s), ("token_ids",)))
    return Problem("token_logp", token_logp, given, faults)


def gated_delta_rule(s: Source) -> Problem:
    dtype, heads_k = s.dtype(HALVES), s.size(2)
    k, v = s.rng.choice((64, 64, 128)), s.rng.choice((64, 64, 128))
    heads, packed, t = heads_k * s.size(2), s.chance(0.5), s.rng.choice((s.size(20), s.size(140)))
    batch = 1 if packed else s.size(2)
    starts = s.starts(t, s.size(3)) if packed else None
    sequences = len(starts) - 1 if starts else batch
    v_first = s.chance(0.3)
    state = (sequences, heads, *((v, k) if v_first else (k, v)))
    counted = sum(-(-(b - a) // 64) for a, b in itertools.pairwise(starts)) if starts else None

    def rows(width: int, of: int = heads) -> Tensor:
        return Tensor(s.floats(batch, t, of, width, dtype=dtype) * 0.1, (0, 1, 2, 3), HALVES, ndim=True)

    def optional(*shape: int) -> Tensor:
        value = -s.floats(*shape).abs() * 0.05 if s.chance(0.5) else None
        return Tensor(value, tuple(range(len(shape))), (torch.float32,), "gates", ndim=True, optional=True)

    given = {
        "q": rows(k, heads_k),
        "k": rows(k, heads_k),
        "w": rows(k),
        "do": rows(v),
        "dv": rows(v),
        "g": optional(batch, t, heads),
        "gk": optional(batch, t, heads, k),
        "dht": optional(*state),
        "scale": Scalar(s.rng.choice((None, s.rng.uniform(0.01, 2))), "finite", optional=True),
        "cu_seqlens": Tensor(
            torch.tensor(starts, dtype=s.dtype(INTS), device="cpu") if starts else None,
            (),
            INTS,
            "starts",
            ndim=True,
            optional=True,
        ),
        "num_chunks": Scalar(
            s.rng.choice((None, counted)),
            "positive int",
            optional=True,
            bad=((counted or 0) + 1, counted - 1) if starts else (1, 2),
        ),
        "state_v_first": Scalar(v_first, "flag"),
        "base2": Scalar(s.chance(0.3), "flag"),
        "need_dh0": Scalar(s.chance(0.5), "flag"),
    }
    faults = [*(_starts_faults(s, "cu_seqlens", t) if starts else ())]
    return Problem("gated_delta_rule", gdr.chunk_gated_delta_rule_bwd_dhu, given, faults, forward_only=True)


# torch.ops.alignkit: the custom ops of engines that use torch.compile.


def _custom(name: str, given: dict, reference: Callable, faults=()) -> Problem:
    return Problem(
        f"alignkit::{name}",
        getattr(torch.ops.alignkit, name),
        given,
        list(faults),
        reference,
        forward_only=True,
        schema=f"alignkit::{name}",
    )


def custom_linear(s: Source) -> Problem:
    name = s.rng.choice(("linear", "linear_fp32", "row_parallel_linear"))
    given: dict = _layer(s, name == "row_parallel_linear")
    if name == "linear":
        return _custom(name, given, ops.linear)
    if name == "linear_fp32":
        return _custom(name, given, partial(ops.linear, out_dtype=torch.float32))
    given["group"] = Scalar("", "group")
    return _custom(name, given, lambda x, weight, bias, group: ops.row_parallel_linear(x, weight, bias))


def custom_rms_norm(s: Source) -> Problem:
    given = rms_norm(s).given
    del given["zero_centered"]
    if given["residual"].value is None:
        del given["residual"]
        return _custom("rms_norm", given, ops.rms_norm)
    given["residual"].optional = False
    return _custom("add_rms_norm", given, ops.rms_norm)


def custom_rope_qk(s: Source) -> Problem:
    given = _rotation(s, ("q", "k"))
    return _custom(
        "rope_qk",
        given,
        lambda q, k, positions, table: (ops.rope(q, positions, table), ops.rope(k, positions, table)),
        _rotation_faults(s, given, ("q", "k")),
    )


def custom_qk_norm_rope(s: Source) -> Problem:
    p = qk_norm_rope(s)
    del p.given["zero_centered"]
    return _custom("qk_norm_rope", p.given, _norm_then_rope, p.faults)


def custom_silu_mul(s: Source) -> Problem:
    given = silu_mul(s).given
    given["up"].optional = False
    return _custom("silu_mul", given, ops.silu_mul)


def custom_moe_router(s: Source) -> Problem:
    p = moe_router(s)
    return _custom("moe_router", p.given, ops.moe_router, p.faults)


def custom_moe_experts(s: Source) -> Problem:
    p = moe_experts(s)
    del p.given["gather"]
    p.given |= {name: Scalar("", "group") for name in ("tp", "ep", "rows")}

    def reference(tp, ep, rows, **others):
        return ops.moe_experts(**others)

    return _custom("moe_experts", p.given, reference, p.faults)


def custom_sigmoid_mul(s: Source) -> Problem:
    return _custom("sigmoid_mul", sigmoid_mul(s).given, ops.sigmoid_mul)


def custom_add(s: Source) -> Problem:
    """Return a call of `add`: the layout of `silu_mul`'s arguments, under other names."""
    given = silu_mul(s).given
    given["up"].optional = False
    return _custom("add", {"x": given["gate"], "y": given["up"]}, lambda x, y: x + y)


PROBLEMS: dict[Callable[[Source], Problem], int] = {
    linear: 12,
    rms_norm: 9,
    rope_table: 4,
    rope: 7,
    rope_of_table: 4,
    qk_norm_rope: 5,
    silu_mul: 7,
    joint_silu_mul: 3,
    attention: 10,
    paged_attention: 10,
    linear_logp: 14,
    logp_from_logits: 9,
    head_logits: 5,
    log_softmax: 5,
    token_logp_: 6,
    gated_delta_rule: 6,
    moe_router: 7,
    moe_experts: 10,
    sigmoid_mul: 5,
    custom_linear: 5,
    custom_rms_norm: 4,
    custom_rope_qk: 4,
    custom_qk_norm_rope: 3,
    custom_silu_mul: 3,
    custom_moe_router: 3,
    custom_moe_experts: 4,
    custom_sigmoid_mul: 2,
    custom_add: 2,
}
"""Weight of each generator."""


def problem(s: Source) -> Problem:
    return s.rng.choices(list(PROBLEMS), list(PROBLEMS.values()))[0](s)


def expected(p: Problem, args: dict[str, Any]) -> Any:
    """Return the reference backend's result for `args`."""
    with dispatch.use("reference"):
        return (p.reference or p.call)(**args)


assert library  # registers torch.ops.alignkit
