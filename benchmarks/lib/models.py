"""Random-weight models and prompts for whole-engine benchmarks, and the layer shapes of published models.

The names of sizes are values of --size and are stored in result files; so are the names in `DENSE`, in ``case``. Stored
rows are comparable only with equal sizes: a changed size needs a new name. A change of `DENSE` or of its order changes
the GEMMs that `matmul.py --draw SEED` draws, and a change of `random_lengths` the lengths of a seed.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from alignkit.contract import k_leaves

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
    "qwen3-0.6b": {
        "hidden": 1024,
        "layers": 28,
        "heads": 16,
        "kv_heads": 8,
        "head_dim": 128,
        "intermediate": 3072,
        "vocab": 151936,
        "max_position": 40960,
        "tied": True,
    },
    "qwen3-8b": {
        "hidden": 4096,
        "layers": 36,
        "heads": 32,
        "kv_heads": 8,
        "head_dim": 128,
        "intermediate": 12288,
        "vocab": 151936,
        "max_position": 40960,
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
SIZES["qwen3-8b-8-layers"] = SIZES["qwen3-8b"] | {"layers": 8}

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
    "max_position": 40960,
}
MOE_SIZES = {
    "qwen3-30b-a3b": _A3B,
    "qwen3-30b-a3b-8-layers": _A3B | {"layers": 8},
    "small-moe": SIZES["small"] | {"arch": "qwen3_moe", "intermediate": 128, "experts": 16, "top_k": 4},
}
"""Sizes of MoE models; `intermediate` is the width of one expert."""


def model_bytes(size: dict, positions: int) -> int:
    """Return the bytes of a model's bf16 weights and of a bf16 KV cache with this many positions."""
    attention, kv = size["heads"] * size["head_dim"], size["kv_heads"] * size["head_dim"]
    experts = 3 * size["hidden"] * size["intermediate"] * size.get("experts", 1)
    layer = 2 * size["hidden"] * (attention + kv) + experts
    return 2 * (size["layers"] * (layer + 2 * kv * positions) + 2 * size["hidden"] * size["vocab"])


class Layer(NamedTuple):
    """One tensor-parallel rank's part of a linear layer: weight [n, k], and the leaves of its k."""

    n: int
    k: int
    leaves: int = 1
    bias: bool = False


class Dense(NamedTuple):
    """The layer shapes of a published dense model."""

    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    qkv_bias: bool = False

    def shares(self, ranks: int) -> bool:
        """Return whether the model can be sharded over this many tensor-parallel ranks."""
        row_parallel = self.heads * self.head_dim, self.intermediate
        return all(
            size % ranks == 0 for size in (self.heads, self.kv_heads, self.intermediate, *map(k_leaves, row_parallel))
        )

    def layers(self, ranks: int) -> dict[str, Layer]:
        """Return the linear layers of a decoder layer, sharded over `ranks` tensor-parallel ranks."""
        attention, kv = self.heads * self.head_dim, self.kv_heads * self.head_dim
        return {
            "qkv": Layer((attention + 2 * kv) // ranks, self.hidden, bias=self.qkv_bias),
            "o": Layer(self.hidden, attention // ranks, k_leaves(attention) // ranks),
            "gate_up": Layer(2 * self.intermediate // ranks, self.hidden),
            "down": Layer(self.hidden, self.intermediate // ranks, k_leaves(self.intermediate) // ranks),
        }


DENSE = {
    "qwen2.5-0.5b": Dense(896, 14, 2, 64, 4864, True),
    "qwen2.5-1.5b": Dense(1536, 12, 2, 128, 8960, True),
    "qwen2.5-3b": Dense(2048, 16, 2, 128, 11008, True),
    "qwen2.5-7b": Dense(3584, 28, 4, 128, 18944, True),
    "qwen2.5-14b": Dense(5120, 40, 8, 128, 13824, True),
    "qwen2.5-32b": Dense(5120, 40, 8, 128, 27648, True),
    "qwen2.5-72b": Dense(8192, 64, 8, 128, 29568, True),
    "qwen3-0.6b": Dense(1024, 16, 8, 128, 3072),
    "qwen3-1.7b": Dense(2048, 16, 8, 128, 6144),
    "qwen3-4b": Dense(2560, 32, 8, 128, 9728),
    "qwen3-8b": Dense(4096, 32, 8, 128, 12288),
    "qwen3-14b": Dense(5120, 40, 8, 128, 17408),
    "qwen3-32b": Dense(5120, 64, 8, 128, 25600),
    "llama2-7b": Dense(4096, 32, 32, 128, 11008),
    "llama2-13b": Dense(5120, 40, 40, 128, 13824),
    "llama2-70b": Dense(8192, 64, 8, 128, 28672),
    "llama3-1b": Dense(2048, 32, 8, 64, 8192),
    "llama3-3b": Dense(3072, 24, 8, 128, 8192),
    "llama3-8b": Dense(4096, 32, 8, 128, 14336),
    "llama3-70b": Dense(8192, 64, 8, 128, 28672),
}
"""All dense sizes of Qwen2.5, Qwen3, Llama 2 and Llama 3 up to 72B, from their config.json."""


def random_lengths(count: int, longest: int) -> tuple[int, ...]:
    """Return `count` seeded random prompt lengths, 5 and `longest` included; a single length is `longest`."""
    if count == 1:
        return (longest,)
    others = torch.randint(5, longest + 1, (count - 2,), generator=torch.Generator().manual_seed(0))
    return 5, longest, *others.tolist()
