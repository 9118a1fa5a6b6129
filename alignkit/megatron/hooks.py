"""Guard for forward hooks of a model's modules: hooks run, but may only observe. No numerics.

`patch_model` and `forward` call the guard; docs/megatron.md, "Errors and remedies", quotes its messages.
"""

from __future__ import annotations

import types
from collections.abc import Iterator
from typing import Any

import torch
from torch.nn.modules import module as torch_module

from alignkit.engines.patch import described
from alignkit.errors import UnsupportedError

from . import state
from .methods import is_megatron_function


class WatchedHook:
    """Wrapper of a forward hook or pre-hook that records whether the hook changes the module's input or output.

    A value that the hook returns is discarded and the forward continues, because a rank that stopped here would leave
    the others waiting. `State.check_hooks` raises the error later, in a collective check. For a module of no patched
    model, such as a copy that outlived the patch, the wrapper only calls the hook.
    """

    __slots__ = ("hook", "label", "pre")

    def __init__(self, hook, label: str, pre: bool):
        self.hook, self.label, self.pre = hook, label, pre

    def __call__(self, module, *args):
        if not (records := state.all_of(module)):
            return self.hook(module, *args)
        tensors = [t for t in _leaves(args) if isinstance(t, torch.Tensor) and not t.is_inference()]
        versions = [t._version for t in tensors]
        result = self.hook(module, *args)
        change = None
        if [t._version for t in tensors] != versions:
            change = f"{self.label} wrote to the module's input or output"
        elif result is not None:
            if self.pre and len(args) == 1 and not isinstance(result, tuple):
                result = (result,)  # torch also wraps the result of a hook without keywords
            if not _same(result, args[-1] if not self.pre else args[0] if len(args) == 1 else args):
                change = f"{self.label} returned another {'input' if self.pre else 'output'} than the module's"
        if change is not None:
            for record in records:
                record.changes.append(change)
        return None


def watch_hooks(path: str, module: torch.nn.Module) -> None:
    """Wrap a module's forward hooks, except Megatron's own (DDP waits for parameters in one).

    Raises UnsupportedError for a hook on an expert's module, which receives no tokens.
    """
    own = module.__dict__
    if getattr(type(module), "returns_weights", False):
        for hook in (*own["_forward_pre_hooks"].values(), *own["_forward_hooks"].values()):
            if not _is_megatron_hook(hook):
                raise UnsupportedError(
                    f"{path}: must not have forward hooks, because all experts (MoE) of a layer are computed together, "
                    f"got {described(getattr(hook, '__func__', hook))}. Remove the hook"
                )
        return
    if own["_forward_pre_hooks"]:
        _watch(own["_forward_pre_hooks"], f"{path or 'model'}: the forward pre-hook", True)
    if own["_forward_hooks"]:
        _watch(own["_forward_hooks"], f"{path or 'model'}: the forward hook", False)


def watch_global_hooks() -> None:
    """Wrap the forward hooks that torch calls for all modules."""
    _watch(torch_module._global_forward_pre_hooks, "torch.nn.Module: the forward pre-hook of all modules", True)
    _watch(torch_module._global_forward_hooks, "torch.nn.Module: the forward hook of all modules", False)


def _watch(hooks: dict[int, Any], label: str, pre: bool) -> None:
    for key, hook in list(hooks.items()):
        if type(hook) is not WatchedHook and not _is_megatron_hook(hook):
            hooks[key] = WatchedHook(hook, f"{label} {described(getattr(hook, '__func__', hook))}", pre)


def _is_megatron_hook(hook: Any) -> bool:
    function = getattr(hook, "__func__", hook)
    return isinstance(function, types.FunctionType) and is_megatron_function(function)


def unwatch_hooks() -> None:
    """Restore all wrapped hooks."""
    registries = [torch_module._global_forward_pre_hooks, torch_module._global_forward_hooks]
    for module in state.registered():
        registries += [module._forward_pre_hooks, module._forward_hooks]
    for hooks in registries:
        for key, hook in list(hooks.items()):
            if type(hook) is WatchedHook:
                hooks[key] = hook.hook


def _same(new: Any, old: Any) -> bool:
    """Return whether `new` is `old`, or a tuple, list or dict of identical objects."""
    if type(new) is not type(old) or not isinstance(new, (tuple, list, dict)):
        return new is old
    if isinstance(new, dict):
        return list(new) == list(old) and _same(list(new.values()), list(old.values()))
    return len(new) == len(old) and all(map(_same, new, old))


def _leaves(value: Any) -> Iterator[Any]:
    """Yield the leaves of nested tuples, lists and dicts."""
    if isinstance(value, (tuple, list)):
        for v in value:
            yield from _leaves(v)
    elif isinstance(value, dict):
        yield from _leaves(list(value.values()))
    else:
        yield value
