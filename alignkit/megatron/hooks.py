"""Forward hooks of a model's modules: they run, and may change nothing. No numerics."""

from __future__ import annotations

import types
import weakref
from collections.abc import Iterator
from typing import Any

import torch
from torch.nn.modules import module as torch_module

from alignkit.engines.patch import described
from alignkit.errors import UnsupportedError

from .methods import of_megatron

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
    """Watches the forward hooks of one module that are not Megatron's own (its DDP waits for parameters in one).
    UnsupportedError for one of a module that is given nothing to compute with."""
    own = module.__dict__
    if getattr(type(module), "hands_down", False):
        for hook in (*own["_forward_pre_hooks"].values(), *own["_forward_hooks"].values()):
            if not _of_megatron(hook):
                raise UnsupportedError(
                    f"{path}: the hook {described(getattr(hook, '__func__', hook))} would see no tokens: experts (MoE) are "
                    "computed together"
                )
        return
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
        if type(hook) is not Watch and not _of_megatron(hook):
            hooks[key] = Watch(hook, f"{named} {described(getattr(hook, '__func__', hook))}", pre)


def _of_megatron(hook: Any) -> bool:
    function = getattr(hook, "__func__", hook)
    return isinstance(function, types.FunctionType) and of_megatron(function)


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
