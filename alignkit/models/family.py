"""Schema of a model family. The families themselves are data in the other files of this folder.

Megatron-core's names of weights are in this file, because all families share them; a family's file has HF's and vLLM's.
Readers: `models/config.py` (config.json), `alignkit/convert.py`, `alignkit/jobs/model.py` (generated checkpoints), the
vLLM adapter and its bisect worker, `megatron/build.py` (`EXPERT_BIAS`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal


@dataclass(frozen=True)
class Weight:
    """A weight of Megatron-core's GPTModel, and the HF tensors that it consists of.

    Attributes:
        megatron: Name in Megatron; for a layer's weight, below ``decoder.layers.N.``. A name with ``{expert}`` stands
            for one weight of every expert.
        hf: HF names (for a layer's weight, below ``model.layers.N.``) -> shapes, as names for `Architecture.size`.
        sharding: Tensor-parallel sharding, and so the way in which the HF tensors are combined: "vocabulary": rows of
            the padded vocabulary; "kv groups": q, k and v interleaved by KV group; "gate and up": gate rows above up
            rows, each sharded by rows; "columns"; "whole": replicated.
        fp32: The weight is fp32 in every model.
    """

    megatron: str
    hf: Mapping[str, tuple[str, ...]]
    sharding: Literal["vocabulary", "kv groups", "gate and up", "columns", "whole"]
    fp32: bool = False

    @property
    def per_expert(self) -> bool:
        """True if every expert has a weight of this name."""
        return "{expert}" in self.megatron

    def for_expert(self, expert: int) -> Weight:
        """Return this weight for one expert, with the expert's index in its names."""
        names = {name.format(expert=expert): sizes for name, sizes in self.hf.items()}
        return replace(self, megatron=self.megatron.format(expert=expert), hf=names)


EMBEDDING = Weight("embedding.word_embeddings.weight", {"model.embed_tokens.weight": ("vocab", "hidden")}, "vocabulary")
FINAL_NORM = Weight("decoder.final_layernorm.weight", {"model.norm.weight": ("hidden",)}, "whole")
HEAD = Weight("output_layer.weight", {"lm_head.weight": ("vocab", "hidden")}, "vocabulary")

ATTENTION = (
    Weight("input_layernorm.weight", {"input_layernorm.weight": ("hidden",)}, "whole"),
    Weight(
        "self_attention.linear_qkv.weight",
        {
            "self_attn.q_proj.weight": ("q", "hidden"),
            "self_attn.k_proj.weight": ("kv", "hidden"),
            "self_attn.v_proj.weight": ("kv", "hidden"),
        },
        "kv groups",
    ),
    Weight("self_attention.linear_proj.weight", {"self_attn.o_proj.weight": ("hidden", "q")}, "columns"),
    Weight("pre_mlp_layernorm.weight", {"post_attention_layernorm.weight": ("hidden",)}, "whole"),
)
"""Weights of attention and norms in a layer of every family."""


def _mlp(width: str) -> tuple[Weight, ...]:
    """Return the weights of a dense MLP. width: name of its intermediate size."""
    return (
        Weight(
            "mlp.linear_fc1.weight",
            {"mlp.gate_proj.weight": (width, "hidden"), "mlp.up_proj.weight": (width, "hidden")},
            "gate and up",
        ),
        Weight("mlp.linear_fc2.weight", {"mlp.down_proj.weight": ("hidden", width)}, "columns"),
    )


LAYER = (*ATTENTION, *_mlp("intermediate"))
"""Weights of a layer in every dense family."""


def experts_layer(router: str, expert: str, gate: str, up: str, down: str) -> tuple[Weight, ...]:
    """Return the weights of an MoE layer.

    Args:
        router: HF name of the router's weight.
        expert: HF name of one expert, with ``{expert}`` for its index.
        gate: HF name of the expert's gate projection.
        up: HF name of the expert's up projection.
        down: HF name of the expert's down projection.
    """
    megatron = "mlp.experts.local_experts.{expert}."
    gate, up, down = (f"{expert}.{part}.weight" for part in (gate, up, down))
    return (
        *ATTENTION,
        Weight("mlp.router.weight", {router: ("experts", "hidden")}, "whole"),
        Weight(
            megatron + "linear_fc1.weight",
            {gate: ("intermediate", "hidden"), up: ("intermediate", "hidden")},
            "gate and up",
        ),
        Weight(megatron + "linear_fc2.weight", {down: ("hidden", "intermediate")}, "columns"),
    )


def expert_bias(bias: str) -> Weight:
    """Return the bias that an MoE layer adds to its scores when it selects experts. bias: HF name."""
    return Weight(EXPERT_BIAS, {bias: ("experts",)}, "whole", fp32=True)


EXPERT_BIAS = "mlp.router.expert_bias"
"""Name of a Megatron buffer; all other weights are parameters."""


def shared_expert(expert: str, gate: str | None) -> tuple[Weight, ...]:
    """Return the weights of an MoE layer's shared expert.

    Args:
        expert: HF name of the shared expert.
        gate: HF name of its gate's weight, or None. The gate scales the output by one number for each token.
    """
    parts = {f"{expert}.{part}_proj.weight": ("shared_intermediate", "hidden") for part in ("gate", "up")}
    return (
        *([Weight(SHARED_GATE, {gate: ("one", "hidden")}, "whole")] if gate else []),
        Weight("mlp.shared_experts.linear_fc1.weight", parts, "gate and up"),
        Weight(
            "mlp.shared_experts.linear_fc2.weight",
            {f"{expert}.down_proj.weight": ("hidden", "shared_intermediate")},
            "columns",
        ),
    )


SHARED_GATE = "mlp.shared_experts.gate_weight"
"""Name of the Megatron weight of a shared expert's gate; `models/config.py` recognizes the gate by it."""

FUSED_NORMS = {
    "input_layernorm.weight": "self_attention.linear_qkv.layer_norm_weight",
    "pre_mlp_layernorm.weight": "mlp.linear_fc1.layer_norm_weight",
}
"""Norm names in the local layer spec -> names in TransformerEngine's, which fuses a norm into the next linear."""

QK_NORMS = (
    Weight("self_attention.q_layernorm.weight", {"self_attn.q_norm.weight": ("head_dim",)}, "whole"),
    Weight("self_attention.k_layernorm.weight", {"self_attn.k_norm.weight": ("head_dim",)}, "whole"),
)
"""Weights of the RMSNorms over query and key heads."""
QKV_BIASES = (
    Weight(
        "self_attention.linear_qkv.bias",
        {"self_attn.q_proj.bias": ("q",), "self_attn.k_proj.bias": ("kv",), "self_attn.v_proj.bias": ("kv",)},
        "kv groups",
    ),
)
"""Biases of the QKV projection."""


@dataclass(frozen=True)
class Experts:
    """Experts of an MoE family, mostly as names of config.json fields.

    Attributes:
        count: Fields with the number of experts; either may be present, as transformers writes both names.
        top_k: Field with the number of experts for each token.
        normalize: Field that says whether the top-k weights are normalized to sum to 1; None: always normalized.
        normalize_published: Value of `normalize` in the published models.
        shared: Field with the width of the shared expert, or None.
        shared_counts: If true, `shared` names the number of shared experts; their width is this number times an
            expert's width.
        dense: Fields that select the layers with a dense MLP. "steps": `mlp_only_layers` and `decoder_sparse_step`;
            "first": `first_k_dense_replace`; "": none, all layers have experts.
        score: Score function of the router's logits.
        groups: Fields with the number of expert groups, and the number of groups that a token's experts come from.
        scale: Field with the factor of the routed experts' weights.
    """

    count: tuple[str, ...] = ("num_experts", "num_local_experts")
    top_k: str = "num_experts_per_tok"
    normalize: str | None = None
    normalize_published: bool = True
    shared: str | None = None
    shared_counts: bool = False
    dense: Literal["", "steps", "first"] = ""
    score: Literal["softmax", "sigmoid"] = "softmax"
    groups: tuple[str, str] | None = None
    scale: str | None = None

    @property
    def fields(self) -> frozenset[str]:
        """Names of all config.json fields in this description."""
        named = (
            *self.count,
            self.top_k,
            self.normalize,
            self.shared,
            *_DENSE_LAYER_FIELDS[self.dense],
            *(self.groups or ()),
            self.scale,
        )
        return frozenset(field for field in named if field)


_DENSE_LAYER_FIELDS = {"": (), "steps": ("mlp_only_layers", "decoder_sparse_step"), "first": ("first_k_dense_replace",)}
"""Config.json fields of each value of `Experts.dense`."""


@dataclass(frozen=True)
class Family:
    """A model family: everything that differs between families.

    Attributes:
        name: `model_type` in config.json.
        architecture: Model class in HF and vLLM.
        may_be_absent: Size fields of config.json that may be missing because they follow from others. Other sizes are
            required: the defaults in transformers are one particular model's.
        rope_base: Default rotary base; None if transformers and vLLM have different defaults.
        sliding_window: "unused": ignored unless `use_sliding_window` is set; "null": must be null or missing;
            "must be null": must be null, because transformers' default is a window.
        file: vLLM's model file, below `model_executor/models`.
        structure: vLLM's model classes that only contain other modules.
        layer: Weights of a layer; in an MoE family, of a layer with experts.
        heads_fill_hidden: vLLM assumes a head dimension of hidden_size / heads and ignores the config's.
        intermediate: Field with the width of an MLP, or of an expert.
        experts: Description of the experts; None in a dense family.
        must_be: Further fields that affect numerics, with the values they may have if they are present.
        optional: Boolean fields, each with the weights that a layer has if the field is true.
        rotary_factor: Default rotated fraction of a head; None: always the whole head.
        mtp: Field with the number of multi-token prediction layers, which neither engine runs, or None.
        mlp: Attribute of a vLLM layer with its MLP or experts.
        off: Attributes of vLLM's attention that must be false, each with the config field that enables it.
    """

    name: str
    architecture: str
    may_be_absent: tuple[str, ...]
    rope_base: float | None
    sliding_window: Literal["unused", "null", "must be null"]
    file: str
    structure: tuple[str, ...]
    layer: tuple[Weight, ...] = LAYER
    heads_fill_hidden: bool = False
    intermediate: str = "intermediate_size"
    experts: Experts | None = None
    must_be: tuple[tuple[str, tuple], ...] = ()
    optional: tuple[tuple[str, tuple[Weight, ...]], ...] = ()
    rotary_factor: float | None = None
    mtp: str | None = None
    mlp: str = "mlp"
    off: tuple[tuple[str, str], ...] = ()

    @property
    def dense_layer(self) -> tuple[Weight, ...]:
        """Weights of an MoE family's layer without experts."""
        return (*(w for w in self.layer if not w.megatron.startswith("mlp.")), *_mlp("dense_intermediate"))

    @property
    def fields(self) -> frozenset[str]:
        """Fields of config.json that are read for this family in addition to `fields.READ`."""
        fields = {self.intermediate, *(field for field, _ in self.optional)}
        fields |= self.experts.fields if self.experts else set()
        fields |= {"partial_rotary_factor"} if self.rotary_factor else set()
        return frozenset(fields | ({self.mtp} if self.mtp else set()))
