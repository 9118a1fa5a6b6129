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

import glob
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
# Fields of config.json fall into four kinds. Those that are read here:
_READ = frozenset(
    (
        "architectures",
        "model_type",
        "num_hidden_layers",
        "hidden_size",
        "num_attention_heads",
        "num_key_value_heads",
        "head_dim",
        "intermediate_size",
        "vocab_size",
        "max_position_embeddings",
        "rms_norm_eps",
        "tie_word_embeddings",
        "hidden_act",
        "layer_types",
        "sliding_window",
        "rope_theta",
        "rope_scaling",
        "rope_parameters",
    )
)
# Those that an engine computes with, and what they must be, if they are there:
_MUST_BE_OFF = frozenset(
    (
        "attention_bias",
        "bias",
        "mlp_bias",
        "qkv_bias",
        "use_sliding_window",
        "quantization_config",
        "num_experts",
        "num_local_experts",
        "clip_qkv",
        "qk_norm",
        "use_qk_norm",
        "layer_norm_elementwise_affine",
        "use_mrope",
        "dual_chunk_attention_config",
        "is_encoder_decoder",
        "add_cross_attention",
    )
)
_MUST_BE = {"partial_rotary_factor": (1, None), "pretraining_tp": (1, None), "logit_scale": (1,), "is_causal": (True,)}
# Those that change no logprob: names, versions, token ids, lengths that only limit, what sampling, training and
# classification take from a config.
_HARMLESS = frozenset(
    (
        "_name_or_path",
        "name_or_path",
        "_commit_hash",
        "auto_map",
        "transformers_version",
        "torch_dtype",
        "dtype",
        "_attn_implementation_autoset",
        "unsloth_fixed",
        "tokenizer_class",
        "torchscript",
        "use_cache",
        "bos_token_id",
        "eos_token_id",
        "pad_token_id",
        "sep_token_id",
        "cls_token_id",
        "decoder_start_token_id",
        "max_window_layers",
        "max_sequence_length",
        "max_seq_len",
        "max_seq_length",
        "model_max_length",
        "seq_length",
        "initializer_range",
        "attention_dropout",
        "hidden_dropout",
        "output_attentions",
        "output_hidden_states",
        "output_scores",
        "return_dict",
        "return_dict_in_generate",
        "chunk_size_feed_forward",
        "is_decoder",
        "cross_attention_hidden_size",
        "tie_encoder_decoder",
        "pruned_heads",
        "use_bfloat16",
        "tf_legacy_loss",
        "id2label",
        "label2id",
        "num_labels",
        "problem_type",
        "finetuning_task",
        "task_specific_params",
        "do_sample",
        "temperature",
        "top_k",
        "top_p",
        "typical_p",
        "min_length",
        "max_length",
        "max_new_tokens",
        "early_stopping",
        "num_beams",
        "num_beam_groups",
        "num_return_sequences",
        "diversity_penalty",
        "length_penalty",
        "repetition_penalty",
        "no_repeat_ngram_size",
        "encoder_no_repeat_ngram_size",
        "bad_words_ids",
        "suppress_tokens",
        "begin_suppress_tokens",
        "forced_bos_token_id",
        "forced_eos_token_id",
        "exponential_decay_length_penalty",
        "remove_invalid_values",
    )
)
# Any other is let through if it holds no number and turns nothing on (null, false, a name), else refused.
_MAY_BE_ABSENT = {"llama": ("num_key_value_heads", "head_dim"), "qwen2": ("head_dim",), "qwen3": ()}
"""Sizes that follow from others. The other defaults of transformers' classes are the sizes of some one model."""
_ROPE_FIELDS = frozenset(("rope_theta", "rope_type", "type", "partial_rotary_factor"))
_FLOATS = frozenset(("F64", "F32", "F16", "BF16"))
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
        for name, size in (
            ("num_key_value_heads", self.kv_heads),
            ("num_attention_heads", self.heads),
            ("intermediate_size", self.intermediate),
        ):
            if tp < 1 or size % tp:
                raise UnsupportedError(f"tp: {tp} ranks do not divide {name} = {size}")


