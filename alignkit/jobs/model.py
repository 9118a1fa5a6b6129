"""Random-weight HF checkpoints with realistic numerics that are small enough for a CPU.

Equal arguments give equal weights. Stored benchmark results were measured with these weights. Other defaults, or
another order of the tensors, give other weights; new results are then not comparable with stored ones.
"""

from __future__ import annotations

import json
import os
from collections.abc import Collection, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from ..errors import InputError
from ..models import FAMILIES
from ..models.config import read_architecture

_DTYPES = {torch.bfloat16: "bfloat16", torch.float32: "float32"}
MAX_POSITION = 4096
"""Default of `max_position`; the drivers of check and bisect limit sequences by it before they write a model."""
HEADS, KV_HEADS = 8, 4
"""Defaults of `heads` and `kv_heads`.

`check.run` writes at least --tp KV heads. The help of `check --training` and docs/drift.md state the 4.
"""
_ROPE_BASE = 10000.0
_NORM_EPS = 1e-6


def make_checkpoint(
    path: str | os.PathLike,
    arch: str = "qwen3",
    dtype: torch.dtype = torch.bfloat16,
    tied: bool = False,
    seed: int = 0,
    hidden: int = 512,
    layers: int = 4,
    heads: int = HEADS,
    kv_heads: int = KV_HEADS,
    head_dim: int = 64,
    intermediate: int | None = None,
    vocab: int = 2000,
    max_position: int = MAX_POSITION,
    std: float = 0.05,
    logit_std: float = 2.5,
    weights: bool = True,
    rope_scaling: Mapping[str, Any] | None = None,
    experts: int = 16,
    top_k: int = 4,
    normalize_top_k: bool | None = None,
    shared_intermediate: int = 512,
    dense_layers: Collection[int] | None = None,
    dense_intermediate: int = 1024,
    groups: int = 1,
    top_groups: int = 1,
    routed_scale: float = 1.5,
    options: Collection[str] | None = None,
    rotary_factor: float | None = None,
    mtp_layers: int = 1,
) -> Path:
    """Write `config.json`, `generation_config.json` and `model.safetensors` into the directory `path`.

    No tokenizer is written; prompts are token ids.

    Args:
        path: Directory to write, created if missing.
        arch: Family of `alignkit.models`: ``"qwen3"`` (q/k norm), ``"qwen2"`` (q/k/v bias), ``"llama"``,
            ``"qwen3_moe"`` (experts), ``"qwen2_moe"`` (experts and a shared expert), ...
        dtype: ``torch.bfloat16`` or ``torch.float32``. Equal seeds give equal values, rounded to dtype.
        tied: Tie the output layer to the embedding.
        seed: Seed of the weights.
        hidden: Hidden size.
        layers: Number of layers.
        heads: Number of query heads.
        kv_heads: Number of KV heads; must divide `heads`.
        head_dim: Size of a head.
        intermediate: Width of an MLP, or of each expert. None: 1536, or 256 with experts.
        vocab: Vocabulary size.
        max_position: Maximum sequence length, prompt and generated tokens together.
        std: Standard deviation of the weights of the transformer layers.
        logit_std: Approximate standard deviation of a position's logits. The default gives a realistic softmax: the
            next token's entropy is well below log(vocab), and no token has all of the probability.
        weights: False omits `model.safetensors`, for engines that use dummy weights.
        rope_scaling: Value of `rope_scaling` in config.json.
        experts: Number of experts (families with experts).
        top_k: Number of experts per token.
        normalize_top_k: Normalize the weights of the selected experts. None: as in the published models.
        shared_intermediate: Width of the shared expert, in families that have one.
        dense_layers: Indices of layers with an MLP instead of experts. None: layer 0 in a family whose first layers
            are dense, if there are several layers; otherwise none.
        dense_intermediate: Width of the MLP in dense layers.
        groups: Number of expert groups, as in `Architecture`.
        top_groups: Number of groups from which a token's experts are selected.
        routed_scale: Factor of the routed experts' output, as in `Architecture`.
        options: Optional features of the family to enable. None: all.
        rotary_factor: Fraction of a head that is rotated. None: the family's.
        mtp_layers: Number of multi-token prediction layers in config.json; their weights are not written.

    Returns:
        The directory.

    Raises:
        InputError: An argument is invalid. Names the argument.
    """
    if arch not in FAMILIES:
        raise InputError(f"arch: expected one of {', '.join(FAMILIES)}, got {arch!r}")
    if dtype not in _DTYPES:
        raise InputError(f"dtype: expected torch.bfloat16 or torch.float32, got {dtype}")
    if heads % kv_heads:
        raise InputError(f"heads: must be a multiple of kv_heads = {kv_heads}, got {heads}")
    if FAMILIES[arch].heads_fill_hidden and heads * head_dim != hidden:
        raise InputError(
            f"head_dim: heads * head_dim must equal hidden = {hidden} for {arch}, got {heads} * {head_dim} = "
            f"{heads * head_dim}"
        )

    family = FAMILIES[arch]
    if family.experts and not 0 < top_k <= experts:
        raise InputError(f"top_k: must be in [1, {experts}] for {experts} experts, got {top_k}")
    if family.experts and family.experts.normalize is None and normalize_top_k is False:
        raise InputError(f"normalize_top_k: must be True or None for {arch}, which always normalizes, got False")
    dense_first = family.experts is not None and family.experts.dense == "first"
    if dense_layers is None:
        dense_layers = (0,) if dense_first and layers > 1 else ()
    if dense_layers and not (family.experts and family.experts.dense):
        raise InputError(f"dense_layers: must be None or empty for {arch}, got {sorted(dense_layers)}")
    if dense_first and sorted(dense_layers) != list(range(len(dense_layers))):
        raise InputError(f"dense_layers: must be the first layers (0, 1, ...) for {arch}, got {sorted(dense_layers)}")
    optional = [field for field, _ in family.optional]
    if unknown := set(options or ()) - set(optional):
        expected = f"may contain only {', '.join(optional)}" if optional else "must be None or empty"
        raise InputError(f"options: {expected} for {arch}, got {', '.join(sorted(unknown))}")
    if intermediate is None:
        intermediate = 256 if family.experts else 1536

    path = Path(path)
    path.mkdir(parents=True, exist_ok=True)
    config = {
        "architectures": [family.architecture],
        "model_type": arch,
        "vocab_size": vocab,
        "hidden_size": hidden,
        family.intermediate: intermediate,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": max_position,
        "rms_norm_eps": _NORM_EPS,
        "rope_theta": _ROPE_BASE,
        "rope_scaling": None if rope_scaling is None else dict(rope_scaling),
        "attention_bias": False,
        "attention_dropout": 0.0,
        "tie_word_embeddings": tied,
        "use_cache": True,
        # No EOS token: a request samples exactly max_tokens tokens.
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": None,
        "torch_dtype": _DTYPES[dtype],
    }
    if family.experts:
        config |= {family.experts.count[0]: experts, family.experts.top_k: top_k}
        if family.experts.normalize:
            config[family.experts.normalize] = (
                family.experts.normalize_published if normalize_top_k is None else normalize_top_k
            )
        if family.experts.shared:
            config[family.experts.shared] = 2 if family.experts.shared_counts else shared_intermediate
        if dense_layers:
            config |= {"intermediate_size": dense_intermediate}
            config |= {"mlp_only_layers": sorted(dense_layers)} if family.experts.dense == "steps" else {}
        if dense_first:
            config["first_k_dense_replace"] = len(dense_layers)
        if family.experts.groups:
            config |= dict(zip(family.experts.groups, (groups, top_groups), strict=True))
        if family.experts.scale:
            config[family.experts.scale] = routed_scale
    config |= {field: options is None or field in options for field, _ in family.optional}
    if family.rotary_factor:
        config["partial_rotary_factor"] = rotary_factor or family.rotary_factor
    if family.mtp:
        config[family.mtp] = mtp_layers
    if family.sliding_window == "must be null":
        config["sliding_window"] = None
    _write_json(path / "config.json", config)
    _write_json(path / "generation_config.json", {"do_sample": True})
    if not weights:
        return path

    # The last hidden state has unit variance after its norm, so a logit is a sum of `hidden` terms.
    head_scale = logit_std / hidden**0.5

    def random_weight(index: int, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        generator = torch.Generator().manual_seed(
            seed << 20 | index
        )  # one per tensor: tensors are generated in parallel

        def normal(scale: float, mean: float = 0.0) -> torch.Tensor:
            return (torch.randn(shape, generator=generator, device="cpu") * scale + mean).to(dtype)

        if name == "lm_head.weight" or (tied and name == "model.embed_tokens.weight"):
            return normal(head_scale)
        if name.endswith("_bias"):  # the router's selection bias is fp32 in every checkpoint
            return torch.randn(shape, generator=generator, device="cpu") * 0.05
        if name.endswith(".bias"):
            return normal(0.5)
        if len(shape) == 1:  # norm weights are not all ones, so that a dropped weight is detected
            return normal(0.1, mean=1.0)
        return normal(std)

    shapes = {name: shape for _, tensors, _ in read_architecture(path).weights() for name, shape in tensors.items()}
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        tensors = dict(zip(shapes, pool.map(random_weight, range(len(shapes)), shapes, shapes.values()), strict=True))
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    return path


def _write_json(path: Path, value: object) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n")
