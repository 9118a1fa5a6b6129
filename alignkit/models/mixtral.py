"""Mixtral without a sliding window as data: Mistral's attention with MoE layers.

`Family` documents the fields. `file`, `structure` and `mlp` hold vLLM's names; the other names are those of Hugging
Face checkpoints (config.json and tensors).
"""

from alignkit.models.family import Experts, Family, experts_layer

MIXTRAL = Family(
    name="mixtral",
    architecture="MixtralForCausalLM",
    may_be_absent=("head_dim",),
    rope_base=None,
    sliding_window="null",
    file="mixtral.py",
    structure=("MixtralForCausalLM", "MixtralModel", "MixtralDecoderLayer", "MixtralAttention", "MixtralMoE"),
    mlp="block_sparse_moe",
    layer=experts_layer(
        "block_sparse_moe.gate.weight", "block_sparse_moe.experts.{expert}", gate="w1", up="w3", down="w2"
    ),
    experts=Experts(),
)
