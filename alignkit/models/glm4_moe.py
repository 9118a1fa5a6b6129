"""GLM-4.5 as data: MoE with sigmoid scores, an expert bias and a shared expert; half of each head is rotated.

`Family` documents the fields. `file` and `structure` hold vLLM's names; the other names are those of Hugging Face
checkpoints (config.json and tensors).
"""

from alignkit.models.family import QK_NORMS, QKV_BIASES, Experts, Family, expert_bias, experts_layer, shared_expert

GLM4_MOE = Family(
    name="glm4_moe",
    architecture="Glm4MoeForCausalLM",
    may_be_absent=(),
    rope_base=None,
    sliding_window="null",
    file="glm4_moe.py",
    structure=(
        "Glm4MoeForCausalLM",
        "Glm4MoeModel",
        "Glm4MoeDecoderLayer",
        "Glm4MoeAttention",
        "Glm4MoE",
        "Glm4MoeMLP",
    ),
    layer=(
        *experts_layer("mlp.gate.weight", "mlp.experts.{expert}", "gate_proj", "up_proj", "down_proj"),
        expert_bias("mlp.gate.e_score_correction_bias"),
        *shared_expert("mlp.shared_experts", None),
    ),
    intermediate="moe_intermediate_size",
    experts=Experts(
        count=("n_routed_experts",),
        normalize="norm_topk_prob",
        shared="n_shared_experts",
        shared_counts=True,
        dense="first",
        score="sigmoid",
        groups=("n_group", "topk_group"),
        scale="routed_scaling_factor",
    ),
    optional=(("attention_bias", QKV_BIASES), ("use_qk_norm", QK_NORMS)),
    rotary_factor=0.5,
    mtp="num_nextn_predict_layers",
)
