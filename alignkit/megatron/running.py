"""What a forward of a model will run: its modules, their methods and those of their classes, and hooks. No numerics.

All of it can be exchanged after a model was built, so it is looked at before each forward. That must take much less
than a millisecond: what is slow to look at is looked at again only where a cheap look finds a change.
"""

from __future__ import annotations

import functools
import itertools
import operator
import sys
import types
import weakref
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch.nn.modules import module as torch_module

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

_UNUSED = frozenset({"_apply_output_gate", "compute_mtp_single_step"})
"""Decorated with torch's, by Megatron itself, and only run for what is refused."""


CHECKED = frozenset(
    {
        "_modules",
        "_parameters",
        "_buffers",
        "_forward_hooks",
        "_forward_pre_hooks",
        "training",
        "config",
        "p",
        "eps",
        "bias",
        "weight",
        "sequence_parallel",
        "gather_output",
        "input_is_parallel",
        "is_expert",
        "disable_grad_reduce",
        "gtp_remat_size",
        "attn_mask_type",
        "self_attn_bda",
        "mlp_bda",
        "bias_dropout_add_exec_handler",
        "off_interface",
    }
)
"""Attributes of modules that `supported` and `fingerprint` look at."""


LOOK = "_alignkit_look"
"""The one attribute that is set, of a model's decoder. A `Look` refers to the whole model, so anywhere else it would keep
a model that nobody uses any more."""


class Look:
    """What was seen of a model's modules when they were checked: which they are, their classes, those of their
    attributes that were checked, and what parameters and buffers are.

    facts: what the caller made of it. keep: for `Look.of`.
    """

    def __init__(self, model: torch.nn.Module, facts: dict[str, str], keep: bool):
        self.facts = facts
        if keep:  # before the attributes are looked at
            vars(model.decoder)[LOOK] = self
        self.found = list(model.named_modules())
        self._modules = [module for _, module in self.found]
        self._classes = list(map(type, self._modules))
        self._own = list(map(vars, self._modules))
        self._getters = [operator.itemgetter(*CHECKED.intersection(own)) for own in self._own]
        self._values = list(self._checked())
        dicts = [own[name] for own in self._own for name in ("_modules", "_parameters", "_buffers")]
        self._dicts = self._own + dicts
        self._lengths = list(map(len, self._dicts))
        self._last = list(map(next, map(reversed, self._own)))
        self._held = [d for d in dicts if d]
        self._contents = list(self._content())
        self._tensors = [
            t for own in self._own for name in ("_parameters", "_buffers") for t in own[name].values() if t is not None
        ]
        self._facts = tensor_facts(self._tensors)
        self._hooks = [own[name] for own in self._own for name in ("_forward_pre_hooks", "_forward_hooks")]

    @staticmethod
    def of(model: torch.nn.Module) -> Look | None:
        """The last one that was kept."""
        look = vars(model.decoder).get(LOOK)
        return look if look is not None and look.found[0][1] is model else None

    def __reduce__(self):
        return types.NoneType, ()  # a copy of the model has not been looked at

    def _checked(self) -> Iterator[Any]:
        values = map(operator.call, self._getters, self._own)  # pyright: ignore[reportArgumentType] - it takes any call
        return itertools.chain.from_iterable(values)

    def _content(self) -> Iterator[Any]:
        return itertools.chain.from_iterable(map(dict.values, self._held))

    def holds(self) -> bool:
        """Whether all is as it was. Much faster than to find and check the modules again: some 0.4 ms for 36 layers.

        Attributes, modules and parameters are compared by identity; a parameter also by what it is, as
        ``model.float()`` changes that in place. A dictionary that has as many keys as before and the same last one has
        got no new one."""
        is_ = operator.is_
        try:
            return (
                all(map(is_, map(type, self._modules), self._classes))
                and all(map(is_, map(vars, self._modules), self._own))
                and list(map(len, self._dicts)) == self._lengths
                and list(map(next, map(reversed, self._own))) == self._last
                and all(map(is_, self._checked(), self._values))
                and all(map(is_, self._content(), self._contents))
                and tensor_facts(self._tensors) == self._facts
            )
        except KeyError:  # an attribute that was there is gone
            return False

    def watch_hooks(self) -> None:
        """Watches the forward hooks of all modules."""
        if any(self._hooks):
            for path, module in self.found:
                watch_hooks(path, module)


_what = [operator.attrgetter(name) for name in ("dtype", "shape", "device")]


def tensor_facts(tensors: list[torch.Tensor]) -> list[list]:
    """Classes, types, shapes and devices of parameters and buffers, and whether they are marked."""
    return [
        list(map(type, tensors)),
        *(list(map(what, tensors)) for what in _what),
        [t.__dict__.get("sequence_parallel") for t in tensors],
    ]


