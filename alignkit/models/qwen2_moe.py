"""Qwen2-MoE as data: Qwen2 with routed experts and a gated shared expert in all or some layers.

`Family` documents the fields. `file` and `structure` hold vLLM's names; the other names are those of Hugging Face
checkpoints (config.json and tensors).
"""

from alignkit.models.family import QKV_BIASES, Experts, Family, experts_layer, shared_expert

QWEN2_MOE = Family(
    name="qwen2_moe",
    architecture="Qwen2MoeForCausalLM",
    may_be_absent=("head_dim",),
    rope_base=None,
    sliding_window="unused",
    file="qwen2_moe.py",
    structure=(
        "Qwen2MoeForCausalLM",
        "Qwen2MoeModel",
        "Qwen2MoeDecoderLayer",
        "Qwen2MoeAttention",
        "Qwen2MoeSparseMoeBlock",
        "Qwen2MoeMLP",
    ),
    layer=(
        experts_layer("mlp.gate.weight", "mlp.experts.{expert}", "gate_proj", "up_proj", "down_proj")
        + shared_expert("mlp.shared_expert", "mlp.shared_expert_gate.weight")
        + QKV_BIASES
    ),
    heads_fill_hidden=True,
    intermediate="moe_intermediate_size",
    experts=Experts(
        normalize="norm_topk_prob", dense="steps", normalize_published=False, shared="shared_expert_intermediate_size"
    ),
    must_be=(("qkv_bias", (True,)),),
)
