"""Checks that a running engine still consists of the parts that alignkit built.

The checks cover the model's modules, the samplers, and the classes of both. Python code can replace any of them at any
time: a module, a method of an object or a class, or a module's output by a hook. The checks do not cover the values of
weights and buffers, alignkit's functions that these classes call, and vLLM's runner, scheduler and front end. Faults
become the text of an UnsupportedError; tests/vllm/test_live.py matches it.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator, Mapping
from itertools import islice
from typing import Any, NamedTuple

import torch
from torch.nn.modules import module as hooks
from vllm.model_executor.layers.attention import Attention
from vllm.v1.sample.ops.topk_topp_sampler import TopKTopPSampler

from alignkit.errors import UnsupportedError
from alignkit.vllm.attention import AlignedAttentionImpl
from alignkit.vllm.built import architecture, deviations
from alignkit.vllm.layers import (
    ALIGNED,
    AlignedEmbeddingMethod,
    AlignedLinearMethod,
    AlignedParallelLMHead,
    AlignedVocabParallelEmbedding,
)
from alignkit.vllm.refuse import refuse_model
from alignkit.vllm.sampler import AlignedSampler, ProcessedLogprobs

PARTS_PER_STEP = 4
"""schedule: parts (modules, or groups of methods) that each engine step checks, round-robin, in microseconds."""
METHODS_PER_PART = 8
"""schedule: methods of a class per part of a step's check."""
ENGINE = ("vllm", "torch", "alignkit")
"""Packages whose classes compute in the engine; their methods must come from them or from the standard library."""

STANDARD_LIBRARY = sys.stdlib_module_names | {"typing_extensions"}
"""Packages whose functions may wrap a method, for example by a decorator."""

CASTS = ("float", "half", "bfloat16")
"""Methods of torch.nn.Module that cast weights. Importing TransformerEngine replaces them with its own versions."""

_first_methods: dict[type, dict[str, Any]] = {}
"""Class -> its methods at the first check."""


