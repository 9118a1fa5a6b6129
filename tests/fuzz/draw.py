"""Random calls: a well-formed sample of tests/samples.py, then unusual forms of its arguments, or errors in them.

The changes to a sample determine the allowed outcomes. `ANSWER`: the bits of the well-formed twin. `REJECT`: one clear
error. `EITHER`: both are allowed, because the documentation does not promise that the caller means the twin.

Any change to the random choices here or in samples changes the calls that SEED:INDEX names. `names` are beginnings
of the ops' error messages, and change with them.
"""

from __future__ import annotations

import contextlib
import decimal
import fractions
import random
import re
import warnings
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from alignkit.ops.samples import Sample, Scalar, Source, Tensor
from tests.samples import sample

from . import modes

ANSWER, EITHER, REJECT = "answer", "either", "reject"


@dataclass
class Draw:
    """A generated call.

    Attributes:
        args: Arguments of the call.
        twin: Arguments of the well-formed call with the same meaning.
        leaves: Arguments whose gradients are computed.
    """

    sample: Sample
    args: dict[str, Any]
    twin: dict[str, Any]
    leaves: list[str]
    must: str = ANSWER
    touched: set[str] = field(default_factory=set)
    """Invalid arguments."""
    names: set[str] = field(default_factory=set)
    """Allowed beginnings of an error message."""
    what: list[str] = field(default_factory=list)
    """Descriptions of the changes."""
    forward: list[str] = field(default_factory=list)
    backward: list[str] = field(default_factory=list)
    before: list[str] | None = None
    """Modes of an earlier call of the twin; None for no such call."""
    gradient: str = "plain"
    twice: str = ""
    """Gradients to differentiate again; empty for no second derivative."""
    wrap: str = ""
    wrapped: str = ""
    """A function transform (`wrap`) and the argument to which it applies."""

    def tighten(self, must: str) -> None:
        self.must = max(self.must, must, key=(ANSWER, EITHER, REJECT).index)

    def text(self) -> str:
        """Return the call as one line."""
        args = ", ".join(f"{n}={describe(v)}" for n, v in self.args.items())
        changes = [*self.what]
        for where, names in (("forward in", self.forward), ("backward in", self.backward), ("before in", self.before)):
            if names or (where == "before in" and names is not None):
                changes.append(f"{where} {', '.join(names) or 'no mode'}")
        if self.leaves:
            changes.append(
                f"gradients of {', '.join(self.leaves)}, given {self.gradient}"
                + (f", then the second derivative, of {self.twice}" if self.twice else "")
            )
        return f"{self.sample.op}({args})" + "".join(f"; {change}" for change in changes) + f"; must {self.must}"


def describe(v: Any) -> str:
    """Return a short description of a value, without tensor data."""
    try:
        if isinstance(v, torch.Tensor):
            kind = type(v).__name__ if type(v) is not torch.Tensor else ""
            if v.is_nested:
                return f"[{str(v.dtype).removeprefix('torch.')} nested]"
            strides = "" if v.layout != torch.strided else f" strides {tuple(v.stride())}"
            where = "" if v.device.type == "cpu" else f" on {v.device}"
            return f"{kind}[{str(v.dtype).removeprefix('torch.')} {tuple(v.shape)}{strides}{where}]"
        return re.sub(r" object at 0x\w+", "", repr(v))[:60]
    except Exception as e:
        return f"<{type(v).__name__}: {type(e).__name__}>"


def draw(seed: int, index: int) -> Draw:
    """Return random call `index` of `seed`."""
    rng = random.Random(f"{seed}:{index}")
    s = Source(rng)
    p = sample(s)
    d = Draw(p, _clone_arguments(p), _clone_arguments(p), [])
    if not p.forward_only and s.chance(0.6):
        d.leaves = [n for n, t in p.tensors().items() if t.leaf and s.chance(0.8)]
        d.gradient = rng.choice(("plain", "plain", "expanded", "transposed", "negative bit", "float64", "one of them"))
    for _ in range(rng.choice((0, 0, 1, 1, 1, 2, 3))):
        rng.choice((_stride, _stride, _stride, _alias, _mode, _mode, _mode, _earlier_call))(d, s)
    fault = rng.random()
    if fault < 0.5:
        for _ in range(1 if fault < 0.42 else 2):
            rng.choices(list(FAULTS), list(FAULTS.values()))[0](d, s)
    elif fault < 0.52:
        _transform(d, s)
    if d.leaves and s.chance(0.08):
        _wrong_backward(d, s)
    elif p.schema and s.chance(0.08) and not set(d.forward) & set(modes.FORWARD):
        d.leaves = [n for n, t in p.tensors().items() if t.leaf and not _is_inference_tensor(d.args[n])]
        if d.leaves:  # the op has no gradients
            d.tighten(REJECT)
            d.names |= {p.op, "backward", "gradient"}
    d.names |= {"device"} | ({"table"} if p.op == "rope" else set())
    for n in d.leaves:
        for args in (d.args, d.twin):
            args[n] = _as_leaf(args[n])
    d.leaves = [n for n in d.leaves if isinstance(d.args[n], torch.Tensor) and d.args[n].requires_grad]
    return d


