"""What a checkpoint's config.json says: its architecture, or the name of the first field that alignkit does not know."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from alignkit.contract.rope import Llama3, Scaling, Yarn, yarn_attention_factor
from alignkit.errors import InputError, UnsupportedError
from alignkit.models import ARCHITECTURES, FAMILIES
from alignkit.models.family import (
    CHOICE_BIAS,
    EMBEDDING,
    FINAL_NORM,
    HEAD,
    QK_NORMS,
    QKV_BIASES,
    SHARED_GATE,
    Experts,
    Family,
    Weight,
)
from alignkit.models.fields import HARMLESS, MUST_BE, MUST_BE_OFF, READ

VOCAB_MULTIPLE = 128
_ROPE_FIELDS = frozenset(("rope_theta", "rope_type", "type", "partial_rotary_factor"))
ROPE_TYPES = {
    "default": (),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
    "yarn": ("factor", "original_max_position_embeddings", "beta_fast", "beta_slow", "attention_factor", "truncate"),
}
"""Kinds of rotary embeddings, and what config.json may say of each beside `_ROPE_FIELDS`."""


@dataclass(frozen=True)
class Architecture:
    """What an HF checkpoint is made of. Sizes are in elements; `vocab` is the true vocabulary size, `intermediate` the
    width of an MLP. With experts (`experts` of them; 0 in a dense model) every layer has them but the `dense_layers`, whose
    MLPs are `dense_intermediate` wide; `intermediate` is the width of each expert, a token goes to `top_k`, and
    `normalize_top_k` says whether the weights of those sum up to 1; `shared_intermediate` is the width of an expert that all
    tokens go to, 0 without one. With `groups` of experts a token's are of `top_groups` of them, and their weights are
    multiplied by `routed_scale`. `options` are the family's optional fields that are true, `rotary_factor` is the part of a
    head that is rotated, and of `mtp_layers` further layers, which nothing runs, weights may be there."""

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
    rope_scaling: Scaling | None = None
    experts: int = 0
    top_k: int = 0
    normalize_top_k: bool = False
    shared_intermediate: int = 0
    dense_layers: tuple[int, ...] = ()
    dense_intermediate: int = 0
    groups: int = 1
    top_groups: int = 1
    routed_scale: float = 1.0
    options: tuple[str, ...] = ()
    rotary_factor: float = 1.0
    mtp_layers: int = 0

    def __post_init__(self) -> None:
        if self.family not in FAMILIES:
            raise UnsupportedError(f"family: {self.family!r:.200} is not one of {', '.join(FAMILIES)}")

    @property
    def qk_norm(self) -> bool:
        """Whether q and k have norms of their own."""
        return self._has(*QK_NORMS)

    @property
    def qkv_bias(self) -> bool:
        """Whether q, k and v have biases."""
        return self._has(*QKV_BIASES)

    @property
    def choice_bias(self) -> bool:
        """Whether a bias has a part in the choice of experts."""
        return any(weight.megatron == CHOICE_BIAS for weight in FAMILIES[self.family].layer)

    @property
    def shared_gate(self) -> bool:
        """Whether a gate is multiplied with what comes out of the expert that all tokens go to."""
        return any(weight.megatron == SHARED_GATE for weight in FAMILIES[self.family].layer)

    @property
    def score(self) -> str:
        """Of an expert, by its logit."""
        experts = FAMILIES[self.family].experts
        return experts.score if experts else Experts.score

    @property
    def rotary_dim(self) -> int:
        """How many of a head's dimensions, the first ones, are rotated."""
        return int(self.head_dim * self.rotary_factor)

    def _has(self, *weights: Weight) -> bool:
        held = (*FAMILIES[self.family].layer, *self._optional)
        return all(weight in held for weight in weights)

    @property
    def _optional(self) -> tuple[Weight, ...]:
        return tuple(w for field, of in FAMILIES[self.family].optional if field in self.options for w in of)

    def size(self, name: str) -> int:
        """A size by its name in the tables of weights: `q` and `kv` are all heads together, `one` is 1, others are
        fields."""
        if name in ("q", "kv"):
            return self.head_dim * (self.heads if name == "q" else self.kv_heads)
        return 1 if name == "one" else getattr(self, name)

    def has_experts(self, layer: int) -> bool:
        return self.experts > 0 and layer not in self.dense_layers

    def layer(self, i: int) -> tuple[Weight, ...]:
        """The weights of layer i."""
        family = FAMILIES[self.family]
        return (*(family.dense_layer if i in self.dense_layers else family.layer), *self._optional)

    def weights(self) -> Iterator[tuple[Weight, dict[str, tuple[int, ...]], str]]:
        """Each weight, its HF tensors by their whole names, with shapes, and its whole name in Megatron."""

        def of(weight: Weight, hf: str = "", megatron: str = "") -> tuple[Weight, dict[str, tuple[int, ...]], str]:
            shapes = {hf + name: tuple(map(self.size, sizes)) for name, sizes in weight.hf.items()}
            return weight, shapes, megatron + weight.megatron

        yield of(EMBEDDING)
        for i in range(self.layers):
            for weight in self.layer(i):
                each = [weight.of_expert(e) for e in range(self.experts)] if weight.per_expert else [weight]
                for one in each:
                    yield of(one, f"model.layers.{i}.", f"decoder.layers.{i}.")
        yield of(FINAL_NORM)
        if not self.tied:
            yield of(HEAD)

    def padded_vocab(self, tp: int) -> int:
        """Rows of the whole embedding in Megatron: the next multiple of ``128 * tp``."""
        step = VOCAB_MULTIPLE * tp
        return -(-self.vocab // step) * step

    def check_tp(self, tp: int) -> None:
        """UnsupportedError unless every rank of `tp` gets the same whole number of heads and columns."""
        family = FAMILIES[self.family]
        sizes = [
            ("num_key_value_heads", self.kv_heads),
            ("num_attention_heads", self.heads),
            (family.intermediate, self.intermediate),
        ]
        if family.experts and family.experts.shared:
            sizes.append((family.experts.shared, self.shared_intermediate))
        if self.dense_layers:
            sizes.append(("intermediate_size", self.dense_intermediate))
        for name, size in sizes:
            if tp < 1 or size % tp:
                raise UnsupportedError(f"tp: {tp} ranks do not divide {name} = {size}")


def read_architecture(model_dir: str | os.PathLike) -> Architecture:
    """Reads ``config.json`` of an HF model directory.

    Raises InputError for a missing or broken file and for a field that cannot be what it says, UnsupportedError naming
    the first field that is not of a model of a known family, with rotary embeddings of the `ROPE_TYPES`, or that is
    not known to change nothing.
    """
    path = Path(model_dir) / "config.json"
    config = read_json(path)
    names = config.get("architectures")
    if not isinstance(names, list) or len(names) != 1 or names[0] not in list(ARCHITECTURES):
        raise UnsupportedError(f"architectures: {names!r:.200} is not one of {', '.join(ARCHITECTURES)}")
    family = ARCHITECTURES[names[0]]
    if config.get("model_type") != family.name:  # it chooses the class that reads the config, with other defaults
        raise UnsupportedError(
            f"model_type: {config.get('model_type')!r:.200} is not {family.name!r}, as {names[0]} is"
        )
    _refuse_foreign(config, family)

    config = dict.fromkeys(family.may_be_absent) | config

    def size(field: str, if_null: int | None = None) -> int:
        if field not in config:
            raise InputError(f"model: {path} has no field {field!r}")
        value = if_null if config[field] is None else config[field]
        if type(value) is not int or not 0 < value < 2**31:
            raise InputError(f"{field}: {config[field]!r:.200} in {path} is not a positive integer")
        return value

    hidden, heads = size("hidden_size"), size("num_attention_heads")
    rope_base, rope_scaling, rotary_factor = _rope(config, family)
    experts, top_k, normalize_top_k, shared_intermediate = 0, 0, False, 0
    layers, dense_layers = size("num_hidden_layers"), ()
    groups, top_groups, routed_scale = 1, 1, 1.0
    if family.experts:
        counts = [size(field) for field in family.experts.count if field in config] or [size(family.experts.count[0])]
        if len(set(counts)) > 1:
            raise InputError(f"{' and '.join(family.experts.count)} are {counts}: which one is it?")
        experts, top_k = counts[0], size(family.experts.top_k)
        normalize_top_k = family.experts.normalize is None or _flag(path, config, family.experts.normalize)
        if family.experts.shared:
            shared_intermediate = size(family.experts.shared)
            shared_intermediate *= size(family.intermediate) if family.experts.shared_counts else 1
        if family.experts.groups:
            groups, top_groups = map(size, family.experts.groups)
        if family.experts.scale:
            routed_scale = _positive(family.experts.scale, config.get(family.experts.scale))
        if family.experts.dense == "steps":
            step = size("decoder_sparse_step", 1) if "decoder_sparse_step" in config else 1
            dense_layers = _dense_layers(config.get("mlp_only_layers"), step, layers)
        elif family.experts.dense == "first":
            first = config.get("first_k_dense_replace")
            if type(first) is not int or not 0 <= first < layers:
                raise InputError(f"first_k_dense_replace: {first!r:.200} is no number of layers below {layers}")
            dense_layers = tuple(range(first))
    arch = Architecture(
        family=family.name,
        layers=layers,
        hidden=hidden,
        heads=heads,
        kv_heads=size("num_key_value_heads", heads),
        head_dim=size("head_dim", hidden // heads if "head_dim" in family.may_be_absent else None),
        intermediate=size(family.intermediate),
        vocab=size("vocab_size"),
        max_position=size("max_position_embeddings"),
        norm_eps=_positive("rms_norm_eps", config.get("rms_norm_eps")),
        rope_base=rope_base,
        rope_scaling=rope_scaling,
        tied=_flag(path, {"tie_word_embeddings": False} | config, "tie_word_embeddings"),
        experts=experts,
        top_k=top_k,
        normalize_top_k=normalize_top_k,
        shared_intermediate=shared_intermediate,
        dense_layers=dense_layers,
        dense_intermediate=size("intermediate_size") if dense_layers else 0,
        groups=groups,
        top_groups=top_groups,
        routed_scale=routed_scale,
        options=tuple(field for field, _ in family.optional if _flag(path, config, field)),
        rotary_factor=rotary_factor,
        mtp_layers=_count(config, family.mtp) if family.mtp else 0,
    )
    _check_choice(arch, family)
    if isinstance(rope_scaling, Yarn) and rotary_factor != 1:
        raise UnsupportedError(
            f"partial_rotary_factor: {rotary_factor} is not supported with YaRN, whose frequencies are of whole heads in "
            "Megatron-core"
        )
    if arch.rotary_dim % 2 or not arch.rotary_dim:
        raise InputError(f"partial_rotary_factor: {rotary_factor} of a head of {arch.head_dim} is no even number")
    if arch.top_k > arch.experts:
        raise InputError(f"num_experts_per_tok: {arch.top_k}, of {arch.experts} experts")
    if arch.heads % arch.kv_heads:
        raise InputError(f"num_key_value_heads: {arch.kv_heads} does not divide {arch.heads} heads")
    if config.get("head_dim") is None and hidden % heads:
        raise InputError(f"num_attention_heads: {heads} does not divide hidden_size = {hidden}")
    if family.heads_fill_hidden and arch.head_dim * heads != hidden:
        raise UnsupportedError(
            f"head_dim: {arch.head_dim} with {heads} heads; in vLLM {family.name}'s is hidden_size / heads"
        )
    kinds = config.get("layer_types")
    if kinds is not None and not (
        isinstance(kinds, list) and len(kinds) == arch.layers and all(kind == "full_attention" for kind in kinds)
    ):
        raise UnsupportedError(f"layer_types: {kinds!r:.200} is not full_attention for each of {arch.layers} layers")
    return arch


def _check_choice(arch: Architecture, family: Family) -> None:
    """That both engines can choose experts so."""
    if family.experts is None or arch.score == "softmax":
        return
    if arch.experts % arch.groups or arch.top_groups > arch.groups:
        raise InputError(f"n_group / topk_group: {arch.top_groups} of {arch.groups} groups of {arch.experts} experts")
    if arch.top_k > arch.experts // arch.groups * arch.top_groups:
        raise InputError(f"num_experts_per_tok: {arch.top_k}, of {arch.top_groups} of {arch.groups} groups")
    if arch.groups > 1 and arch.top_k // arch.top_groups != 2:
        raise UnsupportedError(
            f"topk_group: {arch.top_groups} groups for {arch.top_k} experts are not supported: a group's score is the sum of "
            f"its two best, in Megatron-core of its {arch.top_k // arch.top_groups}"
        )
    if arch.normalize_top_k != (arch.top_k > 1):
        raise UnsupportedError(
            f"norm_topk_prob: {arch.normalize_top_k} is not supported with {arch.score} scores and num_experts_per_tok "
            f"{arch.top_k}: Megatron-core normalizes where there are several"
        )


def _count(config: Mapping, field: str) -> int:
    value = config.get(field) or 0
    if type(value) is not int or not 0 <= value < 2**31:
        raise InputError(f"{field}: {config[field]!r:.200} is no number of layers")
    return value


def _flag(path: Path, config: Mapping, field: str) -> bool:
    if type(config.get(field)) is not bool:
        raise InputError(f"{field}: {config.get(field)!r:.200} in {path} is neither true nor false")
    return config[field]


def _dense_layers(listed: Any, step: int, layers: int) -> tuple[int, ...]:
    """Those of `layers` that are `listed`, or not at the end of a `step`."""
    listed = [] if listed is None else listed
    if not isinstance(listed, list) or not all(type(i) is int and 0 <= i < layers for i in listed):
        raise InputError(f"mlp_only_layers: {listed!r:.200} is no list of numbers of {layers} layers")
    dense = tuple(i for i in range(layers) if i in listed or (i + 1) % step)
    if len(dense) == layers:
        raise UnsupportedError("mlp_only_layers / decoder_sparse_step: no layer has experts")
    return dense


def _refuse_foreign(config: Mapping, family: Family) -> None:
    """Refuses by name what an engine may compute with and alignkit does not."""
    read = READ | family.fields
    must_be = MUST_BE | dict(family.must_be)
    for field, value in config.items():
        if field in read:
            continue
        if field in must_be:
            if value not in must_be[field]:
                raise UnsupportedError(f"{field}: {value!r:.200} is not {must_be[field][0]!r}")
        elif field in MUST_BE_OFF:
            if value:
                raise UnsupportedError(f"{field}: {value!r:.200} is not supported for {family.name}")
        elif field not in HARMLESS and value is not None and value is not False and not isinstance(value, str):
            raise UnsupportedError(
                f"{field}: {value!r:.200} is no field of {family.name} that alignkit knows, and an "
                "engine may compute with it; if it changes nothing, take it out of config.json"
            )
    if config.get("hidden_act", "silu") != "silu":
        raise UnsupportedError(f"hidden_act: {config['hidden_act']!r:.200} is not supported, only 'silu'")
    if family.sliding_window == "must be null" and "sliding_window" not in config:
        raise UnsupportedError(
            f"sliding_window: absent, and {family.name}'s class in transformers then has one; without a window it is null"
        )
    if family.sliding_window != "unused" and config.get("sliding_window") is not None:
        raise UnsupportedError(f"sliding_window: {config['sliding_window']!r:.200} is not supported")


def _rope(config: Mapping, family: Family) -> tuple[float, Scaling | None, float]:
    """The rotary base and scaling, and the part of a head that is rotated; newer configs keep all in `rope_parameters`,
    older ones base and part beside `rope_scaling`."""
    bases = {"rope_theta": config["rope_theta"]} if "rope_theta" in config else {}
    scalings, parts = {}, [config.get("partial_rotary_factor")]
    for field in ("rope_scaling", "rope_parameters"):
        rope = config.get(field)
        if rope is None:
            continue
        if not isinstance(rope, dict):
            raise InputError(f"{field}: {rope!r:.200} is not an object")
        names = [rope[name] for name in ("rope_type", "type") if name in rope] or ["default"]
        for name in names:
            if name not in list(ROPE_TYPES) or name != names[0]:
                known = ", ".join(ROPE_TYPES)
                raise UnsupportedError(f"{field}: rope type {name!r:.200} is not supported, only {known}")
        parts.append(rope.get("partial_rotary_factor"))
        if family.rotary_factor is None and parts[-1] not in (None, 1):
            raise UnsupportedError(f"{field}: partial_rotary_factor {rope['partial_rotary_factor']!r:.200} is not 1")
        for name in rope.keys() - _ROPE_FIELDS - frozenset(ROPE_TYPES[names[0]]):
            raise UnsupportedError(f"{field}: {name}: {rope[name]!r:.200} is not supported")
        scalings[field] = _scaling(field, names[0], rope)
        if "rope_theta" in rope:
            bases[f"{field}: rope_theta"] = rope["rope_theta"]
    if len(set(scalings.values())) > 1:
        raise InputError("rope_scaling and rope_parameters ask for different rotary embeddings")
    scaling = next(iter(scalings.values()), None)
    part = _rotary_factor([part for part in parts if part is not None], family)
    if not bases and family.rope_base is not None:
        return family.rope_base, scaling, part
    if not bases:
        raise InputError("rope_theta: the config names no rotary base")
    values = [_positive(*item) for item in bases.items()]
    if len(set(values)) > 1:
        raise InputError("; ".join(f"{field} is {value}" for field, value in bases.items()) + ": which one is it?")
    return values[0], scaling, part


def _rotary_factor(given: list, family: Family) -> float:
    if family.rotary_factor is None:
        return 1.0
    values = [_positive("partial_rotary_factor", value) for value in given] or [family.rotary_factor]
    if len(set(values)) > 1 or values[0] > 1:
        raise InputError(f"partial_rotary_factor: {values}, expected one number up to 1")
    return values[0]


def _scaling(field: str, kind: str, rope: Mapping) -> Scaling | None:
    """Every number must be there, but for those of YaRN that transformers and vLLM take for the same."""
    if kind == "default":
        return None

    def number(name: str, if_absent: float | None = None) -> float:
        value = rope.get(name)
        if value is None and if_absent is None:
            raise InputError(f"{field}: {name} is missing")
        return _positive(f"{field}: {name}", if_absent if value is None else value)

    original = number("original_max_position_embeddings")
    if original != int(original):
        raise InputError(f"{field}: original_max_position_embeddings: {original} is not a whole number")
    if kind == "llama3":
        low, high = number("low_freq_factor"), number("high_freq_factor")
        if not low < high:
            raise UnsupportedError(f"{field}: low_freq_factor: {low} is not below high_freq_factor, {high}")
        return Llama3(number("factor"), low, high, int(original))
    factor = number("factor")
    attention_factor = yarn_attention_factor(factor)
    if rope.get("attention_factor") not in (None, attention_factor):
        raise UnsupportedError(
            f"{field}: attention_factor: {rope['attention_factor']!r:.200} is not {attention_factor}, and Megatron-core "
            "has no other"
        )
    truncate = rope.get("truncate", True)
    if type(truncate) is not bool:
        raise InputError(f"{field}: truncate: {truncate!r:.200} is neither true nor false")
    return Yarn(factor, int(original), number("beta_fast", 32.0), number("beta_slow", 1.0), attention_factor, truncate)


def _positive(field: str, value) -> float:
    if type(value) not in (int, float) or not 0 < value < 3e38:  # NaN compares false
        raise InputError(f"{field}: {value!r:.200} is not a positive number")
    return float(value)


def read_json(path: Path) -> dict:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as e:
        raise InputError(f"model: cannot read {path}: {e}") from None
    if not isinstance(value, dict):
        raise InputError(f"model: {path} is not a JSON object")
    return value
