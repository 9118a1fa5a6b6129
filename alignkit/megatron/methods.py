"""Rules for the methods that a forward runs: they must be the class's original ones, or the patch's. No numerics.

Each exemption (`_OVERRIDDEN_PREFIXES`, `_UNUSED`, `_may_run`) turns the check off for names. Add one only if no
aligned forward runs it.
"""

from __future__ import annotations

import functools
import sys
import types
from collections.abc import Iterable
from typing import Any

import torch

from alignkit.engines.guards import Methods
from alignkit.engines.patch import described, dotted

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


def runs(cls: type) -> dict[str, Any]:
    """Return the attributes in the body of `cls` that a forward may run."""
    return {name: value for name, value in vars(cls).items() if _may_run(cls, name)}


@functools.cache
def names(cls: type) -> frozenset[str]:
    """Return the names of the methods of `cls`, base classes included, that an attribute of a module would hide."""
    return frozenset(
        name
        for base in cls.__mro__
        for name, value in runs(base).items()
        if callable(value) or isinstance(value, classmethod) or name == "_compiled_call_impl"
    )


def classes(found: Iterable[type]) -> list[type]:
    """Return the classes whose methods modules of the classes `found` run."""
    return [base for cls in found for base in cls.__mro__ if issubclass(base, torch.nn.Module)]


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


def fault(cls: type, name: str, value: Any) -> str | None:
    """Return the reason why `value` is neither data nor a function that is defined in the body of `cls`, or None.

    This also finds methods that were replaced before alignkit was imported.
    """
    if value is Methods.MISSING:
        return f"{dotted(cls)}.{name}: must be the method that the class defines, but was deleted. Undo the deletion"
    if isinstance(value, property):
        value = value.fget
    elif isinstance(value, (staticmethod, classmethod)):
        value = value.__func__
    if isinstance(value, _DATA) or not (callable(value) or hasattr(value, "__get__")):
        return None
    function = value
    while (inner := getattr(function, "__wrapped__", None)) is not None and _decorates(function):
        function = inner
    if (
        isinstance(function, types.FunctionType)
        and function.__globals__ is vars(sys.modules[cls.__module__])
        and function.__code__.co_qualname.startswith(f"{cls.__qualname__}.")
    ):
        return None
    return (
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