def _depends_on_arguments(p: Sample, leaves: list[str]) -> bool:
    """Return whether the gradients of `leaves` depend on the arguments, not only on the incoming gradients."""
    return not p.linear and (not p.op.endswith("linear") or {"x", "weight"} <= set(leaves))


def _clone_arguments(p: Sample) -> dict[str, Any]:
    return {n: a.value.clone() if isinstance(a.value, torch.Tensor) else a.value for n, a in p.given.items()}


def _is_inference_tensor(t: Any) -> bool:
    return isinstance(t, torch.Tensor) and t.is_inference()


def _as_leaf(t: Any) -> Any:
    if isinstance(t, torch.Tensor) and not isinstance(t, (torch.nn.UninitializedParameter, _Opaque)):
        with contextlib.suppress(RuntimeError):  # integer and inference tensors cannot be leaves
            return t.requires_grad_() if isinstance(t, torch.nn.Parameter) else t.detach().requires_grad_()
    return t


# Equal values in another form.


def _stride(d: Draw, s: Source) -> None:
    """Change the memory layout of a tensor."""
    # Output tensors must have the documented layout.
    names = [n for n, t in d.sample.tensors().items() if not t.written and type(d.args[n]) is torch.Tensor]
    if not names:
        return
    name = s.rng.choice(names)
    t = d.args[name]
    if t.dtype == torch.bool or t.layout != torch.strided or t.device.type != "cpu" or t.is_inference():
        return
    form = s.rng.choice(
        (
            "transposed",
            "stepped",
            "offset",
            "negative bit",
            "imaginary part",
            "expanded",
            "windows",
            "view",
            "inference tensor",
            "parameter",
        )
    )
    floating = t.dtype.is_floating_point
    if form == "transposed" and t.ndim > 1:
        a, b = s.rng.sample(range(t.ndim), 2)
        t = t.transpose(a, b).contiguous().transpose(a, b)
    elif form == "stepped" and t.ndim:
        dim, step = s.rng.randrange(t.ndim), s.rng.choice((2, 3))
        big = torch.full([n * step if i == dim else n for i, n in enumerate(t.shape)], 7, dtype=t.dtype, device="cpu")
        part = big[tuple(slice(None, None, step) if i == dim else slice(None) for i in range(t.ndim))]
        t = part.copy_(t)
    elif form == "offset":
        big = torch.zeros(t.numel() + 3, dtype=t.dtype, device="cpu")
        t = big[1 : 1 + t.numel()].view(t.shape).copy_(t)
    elif form == "negative bit" and floating:
        t = torch._neg_view(t.neg())
    elif form == "imaginary part" and t.dtype == torch.float32:
        t = torch.complex(t, t.neg()).conj().imag
    elif form == "expanded" and t.ndim and floating and t.numel():
        dim = s.rng.randrange(t.ndim)
        t = t.narrow(dim, 0, 1).expand(t.shape)
        d.twin[name] = t.clone(memory_format=torch.contiguous_format)
    elif form == "windows" and t.ndim > 1 and floating and t.numel():
        flat = t.flatten()
        t = flat.as_strided(t.shape, [1] * t.ndim) if sum(t.shape) <= len(flat) else t
        d.twin[name] = t.clone(memory_format=torch.contiguous_format)
    elif form == "view":
        t = t.reshape(-1).view(t.shape)
    elif form == "inference tensor":
        if d.leaves:  # torch cannot save inference tensors for backward
            return
        with torch.inference_mode():
            t = t.clone()
    elif form == "parameter" and floating:
        t = torch.nn.Parameter(t)
        if name not in d.leaves:
            t.requires_grad_(False)
    else:
        return
    d.args[name] = t
    d.what.append(f"{name}: {form}")
    if form in ("negative bit", "imaginary part"):
        d.tighten(EITHER)  # its memory does not hold the values
        d.names.add(name)
    if name in ("k_cache", "v_cache") and form in ("transposed", "stepped", "imaginary part", "expanded", "windows"):
        d.tighten(EITHER)  # some layouts cannot be viewed as rows
        d.names.add(name)


