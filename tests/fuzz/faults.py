"""Random forward passes of a GPTModel on two tensor-parallel ranks, each with a fault on one rank.

pair.py runs them with real Megatron-core. Any change to the random choices changes the faults that SEED:INDEX names.
Keys of FAULTS are stored in benchmarks/results/cpu/fuzz.jsonl.
"""

from __future__ import annotations

import contextlib
import os
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

from .draw import ANSWER, EITHER, NEVER, NUMBERS, REJECT, Subclass, _jagged, _Opaque, _Raises, describe

VOCAB, IGNORE = 300, -100
"""Vocabulary size and ignored label; Megatron pads 300 to 512 at TP 2, so rank 1 has padding."""
MODELS = {"qwen3": ("qwen3", torch.bfloat16, False), "llama": ("llama", torch.float32, True)}
"""Architecture, dtype, and whether the output layer shares the embedding's weight."""
SIZES = dict(hidden=64, layers=2, heads=4, kv_heads=2, head_dim=16, intermediate=96, vocab=VOCAB)
KINDS = ("logprobs", "logprobs", "packed", "loss", "logits")
"""Kinds of calls: `logprobs` of padded or packed rows, the model's loss, or logits with Megatron's cross-entropy."""


@dataclass
class Call:
    """Arguments of one rank's forward, as CPU tensors."""

    kind: str
    model: str
    sequence_parallel: bool
    backward: bool
    tokens: Any
    positions: Any
    mask: Any
    labels: Any
    starts: Any = None
    temperature: Any = 1.0
    return_entropy: Any = False
    ignore_index: Any = IGNORE
    packed: Any = None
    """Value of packed_seq_params; if None, it follows from `starts`."""
    label_smoothing: float = 0.0
    logits: Callable = staticmethod(lambda t: t)  # noqa: RUF009 - a plain function
    around: list[Callable] = field(default_factory=list)
    """Context managers to enter around the forward; each takes the model."""


@dataclass
class Fault:
    """A call and its change on one rank.

    Attributes:
        rank: Rank on which `change` modifies the call.
        kind: Key of FAULTS, or "control".
        what: Description of the change.
        must: ANSWER, EITHER or REJECT.
        rebuild: Whether the change leaves the models unusable.
    """

    seed: int
    index: int
    call: Call
    rank: int = 0
    kind: str = "control"
    what: str = ""
    must: str = REJECT
    change: Callable[[Call], None] | None = None
    rebuild: bool = False

    def text(self) -> str:
        """Return the fault as one line."""
        c = self.call
        return (
            f"{c.kind} of {c.model}{', sequence parallel' if c.sequence_parallel else ''}"
            f"{', with backward' if c.backward else ''}, tokens {describe(c.tokens)}, temperature "
            f"{describe(c.temperature)}; rank {self.rank}: {self.what or 'nothing'}; must {self.must}"
        )


def draw(seed: int, index: int) -> Fault:
    """Return random fault `index` of `seed`; one in ten is a control without a fault."""
    rng = random.Random(f"ranks {seed}:{index}")
    call = _call(rng)
    fault = Fault(seed, index, call, rng.randrange(2))
    if rng.random() < 0.1:
        fault.must = ANSWER
        return fault
    while fault.change is None:  # not every fault fits every call
        fault.kind = rng.choices(list(FAULTS), [weight for _, weight in FAULTS.values()])[0]
        FAULTS[fault.kind][0](fault, rng)
    return fault


