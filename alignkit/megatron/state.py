"""State of the patched models: one record for each model, found from the model or from any of its modules. No numerics.

A model owns its record, as the attribute `STATE`. The registry refers to records and modules weakly, so it keeps no
model alive. Copies of a model begin with a new record, which has only the vocabulary size of `set_vocab_size`.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from alignkit.engines.guards import Snapshot
from alignkit.errors import UnsupportedError

if TYPE_CHECKING:
    from .head import LogProbsRequest
    from .modules import OutputLayer, Rotations

STATE = "_alignkit"
"""Attribute of a model that stores its record."""


@dataclass(eq=False)
class State:
    """Record of one model.

    Attributes:
        own_vocab_size: The vocabulary size that `set_vocab_size` set, or None.
        model: Weak reference to the model; None for a copy that no function has looked up.
        rotations: Parameters of the table that the model's rotary embedding returns.
        frequencies: Frequencies of the rotary embedding with their versions, and the base and scaling found in them.
        output_layer: The aligned output layer, once a forward has begun.
        vocab_size: Vocabulary size of that layer without padding, which Megatron does not store; 0 before a forward.
        keep_logits: Option of the patch.
        stock_head: Reason why the output layer stays stock, or None.
        snapshot: The model as of the last inspection for a forward.
        facts: Facts of that inspection that ranks must agree on.
        changes: Changes by forward hooks since the last `check_hooks`.
        checked: The collective check of the current forward has started.
        packed_seq_params: (packed_seq_params,) of a forward whose checks have passed, until the decoder runs.
        request: Options of `logprobs`, on versions whose forward accepts no output processor.
    """

    own_vocab_size: int | None = None
    model: weakref.ref[Any] | None = None
    rotations: Rotations | None = None
    frequencies: tuple[list[tuple[torch.Tensor, int]], float, Any] | None = None
    output_layer: OutputLayer | None = None
    vocab_size: int = 0
    keep_logits: bool = False
    stock_head: str | None = None
    snapshot: Snapshot | None = None
    facts: dict[str, str] = field(default_factory=dict)
    changes: list[str] = field(default_factory=list)
    checked: bool = False
    packed_seq_params: tuple[Any] | None = None
    request: LogProbsRequest | None = None

    def __reduce__(self):
        return State, (self.own_vocab_size,)

    def check_hooks(self) -> None:
        """Raise UnsupportedError if hooks have changed an input or output of the model's modules since the last call.

        Hooks may only observe: `hooks.WatchedHook` discards and records their changes.
        """
        if self.changes:
            changes = "; ".join(dict.fromkeys(self.changes))
            self.changes.clear()
            raise UnsupportedError(
                f"{changes}. Forward hooks must neither change nor replace an input or output. Return None, or remove "
                "the hook"
            )


_owners: weakref.WeakKeyDictionary[torch.nn.Module, tuple[weakref.ref[State], ...]] = weakref.WeakKeyDictionary()
"""Module that may have an aligned class -> records of the models that contain the module, the last to run last."""

records: weakref.WeakSet[State] = weakref.WeakSet()
"""Records of the models that the active patch has patched."""


def of_model(model: torch.nn.Module) -> State:
    """Return the record of `model`, a new one if it has none."""
    state = vars(model).get(STATE)
    if state is None or state.model is None or state.model() is not model:  # a shallow copy shares the attribute
        state = State(state and state.own_vocab_size, weakref.ref(model))
        vars(model)[STATE] = state
    return state


def register(modules: Iterable[torch.nn.Module], state: State | None = None) -> None:
    """Enter modules in the registry, with the record of their model if it is known."""
    if state is not None:
        records.add(state)
    for module in modules:
        others = (ref for ref in _owners.get(module, ()) if ref() not in (None, state))
        _owners[module] = (*others, *(() if state is None else (weakref.ref(state),)))


def claim(state: State, modules: Iterable[torch.nn.Module]) -> None:
    """Make `of` return this record for modules that several models share."""
    register((module for module in modules if of(module) is not state), state)


def device_of(model) -> torch.device:
    """Return a model's device: the current CUDA device for a pipeline stage without parameters."""
    first = next(model.parameters(), None)
    return torch.device(torch.cuda.current_device()) if first is None else first.device


def of(module: torch.nn.Module) -> State | None:
    """Return the record of the model that contains `module`: of several, the last whose forward has begun."""
    return next(iter(all_of(module)), None)


def all_of(module: torch.nn.Module) -> list[State]:
    """Return the records of all models that contain `module`."""
    return [state for ref in reversed(_owners.get(module, ())) if (state := ref()) is not None]


def registered() -> list[torch.nn.Module]:
    """Return all registered modules: those of patched models, and of their copies."""
    return list(_owners)


def clear() -> None:
    """Forget all modules and records, but not the vocabulary sizes of `set_vocab_size`."""
    for state in list(records):
        if state.model is not None and (model := state.model()) is not None:
            vars(model)[STATE] = State(state.own_vocab_size)
            if state.own_vocab_size is None:
                del vars(model)[STATE]
    records.clear()
    _owners.clear()
