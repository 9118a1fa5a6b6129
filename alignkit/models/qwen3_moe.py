"""Qwen3-MoE as data: Qwen3 with routed experts in all or some layers.

`Family` documents the fields. `file` and `structure` hold vLLM's names; the other names are those of Hugging Face
checkpoints (config.json and tensors).
"""

from alignkit.models.family import QK_NORMS, Experts, Family, experts_layer

QWEN3_MOE = Family(
    name="qwen3_moe",
    architecture="Qwen3MoeForCausalLM",
    may_be_absent=("head_dim",),
    rope_base=None,
    sliding_window="unused",
    file="qwen3_moe.py",
    structure=(
        "Qwen3MoeForCausalLM",
        "Qwen3MoeModel",
        "Qwen3MoeDecoderLayer",
        "Qwen3MoeAttention",
        "Qwen3MoeSparseMoeBlock",
        "Qwen3MoeMLP",
    ),
    layer=experts_layer("mlp.gate.weight", "mlp.experts.{expert}", "gate_proj", "up_proj", "down_proj") + QK_NORMS,
    intermediate="moe_intermediate_size",
    experts=Experts(normalize="norm_topk_prob", dense="steps"),
)