def _call(rng: random.Random) -> Call:
    kind, model, parallel = rng.choice(KINDS), rng.choice(list(MODELS)), rng.random() < 0.4
    generator = torch.Generator().manual_seed(rng.getrandbits(62))
    rows = [2 * rng.randint(1, 6) for _ in range(rng.randint(1, 3))]
    b, s = (1, sum(rows)) if kind == "packed" else (len(rows), max(rows))
    tokens = torch.randint(0, VOCAB, (b, s), generator=generator)
    labels = torch.randint(0, VOCAB, (b, s), generator=generator)
    labels = torch.where(torch.rand(b, s, generator=generator) < 0.2, IGNORE, labels)
    labels[0, 0] = rng.randrange(VOCAB)  # at least one label counts
    positions = torch.arange(s).expand(b, s).contiguous()
    call = Call(kind, model, parallel, rng.random() < 0.3, tokens, positions, None, labels)
    if kind == "packed":
        call.starts = torch.tensor([0, *(sum(rows[: i + 1]) for i in range(len(rows)))], dtype=torch.int32)
    elif rng.random() < 0.3:
        call.mask = torch.ones(1, 1, s, s, dtype=torch.bool).triu(1)
    if kind in ("logprobs", "packed"):
        call.temperature = rng.choice((1.0, rng.uniform(0.2, 2.0), torch.rand(b, s, generator=generator) + 0.3))
        call.return_entropy = rng.random() < 0.5
    return call


def _arguments(call: Call) -> set[str]:
    """Return the fields that `call.kind` uses."""
    return {"tokens", "positions", "labels"} | {
        "logprobs": {"mask", "temperature", "return_entropy", "ignore_index"},
        "packed": {"temperature", "return_entropy", "ignore_index", "packed"},
    }.get(call.kind, {"mask"})


def _set_arguments(fault: Fault, what: str, must: str, **values: Any) -> None:
    def change(call: Call) -> None:
        for name, value in values.items():
            setattr(call, name, value)

    fault.what, fault.must, fault.change = what, must, change


def _wrong_kind(fault: Fault, rng: random.Random) -> None:
    """Replace an argument by an object of another kind."""
    call = fault.call
    name = rng.choice(sorted(_arguments(call) - {"positions"}))
    old = getattr(call, name)
    things = [lambda v: "x", lambda v: [1.0], lambda v: _Raises(), lambda v: 2.5, lambda v: {}, lambda v: (1, 2)]
    if name in ("tokens", "labels"):
        things += [
            lambda t: None,
            lambda t: t.tolist(),
            lambda t: t.float(),
            lambda t: t.int(),
            lambda t: t.to("meta"),
            lambda t: t.to_sparse(),
            lambda t: torch.nested.nested_tensor(list(t)),
            _jagged,
            lambda t: t.numpy(),
            lambda t: _Opaque(t),
            lambda t: t.bool(),
            lambda t: t.to(torch.complex64),
        ]
    elif name == "temperature":
        things = [
            *NEVER,
            lambda v: None,
            lambda v: 0.0,
            lambda v: -1.0,
            lambda v: float("inf"),
            lambda v: 10**400,
            lambda v: torch.ones(call.labels.shape, dtype=torch.float64),
            lambda v: torch.ones(call.labels.shape, dtype=torch.int64),
            lambda v: torch.full(call.labels.shape, 0.0),
            lambda v: torch.full(call.labels.shape, float("nan")),
        ]
    elif name == "ignore_index":
        things += [lambda v: None, lambda v: float("nan"), lambda v: 1 + 2j, lambda v: 2**70]
    elif name == "return_entropy":
        things = [lambda v: _Raises(), lambda v: torch.ones(2), lambda v: not v]
    elif name == "packed":
        things = [
            lambda v: "x",
            lambda v: 3,
            lambda v: [0, 4],
            lambda v: _Raises(),
            lambda v: torch.tensor([0, 4]),
            lambda v: {"cu_seqlens_q": v},
        ]
    elif name == "mask":
        s = call.tokens.shape[1]
        things += [
            lambda v: torch.zeros(1, 1, s, s, dtype=torch.bool),
            lambda v: torch.ones(1, 1, s + 1, s).triu(1).bool(),
            lambda v: torch.ones(1, 1, s, s).triu(1),
            lambda v: torch.ones(s, s).bool().triu(1),
        ]
    value = rng.choice(things)(old)
    must = REJECT
    if name == "mask" and isinstance(value, torch.Tensor) and value.shape[-2:] == (call.tokens.shape[1],) * 2:
        must = EITHER if bool((value.bool() == torch.ones_like(value).bool().triu(1)).all()) else REJECT
    _set_arguments(fault, f"{name}: {describe(value)}", must, **{name: value})


