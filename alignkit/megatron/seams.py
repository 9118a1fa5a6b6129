"""The names in Megatron-core that the adapter replaces, calls or is called by; `versions` says which version has which."""

from __future__ import annotations

from alignkit.engines.seams import Seam

COMMON = (
    Seam("models/gpt/gpt_model.py", "GPTModel.__init__", ("config", "vocab_size")),
    Seam(
        "models/gpt/gpt_model.py",
        "GPTModel._preprocess",
        ("input_ids", "position_ids", "inference_context", "packed_seq_params"),
    ),
    Seam("models/gpt/gpt_model.py", "GPTModel._postprocess", ("hidden_states", "labels")),
    Seam(
        "transformer/transformer_block.py",
        "TransformerBlock.forward",
        ("hidden_states", "attention_mask", "attention_bias", "inference_context", "packed_seq_params"),
    ),
    Seam("pipeline_parallel/schedules.py", "forward_backward_pipelining_with_interleaving", ("model", "pg_collection")),
    Seam(
        "pipeline_parallel/schedules.py", "forward_backward_pipelining_without_interleaving", ("model", "pg_collection")
    ),
    Seam(
        "pipeline_parallel/schedules.py",
        "get_forward_backward_func",
        mentions=("forward_backward_pipelining_with_interleaving",),
    ),
    Seam("transformer/transformer_layer.py", "TransformerLayer"),
    Seam("transformer/attention.py", "SelfAttention"),
    Seam(
        "transformer/attention.py",
        "Attention.forward",
        ("hidden_states", "attention_mask", "rotary_pos_emb", "packed_seq_params"),
        mentions=("get_query_key_value_tensors",),
    ),
    Seam(
        "transformer/attention.py", "SelfAttention.get_query_key_value_tensors", mentions=("q_layernorm", "k_layernorm")
    ),
    Seam("transformer/attention.py", "apply_rotary_pos_emb"),
    Seam("transformer/dot_product_attention.py", "DotProductAttention.__init__", ("config", "pg_collection")),
    Seam(
        "transformer/dot_product_attention.py",
        "DotProductAttention.forward",
        ("query", "key", "value", "attention_mask", "attn_mask_type", "attention_bias", "packed_seq_params"),
    ),
    Seam("transformer/mlp.py", "MLP.forward", ("hidden_states", "per_token_scale")),
    Seam("transformer/torch_norm.py", "WrappedTorchNorm.__new__", ("config", "hidden_size", "eps")),
    Seam("transformer/identity_op.py", "IdentityOp"),
    Seam("transformer/identity_op.py", "IdentityFuncOp"),
    Seam("fusions/fused_bias_dropout.py", "get_bias_dropout_add", ("training", "fused")),
    Seam("fusions/fused_softmax.py", "FusedScaleMaskSoftmax"),
    Seam("models/common/language_module/language_module.py", "LanguageModule"),
    Seam("models/common/embeddings/language_model_embedding.py", "LanguageModelEmbedding"),
    Seam(
        "models/common/embeddings/rotary_pos_embedding.py",
        "RotaryEmbedding.forward",
        ("max_seq_len", "offset", "packed_seq"),
    ),
    Seam(
        "models/common/embeddings/rotary_pos_embedding.py",
        "RotaryEmbedding.__init__",
        ("rope_scaling", "rope_scaling_factor", "seq_len_interpolation_factor"),
    ),
    Seam(
        "models/common/embeddings/yarn_rotary_pos_embedding.py",
        "YarnRotaryEmbedding.__init__",
        ("scaling_factor", "original_max_position_embeddings", "beta_fast", "beta_slow", "mscale", "mscale_all_dim"),
        ("inv_freq_extra", "inv_freq_inter", "correction_range_round_to_int"),
    ),
    Seam(
        "models/common/embeddings/rope_utils.py",
        "apply_rotary_pos_emb",
        ("t", "freqs", "config", "cu_seqlens", "mscale"),
    ),
    Seam("tensor_parallel/layers.py", "ColumnParallelLinear.forward", ("input_", "weight")),
    Seam("tensor_parallel/layers.py", "ColumnParallelLinear._forward_impl", ("input", "weight")),
    Seam("tensor_parallel/layers.py", "RowParallelLinear.forward", ("input_",)),
    Seam("tensor_parallel/layers.py", "VocabParallelEmbedding"),
    Seam(
        "tensor_parallel/cross_entropy.py",
        "_VocabParallelCrossEntropy.forward",
        ("vocab_parallel_logits", "target", "label_smoothing"),
    ),
    Seam(
        "tensor_parallel/cross_entropy.py",
        "vocab_parallel_cross_entropy",
        ("vocab_parallel_logits", "target", "label_smoothing"),
    ),
    Seam(
        "fusions/fused_cross_entropy.py",
        "_VocabParallelCrossEntropy.forward",
        ("vocab_parallel_logits", "target", "tp_group"),
    ),
    Seam(
        "models/common/language_module/language_module.py",
        "LanguageModule.compute_language_model_loss",
        ("labels", "logits"),
    ),
    Seam("tensor_parallel/random.py", "CudaRNGStatesTracker.fork"),
    Seam("tensor_parallel/random.py", "_get_cuda_rng_state"),
    Seam("tensor_parallel/random.py", "_set_cuda_rng_state"),
    # Mixtures of experts.
    Seam(
        "transformer/moe/moe_layer.py",
        "MoELayer.forward",
        ("hidden_states", "intermediate_tensors", "padding_mask"),
        ("moe_layer_recompute", "attn_tp_group"),
    ),
    Seam("transformer/moe/moe_layer.py", "MoELayer.route", ("hidden_states", "padding_mask")),
    Seam(
        "transformer/moe/moe_layer.py",
        "BaseMoELayer.__init__",
        mentions=("ep_group", "local_expert_indices", "use_shared_expert"),
    ),
    Seam("transformer/moe/router.py", "TopKRouter.__init__", mentions=("topk", "score_function", "routing_type")),
    Seam("transformer/moe/router.py", "TopKRouter._apply_expert_bias", ("routing_map", "padding_mask")),
    Seam(
        "transformer/moe/router.py",
        "TopKRouter.routing",
        ("logits", "padding_mask"),
        ("topk_routing_with_score_function", "_apply_aux_loss", "_apply_expert_bias", "apply_z_loss"),
    ),
    Seam("transformer/moe/router.py", "Router.gating", ("input",)),
    Seam(
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
    Seam("transformer/moe/experts.py", "SequentialMLP.__init__", mentions=("local_experts", "tp_group")),
    Seam("transformer/moe/experts.py", "TEGroupedMLP.__init__", mentions=("linear_fc1", "linear_fc2", "tp_group")),
    Seam("transformer/moe/shared_experts.py", "SharedExpertMLP.forward", ("hidden_states",), ("gate_weight",)),
    Seam("transformer/moe/shared_experts.py", "SharedExpertMLP.__init__", mentions=("use_shared_expert_gate",)),
    Seam("tensor_parallel/mappings.py", "scatter_to_sequence_parallel_region", ("input_", "group")),
    Seam(
        "tensor_parallel/mappings.py",
        "gather_from_sequence_parallel_region",
        ("input_", "tensor_parallel_output_grad", "group"),
    ),
    # TransformerEngine's layer spec: the wrappers that `te` takes over.
    Seam("extensions/transformer_engine.py", "TEColumnParallelGroupedLinear"),
    Seam("extensions/transformer_engine.py", "TERowParallelGroupedLinear"),
    Seam("models/gpt/gpt_layer_specs.py", "get_gpt_layer_with_transformer_engine_spec"),
    Seam("extensions/transformer_engine.py", "TELayerNormColumnParallelLinear.forward", ("x",)),
    Seam("extensions/transformer_engine.py", "TELinear.forward", ("x",)),
    Seam("extensions/transformer_engine.py", "TEColumnParallelLinear"),
    Seam("extensions/transformer_engine.py", "TERowParallelLinear"),
    Seam("extensions/transformer_engine.py", "TENorm.__new__", ("config", "hidden_size", "eps")),
    Seam(
        "extensions/transformer_engine.py",
        "TEDotProductAttention.forward",
        ("query", "key", "value", "attention_mask", "attn_mask_type", "attention_bias", "packed_seq_params"),
    ),
    # The two ends of every forward, by which the patch gets in.
    Seam("models/gpt/gpt_model.py", "GPTModel.forward", mentions=("_preprocess", "_postprocess")),
)

# From 0.18: the hook by which a framework takes the end of the forward.
HOOK = tuple(
    Seam("models/gpt/gpt_model.py", name, ("output_processor", "output_processor_context"))
    for name in ("GPTModel.forward", "GPTModel._postprocess")
)

SINCE_0_19 = (Seam("tensor_parallel/cross_entropy.py", "vocab_parallel_cross_entropy", ("tp_group",)),)

# GPTModel's successor. Its forward is one function, of which alignkit has its own.
HYBRID = (
    Seam("models/hybrid/hybrid_model.py", "HybridModel.__init__", ("config", "hybrid_layer_pattern", "rotary_base")),
    Seam(
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
    Seam(
        "models/hybrid/hybrid_block.py",
        "HybridStack.forward",
        ("hidden_states", "attention_mask", "rotary_pos_emb", "packed_seq_params", "padding_mask"),
        ("input_tensor", "layers", "final_norm"),
    ),
    Seam("models/hybrid/hybrid_block.py", "HybridStackSubmodules", mentions=("attention_layer", "mlp_layer")),
    Seam("models/hybrid/hybrid_block.py", "TENorm"),
    Seam("ssm/mlp_layer.py", "MLPLayer"),
)