class Watch:
    """The checks of one worker's `runner`, created when its model has been loaded."""

    def __init__(self, runner, config) -> None:
        self._runner, self._config, self._v2 = runner, config, config.use_v2_model_runner
        self._read = architecture(config.model_config)
        self._kinds: set[type] = set()
        self._methods: list[_Methods] = []
        self._parts = self._cycle()
        self._suspect = False

    def inspect(self) -> dict[str, int]:
        """Check all parts and values; return the number of modules per aligned class.

        Raises:
            UnsupportedError: If a part was replaced, or differs from config.json. Every later step raises it too, until
                a check passes.
        """
        self._suspect = True
        model = self._runner.get_model()
        counts = refuse_model(model, tuple(ALIGNED.values()))
        faults = [
            f"{path or 'the model'}: {fault}" for path, module in model.named_modules() for fault in _faults(module)
        ]
        attention = [m for m in model.modules() if isinstance(m, Attention)]
        faults += [f"{m.layer_name}: {self._attention_fault(m)}" for m in attention if self._attention_fault(m)]
        faults += [
            f"{name}: {fault}" for name, part, kind in self._sampling() for fault in _sampling_faults(part, kind)
        ]
        faults += [f"{where}: {_name(hook)}" for where, hook in _global_hooks() if not _is_allowed(hook)]
        parts = [
            *model.modules(),
            *(part for _, part, _ in self._sampling()),
            *(m.impl for m in attention),
            *(m.quant_method for m in model.modules() if hasattr(m, "quant_method")),
        ]
        classes = dict.fromkeys(c for part in parts for c in _classes(type(part)))
        faults += [f"{c.__qualname__}.{name} was replaced" for c in classes for name in _replaced_methods(c)]
        if not faults:  # the parts have the attributes that this reads
            faults = deviations(model, self._read, self._config.parallel_config.tensor_parallel_size)
        if faults:
            raise UnsupportedError(
                "vLLM engine: parts are not aligned: "
                + "; ".join(faults[:8])
                + (f"; and {len(faults) - 8} more" if len(faults) > 8 else "")
            )
        self._kinds = {type(m) for m in model.modules()}
        self._methods = [
            _Methods(vars(c), len(vars(c)), tuple(group)) for c in classes for group in _groups(_first_methods[c])
        ]
        self._suspect = False
        return {**counts, AlignedAttentionImpl.__name__: len(attention), type(self._runner.sampler).__name__: 1}

    def step(self) -> None:
        """Check the samplers and the next few other parts; if one has changed, check everything."""
        if self._suspect or self._seems_replaced():
            self.inspect()

    def _seems_replaced(self) -> bool:
        if hooks._global_forward_hooks or hooks._global_forward_pre_hooks:
            return True
        for _, part, kind in self._sampling():
            if _sampling_faults(part, kind):
                return True
        for part in islice(self._parts, PARTS_PER_STEP):
            if part.changed() if isinstance(part, _Methods) else self._changed(part):
                return True
        return False

    def _changed(self, module: torch.nn.Module) -> bool:
        if type(module) not in self._kinds or _faults(module):
            return True
        return isinstance(module, Attention) and self._attention_fault(module) is not None

    def _cycle(self) -> Iterator[torch.nn.Module | _Methods]:
        while True:
            yield from [*self._runner.get_model().modules(), *self._methods]

    def _sampling(self) -> Iterator[tuple[str, Any, type]]:
        """Yield (name, object that computes logprobs, its required class)."""
        runner, sampler = self._runner, self._runner.sampler
        if self._v2:
            from alignkit.vllm.sampler_v2 import AlignedPromptLogprobs, AlignedSamplerV2, AlignedStates

            yield "sampler", sampler, AlignedSamplerV2
            yield "sampler.sampling_states", getattr(sampler, "sampling_states", None), AlignedStates
            yield "prompt_logprobs_worker", runner.prompt_logprobs_worker, AlignedPromptLogprobs
            yield "rejection_sampler", runner.rejection_sampler, type(None)
            return
        yield "sampler", sampler, AlignedSampler
        if self._config.model_config.logprobs_mode == "processed_logprobs":
            last = getattr(sampler, "topk_topp_sampler", None)
            yield "sampler.topk_topp_sampler", last, ProcessedLogprobs
            yield "sampler.topk_topp_sampler.sampler", getattr(last, "sampler", None), TopKTopPSampler

    def _attention_fault(self, module: Attention) -> str | None:
        if type(module.impl) is not AlignedAttentionImpl:
            return f"attention must be computed by {AlignedAttentionImpl.__name__}, got {type(module.impl).__name__}"
        if not _methods(AlignedAttentionImpl).isdisjoint(vars(module.impl)):
            return f"{_shadowed(module.impl)} of its attention was replaced by an attribute"
        # vLLM runs the attention module that is registered under the layer's name, not the one in the model.
        if self._config.compilation_config.static_forward_context.get(module.layer_name) is not module:
            return "another module is registered in static_forward_context under its layer name"
        return None


class _Methods(NamedTuple):
    """Some methods of a class, as of the last full check; `size` is the number of the class's attributes."""

    attributes: Mapping[str, Any]
    size: int
    methods: tuple[tuple[str, Any], ...]

    def changed(self) -> bool:
        if len(self.attributes) != self.size:
            return True
        for name, method in self.methods:  # noqa: SIM110 - runs in every step; a generator is slower
            if self.attributes.get(name) is not method:
                return True
        return False


def _groups(methods: dict[str, Any]) -> Iterator[list[tuple[str, Any]]]:
    rest = iter(methods.items())
    while group := list(islice(rest, METHODS_PER_PART)):
        yield group


def _faults(module: torch.nn.Module) -> list[str]:
    """Return the reasons why a module does not run its class's methods alone."""
    own, found = vars(module), []
    if own["_forward_hooks"] or own["_forward_pre_hooks"]:
        both = [*own["_forward_hooks"].values(), *own["_forward_pre_hooks"].values()]
        found += [f"forward hook {_name(hook)}" for hook in both if not _is_allowed(hook)]
    if own.get("_compiled_call_impl") is not None:
        found.append("compiled by Module.compile")
    if not _methods(type(module)).isdisjoint(own):
        found.append(f"{_shadowed(module)} was replaced")
    method = own.get("quant_method")
    if method is not None and type(module) in _METHOD_OF:
        if type(method) is not _METHOD_OF[type(module)]:
            found.append(f"must be computed by {_METHOD_OF[type(module)].__name__}, got {type(method).__name__}")
        elif vars(method) and not _methods(type(method)).isdisjoint(vars(method)):
            found.append(f"{_shadowed(method)} of its {type(method).__name__} was replaced")
    return found