def _alias(d: Draw, s: Source) -> None:
    """Pass the same tensor for two arguments."""
    tensors = [n for n, t in d.sample.tensors().items() if not t.written]
    free = [n for n in tensors if type(d.args[n]) is torch.Tensor and n not in d.leaves]
    pairs = [
        (a, b)
        for a in free
        for b in free
        if a < b
        and d.args[a].shape == d.args[b].shape
        and d.args[a].dtype == d.args[b].dtype
        and d.sample.given[a].finite == d.sample.given[b].finite
    ]
    if pairs:
        a, b = s.rng.choice(pairs)
        if d.args[a].dtype.is_floating_point:
            d.args[b], d.twin[b] = d.args[a], d.twin[a]
            d.names |= {b} if a in d.names else set()  # a change to one argument affects both
            d.what.append(f"{b} is {a}")


def _mode(d: Draw, s: Source) -> None:
    """Add a mode to the forward, the backward or both."""
    if s.chance(0.1):
        name = s.rng.choice(list(modes.ODD))
        d.tighten(EITHER)
        d.names |= {name, "mode", "TorchDispatchMode", "TorchFunctionMode", *d.sample.given}
    elif s.chance(0.15):
        name = s.rng.choice(list(modes.FORWARD))
    else:
        name = s.rng.choice(list(modes.SAFE))
    where = s.rng.choice((["forward"], ["backward"], ["forward", "backward"]))
    if name in modes.FORWARD:
        where, d.leaves, d.twice = ["forward"], [], False
    for place in where:
        modes_there = getattr(d, place)
        if name.split()[0] not in {m.split()[0] for m in modes_there}:
            modes_there.append(name)


def _earlier_call(d: Draw, s: Source) -> None:
    """Make the same call earlier, under other modes."""
    d.before = [s.rng.choice((*modes.FORWARD, *modes.SAFE))] if s.chance(0.9) else []


# Invalid arguments.


class _Raises:
    """An object whose methods raise."""

    def __float__(self, *args):
        raise KeyError("an argument's own error")

    __int__ = __index__ = __bool__ = __eq__ = __lt__ = __gt__ = __len__ = __iter__ = __float__
    __hash__ = None

    def __repr__(self):
        return "Raises()"


class _Plain:
    def __repr__(self):
        return "Plain()"


NEVER = [
    lambda v: "x",
    lambda v: "1",
    lambda v: float("nan"),
    lambda v: [1.0],
    lambda v: {},
    lambda v: b"1",
    lambda v: complex(1, 2),
    lambda v: _Raises(),
    lambda v: _Plain(),
    lambda v: torch.ones(2, dtype=torch.float64),  # an fp32 tensor could hold the temperatures of two rows
    lambda v: torch.tensor(1.0, device="meta"),
    lambda v: np.ones(3),
    lambda v: int,
    lambda v: torch.tensor(float("nan")),
    lambda v: np.float32("nan"),
    lambda v: float("-inf"),
]
"""Values that are invalid for every number and flag."""
NUMBERS = [
    np.float64,
    np.float32,
    lambda v: torch.tensor(v, dtype=torch.float64),
    fractions.Fraction,
    decimal.Decimal,
    lambda v: torch.tensor([v], dtype=torch.float64),
    lambda v: np.array(v),
    lambda v: True,
    lambda v: torch.tensor(True),
]
"""Other forms of a float."""
WHOLE = [
    np.int64,
    np.int32,
    lambda v: torch.tensor(v),
    float,
    lambda v: torch.tensor([v]),
    fractions.Fraction,
    np.array,
    lambda v: True,
]
"""Other forms of an int."""
KINDS = {
    "positive": [-1.0, 0.0, -0.0, 0, -(10**400), False],
    "positive finite": [-1.0, 0.0, 0, float("inf"), 10**400, 1e-60, False],
    "finite": [float("inf"), 10**400],
    "int": [6.5, float("inf")],
    "positive int": [0, -1, 6.5, float("inf"), -(2**70), False],
    "flag": [],
    "dtype": ["float32", float, torch.int8, torch.float64, torch.complex64],
    "tp": [3, "tp", object(), True, torch.ones(1), TypeError],
    "device": ["nowhere", 3.5, [], "cuda:99", "meta"],
    "group": ["nobody"],
    "score": ["best", "", "Softmax", None, 1],
}
"""Invalid values by kind of argument."""


