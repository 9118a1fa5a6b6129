"""Hook points in Megatron-core: names that the adapter subclasses, replaces or calls. `versions` has them per version.

A row gives the file below megatron/core/, the dotted name, the parameters that it must accept, and the identifiers that
its source must contain. `patch_megatron` rejects a Megatron-core that lacks a row of its version. Add a row for a name
that the adapter starts to use.
"""

from __future__ import annotations

from alignkit.engines.hook_points import HookPoint

COMMON = (
    HookPoint("models/gpt/gpt_model.py", "GPTModel.__init__", ("config", "vocab_size")),
    HookPoint(
        "models/gpt/gpt_model.py",
        "GPTModel._preprocess",
        ("input_ids", "position_ids", "inference_context", "packed_seq_params"),
    ),
    HookPoint("models/gpt/gpt_model.py", "GPTModel._postprocess", ("hidden_states", "labels")),
    HookPoint(
        "transformer/transformer_block.py",
        "TransformerBlock.forward",
        ("hidden_states", "attention_mask", "attention_bias", "inference_context", "packed_seq_params"),
    ),
    HookPoint(
        "pipeline_parallel/schedules.py", "forward_backward_pipelining_with_interleaving", ("model", "pg_collection")
    ),
    HookPoint(
        "pipeline_parallel/schedules.py", "forward_backward_pipelining_without_interleaving", ("model", "pg_collection")
    ),
    HookPoint(
        "pipeline_parallel/schedules.py",
        "get_forward_backward_func",
        mentions=("forward_backward_pipelining_with_interleaving",),
    ),
    HookPoint("transformer/transformer_layer.py", "TransformerLayer"),
    HookPoint("transformer/attention.py", "SelfAttention"),
    HookPoint(
        "transformer/attention.py",
        "Attention.forward",
        ("hidden_states", "attention_mask", "rotary_pos_emb", "packed_seq_params"),
        mentions=("get_query_key_value_tensors",),
    ),
    HookPoint(
        "transformer/attention.py", "SelfAttention.get_query_key_value_tensors", mentions=("q_layernorm", "k_layernorm")
    ),
    HookPoint("transformer/attention.py", "apply_rotary_pos_emb"),
    HookPoint("transformer/dot_product_attention.py", "DotProductAttention.__init__", ("config", "pg_collection")),
    HookPoint(
        "transformer/dot_product_attention.py",
        "DotProductAttention.forward",
        ("query", "key", "value", "attention_mask", "attn_mask_type", "attention_bias", "packed_seq_params"),
    ),
    HookPoint("transformer/mlp.py", "MLP.forward", ("hidden_states", "per_token_scale")),
    HookPoint("transformer/torch_norm.py", "WrappedTorchNorm.__new__", ("config", "hidden_size", "eps")),
    HookPoint("transformer/identity_op.py", "IdentityOp"),
    HookPoint("transformer/identity_op.py", "IdentityFuncOp"),
    HookPoint("fusions/fused_bias_dropout.py", "get_bias_dropout_add", ("training", "fused")),
    HookPoint("fusions/fused_softmax.py", "FusedScaleMaskSoftmax"),
    HookPoint("models/common/language_module/language_module.py", "LanguageModule"),
    HookPoint("models/common/embeddings/language_model_embedding.py", "LanguageModelEmbedding"),
    HookPoint(
        "models/common/embeddings/rotary_pos_embedding.py",
        "RotaryEmbedding.forward",
        ("max_seq_len", "offset", "packed_seq"),
    ),
    HookPoint(
        "models/common/embeddings/rotary_pos_embedding.py",
        "RotaryEmbedding.__init__",
        ("rope_scaling", "rope_scaling_factor", "seq_len_interpolation_factor"),
    ),
    HookPoint(
        "models/common/embeddings/yarn_rotary_pos_embedding.py",
        "YarnRotaryEmbedding.__init__",
        ("scaling_factor", "original_max_position_embeddings", "beta_fast", "beta_slow", "mscale", "mscale_all_dim"),
        ("inv_freq_extra", "inv_freq_inter", "correction_range_round_to_int"),
    ),
    HookPoint(
        "models/common/embeddings/rope_utils.py",
        "apply_rotary_pos_emb",
        ("t", "freqs", "config", "cu_seqlens", "mscale"),
    ),
    HookPoint("tensor_parallel/layers.py", "ColumnParallelLinear.forward", ("input_", "weight")),
    HookPoint("tensor_parallel/layers.py", "ColumnParallelLinear._forward_impl", ("input", "weight")),
    HookPoint("tensor_parallel/layers.py", "RowParallelLinear.forward", ("input_",)),
    HookPoint("tensor_parallel/layers.py", "VocabParallelEmbedding"),
    HookPoint(
        "tensor_parallel/cross_entropy.py",
        "_VocabParallelCrossEntropy.forward",
        ("vocab_parallel_logits", "target", "label_smoothing"),
    ),
    HookPoint(
        "tensor_parallel/cross_entropy.py",
        "vocab_parallel_cross_entropy",
        ("vocab_parallel_logits", "target", "label_smoothing"),
    ),
    HookPoint(
        "fusions/fused_cross_entropy.py",
        "_VocabParallelCrossEntropy.forward",
        ("vocab_parallel_logits", "target", "tp_group"),
    ),
    HookPoint(
        "models/common/language_module/language_module.py",
        "LanguageModule.compute_language_model_loss",
        ("labels", "logits"),
    ),
    HookPoint("tensor_parallel/random.py", "CudaRNGStatesTracker.fork"),
    HookPoint("tensor_parallel/random.py", "_get_cuda_rng_state"),
    HookPoint("tensor_parallel/random.py", "_set_cuda_rng_state"),
    # MoE.
    HookPoint(
        "transformer/moe/moe_layer.py",
        "MoELayer.forward",
        ("hidden_states", "intermediate_tensors", "padding_mask"),
        ("moe_layer_recompute", "attn_tp_group"),
    ),
    HookPoint("transformer/moe/moe_layer.py", "MoELayer.route", ("hidden_states", "padding_mask")),
    HookPoint(
        "transformer/moe/moe_layer.py",
        "BaseMoELayer.__init__",
        mentions=("ep_group", "local_expert_indices", "use_shared_expert"),
    ),
    HookPoint("transformer/moe/router.py", "TopKRouter.__init__", mentions=("topk", "score_function", "routing_type")),
    HookPoint("transformer/moe/router.py", "TopKRouter._apply_expert_bias", ("routing_map", "padding_mask")),
    HookPoint(
        "transformer/moe/router.py",
        "TopKRouter.routing",
        ("logits", "padding_mask"),
        ("topk_routing_with_score_function", "_apply_aux_loss", "_apply_expert_bias", "apply_z_loss"),
    ),
    HookPoint("transformer/moe/router.py", "Router.gating", ("input",)),
    HookPoint(
        "transformer/moe/moe_utils.py",
        "topk_routing_with_score_function",
        (
            "logits",
            "topk",
            "use_pre_softmax",
            "num_groups",
            "group_topk",
            "scaling_factor",
            "expert_bias",
            "router_replay",
        ),
    ),
    HookPoint("transformer/moe/experts.py", "SequentialMLP.__init__", mentions=("local_experts", "tp_group")),
    HookPoint("transformer/moe/experts.py", "TEGroupedMLP.__init__", mentions=("linear_fc1", "linear_fc2", "tp_group")),
    HookPoint("transformer/moe/shared_experts.py", "SharedExpertMLP.forward", ("hidden_states",), ("gate_weight",)),
    HookPoint("transformer/moe/shared_experts.py", "SharedExpertMLP.__init__", mentions=("use_shared_expert_gate",)),
    HookPoint("tensor_parallel/mappings.py", "scatter_to_sequence_parallel_region", ("input_", "group")),
    HookPoint(
        "tensor_parallel/mappings.py",
        "gather_from_sequence_parallel_region",
        ("input_", "tensor_parallel_output_grad", "group"),
    ),
    # TransformerEngine's layer spec: the wrapper classes that `te` replaces.
    HookPoint("extensions/transformer_engine.py", "TEColumnParallelGroupedLinear"),
    HookPoint("extensions/transformer_engine.py", "TERowParallelGroupedLinear"),
    HookPoint("models/gpt/gpt_layer_specs.py", "get_gpt_layer_with_transformer_engine_spec"),
    HookPoint("extensions/transformer_engine.py", "TELayerNormColumnParallelLinear.forward", ("x",)),
    HookPoint("extensions/transformer_engine.py", "TELinear.forward", ("x",)),
    HookPoint("extensions/transformer_engine.py", "TEColumnParallelLinear"),
    HookPoint("extensions/transformer_engine.py", "TERowParallelLinear"),
    HookPoint("extensions/transformer_engine.py", "TENorm.__new__", ("config", "hidden_size", "eps")),
    HookPoint(
        "extensions/transformer_engine.py",
        "TEDotProductAttention.forward",
        ("query", "key", "value", "attention_mask", "attn_mask_type", "attention_bias", "packed_seq_params"),
    ),
    # First and last call of every forward, which the patch replaces.
    HookPoint("models/gpt/gpt_model.py", "GPTModel.forward", mentions=("_preprocess", "_postprocess")),
)