_METHOD_OF = {aligned: AlignedLinearMethod for name, aligned in ALIGNED.items() if name.endswith("Linear")} | {
    AlignedVocabParallelEmbedding: AlignedEmbeddingMethod,
    AlignedParallelLMHead: AlignedEmbeddingMethod,
}
"""Class of a layer -> the required class of its `quant_method`."""


def _sampling_faults(part: Any, kind: type) -> list[str]:
    if type(part) is not kind:
        return [f"must be {kind.__name__}, got {type(part).__name__}"]
    if kind is TopKTopPSampler:  # vLLM binds `forward` to one of its methods
        own = getattr(part.forward, "__self__", None) is part and part.forward.__func__ in vars(kind).values()
        return [] if own and not part._forward_hooks and not part._forward_pre_hooks else ["its forward was replaced"]
    if isinstance(part, torch.nn.Module):
        return _faults(part)
    return [f"{_shadowed(part)} was replaced"] if part is not None and _shadowed(part) else []


def _global_hooks() -> Iterator[tuple[str, Callable]]:
    yield from (("forward hook of all modules", hook) for hook in hooks._global_forward_hooks.values())
    yield from (("forward hook of all modules", hook) for hook in hooks._global_forward_pre_hooks.values())


def _shadowed(part: Any) -> str:
    return ", ".join(sorted(_methods(type(part)) & vars(part).keys()))


@functools.cache
def _methods(kind: type) -> frozenset[str]:
    """Return the names of a class's methods, which attributes of an object must not shadow."""
    return frozenset(name for c in kind.__mro__ if c is not object for name in _runs(c))


@functools.cache
def _classes(kind: type) -> tuple[type, ...]:
    return tuple(c for c in kind.__mro__ if _package(c.__module__) in ENGINE)


def _runs(kind: type) -> dict[str, Any]:
    """Return the methods that a class itself defines, by name.

    This leaves out weight loading and casts, which frameworks replace, and the function that vLLM sets on models for
    pipeline parallelism.
    """
    return {
        name: value
        for name, value in vars(kind).items()
        if (callable(value) or isinstance(value, (staticmethod, classmethod, property)))
        and not isinstance(value, type)
        and (name == "__call__" or not name.startswith("__"))
        and not name.startswith("load_")
        and "weight_loader" not in name
        and name != "make_empty_intermediate_tensors"
        and not (kind is torch.nn.Module and name in CASTS)
    }


def _replaced_methods(kind: type) -> list[str]:
    """Return the names of a class's methods that changed since the first check, or come from another package."""
    now = _runs(kind)
    then = _first_methods.setdefault(kind, now)
    allowed = ENGINE if _package(kind.__module__) != "alignkit" else ("alignkit",)
    return sorted(
        name
        for name in now.keys() | then.keys()
        if now.get(name) is not then.get(name) or not _comes_from(now[name], allowed)
    )


def _comes_from(method: Any, packages: tuple[str, ...]) -> bool:
    if isinstance(method, property):
        method = method.fget
    while hasattr(method, "__func__") or isinstance(method, functools.partial):
        method = getattr(method, "__func__", None) or method.func
    names = getattr(method, "__globals__", None)  # its module's globals: `functools.wraps` copies `__module__`
    package = _package(names["__name__"] if names else type(method).__module__)
    return package in packages or package in STANDARD_LIBRARY


def _is_allowed(hook: Callable) -> bool:
    """Return whether a hook is vLLM's (NVTX ranges) or alignkit's (the recorder of `alignkit bisect`)."""
    return _comes_from(hook, ("vllm", "alignkit"))


def _name(hook: Callable) -> str:
    return getattr(hook, "__qualname__", type(hook).__name__)


def _package(module: str) -> str:
    return module.partition(".")[0]
