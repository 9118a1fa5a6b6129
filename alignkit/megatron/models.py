"""The models that are aligned, by class, as far as the installed Megatron-core has them. No numerics."""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.models.gpt.gpt_model import GPTModel

hybrid_block: Any
hybrid_model: Any
try:
    from megatron.core.models.hybrid import hybrid_block, hybrid_model
except ModuleNotFoundError:  # before 0.18
    hybrid_block = hybrid_model = None

MODELS: tuple[type, ...] = (GPTModel,) if hybrid_model is None else (GPTModel, hybrid_model.HybridModel)
NAMES = ", ".join(cls.__name__ for cls in MODELS)

LAYERS = {"*": "attention", "-": "dense MLP"}
"""What a layer of a HybridModel may be, by its letter in the pattern."""
_OTHERS = {
    "M": "Mamba",
    "G": "gated delta net",
    "D": "sparse attention (DSA)",
    "+": "multi-latent attention (MLA)",
    "E": "mixture of experts (MoE)",
    "/": "multi-token prediction (MTP)",
}


def pattern(model: torch.nn.Module) -> str | None:
    """The layers of a HybridModel, a letter each, and the borders of its stages; of a GPTModel None."""
    return vars(model).get("hybrid_layer_pattern")


def refused_layers(pattern: str | None) -> str | None:
    """Why a HybridModel of this pattern is refused, if it is."""
    other = next((letter for letter in pattern or "" if letter not in LAYERS and letter != "|"), None)
    if other is None:
        return None
    runs = " and ".join(f"{letter} ({what})" for letter, what in LAYERS.items())
    return f"hybrid_layer_pattern: {other} ({_OTHERS.get(other, 'unknown')}) is not supported, only {runs}"


def depth(model: Any) -> int:
    """How many layers a model has, in all its stages."""
    letters = pattern(model)
    return model.config.num_layers if letters is None else len(letters.replace("|", ""))
