"""The methods that a forward runs: each must be its class's own, or the patch's. No numerics."""

from __future__ import annotations

import functools
import operator
import sys
import types
from collections.abc import Iterable
from typing import Any

import torch

from alignkit.engines.patch import described, dotted
from alignkit.errors import UnsupportedError

_CALLING = frozenset(
    {
        "__call__",
        "_wrapped_call_impl",
        "_call_impl",
        "_compiled_call_impl",
        "_slow_forward",
        "__getattr__",
        "__getattribute__",
    }
)
"""Of torch.nn.Module's own names, those that a forward goes through; and all of the names with two underscores."""

_OVERRIDDEN = ("transformer_engine.", "megatron.core.extensions.")
"""Beginnings of the names of modules whose classes' methods an aligned class does not call."""

_UNUSED = frozenset({"_apply_output_gate", "compute_mtp_single_step", "_apply_expert_bias"})
"""Decorated with torch's, by Megatron itself, and only run for what is refused, or not at all."""


def of_megatron(function: types.FunctionType) -> bool:
    return function.__globals__["__name__"].startswith("megatron.core.")


class Methods:
    """The methods of the classes that aligned models consist of, and of the classes that those inherit from.

    A method is a class's own if it was defined in the body of that class, in that class's module; so one that was
    replaced before alignkit was imported is found too. `ours` are (class, name) -> what the patch has put there.
    """

    def __init__(self, classes: Iterable[type], ours: dict[tuple[type, str], Any]):
        self.ours = ours
        self._checked: dict[type, tuple] = {}
        self._names: dict[type, frozenset[str]] = {}
        self._watch(classes)

    def _watch(self, classes: Iterable[type]) -> bool:
        """Whether there is a class among them that was not watched."""
        found = {base for cls in classes for base in cls.__mro__ if issubclass(base, torch.nn.Module)}
        new = found.difference(self._checked)
        self._checked.update(dict.fromkeys(new, ()))
        return bool(new)

    def watch(self, classes: Iterable[type]) -> None:
        """`check`s these too, from now on."""
        if self._watch(classes):
            self.check()

    def check(self) -> None:
        """UnsupportedError naming the first method of a class that is not its own."""
        for cls, checked in self._checked.items():
            values = tuple(vars(cls).values())
            if len(values) != len(checked) or not all(map(operator.is_, values, checked)):
                for name, value in vars(cls).items():
                    if _runs(cls, name) and self.ours.get((cls, name), self) is not value:
                        _check_own(cls, name, value)
                self._checked[cls] = values

    def shadowed(self, module: torch.nn.Module, cls: type) -> str | None:
        """A method of the class `cls`, which the module has or gets, that one of its attributes hides, if any."""
        own = module.__dict__
        names = self._names.get(cls)
        if names is None:
            names = self._names[cls] = frozenset(
                name
                for base in cls.__mro__
                for name, value in vars(base).items()
                if _runs(base, name)
                and (callable(value) or isinstance(value, classmethod) or name == "_compiled_call_impl")
            )
        return None if names.isdisjoint(own) else sorted(names.intersection(own))[0]


def _runs(cls: type, name: str) -> bool:
    """Whether a forward may run the attribute `name` of `cls`."""
    if name in _CALLING:
        return True
    if cls.__module__.startswith(_OVERRIDDEN):
        return False
    return not (
        cls is torch.nn.Module or name.startswith("__") or name in _UNUSED or "state_dict" in name or "repr" in name
    )


_DATA = (type, types.MemberDescriptorType, types.GetSetDescriptorType)


def _check_own(cls: type, name: str, value: Any) -> None:
    """UnsupportedError unless `value` is data, or a function that was defined in the body of `cls`."""
    if isinstance(value, property):
        value = value.fget
    elif isinstance(value, (staticmethod, classmethod)):
        value = value.__func__
    if isinstance(value, _DATA) or not (callable(value) or hasattr(value, "__get__")):
        return
    function = value
    while (inner := getattr(function, "__wrapped__", None)) is not None and _decorates(function):
        function = inner
    if not (
        isinstance(function, types.FunctionType)
        and function.__globals__ is vars(sys.modules[cls.__module__])
        and function.__code__.co_qualname.startswith(f"{cls.__qualname__}.")
    ):
        raise UnsupportedError(f"{dotted(cls)}.{name}: has been replaced, by {described(value)}")


def _decorates(function: Any) -> bool:
    """Whether `function` is what a decorator of Megatron's or ``functools.lru_cache`` made. Not torch.compile: its code
    rounds elsewhere."""
    if isinstance(function, types.FunctionType):
        return of_megatron(function)
    return type(function) is functools._lru_cache_wrapper