# From 0.18 on: the output processor, with which a framework replaces the loss.
HOOK = tuple(
    HookPoint("models/gpt/gpt_model.py", name, ("output_processor", "output_processor_context"))
    for name in ("GPTModel.forward", "GPTModel._postprocess")
)

# From 0.19 on: the cross-entropy takes its process group.
FROM_0_19 = (HookPoint("tensor_parallel/cross_entropy.py", "vocab_parallel_cross_entropy", ("tp_group",)),)

# From 0.18 on: HybridModel, GPTModel's successor. Its forward is a single function, which alignkit replaces as a whole.
HYBRID = (
    HookPoint(
        "models/hybrid/hybrid_model.py", "HybridModel.__init__", ("config", "hybrid_layer_pattern", "rotary_base")
    ),
    HookPoint(
        "models/hybrid/hybrid_model.py",
        "HybridModel.forward",
        (
            "input_ids",
            "position_ids",
            "attention_mask",
            "decoder_input",
            "labels",
            "inference_context",
            "inference_params",
            "runtime_gather_output",
            "packed_seq_params",
            "padding_mask",
        ),
        ("embedding", "get_rotary_seq_len", "decoder", "output_layer", "shared_embedding_or_output_weight"),
    ),
    HookPoint(
        "models/hybrid/hybrid_block.py",
        "HybridStack.forward",
        ("hidden_states", "attention_mask", "rotary_pos_emb", "packed_seq_params", "padding_mask"),
        ("input_tensor", "layers", "final_norm"),
    ),
    HookPoint("models/hybrid/hybrid_block.py", "HybridStackSubmodules", mentions=("attention_layer", "mlp_layer")),
    HookPoint("models/hybrid/hybrid_block.py", "TENorm"),
    HookPoint("ssm/mlp_layer.py", "MLPLayer"),
)
