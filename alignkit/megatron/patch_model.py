"""Patching of models: checks their modules against an allow-list and swaps their classes. No numerics.

The aligned classes are in `modules`, `moe` and `te`; `supported` checks each module's settings. A class may be added to
`STRUCTURE` only if it does no arithmetic that rounds.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.fusions.fused_softmax import FusedScaleMaskSoftmax
from megatron.core.models.common.embeddings.language_model_embedding import LanguageModelEmbedding
from megatron.core.tensor_parallel.layers import VocabParallelEmbedding
from megatron.core.transformer.identity_op import IdentityFuncOp, IdentityOp
from torch.nn.modules import module as torch_module

from alignkit.dist import strict
from alignkit.engines.guards import Methods, Snapshot, shadowing
from alignkit.engines.patch import described
from alignkit.errors import InputError, UnsupportedError
from alignkit.runtime import dispatch

from . import facts, hooks, methods, modules, moe, policy, state, supported, te
from .models import MODELS
from .state import device_of

ALIGNED = {
    modules.stock_class(cls): cls
    for cls in modules.ALIGNED
    if cls is not modules.OutputLayer and cls not in moe.EXPERT_MODULES
}
"""Megatron's module class -> aligned class.

Lookup is by exact type, so a subclass, an adapter (LoRA) or a module of another backend is rejected. The classes of
TransformerEngine are in `te.ROWS`.
"""

EXPERT_MODULES = {modules.stock_class(cls): cls for cls in moe.EXPERT_MODULES}
"""Same map for modules below the experts of a MoELayer; TransformerEngine's classes are in `te.EXPERT_MODULES`."""

STRUCTURE = frozenset(
    {
        *MODELS,
        LanguageModelEmbedding,
        VocabParallelEmbedding,
        FusedScaleMaskSoftmax,
        IdentityOp,
        IdentityFuncOp,
        torch.nn.ModuleList,
        torch.nn.Dropout,
    }
)
"""Classes that stay stock: containers, gathers and splits, without arithmetic that rounds."""

_KNOWN = frozenset({*STRUCTURE, *ALIGNED, *modules.ALIGNED})
_LAYER = modules.stock_class(modules.TransformerLayer)
_RESIDUAL_ADDS = (get_bias_dropout_add, modules.residual_add)


def aligned_class(cls: type, expert_module: bool = False) -> type | None:
    """Return the aligned class for a module of class `cls`, stock or aligned; None if there is none.

    expert_module: the module is below a MoELayer's experts.
    """
    stock = modules.stock_class(cls)
    if expert_module:
        return EXPERT_MODULES.get(stock) or te.aligned_class(stock, te.EXPERT_MODULES)
    if cls is modules.OutputLayer:
        return cls
    return ALIGNED.get(stock) or te.aligned_class(stock, te.ROWS)