def _other_value(fault: Fault, rng: random.Random) -> None:
    """Change the values of an argument."""
    call = fault.call
    name = rng.choice(sorted(_arguments(call) - {"mask", "positions", "return_entropy"}))
    if name == "packed":
        starts, n = call.starts.tolist(), call.tokens.shape[1]
        cut = rng.randrange(1, n)
        other = rng.choice(
            ([0, n], sorted({0, cut, n}), [*starts[:-1], n - 1], [1, *starts[1:]], [0, n, 0, n], [0.0, n])
        )
        if other != starts:
            _set_arguments(
                fault,
                f"cu_seqlens {other} instead of {starts}",
                REJECT,
                starts=torch.tensor(other, dtype=torch.int32 if isinstance(other[0], int) else torch.float32),
            )
        return
    if name == "temperature":
        t = call.temperature
        other = t.clone() if isinstance(t, torch.Tensor) else t * rng.choice((0.5, 1.001, 2.0, 1 + 2e-7))
        if isinstance(t, torch.Tensor):
            position = tuple(rng.randrange(n) for n in t.shape)
            other[position] *= rng.choice((0.5, 1.01, 2.0))
        elif rng.random() < 0.3:
            other = torch.full(call.labels.shape, 0.9)
        _set_arguments(fault, f"temperature: other values, {describe(other)}", REJECT, temperature=other)
        return
    if name == "ignore_index":
        _set_arguments(fault, "ignore_index: another", REJECT, ignore_index=rng.choice((-1, VOCAB, 5, -101)))
        return
    t = getattr(call, name).clone()
    position = tuple(rng.randrange(n) for n in t.shape)
    if name == "labels" and rng.random() < 0.4:
        new = IGNORE if t[position] != IGNORE else rng.randrange(VOCAB)
    else:
        new = rng.choice((rng.randrange(VOCAB), rng.randrange(VOCAB), VOCAB, VOCAB + 3, -1, 2**40, -(2**60)))
    if t[position] == new:
        return
    what = f"{name}: {new} instead of {int(t[position])} at {position}"
    t[position] = new
    _set_arguments(fault, what, REJECT, **{name: t})


def _other_shape(fault: Fault, rng: random.Random) -> None:
    """Change the shape of the tokens, the labels or both."""
    call = fault.call
    names = rng.choice((("tokens",), ("labels",), ("tokens", "labels", "positions")))
    old = call.tokens
    reshape = rng.choice(
        (
            lambda t: t[:, :-2],
            lambda t: t[:-1],
            lambda t: torch.cat([t, t]),
            lambda t: torch.cat([t, t], 1),
            lambda t: t[None],
            lambda t: t[0],
            lambda t: t[:0],
            lambda t: t[:, :0],
            lambda t: t[:, :-1],
        )
    )
    values = {name: reshape(getattr(call, name)) for name in names}
    if values[names[0]].shape != old.shape:
        if "positions" in names:
            values["mask"] = None
        _set_arguments(fault, f"{', '.join(names)}: shape {tuple(values[names[0]].shape)}", REJECT, **values)


def _equivalent(fault: Fault, rng: random.Random) -> None:
    """Pass an equivalent argument in another form: the result must not change, but some forms may be rejected."""
    call, name = fault.call, rng.choice(("tokens", "labels", "positions", "temperature", "mask", "state", "train"))
    if name in ("tokens", "labels"):
        t = getattr(call, name)
        form, must = rng.choice(
            (
                (lambda t: t.t().contiguous().t(), ANSWER),
                (lambda t: torch.stack([t, t], 2)[..., 0], ANSWER),
                (lambda t: t.as_subclass(Subclass), EITHER),
                (torch.nn.Parameter, EITHER),
            )
        )
        with contextlib.suppress(RuntimeError):
            _set_arguments(fault, f"{name}: the same as {describe(form(t))}", must, **{name: form(t)})
    elif name == "positions":
        other = rng.choice((None, call.positions + 1, "x"))
        _set_arguments(fault, f"positions, which no op reads: {describe(other)}", EITHER, positions=other)
    elif name == "temperature" and name in _arguments(call) and not isinstance(call.temperature, torch.Tensor):
        other = rng.choice(NUMBERS)(call.temperature)
        if float(other) == call.temperature:
            _set_arguments(fault, f"temperature: the same as {describe(other)}", EITHER, temperature=other)
    elif name == "mask" and call.kind != "packed":
        s = call.tokens.shape[1]
        other = torch.ones(1, 1, s, s, dtype=torch.bool).triu(1) if call.mask is None else None
        _set_arguments(fault, f"mask: the same as {describe(other)}", EITHER, mask=other)
    elif name == "state":
        _add_context(fault, rng.choice((_autocast, _no_grad, _default_dtype, _strict, _threads)), EITHER)
    elif name == "train":
        _add_context(fault, _train, ANSWER)


