"""Taking models over: which modules may be in one, which class each gets, and its own class back. No numerics."""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.fusions.fused_softmax import FusedScaleMaskSoftmax
from megatron.core.models.common.embeddings.language_model_embedding import LanguageModelEmbedding
from megatron.core.tensor_parallel.layers import VocabParallelEmbedding
from megatron.core.transformer.identity_op import IdentityFuncOp, IdentityOp

from alignkit.errors import InputError, UnsupportedError

from . import fingerprint, hooks, modules, moe, policy, supported, te
from .look import LOOK, Look, device_of
from .methods import Methods
from .models import MODELS

ALIGNED = {
    modules.stock_class(cls): cls
    for cls in modules.ALIGNED
    if cls is not modules.OutputLayer and cls not in moe.OF_EXPERTS
}
"""Megatron's class of a module -> the class that takes its place; by exact type, so that a subclass, an adapter or a
module of another backend is refused. TransformerEngine's are rows of `te.ROWS`."""

OF_EXPERTS = {modules.stock_class(cls): cls for cls in moe.OF_EXPERTS}
"""The same of modules below the experts of a MoELayer; TransformerEngine's are rows of `te.OF_EXPERTS`."""

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
"""Gathers, splits and structure: no arithmetic that rounds. They stay as they are."""

_KNOWN = frozenset({*STRUCTURE, *ALIGNED, *modules.ALIGNED})
_LAYER = modules.stock_class(modules.TransformerLayer)
_RESIDUAL_ADDS = (get_bias_dropout_add, modules.residual_add)


def aligned_class(cls: type, of_experts: bool = False) -> type | None:
    """The class that a module of class `cls` gets, or has got; None for others. of_experts: the module is below a
    MoELayer's experts."""
    stock = modules.stock_class(cls)
    if of_experts:
        return OF_EXPERTS.get(stock) or te.aligned_class(stock, te.OF_EXPERTS)
    if cls is modules.OutputLayer:
        return cls
    return ALIGNED.get(stock) or te.aligned_class(stock, te.ROWS)


class Models:
    """The models of this process while the patch is in force. replaced: (owner, name) -> what the patch has put there."""

    def __init__(self, vocab_size: int | None, replaced: dict[tuple[Any, str], Any]) -> None:
        self.vocab_size = vocab_size
        self.methods = Methods(_KNOWN, replaced)

    def adopt(self, model, runs: bool = False) -> dict[str, str]:
        """Checks `model` with every module and gives those that compute their aligned class. Returns what must be the
        same on every rank.

        runs: check what only matters once the model runs too: dropout in training, and the device.

        Runs before each forward: modules may have been replaced since (by LoRA, for one), or changed."""
        policy.check_config(model.config)
        supported.check_model(model)
        self.methods.check()
        rotary, device = model.rotary_pos_emb, device_of(model)
        base, scaling = supported.check_rotary(model)
        look = Look.of(model)
        if look is None or not look.holds():
            found = list(model.named_modules())
            left = {model.output_layer} if supported.left_stock(model) else set()
            ours = [(path, module) for path, module in found if module not in left]
            classes = self._check_modules(model, ours, runs)
            for module, cls in classes.items():  # nothing is changed before all is checked
                module.__class__ = cls
            if model.post_process and not left:
                model.output_layer.__class__ = modules.OutputLayer
            hooks.adopted.update(module for _, module in found)
            look = Look(model, fingerprint.modules(found), keep=runs)
        look.watch_hooks()
        hooks.watch_global_hooks()
        modules.rotations[rotary] = modules.Rotations(base, supported.rotary_dim(model), device, scaling)
        if runs:
            vocab_size = self.vocabulary_of(model)
            if model.post_process and isinstance(model.output_layer, modules.OutputLayer):
                modules.vocabulary[model.output_layer] = vocab_size
        return fingerprint.settings(model) | {"rope_scaling": repr(scaling)} | fingerprint.stage(model) | look.facts

    def vocabulary_of(self, model) -> int:
        """The size of a model's vocabulary: its own, by `set_vocab_size`, or the patch's. Raises InputError if there is
        none, or one that the model cannot have."""
        own = vars(model).get(modules.VOCAB_SIZE, self.vocab_size)
        if own is None:
            raise InputError("vocab_size: patch_megatron was given none, and set_vocab_size none for this model")
        if own > model.vocab_size:
            raise InputError(f"vocab_size: {own} is not in [1, {model.vocab_size}], the padded size")
        return own

    def _check_modules(self, model, found: list[tuple[str, torch.nn.Module]], runs: bool) -> dict:
        """The class that each of the modules gets, of those that compute."""
        devices = set() if runs else None
        classes, leaf = {}, None
        mixture = experts = None  # the MoELayer that modules are below, and its experts
        for path, module in found:
            cls = type(module)
            if leaf is not None and path.startswith(leaf):
                if any(p is not None for p in module._parameters.values()):
                    raise UnsupportedError(f"{path}: its parameters would not be used")
                continue
            below_experts = experts is not None and path.startswith(experts)
            aligned = aligned_class(cls, below_experts)
            if aligned is None and cls not in STRUCTURE:
                raise UnsupportedError(f"{path or 'model'}: {cls.__module__}.{cls.__qualname__} is not supported")
            if (name := self.methods.shadowed(module, aligned or cls)) is not None:
                raise UnsupportedError(f"{path or 'model'}.{name}: the module's own method has been replaced")
            in_mixture = mixture is not None and path.startswith(mixture)
            supported.check_module(path, module, model.config, devices, in_mixture)
            if issubclass(cls, _LAYER):
                supported.check_layer(path, module, _RESIDUAL_ADDS)
            elif aligned is moe.MoELayer:
                supported.check_mixture(path, module, runs)
                mixture, experts = f"{path}.", f"{path}.experts."
            if aligned is not None:
                classes[module] = aligned
                if issubclass(aligned, te.Replacement):
                    supported.check_te(path, module, aligned)
                    leaf = f"{path}." if aligned.leaf else leaf
        self.methods.watch(classes.values())
        return classes

    def release(self) -> None:
        """Every module as it was."""
        hooks.unwatch_hooks()
        for module in list(hooks.adopted):
            if type(module) in modules.STOCK:
                module.__class__ = modules.stock_class(type(module))
            vars(module).pop(LOOK, None)
        for kept in (hooks.adopted, modules.vocabulary, modules.rotations, modules.begun):
            kept.clear()


def report(model: torch.nn.Module) -> dict[str, Any]:
    """Which modules of `model` are aligned, path -> op, which are stock but would be replaced, and which are left stock,
    path -> why. `model` may be a wrapper of the model."""
    found: dict[str, Any] = {path: type(m) for path, m in model.named_modules()}
    heads = {f"{path}.output_layer".lstrip("."): m for path, m in model.named_modules() if isinstance(m, MODELS)}
    return {
        "aligned": {path: cls.op for path, cls in found.items() if cls in modules.STOCK},
        "stock": [path for path, cls in found.items() if cls not in modules.STOCK and aligned_class(cls) is not None],
        "left": {path: why for path, m in heads.items() if (why := supported.left_stock(m)) is not None},
    }