class Methods:
    """The methods of the classes that aligned models consist of, and of the classes that those inherit from.

    A method is a class's own if it was defined in the body of that class, in that class's module; so one that was
    replaced before alignkit was imported is found too. `ours` are (class, name) -> what the patch has put there.
    """

    def __init__(self, classes: Iterable[type], ours: dict[tuple[type, str], Any]):
        found = {base: None for cls in classes for base in cls.__mro__ if issubclass(base, torch.nn.Module)}
        self.ours = ours
        self._checked: dict[type, tuple] = dict.fromkeys(found, ())
        self._names: dict[type, frozenset[str]] = {}

    def check(self) -> None:
        """UnsupportedError naming the first method of a class that is not its own."""
        for cls, checked in self._checked.items():
            values = tuple(vars(cls).values())
            if len(values) != len(checked) or not all(map(operator.is_, values, checked)):
                for name, value in vars(cls).items():
                    if _runs(cls, name) and self.ours.get((cls, name), self) is not value:
                        _check_own(cls, name, value)
                self._checked[cls] = values

    def shadowed(self, module: torch.nn.Module) -> str | None:
        """A method of the module's class that one of its attributes hides, if any."""
        cls, own = type(module), module.__dict__
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
        return _of_megatron(function)
    return type(function) is functools._lru_cache_wrapper


def _of_megatron(function: types.FunctionType) -> bool:
    return function.__globals__["__name__"].startswith("megatron.core.")


# Hooks.

adopted: weakref.WeakSet[torch.nn.Module] = weakref.WeakSet()
"""The modules of models that the patch in force has taken over, and of copies of them."""

_changes: list[str] = []
"""What hooks have changed since it was last asked for."""


class Watch:
    """Takes the place of a forward hook or pre-hook among its module's hooks, to see whether it changes anything.

    What the hook returns instead of the module's input or output is thrown away: the forward goes on with what it had,
    as a rank that stopped here would leave the others waiting. `check_hooks` raises it, where all ranks are asked.
    Does nothing of its own for a module that is not adopted: a copy that outlived the patch, or another's.
    """

    __slots__ = ("hook", "named", "pre")

    def __init__(self, hook, named: str, pre: bool):
        self.hook, self.named, self.pre = hook, named, pre

    def __call__(self, module, *given):
        if module not in adopted:
            return self.hook(module, *given)
        tensors = [t for t in _leaves(given) if isinstance(t, torch.Tensor) and not t.is_inference()]
        versions = [t._version for t in tensors]
        result = self.hook(module, *given)
        if [t._version for t in tensors] != versions:
            _changes.append(f"{self.named}: wrote to the module's input or output")
        elif result is not None:
            if self.pre and len(given) == 1 and not isinstance(result, tuple):
                result = (result,)  # as torch takes it, for a hook that is not given keywords
            if not _same(result, given[-1] if not self.pre else given[0] if len(given) == 1 else given):
                _changes.append(f"{self.named}: returned another {'input' if self.pre else 'output'} than the module's")
        return None


def watch_hooks(path: str, module: torch.nn.Module) -> None:
    """Watches the forward hooks of one module that are not Megatron's own (its DDP waits for parameters in one)."""
    own = module.__dict__
    if own["_forward_pre_hooks"]:
        _watch(own["_forward_pre_hooks"], f"{path or 'model'}: the forward pre-hook", True)
    if own["_forward_hooks"]:
        _watch(own["_forward_hooks"], f"{path or 'model'}: the forward hook", False)


def watch_global_hooks() -> None:
    """The same for hooks of every module of the process."""
    _watch(torch_module._global_forward_pre_hooks, "torch.nn.Module: the forward pre-hook of all modules", True)
    _watch(torch_module._global_forward_hooks, "torch.nn.Module: the forward hook of all modules", False)


def _watch(hooks: dict[int, Any], named: str, pre: bool) -> None:
    for key, hook in list(hooks.items()):
        function = getattr(hook, "__func__", hook)
        if type(hook) is not Watch and not (isinstance(function, types.FunctionType) and _of_megatron(function)):
            hooks[key] = Watch(hook, f"{named} {described(function)}", pre)


def check_hooks() -> None:
    """UnsupportedError for what hooks have changed since this was last called."""
    if _changes:
        changes = "; ".join(dict.fromkeys(_changes))
        _changes.clear()
        raise UnsupportedError(changes)


def unwatch_hooks() -> None:
    """All hooks as they were."""
    places = [torch_module._global_forward_pre_hooks, torch_module._global_forward_hooks]
    for module in adopted:
        places += [module._forward_pre_hooks, module._forward_hooks]
    for hooks in places:
        for key, hook in list(hooks.items()):
            if type(hook) is Watch:
                hooks[key] = hook.hook
    _changes.clear()


def _same(new: Any, old: Any) -> bool:
    """Whether `new` is `old`, or a tuple, list or dict of the very same."""
    if type(new) is not type(old) or not isinstance(new, (tuple, list, dict)):
        return new is old
    if isinstance(new, dict):
        return list(new) == list(old) and _same(list(new.values()), list(old.values()))
    return len(new) == len(old) and all(map(_same, new, old))


def _leaves(value: Any) -> Iterator[Any]:
    """What is in tuples, lists and dicts."""
    if isinstance(value, (tuple, list)):
        for v in value:
            yield from _leaves(v)
    elif isinstance(value, dict):
        yield from _leaves(list(value.values()))
    else:
        yield value