RELATED = {
    "ignore_index": ("target",),
    "vocab_size": ("target",),
    "num_chunks": ("cu_seqlens",),
    "state_v_first": ("dht",),
    "sequence_parallel": ("x",),
    "head_dim": ("table",),
    "rotary_dim": ("table",),
    "max_position": ("positions",),
    "groups": ("top_groups", "top_k"),
    "top_groups": ("top_k",),
}
"""Other arguments that an error about an argument's value may name."""


def _wrong_scalar(d: Draw, s: Source) -> None:
    """Replace a number or flag by an object of another kind, or by a value out of range."""
    scalars = {n: a for n, a in d.sample.given.items() if isinstance(a, Scalar) and n not in d.touched}
    if not scalars:
        return
    name = s.rng.choice(list(scalars))
    a = scalars[name]
    value = a.value
    draws = [lambda v, bad=bad: bad for bad in (*KINDS[a.kind], *a.bad)]
    if a.kind in ("tp", "device", "dtype", "group", "score"):
        put, must = s.rng.choice([*draws, lambda v: _Plain(), lambda v: 2])(value), REJECT
        if a.kind == "device" and put == "meta":
            must = EITHER
            d.twin[name] = put
    elif a.kind == "flag":
        put = s.rng.choice(
            (
                "x",
                "",
                None,
                0,
                1,
                2,
                np.bool_(value),
                torch.tensor(value),
                [],
                _Raises(),
                torch.ones(2),
                torch.tensor(True, device="meta"),
            )
        )
        must = (
            REJECT
            if isinstance(put, _Raises) or (isinstance(put, torch.Tensor) and (put.ndim or put.device.type == "meta"))
            else EITHER
        )
        if must == EITHER:
            d.twin[name] = bool(put)
    elif s.chance(0.7):
        choices = [*draws, *NEVER] + ([] if a.optional else [lambda v: None])
        put, must = s.rng.choice(choices)(value), REJECT
    else:
        must = EITHER
        form = s.rng.choice(WHOLE if a.kind.endswith("int") else NUMBERS)
        if a.kind == "positive" and s.chance(0.1):
            put = d.twin[name] = float("inf")
            if name == "soft_cap":
                d.twin[name] = None
        elif a.kind == "int" and s.chance(0.2):
            put = s.rng.choice((2**70, -(2**70)))
            d.twin[name] = -(10**9) if name == "ignore_index" else put
        elif value is None:
            return
        else:
            try:
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")
                    put = form(value)
                    d.twin[name] = (int if a.kind.endswith("int") else float)(put)
            except (OverflowError, ValueError):
                return
    d.args[name] = put
    d.tighten(must)
    d.touched.add(name)
    d.names |= {name, *RELATED.get(name, ())}
    d.what.append(f"{name}: {describe(put)}")


class Subclass(torch.Tensor):
    """A user's tensor subclass."""


class _Opaque(torch.Tensor):
    """A wrapper subclass without data."""

    @staticmethod
    def __new__(cls, t):
        return torch.Tensor._make_wrapper_subclass(cls, t.shape, dtype=t.dtype, device="cpu")

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        raise KeyError("a subclass's own error")


class _Duck:
    """An object with a tensor's attributes."""

    def __init__(self, t):
        self.dtype, self.shape, self.ndim, self.device, self.layout = t.dtype, t.shape, t.ndim, t.device, t.layout


def _fake(t):
    return FakeTensorMode().from_tensor(t)


def _freed(t):
    t = t.clone()
    t.untyped_storage().resize_(0)
    return t


def _functional(t):
    return torch._to_functional_tensor(t)


def _quantized(t):
    return torch.quantize_per_tensor(t.float(), 0.1, 0, torch.qint8)


