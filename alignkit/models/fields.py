"""Fields of config.json that alignkit knows in every family, in four categories, which `config` reads.

An unknown field is accepted if it is null, false or a string, and rejected otherwise. A field belongs to HARMLESS only
if neither engine reads it for logprobs. The file of a family lists the fields that only this family has.
"""

READ = frozenset(
    """
    architectures model_type num_hidden_layers hidden_size num_attention_heads num_key_value_heads head_dim
    intermediate_size vocab_size max_position_embeddings rms_norm_eps tie_word_embeddings hidden_act layer_types
    sliding_window rope_theta rope_scaling rope_parameters
    """.split()
)
"""Fields that `config` reads; an MoE family adds its own."""

MUST_BE_OFF = frozenset(
    """
    attention_bias bias mlp_bias qkv_bias use_sliding_window quantization_config num_experts num_local_experts
    clip_qkv qk_norm use_qk_norm layer_norm_elementwise_affine use_mrope dual_chunk_attention_config
    is_encoder_decoder add_cross_attention mlp_only_layers router_jitter_noise
    """.split()
)
"""Fields that affect numerics if they are set, and so must be false, 0, empty or null."""

MUST_BE = {
    "partial_rotary_factor": (1, None),
    "pretraining_tp": (1, None),
    "logit_scale": (1,),
    "is_causal": (True,),
    "decoder_sparse_step": (1, None),
}
"""Fields that affect numerics, with the values they may have if they are present."""

HARMLESS = frozenset(
    """
    _name_or_path name_or_path _commit_hash auto_map transformers_version torch_dtype dtype _attn_implementation_autoset
    is_llama_config transformers.js_config unsloth_fixed tokenizer_class torchscript use_cache bos_token_id eos_token_id
    pad_token_id sep_token_id cls_token_id decoder_start_token_id max_window_layers max_sequence_length max_seq_len
    max_seq_length model_max_length seq_length initializer_range attention_dropout hidden_dropout output_attentions
    output_hidden_states output_scores return_dict return_dict_in_generate chunk_size_feed_forward is_decoder
    cross_attention_hidden_size tie_encoder_decoder pruned_heads use_bfloat16 tf_legacy_loss id2label label2id
    num_labels problem_type finetuning_task task_specific_params do_sample temperature top_k top_p typical_p min_length
    max_length max_new_tokens early_stopping num_beams num_beam_groups num_return_sequences diversity_penalty
    length_penalty repetition_penalty no_repeat_ngram_size encoder_no_repeat_ngram_size bad_words_ids suppress_tokens
    begin_suppress_tokens forced_bos_token_id forced_eos_token_id exponential_decay_length_penalty remove_invalid_values
    output_router_logits router_aux_loss_coef
    """.split()
)
"""Fields that do not affect logprobs: names, versions, token ids, length limits, sampling, training, classification."""
