"""Check that the methods a forward runs are the class's original ones, or the patch's. No numerics.

Each exemption (`_OVERRIDDEN_PREFIXES`, `_UNUSED`, `_may_run`) turns the check off for names. Add one only if no
aligned forward runs it.
"""

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

_CALL_PATH = frozenset(
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
"""The only names checked on torch.nn.Module itself, and the only dunder names checked on any class."""

_OVERRIDDEN_PREFIXES = ("transformer_engine.", "megatron.core.extensions.")
"""Prefixes of modules whose classes' methods never run, because the aligned classes override them."""

_UNUSED = frozenset({"_apply_output_gate", "compute_mtp_single_step", "_apply_expert_bias"})
"""Methods that Megatron itself wraps with torch decorators, and that aligned models never run."""


def is_megatron_function(function: types.FunctionType) -> bool:
    """Return whether a function is defined in megatron.core."""
    return function.__globals__["__name__"].startswith("megatron.core.")


class Methods:
    """Checker for the methods of the classes in aligned models, base classes included.

    A method is original if it is defined in its class's body, in the class's module. This also finds methods that were
    replaced before alignkit was imported. replaced: (class, name) -> the patch's replacement.
    """

    def __init__(self, classes: Iterable[type], replaced: dict[tuple[type, str], Any]):
        self.replaced = replaced
        self._checked: dict[type, tuple] = {}
        self._names: dict[type, frozenset[str]] = {}
        self._watch(classes)

    def _watch(self, classes: Iterable[type]) -> bool:
        """Add classes; return whether one of them is new."""
        found = {base for cls in classes for base in cls.__mro__ if issubclass(base, torch.nn.Module)}
        new = found.difference(self._checked)
        self._checked.update(dict.fromkeys(new, ()))
        return bool(new)

    def watch(self, classes: Iterable[type]) -> None:
        """Add classes to those that `check` covers, and check at once if one is new."""
        if self._watch(classes):
            self.check()

    def check(self) -> None:
        """Raise UnsupportedError naming the first method of a class that has been replaced."""
        for cls, checked in self._checked.items():
            values = tuple(vars(cls).values())
            if len(values) != len(checked) or not all(map(operator.is_, values, checked)):
                for name, value in vars(cls).items():
                    # `self` is a default that equals no value.
                    if _may_run(cls, name) and self.replaced.get((cls, name), self) is not value:
                        _check_original(cls, name, value)
                self._checked[cls] = values

    def overridden_method(self, module: torch.nn.Module, cls: type) -> str | None:
        """Return the name of a method of `cls` that an instance attribute of `module` overrides, or None."""
        own = module.__dict__
        names = self._names.get(cls)
        if names is None:
            names = self._names[cls] = frozenset(
                name
                for base in cls.__mro__
                for name, value in vars(base).items()
                if _may_run(base, name)
                and (callable(value) or isinstance(value, classmethod) or name == "_compiled_call_impl")
            )
        return None if names.isdisjoint(own) else sorted(names.intersection(own))[0]


def _may_run(cls: type, name: str) -> bool:
    """Return whether a forward may run the attribute `name` of `cls`."""
    if name in _CALL_PATH:
        return True
    if cls.__module__.startswith(_OVERRIDDEN_PREFIXES):
        return False
    return not (
        cls is torch.nn.Module or name.startswith("__") or name in _UNUSED or "state_dict" in name or "repr" in name
    )


_DATA = (type, types.MemberDescriptorType, types.GetSetDescriptorType)
"""Types of class attributes that are not checked: nested classes, and descriptors of slots and of C attributes."""


def _check_original(cls: type, name: str, value: Any) -> None:
    """Raise UnsupportedError unless `value` is data or a function that is defined in the body of `cls`."""
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
        raise UnsupportedError(
            f"{dotted(cls)}.{name}: must be the method that the class defines, got {described(value)}. Undo that "
            "replacement"
        )


def _decorates(function: Any) -> bool:
    """Return whether `function` is a wrapper by a Megatron decorator or ``functools.lru_cache``.

    torch.compile is not accepted, because compiled code rounds differently.
    """
    if isinstance(function, types.FunctionType):
        return is_megatron_function(function)
    return type(function) is functools._lru_cache_wrapper