def read_architecture(model_dir: str | os.PathLike) -> Architecture:
    """Reads ``config.json`` of an HF model directory.

    Raises InputError for a missing or broken file and for a field that cannot be what it says, UnsupportedError naming
    the first field that is not of a dense Qwen2, Qwen3 or Llama with default rotary embeddings, or that is not known to
    change nothing.
    """
    path = Path(model_dir) / "config.json"
    config = _read_json(path)
    names = config.get("architectures")
    if not isinstance(names, list) or len(names) != 1 or names[0] not in list(_FAMILIES):
        raise UnsupportedError(f"architectures: {names!r:.200} is not one of {', '.join(_FAMILIES)}")
    family = _FAMILIES[names[0]]
    if config.get("model_type") != family:  # it chooses the class that reads the config, with other defaults
        raise UnsupportedError(f"model_type: {config.get('model_type')!r:.200} is not {family!r}, as {names[0]} is")
    _refuse_foreign(config, family)

    config = dict.fromkeys(_MAY_BE_ABSENT[family]) | config

    def size(field: str, if_null: int | None = None) -> int:
        if field not in config:
            raise InputError(f"model: {path} has no field {field!r}")
        value = if_null if config[field] is None else config[field]
        if type(value) is not int or not 0 < value < 2**31:
            raise InputError(f"{field}: {config[field]!r:.200} in {path} is not a positive integer")
        return value

    hidden, heads = size("hidden_size"), size("num_attention_heads")
    arch = Architecture(
        family=family,
        layers=size("num_hidden_layers"),
        hidden=hidden,
        heads=heads,
        kv_heads=size("num_key_value_heads", heads),
        head_dim=size("head_dim", None if family == "qwen3" else hidden // heads),
        intermediate=size("intermediate_size"),
        vocab=size("vocab_size"),
        max_position=size("max_position_embeddings"),
        norm_eps=_positive("rms_norm_eps", config.get("rms_norm_eps")),
        rope_base=_rope_base(config, family),
        tied=config.get("tie_word_embeddings", False),  # pyright: ignore[reportArgumentType] - looked at below
    )
    if type(arch.tied) is not bool:
        raise InputError(f"tie_word_embeddings: {arch.tied!r:.200} in {path} is neither true nor false")
    if arch.heads % arch.kv_heads:
        raise InputError(f"num_key_value_heads: {arch.kv_heads} does not divide {arch.heads} heads")
    if config.get("head_dim") is None and hidden % heads:
        raise InputError(f"num_attention_heads: {heads} does not divide hidden_size = {hidden}")
    if family == "qwen2" and arch.head_dim * heads != hidden:
        raise UnsupportedError(f"head_dim: {arch.head_dim} with {heads} heads; in vLLM qwen2's is hidden_size / heads")
    kinds = config.get("layer_types")
    if kinds is not None and not (
        isinstance(kinds, list) and len(kinds) == arch.layers and all(kind == "full_attention" for kind in kinds)
    ):
        raise UnsupportedError(f"layer_types: {kinds!r:.200} is not full_attention for each of {arch.layers} layers")
    return arch


def _refuse_foreign(config: Mapping, family: str) -> None:
    """Refuses by name what an engine may compute with and alignkit does not."""
    for field, value in config.items():
        if field in _MUST_BE_OFF:
            if value:
                raise UnsupportedError(f"{field}: {value!r:.200} is not supported for a dense {family}")
        elif field in _MUST_BE:
            if value not in _MUST_BE[field]:
                raise UnsupportedError(f"{field}: {value!r:.200} is not {_MUST_BE[field][0]!r}")
        elif field not in _READ | _HARMLESS and value is not None and value is not False and not isinstance(value, str):
            raise UnsupportedError(
                f"{field}: {value!r:.200} is no field of a dense {family} that alignkit knows, and an "
                "engine may compute with it; if it changes nothing, take it out of config.json"
            )
    if config.get("hidden_act", "silu") != "silu":
        raise UnsupportedError(f"hidden_act: {config['hidden_act']!r:.200} is not supported, only 'silu'")
    # Qwen's classes ignore the window where use_sliding_window is off; vLLM takes any other's.
    if family == "llama" and config.get("sliding_window") is not None:
        raise UnsupportedError(f"sliding_window: {config['sliding_window']!r:.200} is not supported")


def _rope_base(config: Mapping, family: str) -> float:
    """The rotary base; newer configs keep it in `rope_parameters`, older ones beside `rope_scaling`."""
    bases = {"rope_theta": config["rope_theta"]} if "rope_theta" in config else {}
    for field in ("rope_scaling", "rope_parameters"):
        rope = config.get(field)
        if rope is None:
            continue
        if not isinstance(rope, dict):
            raise InputError(f"{field}: {rope!r:.200} is not an object")
        for name in ("rope_type", "type"):
            if rope.get(name, "default") != "default":
                raise UnsupportedError(f"{field}: rope type {rope[name]!r:.200} is not supported, only the default")
        if rope.get("partial_rotary_factor", 1.0) != 1.0:
            raise UnsupportedError(f"{field}: partial_rotary_factor {rope['partial_rotary_factor']!r:.200} is not 1")
        for name in rope.keys() - _ROPE_FIELDS:
            raise UnsupportedError(f"{field}: {name}: {rope[name]!r:.200} is not supported")
        if "rope_theta" in rope:
            bases[f"{field}: rope_theta"] = rope["rope_theta"]
    if not bases and family == "llama":
        return 10000.0
    if not bases:  # transformers and vLLM have different defaults
        raise InputError("rope_theta: the config names no rotary base")
    values = [_positive(*item) for item in bases.items()]
    if len(set(values)) > 1:
        raise InputError("; ".join(f"{field} is {value}" for field, value in bases.items()) + ": which one is it?")
    return values[0]


def _positive(field: str, value) -> float:
    if type(value) not in (int, float) or not 0 < value < 3e38:  # NaN compares false
        raise InputError(f"{field}: {value!r:.200} is not a positive number")
    return float(value)


def _read_json(path: Path) -> dict:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as e:
        raise InputError(f"model: cannot read {path}: {e}") from None
    if not isinstance(value, dict):
        raise InputError(f"model: {path} is not a JSON object")
    return value


class Checkpoint(Mapping):
    """The tensors of an HF directory by name, read on demand: one file, or several with an index."""

    def __init__(self, model_dir: str | os.PathLike):
        """Raises InputError naming a file that is missing, unreadable, shorter or longer than its header says, or that
        vLLM would read and alignkit not."""
        root = Path(model_dir)
        index = root / "model.safetensors.index.json"
        weight_map = _weight_map(index) if index.exists() else {}
        files = sorted(set(weight_map.values())) or ["model.safetensors"]
        _refuse_other_files(root, files, bool(weight_map))
        self._where = {}
        for name in files:
            if not (root / name).is_file():
                raise InputError(f"model: {root} has no {name}" + (f", which {index.name} names" if weight_map else ""))
            try:
                file = safe_open(root / name, framework="pt")
            except (OSError, SafetensorError) as e:
                raise InputError(f"model: cannot read {root / name}: {e}") from None
            for tensor in file.keys():
                if tensor in self._where:
                    raise InputError(f"model: {tensor} is in two files of {root}")
                self._where[tensor] = file
        for tensor in sorted(weight_map.keys() - self._where.keys()):
            raise InputError(f"model: {weight_map[tensor]} has no tensor {tensor!r}, which {index} names")

    def __getitem__(self, name: str) -> torch.Tensor:
        return self._where[name].get_tensor(name)

    def __iter__(self) -> Iterator[str]:
        return iter(self._where)

    def __len__(self) -> int:
        return len(self._where)

    def header(self, name: str) -> tuple[str, tuple[int, ...]]:
        """Type, as safetensors names it, and shape; nothing of the tensor is read."""
        tensor = self._where[name].get_slice(name)
        return tensor.get_dtype(), tuple(tensor.get_shape())


def _weight_map(index: Path) -> dict[str, str]:
    """Names of the files by tensor."""
    weight_map = _read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise InputError(f"model: {index} has no weight_map")
    for tensor, name in weight_map.items():
        if not isinstance(name, str) or Path(name).name != name:
            raise InputError(f"model: {index}: {tensor!r} is in {name!r:.200}, which is not the name of a file")
    return weight_map


def _refuse_other_files(root: Path, files: list[str], indexed: bool) -> None:
    """vLLM prefers consolidated*.safetensors, reads every *.safetensors where there is no index, and quantizes where
    there is a file for it."""
    for name in sorted(glob.glob("*.safetensors", root_dir=root)):
        if name not in files and (not indexed or name.startswith("consolidated")):
            raise UnsupportedError(f"model: {root / name} stands beside {files[0]}, and vLLM would read it")
    if (root / "hf_quant_config.json").exists():
        raise UnsupportedError(f"hf_quant_config.json: {root} is quantized")


def check_weights(arch: Architecture, weights: Mapping[str, torch.Tensor]) -> None:
    """That `weights`, HF names to whole tensors, are those of `arch`: all of them, of their shapes, and no others.

    Of a `Checkpoint` only headers are read, and the two copies of a tied head.
    Raises UnsupportedError for a tensor of something else, InputError for one that is missing or not what it should be.
    """
    names = set()
    for name, shape in _hf_shapes(arch):
        if name not in weights:
            raise InputError(f"model: the checkpoint has no tensor {name!r}")
        _check_tensor(weights, name, shape)
        names.add(name)
    foreign = sorted(name for name in weights if name not in names and not _ignored(arch, name))
    if foreign:
        raise UnsupportedError(f"model: {len(foreign)} tensors are not {arch.family}'s, first {foreign[0]!r}")
    if arch.tied and "lm_head.weight" in weights:
        head, embedding = weights["lm_head.weight"], weights["model.embed_tokens.weight"]
        if (head.dtype, head.shape) != (embedding.dtype, embedding.shape) or not torch.equal(
            head.contiguous().view(torch.uint8), embedding.contiguous().view(torch.uint8)
        ):
            raise InputError(
                "tie_word_embeddings: config.json says that the head is the embedding, but the checkpoint "
                "carries another lm_head.weight; with false it is a head of its own"
            )


def _check_tensor(weights: Mapping[str, torch.Tensor], name: str, shape: tuple[int, ...]) -> None:
    if isinstance(weights, Checkpoint):
        dtype, found = weights.header(name)
        floating = dtype in _FLOATS
    else:
        dtype, found = weights[name].dtype, tuple(weights[name].shape)
        floating = dtype in (torch.float64, torch.float32, torch.float16, torch.bfloat16)
    if found != shape:
        raise InputError(f"model: {name} has shape {found}, not {shape}")
    if not floating:
        raise UnsupportedError(f"model: {name} is of type {dtype}")


def to_megatron(
    arch: Architecture,
    weights: Mapping[str, torch.Tensor],
    *,
    tp_rank: int = 0,
    tp_size: int = 1,
    dtype: torch.dtype | None = None,
) -> dict[str, torch.Tensor]:
    """One rank's GPTModel state dict.

    weights: HF names to whole tensors, for instance a `Checkpoint`.
    dtype: type of the result; None keeps each tensor's own.
    Raises UnsupportedError if `tp_size` does not divide the heads or if the checkpoint holds tensors of
    something else, InputError for one that is missing or not what it should be; before anything is made.
    """
    arch.check_tp(tp_size)
    if not 0 <= tp_rank < tp_size:
        raise InputError(f"tp_rank: {tp_rank} is not in [0, {tp_size})")
    check_weights(arch, weights)

    def take(tensor: torch.Tensor, dim: int = 0) -> torch.Tensor:
        return tensor.chunk(tp_size, dim)[tp_rank].contiguous().to(dtype or tensor.dtype)

    def vocab(name: str) -> torch.Tensor:
        tensor = weights[name]
        padding = tensor.new_zeros(arch.padded_vocab(tp_size) - arch.vocab, arch.hidden)
        return take(torch.cat([tensor, padding]))

    state = {_EMBEDDING: vocab("model.embed_tokens.weight")}
    for i in range(arch.layers):
        hf, mg = f"model.layers.{i}.", f"decoder.layers.{i}."
        for suffix in ("weight", "bias") if arch.qkv_bias else ("weight",):
            qkv = (weights[f"{hf}self_attn.{x}_proj.{suffix}"] for x in "qkv")
            state[f"{mg}self_attention.linear_qkv.{suffix}"] = take(merge_qkv(arch, *qkv))
        state[mg + "self_attention.linear_proj.weight"] = take(weights[hf + "self_attn.o_proj.weight"], 1)
        gate, up = (take(weights[f"{hf}mlp.{x}_proj.weight"]) for x in ("gate", "up"))
        state[mg + "mlp.linear_fc1.weight"] = torch.cat([gate, up])
        state[mg + "mlp.linear_fc2.weight"] = take(weights[hf + "mlp.down_proj.weight"], 1)
        for ours, theirs in _replicated(arch, i):
            tensor = weights[theirs]
            state[ours] = tensor.to(dtype or tensor.dtype)
    norm = weights["model.norm.weight"]
    state["decoder.final_layernorm.weight"] = norm.to(dtype or norm.dtype)
    if not arch.tied:
        state[_HEAD] = vocab("lm_head.weight")
    return state


def to_hf(
    arch: Architecture, names: Iterable[str], shards: Callable[[str], list[torch.Tensor]]
) -> Iterator[tuple[str, torch.Tensor]]:
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


def _layer_to_hf(arch: Architecture, name: str, parts: list[torch.Tensor]) -> Iterator[tuple[str, torch.Tensor]]:
    prefix, _, rest = name.removeprefix("decoder.layers.").partition(".")
    hf = f"model.layers.{prefix}."
    if rest in ("self_attention.linear_qkv.weight", "self_attention.linear_qkv.bias"):
        suffix = rest.rpartition(".")[2]
        for x, tensor in zip("qkv", split_qkv(arch, torch.cat(parts)), strict=True):
            yield f"{hf}self_attn.{x}_proj.{suffix}", tensor
    elif rest == "self_attention.linear_proj.weight":
        yield hf + "self_attn.o_proj.weight", torch.cat(parts, 1)
    elif rest == "mlp.linear_fc2.weight":
        yield hf + "mlp.down_proj.weight", torch.cat(parts, 1)
    elif rest == "mlp.linear_fc1.weight":
        gates, ups = zip(*(part.chunk(2) for part in parts), strict=True)
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
    q, k, v = (x.flatten(0, 1).contiguous() for x in parts)
    return q, k, v


def _replicated(arch: Architecture, i: int) -> list[tuple[str, str]]:
    """(Megatron, HF) names of the layer's weights that every rank holds whole."""
    hf, mg = f"model.layers.{i}.", f"decoder.layers.{i}."
    names = [
        (mg + "input_layernorm.weight", hf + "input_layernorm.weight"),
        (mg + "pre_mlp_layernorm.weight", hf + "post_attention_layernorm.weight"),
    ]
    if arch.qk_norm:
        names += [(f"{mg}self_attention.{x}_layernorm.weight", f"{hf}self_attn.{x}_norm.weight") for x in "qk"]
    return names


def _hf_shapes(arch: Architecture) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Name and shape of every tensor of the architecture's HF checkpoint."""
    q, kv = arch.heads * arch.head_dim, arch.kv_heads * arch.head_dim
    yield "model.embed_tokens.weight", (arch.vocab, arch.hidden)
    yield "model.norm.weight", (arch.hidden,)
    if not arch.tied:
        yield "lm_head.weight", (arch.vocab, arch.hidden)
    for i in range(arch.layers):
        hf = f"model.layers.{i}."
        for x, width in (("q", q), ("k", kv), ("v", kv)):
            yield f"{hf}self_attn.{x}_proj.weight", (width, arch.hidden)
            if arch.qkv_bias:
                yield f"{hf}self_attn.{x}_proj.bias", (width,)
        yield hf + "self_attn.o_proj.weight", (arch.hidden, q)
        for x in ("gate", "up"):
            yield f"{hf}mlp.{x}_proj.weight", (arch.intermediate, arch.hidden)
        yield hf + "mlp.down_proj.weight", (arch.hidden, arch.intermediate)
        for _, theirs in _replicated(arch, i):
            yield theirs, (arch.head_dim if "self_attn" in theirs else arch.hidden,)


def _ignored(arch: Architecture, name: str) -> bool:
    """Tensors some checkpoints carry beside the weights: rotary tables, and a copy of a tied head."""
    return name.endswith("rotary_emb.inv_freq") or (arch.tied and name == "lm_head.weight")