@contextlib.contextmanager
def _autocast(model) -> Iterator[None]:
    """Enable autocast."""
    with torch.autocast(next(model.parameters()).device.type, torch.bfloat16):
        yield


@contextlib.contextmanager
def _no_grad(model) -> Iterator[None]:
    """Disable gradients."""
    with torch.no_grad():
        yield


@contextlib.contextmanager
def _default_dtype(model) -> Iterator[None]:
    """Set the default dtype to float64."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


@contextlib.contextmanager
def _strict(model) -> Iterator[None]:
    """Set ALIGNKIT_STRICT=1."""
    os.environ["ALIGNKIT_STRICT"] = "1"
    try:
        yield
    finally:
        del os.environ["ALIGNKIT_STRICT"]


@contextlib.contextmanager
def _threads(model) -> Iterator[None]:
    """Use 2 threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@contextlib.contextmanager
def _train(model) -> Iterator[None]:
    """Enable training mode."""
    model.train()
    try:
        yield
    finally:
        model.eval()


@contextlib.contextmanager
def _attribute(owner, name: str, value) -> Iterator[None]:
    before = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)


def _add_context(fault: Fault, manager: Callable, must: str, what: str = "") -> None:
    fault.what, fault.must = what or manager.__doc__.removesuffix("."), must
    fault.change = lambda call: call.around.append(manager)


def _other_setting(fault: Fault, rng: random.Random) -> None:
    """Change a setting of the model."""
    norms = {
        "final_layernorm": lambda m: m.decoder.final_layernorm,
        "input_layernorm": lambda m: m.decoder.layers[1].input_layernorm,
        "pre_mlp_layernorm": lambda m: m.decoder.layers[0].pre_mlp_layernorm,
    }
    name, factor = rng.choice(list(norms)), rng.choice((2.0, 1.01, 1e3))
    what = rng.choice(
        ("eps", "eps", "eps", "wrong eps", "rotary base", "MoE", "padded vocab", "true vocab", "config eps")
    )
    if what == "eps":
        _add_context(
            fault,
            lambda m: _attribute(norms[name](m), "eps", norms[name](m).eps * factor),
            REJECT,
            f"eps of {name} times {factor}",
        )
    elif what == "wrong eps":
        eps = rng.choice((0.0, -1.0, None, "x", float("nan")))
        _add_context(fault, lambda m: _attribute(norms[name](m), "eps", eps), REJECT, f"eps of {name}: {eps!r}")
    elif what == "rotary base":
        _add_context(fault, lambda m: _attribute(m, "rotary_base", 5e5), REJECT, "rotary_base: 500000")
    elif what == "MoE":
        _add_context(fault, lambda m: _attribute(m.config, "num_moe_experts", 2), REJECT, "num_moe_experts: 2")
    elif what == "padded vocab":
        _add_context(
            fault, lambda m: _attribute(m, "vocab_size", m.vocab_size + 128), REJECT, "padded vocab_size: another"
        )
    elif what == "true vocab":
        _add_context(fault, lambda m: _vocab(VOCAB - 1), REJECT, f"patched with vocab_size {VOCAB - 1}")
    else:
        _add_context(
            fault, lambda m: _attribute(m.config, "layernorm_epsilon", 0.1), EITHER, "config.layernorm_epsilon: 0.1"
        )


