"""Supported model classes of the installed Megatron-core, and the layers of a HybridModel's pattern. No numerics.

Checks of a model's settings are in `supported`. docs/megatron.md lists the layers, and tests/megatron/test_hybrid.py
matches the messages.
"""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.models.gpt.gpt_model import GPTModel

from alignkit.engines.hook_points import relies_on
from alignkit.errors import InputError

relies_on("models/hybrid/hybrid_block.py:HybridStackSubmodules", mentions="attention_layer mlp_layer", when="hybrid")
hybrid_block: Any
hybrid_model: Any
try:
    from megatron.core.models.hybrid import hybrid_block, hybrid_model
except ModuleNotFoundError:  # before 0.18
    hybrid_block = hybrid_model = None

MODELS: tuple[type, ...] = (GPTModel,) if hybrid_model is None else (GPTModel, hybrid_model.HybridModel)
NAMES = ", ".join(cls.__name__ for cls in MODELS)

LAYERS = {"*": "attention", "-": "dense MLP"}
"""Supported layers of a HybridModel, by their letter in the pattern."""
_UNSUPPORTED_LAYERS = {
    "M": "Mamba",
    "G": "gated delta net",
    "D": "sparse attention (DSA)",
    "+": "multi-latent attention (MLA)",
    "E": "mixture of experts (MoE)",
    "/": "multi-token prediction (MTP)",
}


def contained(model: torch.nn.Module) -> list[Any]:
    """Return the supported models in `model`, itself included. Raises InputError if there is none."""
    found = [module for module in model.modules() if isinstance(module, MODELS)]
    if not found:
        raise InputError(f"model: must be or contain one of {NAMES}, got a {type(model).__name__}")
    return found


def pattern(model: torch.nn.Module) -> str | None:
    """Return a HybridModel's pattern, one letter per layer and | between pipeline stages; None for a GPTModel."""
    return vars(model).get("hybrid_layer_pattern")


def unsupported_layers(letters: str | None) -> str | None:
    """Return the reason why a HybridModel with the pattern `letters` is not supported, or None."""
    other = next((letter for letter in letters or "" if letter not in LAYERS and letter != "|"), None)
    if other is None:
        return None
    supported = " and ".join(f"{letter} ({kind})" for letter, kind in LAYERS.items())
    return (
        f"hybrid_layer_pattern: must contain only {supported}, got {other} "
        f"({_UNSUPPORTED_LAYERS.get(other, 'unknown')})"
    )


def depth(model: Any) -> int:
    """Return the number of layers in all pipeline stages of a model."""
    letters = pattern(model)
    return model.config.num_layers if letters is None else len(letters.replace("|", ""))
