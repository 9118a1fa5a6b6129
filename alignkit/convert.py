"""HF safetensors weights (dense Qwen2, Qwen3, Llama) to Megatron-core's GPTModel layout, and back.

Pure tensor bookkeeping: neither engine is imported and no number is changed, except by an explicit dtype.

Megatron's layout, per tensor-parallel rank:

- ``linear_qkv`` rows go by KV group: the queries of group 0, its key, its value, then group 1, ...
  A rank owns whole groups.
- ``linear_fc1`` rows are ``[gate | up]`` of the rank's slice of the intermediate size.
- ``linear_proj`` and ``linear_fc2`` are cut along their columns.
- The vocabulary is padded with zero rows to a multiple of ``128 * tp``, then cut along its rows.
"""
from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from alignkit.errors import InputError, UnsupportedError

VOCAB_MULTIPLE = 128
_FAMILIES = {"Qwen2ForCausalLM": "qwen2", "Qwen3ForCausalLM": "qwen3", "LlamaForCausalLM": "llama"}
_MUST_BE_OFF = ("attention_bias", "mlp_bias", "use_sliding_window", "quantization_config", "num_experts",
                "num_local_experts", "clip_qkv", "use_qk_norm", "layer_norm_elementwise_affine")
_EMBEDDING, _HEAD = "embedding.word_embeddings.weight", "output_layer.weight"