@contextlib.contextmanager
def _vocab(size: int) -> Iterator[None]:
    from alignkit.megatron import patch

    before = patch.active()
    before.undo()
    try:
        with patch.patch_megatron(size):
            yield
    finally:
        patch.patch_megatron(before.vocab_size)


def _other_dtype(fault: Fault, rng: random.Random) -> None:
    """Cast the model, or a part of it, to another dtype."""
    now = MODELS[fault.call.model][1]
    dtype = rng.choice([t for t in (torch.float32, torch.bfloat16, torch.float16, torch.float64) if t != now])
    part = rng.choice(("model", "model", "norm", "output layer"))

    @contextlib.contextmanager
    def cast(model):
        {"model": model, "norm": model.decoder.final_layernorm, "output layer": model.output_layer}[part].to(dtype)
        yield

    tied = part == "output layer" and MODELS[fault.call.model][2]
    if not tied:
        _add_context(fault, cast, REJECT, f"{part}.to({dtype})")
        fault.rebuild = True


def _cross_entropy(fault: Fault, rng: random.Random) -> None:
    """Change the arguments of Megatron's cross-entropy."""
    if fault.call.kind == "logits":
        what, values = rng.choice(
            (
                ("label_smoothing: 0.1", {"label_smoothing": 0.1}),
                ("logits: bfloat16", {"logits": lambda t: t.bfloat16()}),
                ("logits: float64", {"logits": lambda t: t.double()}),
                ("logits: cut", {"logits": lambda t: t[:-1]}),
                ("logits: None", {"logits": lambda t: None}),
                ("logits: a string", {"logits": lambda t: "x"}),
                ("logits: narrow", {"logits": lambda t: t[..., :-1]}),
            )
        )
        _set_arguments(fault, what, REJECT, **values)


class _Context:
    """An `output_processor` context whose attributes raise."""

    @property
    def temperature(self):
        raise KeyError("an argument's own error")

    return_entropy = ignore_index = temperature


def _own_exception(fault: Fault, rng: random.Random) -> None:
    """Raise an exception in an argument's method, or in a forward pre-hook of the model."""
    if rng.random() < 0.7:
        name = rng.choice(sorted(_arguments(fault.call) - {"positions"}))
        value = rng.choice((_Raises(), _Opaque(fault.call.tokens), _Context()))
        _set_arguments(fault, f"{name}: {describe(value)}", REJECT, **{name: value})
        return

    @contextlib.contextmanager
    def hook(model):
        def reject(*_):
            raise KeyError("a hook's own error")

        handle = model.register_forward_pre_hook(reject)
        try:
            yield
        finally:
            handle.remove()

    _add_context(fault, hook, REJECT, "a forward hook that raises")


def _other_call(fault: Fault, rng: random.Random) -> None:
    """Make another call: on the other model, or of another kind."""
    call = fault.call
    if rng.random() < 0.5:
        other = next(name for name in MODELS if name != call.model)
        _set_arguments(fault, f"model: {other}", REJECT, model=other)
    elif call.kind in ("logprobs", "loss") and not isinstance(call.temperature, torch.Tensor):
        # The loss is the negated result of `logprobs` at temperature 1.
        other = "loss" if call.kind == "logprobs" else "logprobs"
        _set_arguments(
            fault,
            f"{other} instead of {call.kind}",
            EITHER if call.temperature == 1.0 and not call.return_entropy else REJECT,
            kind=other,
        )


FAULTS: dict[str, tuple[Callable, int]] = {
    "other values": (_other_value, 30),
    "another kind of thing": (_wrong_kind, 22),
    "another shape": (_other_shape, 8),
    "the same in another form": (_equivalent, 12),
    "a setting of the model": (_other_setting, 12),
    "the model's type": (_other_dtype, 4),
    "the cross-entropy by itself": (_cross_entropy, 30),
    "an exception of its own": (_own_exception, 6),
    "another call": (_other_call, 3),
}
"""Generator and weight of each kind of fault."""
