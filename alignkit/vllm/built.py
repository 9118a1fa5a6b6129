"""What vLLM built, beside what alignkit reads from the model's config.json: the training side is made from that."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from alignkit.convert import Architecture, read_architecture
from alignkit.errors import UnsupportedError
from alignkit.models import FAMILIES


def architecture(model_config) -> Architecture:
    """`read_architecture` of the folder, or of the repository on a hub, that vLLM took the configuration from."""
    source = str(model_config.hf_config_path or model_config.model)
    if Path(source).is_dir():
        return read_architecture(source)
    from transformers.utils import cached_file

    try:
        path = cached_file(source, "config.json", revision=model_config.revision)
    except OSError as e:
        raise UnsupportedError(f"model {source}: its config.json cannot be read: {e}") from e
    return read_architecture(Path(str(path)).parent)


def deviations(model: torch.nn.Module, read: Architecture, tp: int) -> list[str]:
    """What one of `tp` ranks built otherwise than `read`, by the names of config.json. The device is not asked."""
    found = {}
    for name, built, expected in _facts(model, read, tp):
        if built != expected:
            found.setdefault(name, f"{name} ({built} is built, by config.json it is {expected})")
    return list(found.values())


def _facts(model: Any, read: Architecture, tp: int) -> Iterator[tuple[str, Any, Any]]:
    """(name, as built, as read)."""
    trunk, head, logits = model.model, model.lm_head, model.logits_processor
    embedding = trunk.embed_tokens
    yield "num_hidden_layers", len(trunk.layers), read.layers
    yield "hidden_size", embedding.embedding_dim, read.hidden
    yield "vocab_size", embedding.org_vocab_size, read.vocab
    yield "vocab_size", head.org_vocab_size, read.vocab
    yield "vocab_size", logits.org_vocab_size, read.vocab
    # vLLM takes a head of its own out of a checkpoint whose config.json says that it is tied, and unties the two.
    yield "tie_word_embeddings", head.weight.data_ptr() == embedding.weight.data_ptr(), read.tied
    yield "logit_scale", logits.scale, 1.0
    yield "a soft cap of the logits", logits.soft_cap, None
    yield "a bias of the head", getattr(head, "bias", None) is not None, False
    yield "rms_norm_eps", trunk.norm.variance_epsilon, read.norm_eps
    for i, layer in enumerate(trunk.layers):
        attention, mlp = layer.self_attn, getattr(layer, FAMILIES[read.family].mlp)
        yield "num_attention_heads", attention.attn.num_heads * tp, read.heads
        yield "num_key_value_heads", attention.attn.num_kv_heads, max(1, read.kv_heads // tp)
        yield "head_dim", attention.attn.head_size, read.head_dim
        yield "the scale of attention", attention.attn.impl.scale, read.head_dim**-0.5
        yield "rope_theta", attention.rotary_emb.base, read.rope_base
        yield "rope_scaling", attention.rotary_emb.scaling, read.rope_scaling
        yield "partial_rotary_factor", attention.rotary_emb.rotary_dim, read.rotary_dim
        mixture = read.has_experts(i)
        yield f"experts in layer {i}", hasattr(mlp, "experts"), mixture
        if hasattr(mlp, "experts") == mixture:
            yield from _expert_facts(mlp.experts, read) if mixture else _mlp_facts(mlp, read)
        yield "biases of q, k and v", attention.qkv_proj.bias is not None, read.qkv_bias
        yield "attention_bias", attention.o_proj.bias is not None, False
        norms = [layer.input_layernorm, layer.post_attention_layernorm]
        for attribute, field in FAMILIES[read.family].off:
            yield field, bool(getattr(attention, attribute)), False
        yield "norms of q and k", hasattr(attention, "q_norm"), read.qk_norm
        if read.qk_norm and hasattr(attention, "q_norm"):
            norms += [attention.q_norm, attention.k_norm]
        for norm in norms:
            yield "rms_norm_eps", norm.variance_epsilon, read.norm_eps


def _mlp_facts(mlp: Any, read: Architecture) -> Iterator[tuple[str, Any, Any]]:
    yield "intermediate_size", mlp.down_proj.input_size, read.dense_intermediate or read.intermediate
    for linear in (mlp.gate_up_proj, mlp.down_proj):
        yield "mlp_bias", linear.bias is not None, False


def _expert_facts(runner: Any, read: Architecture) -> Iterator[tuple[str, Any, Any]]:
    experts, of, width = runner.routed_experts, runner.moe_config, FAMILIES[read.family].intermediate
    yield "num_experts", experts.global_num_experts, read.experts
    yield "num_experts_per_tok", experts.top_k, read.top_k
    yield "norm_topk_prob", experts.renormalize, read.normalize_top_k
    yield "scores of experts", experts.scoring_func, read.score
    yield "a bias of the choice", experts.e_score_correction_bias is not None, read.choice_bias
    groups = (experts.num_expert_group, experts.topk_group) if experts.use_grouped_topk else (1, 1)
    yield "n_group / topk_group", groups, (read.groups, read.top_groups)
    yield "routed_scaling_factor", runner.routed_scaling_factor * experts.routed_scaling_factor, read.routed_scale
    own, features = read.experts // of.ep_size, read.intermediate // of.tp_size
    yield width, tuple(experts.w13_weight.shape), (own, 2 * features, read.hidden)
    yield width, tuple(experts.w2_weight.shape), (own, read.hidden, features)
    shared = runner._shared
    yield "a shared expert", shared is not None, bool(read.shared_intermediate)
    if shared is not None:
        yield "shared_expert_intermediate_size", shared.down_proj.input_size, read.shared_intermediate
        gate = getattr(shared, "expert_gate", None)
        yield "a gate of the shared expert", gate is not None, read.shared_gate
        for linear in (shared.gate_up_proj, shared.down_proj, gate):
            yield "biases of the shared expert", linear is not None and linear.bias is not None, False
