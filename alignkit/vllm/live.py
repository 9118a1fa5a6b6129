"""Checks that a running engine still computes with the modules, samplers and methods that alignkit installed.

Other Python code can replace a module, a method of an object or a class, or a module's output (by a hook) at any time.
The checks do not cover the values of weights and buffers, alignkit's functions that the checked classes call, and
vLLM's runner, scheduler and front end. `built` compares values with config.json, and `refuse` checks configurations and
new models. The texts of faults are for people; tests/vllm/test_live.py, test_cuda.py and test_experts.py match them.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any

import torch
from torch.nn.modules import module as hooks
from vllm.model_executor.layers.attention import Attention
from vllm.v1.sample.ops.topk_topp_sampler import TopKTopPSampler

from alignkit.dist import strict
from alignkit.engines.guards import Methods, hooks_registered, shadowing
from alignkit.engines.hook_points import relies_on
from alignkit.engines.patch import described
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
"""schedule: parts (modules, or classes) that one engine step checks, round-robin; a step's check must take
microseconds. A smaller number finds a replacement after more steps."""
ENGINE = ("vllm", "torch", "alignkit")
"""Packages whose classes compute in the engine; their methods must come from them or from the standard library."""

STANDARD_LIBRARY = sys.stdlib_module_names | {"typing_extensions"}
"""Packages whose functions may wrap a method, for example by a decorator."""

CASTS = ("float", "half", "bfloat16")
"""Methods of torch.nn.Module that cast weights. Importing TransformerEngine replaces them with its own versions."""


@relies_on("v1/worker/gpu_model_runner.py:GPUModelRunner", members="get_model", when="cuda")
@relies_on("v1/worker/gpu/model_runner.py:GPUModelRunner", members="get_model", when="cuda")
@relies_on(
    "v1/worker/gpu/model_runner.py:GPUModelRunner.load_model",
    mentions="sampler rejection_sampler prompt_logprobs_worker",
    when="cuda",
)
@relies_on("config/compilation.py:CompilationConfig", members="static_forward_context")
class Watch:
    """The checks of one worker's `runner`, created when its model has been loaded."""

    def __init__(self, runner, config) -> None:
        self._runner, self._config, self._v2 = runner, config, config.use_v2_model_runner
        self._read = architecture(config.model_config)
        self._kinds: set[type] = set()
        self._sizes: dict[torch.nn.Module, list] = {}
        self._classes: list[type] = []
        self._hooks, self._strict = 0, False
        self._parts = self._cycle()
        self._suspect = False

    def inspect(self) -> dict[str, int]:
        """Check all modules, samplers, methods and values; return the number of modules per aligned class.

        Raises:
            UnsupportedError: If a module, sampler or method was replaced, or a value differs from config.json. Every
                later step raises the error too, until a check passes.
        """
        self._suspect, self._hooks, self._strict = True, hooks_registered(), strict()
        model = self._runner.get_model()
        counts = refuse_model(model, tuple(ALIGNED.values()))
        faults = [
            f"{path or 'the model'}: {fault}" for path, module in model.named_modules() for fault in _faults(module)
        ]
        attention = [m for m in model.modules() if isinstance(m, Attention)]
        faults += [f"{m.layer_name}: {fault}" for m in attention for fault in self._attention_faults(m)]
        faults += [
            f"{name}: {fault}" for name, part, kind in self._sampling() for fault in _sampling_faults(part, kind)
        ]
        foreign = [hook for hook in _global_hooks() if not _is_allowed(hook)]
        faults += [f"torch.nn.Module: {_hook_fault(hook, 'global ')}" for hook in foreign]
        parts = [
            *model.modules(),
            *(part for _, part, _ in self._sampling()),
            *(m.impl for m in attention),
            *(m.quant_method for m in model.modules() if hasattr(m, "quant_method")),
        ]
        classes = dict.fromkeys(c for part in parts for c in _classes(type(part)))
        _METHODS.watch(classes)
        faults += _METHODS.faults(classes)
        if not faults:  # the parts have the attributes that this reads
            ranks, dtype = self._config.parallel_config.tensor_parallel_size, self._config.model_config.dtype
            faults = deviations(model, self._read, ranks, dtype)
        if faults:
            raise UnsupportedError(
                "vLLM engine: must run alignkit's code with the values of config.json. Failed checks: "
                + "; ".join(faults[:8])
                + (f"; and {len(faults) - 8} more" if len(faults) > 8 else "")
                + ". Remove the hooks, monkey-patches or overrides listed here"
            )
        self._kinds = {type(m) for m in model.modules()}
        self._sizes = {m: _sizes(m) for m in model.modules()}
        self._classes = list(classes)
        self._suspect = False
        return {**counts, AlignedAttentionImpl.__name__: len(attention), type(self._runner.sampler).__name__: 1}

    def allow_hooks(self) -> None:
        """Take the hooks registered so far as alignkit's own: they alone are no reason to inspect before a step."""
        self._hooks = hooks_registered()

    def step(self) -> None:
        """Check the samplers and the next few other parts; if one has changed, or a hook is new, check everything."""
        if self._suspect or self._strict or self._hooks != hooks_registered() or self._seems_replaced():
            self.inspect()

    def _seems_replaced(self) -> bool:
        if hooks._global_forward_hooks or hooks._global_forward_pre_hooks:
            return True
        for _, part, kind in self._sampling():
            if _sampling_faults(part, kind):
                return True
        for part in islice(self._parts, PARTS_PER_STEP):
            if _METHODS.changed(part) if isinstance(part, type) else self._changed(part):
                return True
        return False

    def _changed(self, module: torch.nn.Module) -> bool:
        if type(module) not in self._kinds or _faults(module) or self._sizes.get(module) != _sizes(module):
            return True
        return isinstance(module, Attention) and bool(self._attention_faults(module))

    def _cycle(self) -> Iterator[torch.nn.Module | type]:
        while True:
            yield from [*self._runner.get_model().modules(), *self._classes]

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

    def _attention_faults(self, module: Attention) -> list[str]:
        if type(module.impl) is not AlignedAttentionImpl:
            return [f"impl: must be {AlignedAttentionImpl.__name__}, got {type(module.impl).__name__}"]
        faults = _shadowed(module.impl, "impl.")
        # vLLM runs the attention module that is registered under the layer's name, not the one in the model.
        if self._config.compilation_config.static_forward_context.get(module.layer_name) is not module:
            faults.append(
                "compilation_config.static_forward_context: must map this layer's name to the model's attention layer, "
                "got another object"
            )
        return faults