@dataclass(frozen=True)
class Architecture:
    """What a dense HF checkpoint is made of. Sizes are in elements; `vocab` is the true vocabulary size."""

    family: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocab: int
    max_position: int
    norm_eps: float
    rope_base: float
    tied: bool

    @property
    def qk_norm(self) -> bool:
        return self.family == "qwen3"

    @property
    def qkv_bias(self) -> bool:
        return self.family == "qwen2"

    def padded_vocab(self, tp: int) -> int:
        """Rows of the whole embedding in Megatron: the next multiple of ``128 * tp``."""
        step = VOCAB_MULTIPLE * tp
        return -(-self.vocab // step) * step

    def check_tp(self, tp: int) -> None:
        """UnsupportedError unless every rank of `tp` gets the same whole number of heads and columns."""
        for name, size in (("num_key_value_heads", self.kv_heads), ("num_attention_heads", self.heads),
                           ("intermediate_size", self.intermediate)):
            if tp < 1 or size % tp:
                raise UnsupportedError(f"tp: {tp} ranks do not divide {name} = {size}")


def read_architecture(model_dir: str | os.PathLike) -> Architecture:
    """Reads ``config.json`` of an HF model directory.

    Raises InputError for a missing or broken file, UnsupportedError naming the first field that is not
    a dense Qwen2, Qwen3 or Llama with default rotary embeddings.
    """
    path = Path(model_dir) / "config.json"
    try:
        config = json.loads(path.read_text())
    except (OSError, ValueError) as e:
        raise InputError(f"model: cannot read {path}: {e}") from e
    if not isinstance(config, dict):
        raise InputError(f"model: {path} is not a JSON object")

    names = config.get("architectures") or [None]
    if len(names) != 1 or names[0] not in _FAMILIES:
        raise UnsupportedError(f"architectures: {names} is not one of {', '.join(_FAMILIES)}")
    for field in _MUST_BE_OFF:
        if config.get(field):
            raise UnsupportedError(f"{field}: {config[field]!r} is not supported for {names[0]}")
    if config.get("hidden_act", "silu") != "silu":
        raise UnsupportedError(f"hidden_act: {config['hidden_act']!r} is not supported, only 'silu'")
    if config.get("partial_rotary_factor", 1.0) != 1.0:
        raise UnsupportedError(f"partial_rotary_factor: {config['partial_rotary_factor']} is not 1")
    if config.get("pretraining_tp", 1) != 1:
        raise UnsupportedError(f"pretraining_tp: {config['pretraining_tp']} is not 1")
    kinds = set(config.get("layer_types") or ()) - {"full_attention"}
    if kinds:
        raise UnsupportedError(f"layer_types: {', '.join(sorted(kinds))} is not supported")

    try:
        heads = config["num_attention_heads"]
        arch = Architecture(
            family=_FAMILIES[names[0]],
            layers=config["num_hidden_layers"],
            hidden=config["hidden_size"],
            heads=heads,
            kv_heads=config.get("num_key_value_heads") or heads,
            head_dim=config.get("head_dim") or config["hidden_size"] // heads,
            intermediate=config["intermediate_size"],
            vocab=config["vocab_size"],
            max_position=config["max_position_embeddings"],
            norm_eps=config["rms_norm_eps"],
            rope_base=_rope_base(config),
            tied=bool(config.get("tie_word_embeddings", False)),
        )
    except KeyError as e:
        raise InputError(f"model: {path} has no field {e.args[0]!r}") from e
    if arch.heads % arch.kv_heads:
        raise InputError(f"num_key_value_heads: {arch.kv_heads} does not divide {arch.heads} heads")
    return arch


def _rope_base(config: Mapping) -> float:
    """The rotary base; newer configs keep it in `rope_parameters`, older ones beside `rope_scaling`."""
    base = config.get("rope_theta", 10000.0)
    for field in ("rope_scaling", "rope_parameters"):
        rope = config.get(field) or {}
        kind = rope.get("rope_type", rope.get("type", "default"))
        if kind != "default":
            raise UnsupportedError(f"{field}: rope type {kind!r} is not supported, only the default")
        if rope.get("partial_rotary_factor", 1.0) != 1.0:
            raise UnsupportedError(f"{field}: partial_rotary_factor {rope['partial_rotary_factor']} is not 1")
        base = rope.get("rope_theta", base)
    return float(base)


class Checkpoint(Mapping):
    """The tensors of an HF directory by name, read on demand: one file, or several with an index."""

    def __init__(self, model_dir: str | os.PathLike):
        """Raises InputError naming a missing or unreadable file."""
        root = Path(model_dir)
        index = root / "model.safetensors.index.json"
        try:
            if index.exists():
                files = sorted(set(json.loads(index.read_text())["weight_map"].values()))
            else:
                files = ["model.safetensors"]
            self._files = [safe_open(root / name, framework="pt") for name in files]
        except (OSError, ValueError, KeyError, SafetensorError) as e:
            raise InputError(f"model: cannot read the weights in {root}: {e}") from e
        self._where = {name: f for f in self._files for name in f.keys()}

    def __getitem__(self, name: str) -> torch.Tensor:
        return self._where[name].get_tensor(name)

    def __iter__(self) -> Iterator[str]:
        return iter(self._where)

    def __len__(self) -> int:
        return len(self._where)


def to_megatron(arch: Architecture, weights: Mapping[str, torch.Tensor], *, tp_rank: int = 0,
                tp_size: int = 1, dtype: torch.dtype | None = None) -> dict[str, torch.Tensor]:
    """One rank's GPTModel state dict.

    weights: HF names to whole tensors, for instance a `Checkpoint`.
    dtype: type of the result; None keeps each tensor's own.
    Raises UnsupportedError if `tp_size` does not divide the heads or if the checkpoint holds tensors of
    something else, InputError for a missing tensor or one of another shape; before anything is returned.
    """
    arch.check_tp(tp_size)
    if not 0 <= tp_rank < tp_size:
        raise InputError(f"tp_rank: {tp_rank} is not in [0, {tp_size})")
    shapes = _hf_shapes(arch)
    foreign = sorted(n for n in weights if n not in shapes and not _ignored(arch, n))
    if foreign:
        raise UnsupportedError(f"model: {len(foreign)} tensors are not {arch.family}'s, first {foreign[0]!r}")
    for name in shapes:
        if name not in weights:
            raise InputError(f"model: the checkpoint has no tensor {name!r}")

    def get(name: str) -> torch.Tensor:
        tensor = weights[name]
        if tuple(tensor.shape) != shapes[name]:
            raise InputError(f"model: {name} has shape {tuple(tensor.shape)}, not {shapes[name]}")
        return tensor

    def take(tensor: torch.Tensor, dim: int = 0) -> torch.Tensor:
        return tensor.chunk(tp_size, dim)[tp_rank].contiguous().to(dtype or tensor.dtype)

    def vocab(name: str) -> torch.Tensor:
        tensor = get(name)
        padding = tensor.new_zeros(arch.padded_vocab(tp_size) - arch.vocab, arch.hidden)
        return take(torch.cat([tensor, padding]))

    state = {_EMBEDDING: vocab("model.embed_tokens.weight")}
    for i in range(arch.layers):
        hf, mg = f"model.layers.{i}.", f"decoder.layers.{i}."
        for suffix in ("weight", "bias") if arch.qkv_bias else ("weight",):
            qkv = (get(f"{hf}self_attn.{x}_proj.{suffix}") for x in "qkv")
            state[f"{mg}self_attention.linear_qkv.{suffix}"] = take(merge_qkv(arch, *qkv))
        state[mg + "self_attention.linear_proj.weight"] = take(get(hf + "self_attn.o_proj.weight"), 1)
        gate, up = (take(get(f"{hf}mlp.{x}_proj.weight")) for x in ("gate", "up"))
        state[mg + "mlp.linear_fc1.weight"] = torch.cat([gate, up])
        state[mg + "mlp.linear_fc2.weight"] = take(get(hf + "mlp.down_proj.weight"), 1)
        for ours, theirs in _replicated(arch, i):
            tensor = get(theirs)
            state[ours] = tensor.to(dtype or tensor.dtype)
    norm = get("model.norm.weight")
    state["decoder.final_layernorm.weight"] = norm.to(dtype or norm.dtype)
    if not arch.tied:
        state[_HEAD] = vocab("lm_head.weight")
    return state


def to_hf(arch: Architecture, names: Iterable[str],
          shards: Callable[[str], list[torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
    """Whole HF tensors, one at a time, from Megatron's shards: the inverse of `to_megatron`.

    names: the Megatron names to convert, the same in the same order on every rank.
    shards: gives the tensors of all tensor-parallel ranks for a name; called once a name.
    Raises UnsupportedError for a name that `to_megatron` does not make.
    """
    replicated = {ours: theirs for i in range(arch.layers) for ours, theirs in _replicated(arch, i)}
    replicated["decoder.final_layernorm.weight"] = "model.norm.weight"
    vocab = {_EMBEDDING: "model.embed_tokens.weight", _HEAD: "lm_head.weight"}
    for name in names:
        parts = shards(name)
        if name in replicated:
            yield replicated[name], parts[0]
        elif name in vocab:
            yield vocab[name], torch.cat(parts)[: arch.vocab]
        else:
            yield from _layer_to_hf(arch, name, parts)


def _layer_to_hf(arch: Architecture, name: str,
                 parts: list[torch.Tensor]) -> Iterator[tuple[str, torch.Tensor]]:
    prefix, _, rest = name.removeprefix("decoder.layers.").partition(".")
    hf = f"model.layers.{prefix}."
    if rest in ("self_attention.linear_qkv.weight", "self_attention.linear_qkv.bias"):
        suffix = rest.rpartition(".")[2]
        for x, tensor in zip("qkv", split_qkv(arch, torch.cat(parts))):
            yield f"{hf}self_attn.{x}_proj.{suffix}", tensor
    elif rest == "self_attention.linear_proj.weight":
        yield hf + "self_attn.o_proj.weight", torch.cat(parts, 1)
    elif rest == "mlp.linear_fc2.weight":
        yield hf + "mlp.down_proj.weight", torch.cat(parts, 1)
    elif rest == "mlp.linear_fc1.weight":
        gates, ups = zip(*(part.chunk(2) for part in parts))
        yield hf + "mlp.gate_proj.weight", torch.cat(gates)
        yield hf + "mlp.up_proj.weight", torch.cat(ups)
    else:
        raise UnsupportedError(f"model: {name!r} is not a weight of a dense {arch.family}")


def merge_qkv(arch: Architecture, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """q ``[heads * D, ...]``, k and v ``[kv_heads * D, ...]`` (weights or biases) to rows by KV group."""
    groups = [x.unflatten(0, (arch.kv_heads, -1)) for x in (q, k, v)]
    return torch.cat(groups, 1).flatten(0, 1)


def split_qkv(arch: Architecture, qkv: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The inverse of `merge_qkv`."""
    width = arch.head_dim * arch.heads // arch.kv_heads
    parts = qkv.unflatten(0, (arch.kv_heads, -1)).split([width, arch.head_dim, arch.head_dim], 1)
    return tuple(x.flatten(0, 1).contiguous() for x in parts)


def _replicated(arch: Architecture, i: int) -> list[tuple[str, str]]:
    """(Megatron, HF) names of the layer's weights that every rank holds whole."""
    hf, mg = f"model.layers.{i}.", f"decoder.layers.{i}."
    names = [(mg + "input_layernorm.weight", hf + "input_layernorm.weight"),
             (mg + "pre_mlp_layernorm.weight", hf + "post_attention_layernorm.weight")]
    if arch.qk_norm:
        names += [(f"{mg}self_attention.{x}_layernorm.weight", f"{hf}self_attn.{x}_norm.weight")
                  for x in "qk"]
    return names


def _hf_shapes(arch: Architecture) -> dict[str, tuple[int, ...]]:
    """Every tensor of the architecture's HF checkpoint."""
    q, kv = arch.heads * arch.head_dim, arch.kv_heads * arch.head_dim
    shapes = {"model.embed_tokens.weight": (arch.vocab, arch.hidden), "model.norm.weight": (arch.hidden,)}
    if not arch.tied:
        shapes["lm_head.weight"] = (arch.vocab, arch.hidden)
    for i in range(arch.layers):
        hf = f"model.layers.{i}."
        for x, width in (("q", q), ("k", kv), ("v", kv)):
            shapes[f"{hf}self_attn.{x}_proj.weight"] = (width, arch.hidden)
            if arch.qkv_bias:
                shapes[f"{hf}self_attn.{x}_proj.bias"] = (width,)
        shapes[hf + "self_attn.o_proj.weight"] = (arch.hidden, q)
        for x in ("gate", "up"):
            shapes[f"{hf}mlp.{x}_proj.weight"] = (arch.intermediate, arch.hidden)
        shapes[hf + "mlp.down_proj.weight"] = (arch.hidden, arch.intermediate)
        for _, theirs in _replicated(arch, i):
            shapes[theirs] = (arch.head_dim if "self_attn" in theirs else arch.hidden,)
    return shapes


def _ignored(arch: Architecture, name: str) -> bool:
    """Tensors some checkpoints carry beside the weights: rotary tables, and a copy of a tied head."""
    return name.endswith("rotary_emb.inv_freq") or (arch.tied and name == "lm_head.weight")
