"""Comparison of the model that vLLM built with config.json, from which the training side is built.

A fact is named by its field in config.json, or in words if no field holds it or the field's name depends on the
family. `live` raises the error that lists the differences.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import torch

from alignkit.convert import Architecture
from alignkit.engines.hook_points import relies_on
from alignkit.models import FAMILIES
from alignkit.models.config import find_architecture


@relies_on("config/model.py:ModelConfig", members="hf_config_path")
def architecture(model_config) -> Architecture:
    """Return the `Architecture` in the config.json that vLLM uses, in a folder or a Hugging Face Hub repository."""
    return find_architecture(str(model_config.hf_config_path or model_config.model), model_config.revision)


def deviations(model: torch.nn.Module, read: Architecture, tp: int, dtype: torch.dtype) -> list[str]:
    """Return a text for each value of the model that differs from `read`, without a device sync.

    tp: number of tensor-parallel ranks. The model is this rank's. dtype: the model's dtype.
    """
    found = {}
    for name, built, expected in (*_facts(model, read, tp), *_tensors(model, read, dtype)):
        if built != expected:
            wanted, given = (json.dumps(v) if isinstance(v, bool) else v for v in (expected, built))
            found.setdefault(name, f"{name}: must be {wanted} according to config.json, got {given} in vLLM's model")
    return list(found.values())


@relies_on("model_executor/layers/linear.py:LinearBase.__init__", mentions="input_size output_size")
@relies_on("model_executor/layers/linear.py:ColumnParallelLinear.__init__", mentions="output_size_per_partition")
@relies_on("model_executor/layers/linear.py:RowParallelLinear.__init__", mentions="input_size_per_partition")
@relies_on(
    "model_executor/layers/vocab_parallel_embedding.py:VocabParallelEmbedding.__init__",
    mentions="num_embeddings_per_partition embedding_dim",
)
@relies_on("model_executor/layers/layernorm.py:RMSNorm.__init__", mentions="hidden_size")
def _tensors(model: torch.nn.Module, read: Architecture, dtype: torch.dtype) -> Iterator[tuple[str, Any, Any]]:
    """Yield the dtype and shape of each parameter and rotary table, by name.

    A module stores the sizes that vLLM made it with, which `_facts` compares with config.json.
    """
    for path, module in model.named_modules():
        own: dict[str, Any] = vars(module)
        rows, columns = (), ()
        if "num_embeddings_per_partition" in own:
            rows, columns = (own["num_embeddings_per_partition"],), (own["embedding_dim"],)
        elif "output_size" in own:
            rows = (own.get("output_size_per_partition", own["output_size"]),)
            columns = (own.get("input_size_per_partition", own["input_size"]),)
        elif "variance_epsilon" in own:
            rows = (own["hidden_size"],)
        expected = {
            "weight": _described(dtype, (*rows, *columns)),
            "bias": _described(dtype, rows),
            "e_score_correction_bias": _described(torch.float32, (read.experts,)),
        }
        for name, tensor in module.named_parameters(recurse=False):
            if name in expected:
                yield f"{path}.{name}", _described(tensor.dtype, tensor.shape), expected[name]
            else:  # `_expert_facts` compares the shapes of the experts' weights
                yield f"{path}.{name}", tensor.dtype, dtype
        if (table := own["_buffers"].get("cos_sin_cache")) is not None:
            positions = getattr(own.get("scaling"), "positions", own["max_position_embeddings"])
            wanted = _described(torch.float32, (positions, own["rotary_dim"]))
            yield f"{path}.cos_sin_cache", _described(table.dtype, table.shape), wanted


def _described(dtype: torch.dtype, shape: tuple[int, ...]) -> str:
    return f"{str(dtype).removeprefix('torch.')} {list(shape)}"


def _facts(model: Any, read: Architecture, tp: int) -> Iterator[tuple[str, Any, Any]]:
    """Yield (name, value in the built model, value in config.json)."""
    decoder, head, logits = model.model, model.lm_head, model.logits_processor
    embedding = decoder.embed_tokens
    yield "num_hidden_layers", len(decoder.layers), read.layers
    yield "hidden_size", embedding.embedding_dim, read.hidden
    yield "vocab_size", embedding.org_vocab_size, read.vocab
    yield "vocab_size", head.org_vocab_size, read.vocab
    yield "vocab_size", logits.org_vocab_size, read.vocab
    # If a checkpoint contains a head although config.json says tied, vLLM loads the head and unties it.
    yield "tie_word_embeddings", head.weight.data_ptr() == embedding.weight.data_ptr(), read.tied
    yield "logit_scale", logits.scale, 1.0
    yield "logits soft cap", logits.soft_cap, None
    yield "head bias", getattr(head, "bias", None) is not None, False
    yield "rms_norm_eps", decoder.norm.variance_epsilon, read.norm_eps
    for i, layer in enumerate(decoder.layers):
        attention, mlp = layer.self_attn, getattr(layer, FAMILIES[read.family].mlp)
        yield "num_attention_heads", attention.attn.num_heads * tp, read.heads
        yield "num_key_value_heads of a rank", attention.attn.num_kv_heads, max(1, read.kv_heads // tp)
        yield "head_dim", attention.attn.head_size, read.head_dim
        yield "attention scale", attention.attn.impl.scale, read.head_dim**-0.5
        yield "rope_theta", attention.rotary_emb.base, read.rope_base
        yield "rope_scaling", attention.rotary_emb.scaling, read.rope_scaling
        yield "head_dim * partial_rotary_factor", attention.rotary_emb.rotary_dim, read.rotary_dim
        is_moe = read.has_experts(i)
        yield f"experts in layer {i}", hasattr(mlp, "experts"), is_moe
        if hasattr(mlp, "experts") == is_moe:
            yield from _expert_facts(mlp.experts, read) if is_moe else _mlp_facts(mlp, read)
        yield "QKV bias", attention.qkv_proj.bias is not None, read.qkv_bias
        yield "attention_bias", attention.o_proj.bias is not None, False
        norms = [layer.input_layernorm, layer.post_attention_layernorm]
        for attribute, field in FAMILIES[read.family].off:
            yield field, bool(getattr(attention, attribute)), False
        yield "QK norms", hasattr(attention, "q_norm"), read.qk_norm
        if read.qk_norm and hasattr(attention, "q_norm"):
            norms += [attention.q_norm, attention.k_norm]
        for norm in norms:
            yield "rms_norm_eps", norm.variance_epsilon, read.norm_eps


def _mlp_facts(mlp: Any, read: Architecture) -> Iterator[tuple[str, Any, Any]]:
    yield "intermediate_size", mlp.down_proj.input_size, read.dense_intermediate or read.intermediate
    for linear in (mlp.gate_up_proj, mlp.down_proj):
        yield "mlp_bias", linear.bias is not None, False


def _expert_facts(runner: Any, read: Architecture) -> Iterator[tuple[str, Any, Any]]:
    experts, moe, width = runner.routed_experts, runner.moe_config, FAMILIES[read.family].intermediate
    yield "num_experts", experts.global_num_experts, read.experts
    yield "num_experts_per_tok", experts.top_k, read.top_k
    yield "norm_topk_prob", experts.renormalize, read.normalize_top_k
    yield "router score function", experts.scoring_func, read.score
    yield "router bias (e_score_correction_bias)", experts.e_score_correction_bias is not None, read.expert_bias
    groups = (experts.num_expert_group, experts.topk_group) if experts.use_grouped_topk else (1, 1)
    yield "n_group / topk_group", groups, (read.groups, read.top_groups)
    yield "routed_scaling_factor", runner.routed_scaling_factor * experts.routed_scaling_factor, read.routed_scale
    local, features = read.experts // moe.ep_size, read.intermediate // moe.tp_size
    yield f"{width}: shape of w13_weight", tuple(experts.w13_weight.shape), (local, 2 * features, read.hidden)
    yield f"{width}: shape of w2_weight", tuple(experts.w2_weight.shape), (local, read.hidden, features)
    shared = runner._shared
    yield "shared expert", shared is not None, bool(read.shared_intermediate)
    if shared is not None:
        yield "shared_expert_intermediate_size", shared.down_proj.input_size, read.shared_intermediate
        gate = getattr(shared, "expert_gate", None)
        yield "shared expert gate", gate is not None, read.shared_gate
        for linear in (shared.gate_up_proj, shared.down_proj, gate):
            yield "shared expert bias", linear is not None and linear.bias is not None, False