def _sizes(module: torch.nn.Module) -> list[tuple[torch.dtype, torch.Size]]:
    """Return dtypes and shapes of a module's own parameters and buffers."""
    own = vars(module)
    return [(t.dtype, t.shape) for part in ("_parameters", "_buffers") for t in own[part].values() if t is not None]


def _faults(module: torch.nn.Module) -> list[str]:
    """Return the reasons why a module does not run its class's methods alone."""
    own, found = vars(module), []
    if own["_forward_hooks"] or own["_forward_pre_hooks"]:
        both = [*own["_forward_hooks"].values(), *own["_forward_pre_hooks"].values()]
        found += [_hook_fault(hook) for hook in both if not _is_allowed(hook)]
    if own.get("_compiled_call_impl") is not None:
        found.append("must not be compiled by torch.nn.Module.compile()")
    found += _shadowed(module)
    method = own.get("quant_method")
    if method is not None and type(module) in _METHOD_OF:
        if type(method) is not _METHOD_OF[type(module)]:
            found.append(f"quant_method: must be {_METHOD_OF[type(module)].__name__}, got {type(method).__name__}")
        else:
            found += _shadowed(method, "quant_method.")
    return found


_METHOD_OF = {aligned: AlignedLinearMethod for name, aligned in ALIGNED.items() if name.endswith("Linear")} | {
    AlignedVocabParallelEmbedding: AlignedEmbeddingMethod,
    AlignedParallelLMHead: AlignedEmbeddingMethod,
}
"""Class of a layer -> the required class of its `quant_method`."""


def _sampling_faults(part: Any, kind: type) -> list[str]:
    if type(part) is not kind:
        wanted = "None" if kind is type(None) else kind.__name__
        return [f"must be {wanted}, got {'None' if part is None else type(part).__name__}"]
    if kind is TopKTopPSampler:  # vLLM binds `forward` to one of its methods
        if getattr(part.forward, "__self__", None) is not part or part.forward.__func__ not in vars(kind).values():
            return [f"forward: must be a method of {kind.__name__}, got {described(part.forward)}"]
        own = (*part._forward_hooks.values(), *part._forward_pre_hooks.values())
        return [f"must have no forward hooks, got {_name(hook)}" for hook in own]
    if isinstance(part, torch.nn.Module):
        return _faults(part)
    return [] if part is None else _shadowed(part)


def _global_hooks() -> Iterator[Callable]:
    yield from hooks._global_forward_hooks.values()
    yield from hooks._global_forward_pre_hooks.values()


def _hook_fault(hook: Callable, kind: str = "") -> str:
    return f"must have only {kind}forward hooks of vLLM or alignkit, got {_name(hook)}"


def _shadowed(part: Any, prefix: str = "") -> list[str]:
    """Return a fault for each method of an object that an attribute of the object hides. prefix: path to the object."""
    if not (names := shadowing(part, _methods(type(part)))):  # the usual case, within a step's check
        return []
    wanted = type(part).__name__
    return [f"{prefix}{name}: must be {wanted}'s method, got an attribute assigned to the object" for name in names]


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


def _method_fault(kind: type, name: str, now: Any, first: Any) -> str | None:
    """Return a fault if a method of a class has changed since it was first seen, or comes from another package."""
    allowed = ENGINE if _package(kind.__module__) != "alignkit" else ("alignkit",)
    if now is first and _comes_from(now, allowed):
        return None
    got = "no such method" if now is Methods.MISSING else described(now)
    return f"{kind.__qualname__}.{name}: must be the method that {_package(kind.__module__)} defines, got {got}"


_METHODS = Methods(_runs, _method_fault)
"""Guard of the classes of all engines in this process."""


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