def _jagged(t):
    return torch.nested.nested_tensor([t, t], layout=torch.jagged)


def _mkldnn(t):
    return t.float().to_mkldnn()


FORMS = {
    "None": lambda t: None,
    "a string": lambda t: "x",
    "a number": lambda t: 1.0,
    "a list": lambda t: t.tolist(),
    "numpy": lambda t: t.float().numpy(),
    "meta": lambda t: t.to("meta"),
    "nested": lambda t: torch.nested.nested_tensor([t]),
    "jagged": _jagged,
    "sparse": lambda t: t.to_sparse(),
    "csr": lambda t: t.to_sparse_csr(),
    "quantized": _quantized,
    "mkldnn": _mkldnn,
    "fake": _fake,
    "complex": lambda t: t.to(torch.complex64),
    "conjugated": lambda t: t.to(torch.complex64).conj(),
    "freed": _freed,
    "uninitialized": lambda t: torch.nn.UninitializedParameter(),
    "opaque": lambda t: _Opaque(t),
    "a module": lambda t: torch.nn.Linear(1, 1),
    "duck-typed tensor": _Duck,
    "an object that raises": lambda t: _Raises(),
}
"""Invalid replacements of a tensor, by name."""
ODD_FORMS = {"subclass": lambda t: t.as_subclass(Subclass), "functional": _functional}
"""Replacements that an op may accept or reject."""


def _wrong_tensor(d: Draw, s: Source) -> None:
    """Replace a tensor by another object."""
    names = [n for n, a in d.sample.given.items() if isinstance(a, Tensor) and n not in d.touched]
    if not names:
        return
    name = s.rng.choice(names)
    a, t = d.sample.given[name], d.args[name]
    if t is not None and type(t) is not torch.Tensor:
        return
    if t is None:
        t = torch.ones(2, 2)
        form = s.rng.choice(("a string", "a number", "a list", "numpy", "sparse", "a module", "an object that raises"))
    else:
        odd = s.chance(0.15)
        form = s.rng.choice(list(ODD_FORMS if odd else FORMS))
        if form == "freed" and not t.numel():
            return
    if (
        (form == "None" and a.optional)
        or (form == "uninitialized" and name == "out")
        or (name == "temperature" and form in ("a number", "a list", "numpy"))
        or (d.sample.schema and form in ("uninitialized", "opaque", "meta", "fake", "jagged"))
    ):  # handled by torch before the op runs
        return
    if t.is_inference() or t.is_neg():
        t = t.clone()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            d.args[name] = (FORMS | ODD_FORMS)[form](t)
    except (RuntimeError, TypeError, ValueError, IndexError):
        return  # torch does not support this form
    d.tighten(EITHER if form in ODD_FORMS else REJECT)
    d.touched.add(name)
    d.names.add(name)
    if form in ("meta", "fake"):
        d.names |= set(d.sample.given)
    d.what.append(f"{name}: {form}")


def _wrong_shape(d: Draw, s: Source) -> None:
    """Change the shape of a tensor, once per call: two changed shapes might fit each other."""
    if any(": shape " in what for what in d.what):
        return
    fit = {
        n: t
        for n, t in d.sample.tensors().items()
        if type(d.args[n]) is torch.Tensor and (t.bound or t.ndim) and n not in d.touched
    }
    if not fit:
        return
    name = s.rng.choice(list(fit))
    a, t = fit[name], d.args[name]
    if a.bound and s.chance(0.7) and max(a.bound) < t.ndim:
        dim = s.rng.choice(a.bound)
        n = s.rng.choice(
            [m for m in (0, 1, t.shape[dim] - 1, t.shape[dim] + 1, 2 * t.shape[dim]) if m not in (t.shape[dim], -1)]
        )
        shape = [n if i == dim else m for i, m in enumerate(t.shape)]
    elif a.ndim:
        fewer = [*t.shape[:-2], t.shape[-2:].numel()] if t.ndim > 1 else []
        shape = s.rng.choice(([*t.shape, 1], [1, *t.shape], fewer))
    else:
        return
    if t.dtype.is_floating_point:
        d.args[name] = s.floats(*shape, dtype=torch.float32, finite=True).to(t.dtype)
    else:
        d.args[name] = torch.zeros(shape, dtype=t.dtype, device="cpu")
    d.tighten(REJECT)
    d.touched.add(name)
    d.names |= {n for n, g in d.sample.given.items() if isinstance(g, Tensor)}
    d.names |= {"num_chunks", "top_k", "groups"}
    d.what.append(f"{name}: shape {tuple(shape)} instead of {tuple(t.shape)}")


