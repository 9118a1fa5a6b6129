"""What a family of models is described by. The families themselves are files of data beside this one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal


@dataclass(frozen=True)
class Weight:
    """A weight of Megatron-core's GPTModel, and the tensors of an HF checkpoint that it is made of.

    megatron: its name, in a layer below ``decoder.layers.N.``. hf: names, in a layer below ``model.layers.N.``, and their
    shapes in sizes of `Architecture.size`. Where the names say ``{expert}``, every expert has one. cut: how tensor-parallel ranks hold it, which also says how it is put
    together: by the rows of the padded vocabulary; by KV group, q, k and v of a group together; gate above up, each cut
    by rows; by columns; or whole, on every rank. fp32: it is of that type, whatever the model's is.
    """

    megatron: str
    hf: Mapping[str, tuple[str, ...]]
    cut: Literal["vocabulary", "kv groups", "gate and up", "columns", "whole"]
    fp32: bool = False

    @property
    def per_expert(self) -> bool:
        return "{expert}" in self.megatron

    def of_expert(self, expert: int) -> Weight:
        """The same with the expert's number in its names."""
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
"""What a layer of every family has."""


def _mlp(width: str) -> tuple[Weight, ...]:
    """An MLP that all tokens go to."""
    return (
        Weight(
            "mlp.linear_fc1.weight",
            {"mlp.gate_proj.weight": (width, "hidden"), "mlp.up_proj.weight": (width, "hidden")},
            "gate and up",
        ),
        Weight("mlp.linear_fc2.weight", {"mlp.down_proj.weight": ("hidden", width)}, "columns"),
    )


LAYER = (*ATTENTION, *_mlp("intermediate"))
"""What a layer of every dense family has."""


def experts_layer(router: str, expert: str, gate: str, up: str, down: str) -> tuple[Weight, ...]:
    """What a layer of a family with experts has. router: HF's name of the router's weight; expert: of one expert, with
    its number as ``{expert}``; gate, up, down: of its parts."""
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


def choice_bias(bias: str) -> Weight:
    """What such a layer has beside these where a bias has a part in the choice of experts. bias: HF's name of it."""
    return Weight(CHOICE_BIAS, {bias: ("experts",)}, "whole", fp32=True)


CHOICE_BIAS = "mlp.router.expert_bias"
"""A buffer of Megatron's; all other weights are parameters."""


def shared_expert(expert: str, gate: str | None) -> tuple[Weight, ...]:
    """What such a layer has beside these for an expert that all tokens go to. expert: HF's name of it; gate: of the weight
    that makes a factor of its output, one for each token, if there is one."""
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

FUSED_NORMS = {
    "input_layernorm.weight": "self_attention.linear_qkv.layer_norm_weight",
    "pre_mlp_layernorm.weight": "mlp.linear_fc1.layer_norm_weight",
}
"""Megatron's names with the TransformerEngine layer spec, whose linears have the norms before them within."""

QK_NORMS = (
    Weight("self_attention.q_layernorm.weight", {"self_attn.q_norm.weight": ("head_dim",)}, "whole"),
    Weight("self_attention.k_layernorm.weight", {"self_attn.k_norm.weight": ("head_dim",)}, "whole"),
)
QKV_BIASES = (
    Weight(
        "self_attention.linear_qkv.bias",
        {"self_attn.q_proj.bias": ("q",), "self_attn.k_proj.bias": ("kv",), "self_attn.v_proj.bias": ("kv",)},
        "kv groups",
    ),
)


@dataclass(frozen=True)
class Experts:
    """The fields of config.json in which a family with experts says how many there are (either; transformers writes both
    names), how many of them a token goes to, whether the weights of those are normalized to sum up to 1; None: they
    always are, and the width of an expert that all tokens go to, if there is one. normalizes: whether the published
    models' are. shared_counts: that field says instead how many experts make it up, by their width. dense: the fields that
    say which layers have an MLP in place of experts: "steps" are `mlp_only_layers` and `decoder_sparse_step`, "first" is
    `first_k_dense_replace`; "": all layers have experts. score: of an expert, by its logit. groups: the fields with the number
    of equal groups that experts are in, and of those that a token's experts are of. scale: the field with a factor of their
    weights."""

    count: tuple[str, ...] = ("num_experts", "num_local_experts")
    top_k: str = "num_experts_per_tok"
    normalize: str | None = None
    normalizes: bool = True
    shared: str | None = None
    shared_counts: bool = False
    dense: Literal["", "steps", "first"] = ""
    score: Literal["softmax", "sigmoid"] = "softmax"
    groups: tuple[str, str] | None = None
    scale: str | None = None

    @property
    def fields(self) -> frozenset[str]:
        named = (
            *self.count,
            self.top_k,
            self.normalize,
            self.shared,
            *_OF_DENSE_LAYERS[self.dense],
            *(self.groups or ()),
            self.scale,
        )
        return frozenset(field for field in named if field)


_OF_DENSE_LAYERS = {"": (), "steps": ("mlp_only_layers", "decoder_sparse_step"), "first": ("first_k_dense_replace",)}


@dataclass(frozen=True)
class Family:
    """A family. Everything that differs between families is a field of this.

    name: `model_type` in config.json. architecture: HF's class, and vLLM's. layer: the weights of a layer, of a family with
    experts of one that has them.

    Of config.json: may_be_absent, sizes that follow from others (the other defaults of transformers' classes are the
    sizes of some one model). rope_base: the rotary base if the config names none; None where transformers and vLLM have
    different ones. heads_fill_hidden: whether vLLM takes the head's size to be hidden_size / heads, whatever the config
    says. sliding_window: "unused" unless `use_sliding_window` asks for it; used unless it is "null", or absent; used
    unless the config says that it "must be null", as transformers' class has a window by default. intermediate: the field
    with the width of an MLP, or of an expert's. experts: None of a dense family. must_be: fields of its own class that an
    engine computes with, and what they must be, if they are there. optional: fields that say, each by true or false, whether
    a layer has further weights, and those. rotary_factor: what part of a head is rotated if the config does not say; None:
    all of it, always. mtp: the field with the number of further layers, for multi-token prediction, which neither engine runs.

    Of vLLM: file, its model's below `model_executor/models`. structure: classes of a built model that only arrange
    others. mlp: the attribute of a layer. off: attributes of its attention that must be false, each with the field of a config that turns it on.
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
        """The weights of a layer without experts, in a family with them."""
        return (*(w for w in self.layer if not w.megatron.startswith("mlp.")), *_mlp("dense_intermediate"))

    @property
    def fields(self) -> frozenset[str]:
        """Those of config.json that not every family has, and that are read."""
        fields = {self.intermediate, *(field for field, _ in self.optional)}
        fields |= self.experts.fields if self.experts else set()
        fields |= {"partial_rotary_factor"} if self.rotary_factor else set()
        return frozenset(fields | ({self.mtp} if self.mtp else set()))
