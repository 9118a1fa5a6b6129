"""Taking models over: which modules may be in one, which class each gets, and its own class back. No numerics."""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.fusions.fused_softmax import FusedScaleMaskSoftmax
from megatron.core.models.common.embeddings.language_model_embedding import LanguageModelEmbedding
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.tensor_parallel.layers import VocabParallelEmbedding
from megatron.core.transformer.attention import SelfAttention
from megatron.core.transformer.identity_op import IdentityFuncOp, IdentityOp

from alignkit.errors import UnsupportedError

from . import fingerprint, hooks, modules, policy, supported
from .look import LOOK, Look, device_of
from .methods import Methods

ALIGNED = {modules.stock_class(cls): cls for cls in modules.ALIGNED if cls is not modules.OutputLayer}
"""Megatron's class of a module -> the class that takes its place; by exact type, so that a subclass, an adapter or a
module of another backend is refused."""

STRUCTURE = frozenset(
    {
        GPTModel,
        LanguageModelEmbedding,
        VocabParallelEmbedding,
        SelfAttention,
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


class Models:
    """The models of this process while the patch is in force. replaced: (owner, name) -> what the patch has put there."""

    def __init__(self, vocab_size: int, replaced: dict[tuple[Any, str], Any]) -> None:
        self.vocab_size = vocab_size
        self.methods = Methods(_KNOWN, replaced)

    def adopt(self, model, runs: bool = False) -> dict[str, str]:
        """Checks `model` with every module and gives those that compute their aligned class. Returns what must be the
        same on every rank.

        runs: check what only matters once the model runs too: dropout in training, and the device.

        Runs before each forward: modules may have been replaced since (by LoRA, for one), or changed."""
        policy.check_config(model.config)
        supported.check_model(model, self.vocab_size)
        self.methods.check()
        rotary, device = model.rotary_pos_emb, device_of(model)
        supported.check_rotary(rotary, model.rotary_base, model.config.kv_channels)
        look = Look.of(model)
        if look is None or not look.holds():
            found = list(model.named_modules())
            self._check_modules(model, found, runs)
            for _, module in found:  # nothing is changed before all is checked
                if type(module) in ALIGNED:
                    module.__class__ = ALIGNED[type(module)]
            if model.post_process:
                model.output_layer.__class__ = modules.OutputLayer
            hooks.adopted.update(module for _, module in found)
            look = Look(model, fingerprint.modules(found), keep=runs)
        look.watch_hooks()
        hooks.watch_global_hooks()
        modules.rotations[rotary] = modules.Rotations(float(model.rotary_base), model.config.kv_channels, device)
        if model.post_process:
            modules.vocabulary[model.output_layer] = self.vocab_size
        return fingerprint.settings(model) | fingerprint.stage(model) | look.facts

    def _check_modules(self, model, found: list[tuple[str, torch.nn.Module]], runs: bool) -> None:
        devices = set() if runs else None
        for path, module in found:
            cls = type(module)
            if cls not in _KNOWN:
                raise UnsupportedError(f"{path or 'model'}: {cls.__module__}.{cls.__qualname__} is not supported")
            if (name := self.methods.shadowed(module)) is not None:
                raise UnsupportedError(f"{path or 'model'}.{name}: the module's own method has been replaced")
            supported.check_module(path, module, model.config, devices)
            if modules.stock_class(cls) is _LAYER:
                supported.check_layer(path, module, _RESIDUAL_ADDS)

    def release(self) -> None:
        """Every module as it was."""
        hooks.unwatch_hooks()
        for module in list(hooks.adopted):
            if type(module) in modules.ALIGNED:
                module.__class__ = modules.stock_class(type(module))
            vars(module).pop(LOOK, None)
        for kept in (hooks.adopted, modules.vocabulary, modules.rotations, modules.begun):
            kept.clear()


def report(model: torch.nn.Module) -> dict[str, Any]:
    """Which modules of `model` are aligned, path -> op, and which are stock but would be replaced."""
    return {
        "aligned": {path: cls.op for path, m in model.named_modules() if (cls := type(m)) in modules.ALIGNED},
        "stock": [path for path, m in model.named_modules() if type(m) in ALIGNED],
    }
