"""Guards of both adapters: they notice that modules, methods or hooks have changed since the last full inspection.

An adapter inspects everything when it builds a model, after weight updates, and in every step under
``ALIGNKIT_STRICT=1``. In other steps it asks the guards here, and inspects again only what has changed. No numerics.
"""

from __future__ import annotations

import functools
import itertools
import operator
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch.utils.hooks import RemovableHandle


def hooks_registered() -> int:
    """Return the number of hooks that torch has registered in this process: it grows with each one, on any module."""
    return RemovableHandle.next_id


def shadowing(part: object, methods: frozenset[str]) -> list[str]:
    """Return the names in `methods` that are attributes of the object itself, which hide the methods of its class."""
    own = vars(part)
    return [] if methods.isdisjoint(own) else sorted(methods.intersection(own))


class Methods:
    """Guard of the methods of classes.

    runs: returns the attributes in a class's body, by name, that the engine may run. fault: returns the reason why an
    attribute is not the engine's or alignkit's, or None. It gets the class, the name, the value (`MISSING` if it was
    removed) and the value when the class was first seen (`MISSING` if it was added).
    """

    MISSING = object()

    def __init__(
        self, runs: Callable[[type], dict[str, Any]], fault: Callable[[type, str, Any, Any], str | None]
    ) -> None:
        self._runs, self._fault = runs, fault
        self._first: dict[type, dict[str, Any]] = {}
        self._passed: dict[type, tuple] = {}

    def watch(self, classes: Iterable[type]) -> bool:
        """Add classes to those that `faults` covers; return whether one of them is new."""
        new = [cls for cls in dict.fromkeys(classes) if cls not in self._first]
        self._first.update((cls, self._runs(cls)) for cls in new)
        return bool(new)

    def changed(self, cls: type) -> bool:
        """Return whether the methods of a class differ from those that passed the last check; takes a microsecond."""
        if cls not in self._passed:
            return True
        attributes, count, get, values = self._passed[cls]
        try:
            return len(attributes) != count or get(attributes) != values
        except KeyError:  # a method has been removed
            return True

    def faults(self, classes: Iterable[type] | None = None) -> Iterator[str]:
        """Yield the faults of those `classes`, by default all, whose methods have changed since they passed."""
        for cls in list(self._first) if classes is None else classes:
            if self.changed(cls):
                first, now, missing = self._first[cls], self._runs(cls), self.MISSING
                found = [self._fault(cls, n, now.get(n, missing), first.get(n, missing)) for n in {**first, **now}]
                yield from (fault for fault in found if fault is not None)
                if not any(found):
                    get = operator.itemgetter(*now, "__module__")  # at least one name
                    self._passed[cls] = vars(cls), len(vars(cls)), get, get(vars(cls))


class Snapshot:
    """Record of a model at an inspection: modules, classes, checked attributes, parameters, buffers and settings.

    A snapshot references the whole model, so only the model may own it.

    Attributes:
        named_modules: (path, module) of all modules.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        checked: Callable[[type], frozenset[str]],
        settings: Iterable[tuple[Any, Iterable[str]]] = (),
    ) -> None:
        """Record the model.

        Args:
            model: The model.
            checked: Function from the class of a module to the attributes that the inspection reads.
            settings: Further objects, each with the attributes that the inspection reads.
        """
        self.named_modules = list(model.named_modules())
        self._modules = [module for _, module in self.named_modules]
        self._classes = list(map(type, self._modules))
        self._vars = list(map(vars, self._modules))
        self._getters = [
            operator.itemgetter(*checked(cls).intersection(own))
            for cls, own in zip(self._classes, self._vars, strict=True)
        ]
        self._values = list(self._checked())
        dicts = [own[name] for own in self._vars for name in ("_modules", "_parameters", "_buffers")]
        self._dicts = self._vars + dicts
        self._lengths = list(map(len, self._dicts))
        self._last = list(map(next, map(reversed, self._vars)))
        self._nonempty = [d for d in dicts if d]
        self._contents = list(self._content())
        self._tensors = [
            t for own in self._vars for name in ("_parameters", "_buffers") for t in own[name].values() if t is not None
        ]
        self._facts = tensor_facts(self._tensors)
        self._hooks = [own[name] for own in self._vars for name in ("_forward_pre_hooks", "_forward_hooks")]
        self._settings = [functools.partial(_read, owner, tuple(names)) for owner, names in settings]
        self._set = list(self._read_settings())
        self._mutable = [(value, value.copy()) for value in self._set if isinstance(value, (list, dict, set))]

    def _checked(self) -> Iterator[Any]:
        values = map(operator.call, self._getters, self._vars)  # pyright: ignore[reportArgumentType] - any callable
        return itertools.chain.from_iterable(values)

    def _content(self) -> Iterator[Any]:
        return itertools.chain.from_iterable(map(dict.values, self._nonempty))

    def _read_settings(self) -> Iterator[Any]:
        return itertools.chain.from_iterable(map(operator.call, self._settings))

    def is_current(self) -> bool:
        """Return whether nothing has changed; takes about 0.4 ms for 36 layers.

        Attributes, modules and parameters are compared by identity. Tensors are also compared by dtype, shape and
        device, which ``model.float()`` changes in place. A dictionary of the same size with the same last key has no
        new keys.
        """
        is_ = operator.is_
        try:
            return (
                all(map(is_, map(type, self._modules), self._classes))
                and all(map(is_, map(vars, self._modules), self._vars))
                and list(map(len, self._dicts)) == self._lengths
                and list(map(next, map(reversed, self._vars))) == self._last
                and all(map(is_, self._checked(), self._values))
                and all(map(is_, self._content(), self._contents))
                and tensor_facts(self._tensors) == self._facts
                and all(map(is_, self._read_settings(), self._set))
                and all(value == copied for value, copied in self._mutable)
            )
        except KeyError:  # an attribute has been removed
            return False

    def has_hooks(self) -> bool:
        """Return whether a module has forward hooks."""
        return any(self._hooks)


_ABSENT = object()


def _read(owner: Any, names: tuple[str, ...]) -> list[Any]:
    return [getattr(owner, name, _ABSENT) for name in names]


_tensor_getters = [operator.attrgetter(name) for name in ("dtype", "shape", "device")]


def tensor_facts(tensors: list[torch.Tensor]) -> list[list]:
    """Return classes, dtypes, shapes, devices and sequence_parallel marks of tensors."""
    return [
        list(map(type, tensors)),
        *(list(map(getter, tensors)) for getter in _tensor_getters),
        [t.__dict__.get("sequence_parallel") for t in tensors],
    ]
