"""TransformerEngine's fused MoE router functions, which Megatron-core imports and the tests do not call."""

fused_compute_score_for_moe_aux_loss = fused_moe_aux_loss = fused_topk_with_score_function = None