STRANGE = [
    torch.float64,
    torch.float16,
    torch.bool,
    torch.uint8,
    torch.int8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.complex64,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.float32,
    torch.bfloat16,
    torch.uint32,
]


def _wrong_dtype(d: Draw, s: Source) -> None:
    """Cast a tensor, or all of its group, to an unsupported dtype."""
    fit = {n: t for n, t in d.sample.tensors().items() if type(d.args[n]) is torch.Tensor and n not in d.touched}
    if not fit:
        return
    name = s.rng.choice(list(fit))
    a = fit[name]
    if name == "temperature" and not a.value.ndim:  # 0-dim: any dtype is valid
        return
    group = [n for n, t in fit.items() if t.group == a.group]
    together = s.chance(0.5)
    dtypes = [t for t in STRANGE if t not in a.dtypes or (not together and len(group) > 1 and t != a.value.dtype)]
    dtype = s.rng.choice(dtypes)
    for n in group if together else (name,):
        t = d.args[n]
        d.args[n] = (t.clone() if t.is_inference() else t).detach().to(dtype)
        d.touched.add(n)
    d.tighten(REJECT)
    d.names |= {n for n, g in d.sample.given.items() if isinstance(g, Tensor)}
    d.what.append(f"{'all of ' if together else ''}{name}: {dtype}")


def _own_fault(d: Draw, s: Source) -> None:
    """Apply one of the op's own faults."""
    if d.sample.faults and not d.touched:
        what, put, names = s.rng.choice(d.sample.faults)
        put(d.args)
        d.tighten(REJECT)
        d.touched |= set(d.args)
        d.names |= set(names)
        d.what.append(what)


def _wrong_backward(d: Draw, s: Source) -> None:
    """Request a gradient of another kind, or a second derivative."""
    d.tighten(REJECT)
    d.names |= {d.sample.op, "backward", "double backward", "gradient"}
    # A weight's gradient that is added to main_grad is not returned and cannot be differentiated.
    returned = [n for n in d.leaves if n != "weight" or d.args.get("main_grad") is None]
    if s.chance(0.4) or not returned:
        d.gradient = s.rng.choice(("sparse", "fake"))
    else:
        plain = _depends_on_arguments(d.sample, d.leaves) and s.chance(0.5)
        d.twice = "plain gradients" if plain else "gradients that require one"
        if d.gradient == "one of them":  # the one may not depend on the leaves
            d.gradient = "plain"


def _transform(d: Draw, s: Source) -> None:
    """Call inside one of torch's function transforms."""
    floating = [
        n
        for n, t in d.sample.tensors().items()
        if type(d.args[n]) is torch.Tensor and not t.written and d.args[n].dtype.is_floating_point
    ]
    if not floating or d.sample.schema:  # the dispatcher handles custom ops in transforms
        return
    if "saved tensors are cloned" in d.forward:  # torch rejects transforms with saved-tensor hooks
        return
    d.wrapped = s.rng.choice(floating)
    d.wrap = s.rng.choice(("vmap", "func.grad", "fake mode", "forward AD"))
    if d.wrap == "forward AD" and 0 in d.args[d.wrapped].stride():  # torch makes no dual of overlapping memory
        d.wrapped = d.wrap = ""
        return
    if d.wrap == "forward AD" and {"inference mode", "dispatch mode"} <= set(d.forward):
        d.wrapped = d.wrap = ""  # an assertion of torch fails in both modes
        return
    lost = d.wrap == "forward AD" and d.sample.given[d.wrapped].leaf and "inference mode" not in d.forward
    d.tighten(REJECT if d.wrap == "fake mode" or lost else EITHER)
    call = getattr(d.sample.call, "__name__", "")
    d.names |= {d.wrap, d.sample.op, call, "rope_table", "torch.func", "vmap", "forward", *d.sample.given}
    d.leaves, d.twice = [], ""
    d.what.append(f"{d.wrap} of {d.wrapped}")


FAULTS = {_wrong_scalar: 10, _wrong_tensor: 10, _wrong_shape: 7, _wrong_dtype: 5, _own_fault: 8}
"""Weight of each generator."""
