"""The random-weight models that whole engines are measured with, and their prompts."""

from __future__ import annotations

import torch

SIZES = {
    "large": {
        "hidden": 1024,
        "layers": 8,
        "heads": 16,
        "kv_heads": 8,
        "head_dim": 128,
        "intermediate": 3072,
        "vocab": 151936,
    },
    "qwen3-8b": {
        "hidden": 4096,
        "layers": 36,
        "heads": 32,
        "kv_heads": 8,
        "head_dim": 128,
        "intermediate": 12288,
        "vocab": 151936,
    },
    "small": {
        "hidden": 256,
        "layers": 2,
        "heads": 4,
        "kv_heads": 4,
        "head_dim": 64,
        "intermediate": 512,
        "vocab": 2000,
    },
}

_A3B = {
    "arch": "qwen3_moe",
    "hidden": 2048,
    "layers": 48,
    "heads": 32,
    "kv_heads": 4,
    "head_dim": 128,
    "intermediate": 768,
    "experts": 128,
    "top_k": 8,
    "vocab": 151936,
}
MIXTURES = {
    "qwen3-30b-a3b": _A3B,
    "qwen3-30b-a3b-8-layers": _A3B | {"layers": 8},
    "small-moe": SIZES["small"] | {"arch": "qwen3_moe", "intermediate": 128, "experts": 16, "top_k": 4},
}
"""Sizes of mixtures of experts, of which `intermediate` is the width of each."""


def draw_lengths(count: int, longest: int) -> tuple[int, ...]:
    """Lengths of `count` prompts, from 5 to `longest` tokens, both of which occur; of one prompt `longest`."""
    if count == 1:
        return (longest,)
    drawn = torch.randint(5, longest + 1, (count - 2,), generator=torch.Generator().manual_seed(0))
    return 5, longest, *drawn.tolist()
