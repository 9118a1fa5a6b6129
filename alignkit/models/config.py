"""Reader for config.json: returns the architecture, or rejects the first field that alignkit does not support.

`fields` lists the accepted fields; `family` and the family files describe what differs between families.
`alignkit.convert` re-exports `Architecture` and `read_architecture`. The weight tables in `family` refer to fields of
`Architecture` by name, so a renamed field changes there too.
"""

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
    EMBEDDING,
    EXPERT_BIAS,
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
"""Vocabulary padding multiple for one tensor-parallel rank. It equals the default of Megatron's
make_vocab_size_divisible_by; padding rows affect no bits, so it is not part of the contract."""
_ROPE_FIELDS = frozenset(("rope_theta", "rope_type", "type", "partial_rotary_factor"))
ROPE_TYPES = {
    "default": (),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
    "yarn": ("factor", "original_max_position_embeddings", "beta_fast", "beta_slow", "attention_factor", "truncate"),
}
"""Supported rope types, and the fields that each may have in addition to `_ROPE_FIELDS`."""


@dataclass(frozen=True)
class Architecture:
    """Architecture of an HF checkpoint. Sizes are in elements.

    Attributes:
        family: `model_type` of config.json.
        layers: Number of layers.
        hidden: Hidden size.
        heads: Number of query heads.
        kv_heads: Number of KV heads.
        head_dim: Head dimension.
        intermediate: Width of an MLP, or of each expert in an MoE model.
        vocab: Vocabulary size without padding.
        max_position: Longest supported sequence.
        norm_eps: Epsilon of the RMSNorms.
        rope_base: Rotary base (rope_theta).
        tied: Whether the head shares the embedding's weight.
        rope_scaling: Scaling of the rotary frequencies, or None.
        experts: Number of routed experts; 0 in a dense model.
        top_k: Number of experts for each token.
        normalize_top_k: Whether the top-k weights are normalized to sum to 1.
        shared_intermediate: Width of the shared expert; 0 if there is none.
        dense_layers: Indices of an MoE model's layers that have a dense MLP.
        dense_intermediate: Width of the MLPs of `dense_layers`.
        groups: Number of expert groups.
        top_groups: Number of groups that a token's experts come from.
        routed_scale: Factor of the routed experts' weights.
        options: The family's optional fields that are true.
        rotary_factor: Rotated fraction of a head.
        mtp_layers: Number of multi-token prediction (MTP) layers. Their weights may be present, but are not used.
    """

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
            raise UnsupportedError(f"family: must be one of {', '.join(FAMILIES)}, got {self.family!r:.200}")

    @property
    def qk_norm(self) -> bool:
        """True if queries and keys have norms."""
        return self._has(*QK_NORMS)

    @property
    def qkv_bias(self) -> bool:
        """True if the QKV projection has biases."""
        return self._has(*QKV_BIASES)

    @property
    def expert_bias(self) -> bool:
        """True if the router adds a bias to the scores when it selects experts."""
        return any(weight.megatron == EXPERT_BIAS for weight in FAMILIES[self.family].layer)

    @property
    def shared_gate(self) -> bool:
        """True if a gate scales the shared expert's output."""
        return any(weight.megatron == SHARED_GATE for weight in FAMILIES[self.family].layer)

    @property
    def score(self) -> str:
        """Router score function, "softmax" or "sigmoid"."""
        experts = FAMILIES[self.family].experts
        return experts.score if experts else Experts.score

    @property
    def rotary_dim(self) -> int:
        """Number of rotated dimensions of a head, its first ones."""
        return int(self.head_dim * self.rotary_factor)

    @property
    def positions(self) -> int:
        """Number of positions that both engines compute: `max_position`, or YaRN's if there are fewer."""
        return min(self.max_position, getattr(self.rope_scaling, "positions", self.max_position))

    def _has(self, *weights: Weight) -> bool:
        held = (*FAMILIES[self.family].layer, *self._optional)
        return all(weight in held for weight in weights)

    @property
    def _optional(self) -> tuple[Weight, ...]:
        optional = FAMILIES[self.family].optional
        return tuple(weight for field, weights in optional if field in self.options for weight in weights)

    def size(self, name: str) -> int:
        """Return a size by its name in the weight tables.

        Args:
            name: "q" or "kv" (all query or KV heads together), "one" (1), or a field of this class.
        """
        if name in ("q", "kv"):
            return self.head_dim * (self.heads if name == "q" else self.kv_heads)
        return 1 if name == "one" else getattr(self, name)

    def has_experts(self, layer: int) -> bool:
        """Return whether layer number `layer`, counted from 0, has experts."""
        return self.experts > 0 and layer not in self.dense_layers

    def layer(self, i: int) -> tuple[Weight, ...]:
        """Return the weights of layer `i`."""
        family = FAMILIES[self.family]
        return (*(family.dense_layer if i in self.dense_layers else family.layer), *self._optional)

    def weights(self) -> Iterator[tuple[Weight, dict[str, tuple[int, ...]], str]]:
        """Yield each weight, the shapes of its HF tensors by full name, and its full name in Megatron."""

        def of(weight: Weight, hf: str = "", megatron: str = "") -> tuple[Weight, dict[str, tuple[int, ...]], str]:
            shapes = {hf + name: tuple(map(self.size, sizes)) for name, sizes in weight.hf.items()}
            return weight, shapes, megatron + weight.megatron

        yield of(EMBEDDING)
        for i in range(self.layers):
            for weight in self.layer(i):
                each = [weight.for_expert(e) for e in range(self.experts)] if weight.per_expert else [weight]
                for one in each:
                    yield of(one, f"model.layers.{i}.", f"decoder.layers.{i}.")
        yield of(FINAL_NORM)
        if not self.tied:
            yield of(HEAD)

    def hf_tensors(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        """Yield the name and shape of each HF tensor; config.json alone says how many there are."""
        for _, shapes, _ in self.weights():
            yield from shapes.items()

    def hf_shapes(self) -> dict[str, tuple[int, ...]]:
        """Return the shape of each HF tensor, for a model whose weights exist."""
        return dict(self.hf_tensors())

    def padded_vocab(self, tp: int) -> int:
        """Return the vocabulary size padded to a multiple of ``128 * tp``, as Megatron pads it."""
        step = VOCAB_MULTIPLE * tp
        return -(-self.vocab // step) * step

    def check_tp(self, tp: int) -> None:
        """Raise UnsupportedError unless `tp` ranks divide the heads, KV heads and MLP widths."""
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
                raise UnsupportedError(f"tp: must divide {name} = {size}, got {tp}")


def read_architecture(model_dir: str | os.PathLike) -> Architecture:
    """Read ``config.json`` of an HF model directory.

    Args:
        model_dir: HF model directory.

    Returns:
        The architecture.

    Raises:
        InputError: If the file is missing or broken, or a field has an invalid value.
        UnsupportedError: Naming the first field that alignkit does not support: an unknown family, rope type or value,
            or an unknown field that may affect numerics.
    """
    path = Path(model_dir) / "config.json"
    config = read_json(path)
    names = config.get("architectures")
    if not isinstance(names, list) or len(names) != 1 or names[0] not in list(ARCHITECTURES):
        raise UnsupportedError(
            f"architectures: must be a list with one of {', '.join(ARCHITECTURES)}, {_given(config, 'architectures')}"
        )
    family = ARCHITECTURES[names[0]]
    if config.get("model_type") != family.name:  # it selects the config class, and so the defaults
        raise UnsupportedError(
            f"model_type: must be {_json(family.name)} for {names[0]}, {_given(config, 'model_type')}"
        )
    _check_fields(config, family)

    config = dict.fromkeys(family.may_be_absent) | config

    def size(field: str, if_null: int | None = None) -> int:
        if field not in config:
            raise InputError(f"{field}: required, but missing in {path}")
        value = if_null if config[field] is None else config[field]
        if type(value) is not int or value < 1:
            raise InputError(f"{field}: must be a positive integer, got {_json(config[field])} in {path}")
        if value >= 2**31:
            raise InputError(f"{field}: must be less than 2^31, got {_json(value)} in {path}")
        return value

    hidden, heads = size("hidden_size"), size("num_attention_heads")
    rope_base, rope_scaling, rotary_factor = _rope(config, family)
    experts, top_k, normalize_top_k, shared_intermediate = 0, 0, False, 0
    layers, dense_layers = size("num_hidden_layers"), ()
    groups, top_groups, routed_scale = 1, 1, 1.0
    if family.experts:
        counts = [size(field) for field in family.experts.count if field in config] or [size(family.experts.count[0])]
        if len(set(counts)) > 1:
            raise InputError(f"{' and '.join(family.experts.count)}: must be equal, got {counts}")
        experts, top_k = counts[0], size(family.experts.top_k)
        normalize_top_k = family.experts.normalize is None or _flag(path, config, family.experts.normalize)
        if family.experts.shared:
            shared_intermediate = size(family.experts.shared)
            shared_intermediate *= size(family.intermediate) if family.experts.shared_counts else 1
        if family.experts.groups:
            groups, top_groups = map(size, family.experts.groups)
        if family.experts.scale:
            routed_scale = _number(config, family.experts.scale)
        if family.experts.dense == "steps":
            step = size("decoder_sparse_step", 1) if "decoder_sparse_step" in config else 1
            dense_layers = _dense_layers(config.get("mlp_only_layers"), step, layers)
        elif family.experts.dense == "first":
            first = config.get("first_k_dense_replace")
            if type(first) is not int or not 0 <= first < layers:
                given = _given(config, "first_k_dense_replace")
                raise InputError(f"first_k_dense_replace: must be an integer in [0, {layers}), {given}")
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
        norm_eps=_number(config, "rms_norm_eps"),
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
    _check_routing(arch, family)
    if isinstance(rope_scaling, Yarn) and rotary_factor != 1:
        raise UnsupportedError(
            "partial_rotary_factor: must be 1 with YaRN, because Megatron-core's YaRN rotates whole heads, got "
            f"{rotary_factor}"
        )
    if arch.head_dim % 2:
        raise InputError(f"head_dim: must be even, because RoPE rotates pairs of dimensions, got {arch.head_dim}")
    if arch.rotary_dim % 2 or not arch.rotary_dim:
        raise InputError(
            "head_dim, partial_rotary_factor: int(head_dim * partial_rotary_factor) must be a positive even number, "
            f"got int({arch.head_dim} * {rotary_factor}) = {arch.rotary_dim}"
        )
    if arch.top_k > arch.experts:
        raise InputError(
            f"num_experts_per_tok: must be at most {arch.experts}, the number of experts, got {arch.top_k}"
        )
    if arch.heads % arch.kv_heads:
        raise InputError(f"num_key_value_heads: must divide num_attention_heads = {arch.heads}, got {arch.kv_heads}")
    if config.get("head_dim") is None and hidden % heads:
        raise InputError(f"num_attention_heads: must divide hidden_size = {hidden} if head_dim is not set, got {heads}")
    if family.heads_fill_hidden and arch.head_dim * heads != hidden:
        raise UnsupportedError(
            f"head_dim: must be hidden_size / num_attention_heads = {hidden / heads:g}, which vLLM assumes for "
            f"{family.name}, got {arch.head_dim}"
        )
    _check_layer_types(config.get("layer_types"), layers)
    return arch


def find_architecture(source: str | os.PathLike, revision: str | None = None) -> Architecture:
    """Return the `Architecture` of the config.json in a folder or, at `revision`, a Hugging Face Hub repository."""
    if Path(source).is_dir():
        return read_architecture(source)
    from transformers.utils import cached_file

    try:
        path = cached_file(str(source), "config.json", revision=revision)
    except OSError as e:
        raise UnsupportedError(f"model {source}: cannot read config.json: {e}") from e
    return read_architecture(Path(str(path)).parent)


def _check_layer_types(kinds: Any, layers: int) -> None:
    if kinds is None:
        return
    if not isinstance(kinds, list):
        raise UnsupportedError(f"layer_types: must be a list with an entry for each layer, got {_json(kinds)}")
    if len(kinds) != layers:
        raise UnsupportedError(f"layer_types: must have num_hidden_layers = {layers} entries, got {len(kinds)}")
    for i, kind in enumerate(kinds):
        if kind != "full_attention":
            raise UnsupportedError(f'layer_types: entry {i} must be "full_attention", got {_json(kind)}')


def _check_routing(arch: Architecture, family: Family) -> None:
    """Check that both engines support the routing with sigmoid scores and expert groups."""
    if family.experts is None or arch.score == "softmax":
        return
    if arch.experts % arch.groups:
        raise InputError(f"n_group: must divide {arch.experts}, the number of experts, got {arch.groups}")
    if arch.top_groups > arch.groups:
        raise InputError(f"topk_group: must be at most n_group = {arch.groups}, got {arch.top_groups}")
    if arch.top_k > (eligible := arch.experts // arch.groups * arch.top_groups):
        raise InputError(
            f"num_experts_per_tok: must be at most {eligible}, the number of experts in topk_group = {arch.top_groups} "
            f"of n_group = {arch.groups} groups, got {arch.top_k}"
        )
    if arch.groups > 1 and arch.top_k // arch.top_groups != 2:
        raise UnsupportedError(
            f"topk_group: num_experts_per_tok // topk_group must be 2, got {arch.top_k} // {arch.top_groups} = "
            f"{arch.top_k // arch.top_groups}. vLLM scores a group by its two best experts, Megatron-core by its "
            "num_experts_per_tok // topk_group best"
        )
    if arch.normalize_top_k != (arch.top_k > 1):
        raise UnsupportedError(
            f"norm_topk_prob: must be {json.dumps(arch.top_k > 1)} with {arch.score} scores and num_experts_per_tok = "
            f"{arch.top_k}, got {json.dumps(arch.normalize_top_k)}. Megatron-core "
            "always normalizes the weights of 2 or more experts, and never the weight of one"
        )


def _count(config: Mapping, field: str) -> int:
    value = config.get(field) or 0
    if type(value) is not int or not 0 <= value < 2**31:
        raise InputError(f"{field}: must be a nonnegative integer, got {_json(config[field])}")
    return value


def _flag(path: Path, config: Mapping, field: str) -> bool:
    if type(config.get(field)) is not bool:
        raise InputError(f"{field}: must be true or false, {_given(config, field)} in {path}")
    return config[field]


def _dense_layers(listed: Any, step: int, layers: int) -> tuple[int, ...]:
    """Return the indices of dense layers: `listed`, or not the last of each `step` layers."""
    listed = [] if listed is None else listed
    if not isinstance(listed, list) or not all(type(i) is int and 0 <= i < layers for i in listed):
        raise InputError(f"mlp_only_layers: must be a list of layer indices in [0, {layers}), got {_json(listed)}")
    dense = tuple(i for i in range(layers) if i in listed or (i + 1) % step)
    if len(dense) == layers:
        raise UnsupportedError(
            "mlp_only_layers / decoder_sparse_step: at least one layer must have experts, got mlp_only_layers = "
            f"{_json(listed)} and decoder_sparse_step = {step}, which make all {layers} layers dense"
        )
    return dense


def _check_fields(config: Mapping, family: Family) -> None:
    """Raise UnsupportedError naming the first unsupported field that may affect numerics."""
    read = READ | family.fields
    must_be = MUST_BE | dict(family.must_be)
    for field, value in config.items():
        if field in read:
            continue
        if field in must_be:
            if value not in must_be[field]:
                raise UnsupportedError(f"{field}: must be {_json(must_be[field][0])}, got {_json(value)}")
        elif field in MUST_BE_OFF:
            if value:
                raise UnsupportedError(
                    f"{field}: must be off (absent, null, false or 0) for {family.name}, got {_json(value)}"
                )
        elif field not in HARMLESS and value is not None and value is not False and not isinstance(value, str):
            raise UnsupportedError(
                f"{field}: must be absent, null, false or a string, because alignkit does not know this field of "
                f"{family.name}, got {_json(value)}. Remove the field from config.json if neither engine uses it"
            )
    if config.get("hidden_act", "silu") != "silu":
        raise UnsupportedError(f'hidden_act: must be "silu", got {_json(config["hidden_act"])}')
    if family.sliding_window == "must be null" and "sliding_window" not in config:
        raise UnsupportedError(
            "sliding_window: must be null in config.json, but the field is missing, and transformers then uses a "
            f'window with {family.name}. Add "sliding_window": null'
        )
    if family.sliding_window != "unused" and config.get("sliding_window") is not None:
        raise UnsupportedError(f"sliding_window: must be null, got {_json(config['sliding_window'])}")


def _rope(config: Mapping, family: Family) -> tuple[float, Scaling | None, float]:
    """Return the rotary base, the scaling and the rotated fraction of a head.

    Newer configs have all three in `rope_parameters`; older ones have base and fraction next to `rope_scaling`.
    """
    bases = {"rope_theta": config["rope_theta"]} if "rope_theta" in config else {}
    scalings = {}
    parts = [config["partial_rotary_factor"]] if "partial_rotary_factor" in config else []
    for field in ("rope_scaling", "rope_parameters"):
        rope = config.get(field)
        if rope is None:
            continue
        if not isinstance(rope, dict):
            raise InputError(f"{field}: must be a JSON object, got {_json(rope)}")
        names = [rope[name] for name in ("rope_type", "type") if name in rope] or ["default"]
        for name in names:
            if name not in list(ROPE_TYPES):
                known = ", ".join(ROPE_TYPES)
                raise UnsupportedError(f"{field}: rope_type: must be one of {known}, got {_json(name)}")
            if name != names[0]:
                raise UnsupportedError(
                    f"{field}: rope_type and type must be equal, got {_json(names[0])} and {_json(name)}"
                )
        if "partial_rotary_factor" in rope:
            parts.append(rope["partial_rotary_factor"])
            if family.rotary_factor is None and parts[-1] != 1:
                raise UnsupportedError(f"{field}: partial_rotary_factor: must be 1, got {_json(parts[-1])}")
        for name in rope.keys() - _ROPE_FIELDS - frozenset(ROPE_TYPES[names[0]]):
            raise UnsupportedError(
                f"{field}: {name}: must be absent with rope_type {_json(names[0])}, got {_json(rope[name])}"
            )
        scalings[field] = _scaling(field, names[0], rope)
        if "rope_theta" in rope:
            bases[f"{field}: rope_theta"] = rope["rope_theta"]
    if len(set(scalings.values())) > 1:
        given = " and ".join(str(scaling or "no scaling") for scaling in scalings.values())
        raise InputError(
            f"rope_scaling, rope_parameters: must specify the same scaling, got {given}. Remove one of the two fields"
        )
    scaling = next(iter(scalings.values()), None)
    part = _rotary_factor(parts, family)
    if not bases and family.rope_base is not None:
        return family.rope_base, scaling, part
    if not bases:
        raise InputError("rope_theta: required, but missing in config.json")
    values = [_positive(*item) for item in bases.items()]
    if len(set(values)) > 1:
        given = " and ".join(f"{field} = {value}" for field, value in bases.items())
        raise InputError(f"rope_theta: must have one value in config.json, got {given}")
    return values[0], scaling, part


def _rotary_factor(given: list, family: Family) -> float:
    if family.rotary_factor is None:
        return 1.0
    values = [_positive("partial_rotary_factor", value) for value in given] or [family.rotary_factor]
    if len(set(values)) > 1:
        found = " and ".join(map(str, dict.fromkeys(values)))
        raise InputError(f"partial_rotary_factor: must have one value in config.json, got {found}")
    if values[0] > 1:
        raise InputError(f"partial_rotary_factor: must be in (0, 1], got {values[0]}")
    return values[0]


def _scaling(field: str, kind: str, rope: Mapping) -> Scaling | None:
    """Return the scaling; only fields with the same default in transformers and vLLM may be missing, or null.

    Both read an `attention_factor` of null as missing. vLLM has no default for null in the other fields.
    """
    if kind == "default":
        return None

    def number(name: str, if_absent: float | None = None) -> float:
        if name not in rope and if_absent is None:
            raise InputError(f"{field}: {name}: required, but missing in config.json")
        return _positive(f"{field}: {name}", rope.get(name, if_absent))

    original = number("original_max_position_embeddings")
    if original != int(original):
        raise InputError(f"{field}: original_max_position_embeddings: must be an integer, got {original}")
    if kind == "llama3":
        low, high = number("low_freq_factor"), number("high_freq_factor")
        if not low < high:
            raise UnsupportedError(f"{field}: low_freq_factor: must be less than high_freq_factor = {high}, got {low}")
        return Llama3(number("factor"), low, high, int(original))
    factor = number("factor")
    attention_factor = yarn_attention_factor(factor)
    if rope.get("attention_factor") not in (None, attention_factor):
        raise UnsupportedError(
            f"{field}: attention_factor: must be absent or {attention_factor}, the only value that Megatron-core "
            f"supports with this factor, got {_json(rope['attention_factor'])}"
        )
    truncate = rope.get("truncate", True)
    if type(truncate) is not bool:
        raise InputError(f"{field}: truncate: must be true or false, got {_json(truncate)}")
    return Yarn(factor, int(original), number("beta_fast", 32.0), number("beta_slow", 1.0), attention_factor, truncate)


def _number(config: Mapping, field: str) -> float:
    if field not in config:
        raise InputError(f"{field}: required, but missing in config.json")
    return _positive(field, config[field])


def _positive(field: str, value) -> float:
    if type(value) not in (int, float) or not 0 < value < 3e38:  # NaN compares false
        raise InputError(f"{field}: must be a positive number, got {_json(value)}")
    return float(value)


def _json(value: Any) -> str:
    """Return a value as config.json spells it, at most 200 characters."""
    return json.dumps(value)[:200]


def _given(config: Mapping, field: str) -> str:
    return f"got {_json(config[field])}" if field in config else "but the field is missing"


def read_json(path: Path) -> dict:
    """Return the JSON object in `path`. Raises InputError if the file is missing or holds no JSON object."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError):
        raise InputError(
            f"model: must be a local checkpoint directory, but {path} does not exist. Download the model first"
        ) from None
    except (OSError, ValueError, RecursionError) as e:
        raise InputError(f"model: cannot read {path}: {e}") from None
    if not isinstance(value, dict):
        raise InputError(f"model: {path}: must be a JSON object, got a {type(value).__name__}")
    return value