class Models:
    """Models of this process while the patch is active.

    replaced: (owner, name) -> the patch's replacement. The other arguments are the patch's options.
    """

    def __init__(self, vocab_size: int | None, keep_logits: bool, replaced: dict[tuple[Any, str], Any]) -> None:
        self.vocab_size, self.keep_logits = vocab_size, keep_logits

        def fault(cls: type, name: str, value: Any, _: Any) -> str | None:
            return None if replaced.get((cls, name), self) is value else methods.fault(cls, name, value)

        self.methods = Methods(methods.runs, fault)
        self.methods.watch(methods.classes(_KNOWN))

    def patch_model(self, model, for_forward: bool = False) -> dict[str, str]:
        """Check a model with all its modules and set their aligned classes; return the facts that ranks must agree on.

        Called before each forward, because modules may have been replaced (by LoRA, for example) or changed. The model
        is inspected only if something has, or under ``ALIGNKIT_STRICT=1``.

        for_forward: also check what matters only in a forward: dropout in training, the device, and the vocabulary.
        """
        record = state.of_model(model)
        self.check_methods()
        snapshot = record.snapshot if for_forward and not strict() else None
        if snapshot is None or not snapshot.is_current():
            snapshot = self._inspect(model, record, for_forward)
        elif supported.reads_frequencies(record):
            supported.check_rotary(model)
        if snapshot.has_hooks():
            for path, module in snapshot.named_modules:
                hooks.watch_hooks(path, module)
        if torch_module._global_forward_pre_hooks or torch_module._global_forward_hooks:
            hooks.watch_global_hooks()
        if not for_forward:
            return record.facts
        record.vocab_size = self.vocabulary_of(model)
        head = [] if record.output_layer is None else [record.output_layer]
        state.claim(record, [model.rotary_pos_emb, model.decoder, *head])
        return record.facts | {"vocab_size": str(record.vocab_size)}

    def check_methods(self) -> None:
        """Raise UnsupportedError naming the first method of a class that has been replaced."""
        for fault in self.methods.faults():
            raise UnsupportedError(fault)

    def _inspect(self, model, record: state.State, for_forward: bool) -> Snapshot:
        policy.check_config(model.config)
        supported.check_model(model)
        base, scaling = supported.check_rotary(model)
        found, device = list(model.named_modules()), device_of(model)
        record.stock_head = supported.stock_head_reason(model)
        stock_heads = {model.output_layer} if record.stock_head else set()
        checked = [(path, module) for path, module in found if module not in stock_heads]
        classes = self._check_modules(model, checked, for_forward)
        for module, cls in classes.items():  # all checks precede the first change
            module.__class__ = cls
        record.output_layer = model.output_layer if model.post_process and not stock_heads else None
        if record.output_layer is not None:
            record.output_layer.__class__ = modules.OutputLayer
        record.keep_logits = self.keep_logits
        record.rotations = modules.Rotations(base, supported.rotary_dim(model), device, scaling)
        record.facts = {
            **facts.settings(model),
            "rope_scaling": repr(scaling),
            **facts.stage(model),
            **facts.modules(found),
        }
        if for_forward:  # a model may be built on the meta device
            record.facts["contract"] = dispatch.family(device).contract_id
        state.register((module for _, module in found), record)
        settings = (
            (model.config, (*policy.restricted(), *facts.FIELDS, *modules.YARN_FIELDS)),
            (model.pg_collection, vars(model.pg_collection)),
        )
        snapshot = Snapshot(model, _checked_attributes, settings)
        record.snapshot = snapshot if for_forward else None
        return snapshot

    def vocabulary_of(self, model) -> int:
        """Return a model's vocabulary size, set by `set_vocab_size` or else by the patch.

        Raises InputError if neither set one, or if it exceeds the padded size.
        """
        own = state.of_model(model).own_vocab_size
        own = self.vocab_size if own is None else own
        if own is None:
            raise InputError(
                "vocab_size: required. Pass vocab_size to patch_megatron, or call set_vocab_size for this model"
            )
        if own > model.vocab_size:
            raise InputError(f"vocab_size: must be at most {model.vocab_size}, the model's padded size, got {own}")
        return own

    def _check_modules(self, model, found: list[tuple[str, torch.nn.Module]], for_forward: bool) -> dict:
        """Check the modules and return the aligned class of each one that computes."""
        devices = set() if for_forward else None
        classes, ignored_prefix = {}, None
        moe_prefix = experts_prefix = None  # path prefixes of the current MoELayer and its experts
        for path, module in found:
            cls = type(module)
            if ignored_prefix is not None and path.startswith(ignored_prefix):
                if any(p is not None for p in module._parameters.values()):
                    names = ", ".join(name for name, p in module._parameters.items() if p is not None)
                    raise UnsupportedError(
                        f"{path}: must not have parameters, because alignkit does not run this module of "
                        f"TransformerEngine, got {names}"
                    )
                continue
            below_experts = experts_prefix is not None and path.startswith(experts_prefix)
            aligned = aligned_class(cls, below_experts)
            if aligned is None and cls not in STRUCTURE:
                raise UnsupportedError(
                    f"{path or 'model'}: module class {cls.__module__}.{cls.__qualname__} is not supported"
                )
            for name in shadowing(module, methods.names(aligned or cls)):
                raise UnsupportedError(
                    f"{path or 'model'}.{name}: must be the method of {cls.__qualname__}, but an attribute of the "
                    f"module replaces it, got {described(vars(module)[name])}. Delete the attribute"
                )
            in_moe_layer = moe_prefix is not None and path.startswith(moe_prefix)
            supported.check_module(path, module, model.config, devices, in_moe_layer)
            if issubclass(cls, _LAYER):
                supported.check_layer(path, module, _RESIDUAL_ADDS)
            elif aligned is moe.MoELayer:
                supported.check_moe_layer(path, module, for_forward)
                moe_prefix, experts_prefix = f"{path}.", f"{path}.experts."
            if aligned is not None:
                classes[module] = aligned
                if issubclass(aligned, te.Replacement):
                    supported.check_te(path, module, aligned)
                    ignored_prefix = f"{path}." if aligned.ignores_children else ignored_prefix
        if self.methods.watch(methods.classes(classes.values())):
            self.check_methods()
        return classes

    def restore(self) -> None:
        """Restore the stock class and the hooks of every module."""
        hooks.unwatch_hooks()
        for module in state.registered():
            if type(module) in modules.STOCK:
                module.__class__ = modules.stock_class(type(module))
        state.clear()


@functools.cache
def _checked_attributes(cls: type) -> frozenset[str]:
    return supported.CHECKED.union(getattr(cls, "required", ()))


def report(model: torch.nn.Module) -> dict[str, Any]:
    """Return the aligned modules, the modules that are still stock, and the output layers that stay stock.

    model: a model or a wrapper of one. Keys: aligned (path -> op), stock (paths), left (path -> reason).
    """
    found: dict[str, Any] = {path: type(m) for path, m in model.named_modules()}
    heads = {f"{path}.output_layer".lstrip("."): m for path, m in model.named_modules() if isinstance(m, MODELS)}
    return {
        "aligned": {path: cls.op for path, cls in found.items() if cls in modules.STOCK},
        "stock": [path for path, cls in found.items() if cls not in modules.STOCK and aligned_class(cls) is not None],
        "left": {path: why for path, m in heads.items() if (why := supported.stock_head_reason(m)) is not None},
    }
