"""Builder of a Megatron-core GPTModel or HybridModel from an HF model directory, with a stock layer spec.

`alignkit check`, `alignkit bisect`, the examples and the tests build their models here; frameworks build their own. The
models are stock until `patch_megatron` replaces their modules.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import os
from collections.abc import Iterator, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core import parallel_state
from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_decoder_block_spec,
    get_gpt_layer_local_spec,
    get_gpt_layer_with_transformer_engine_spec,
)
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.ssm.mlp_layer import MLPLayer
from megatron.core.transformer import torch_norm
from megatron.core.transformer.identity_op import IdentityFuncOp, IdentityOp
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_config import TransformerConfig

from alignkit.contract.rope import Llama3, Yarn
from alignkit.convert import Architecture, Checkpoint, read_architecture, to_hf, to_megatron
from alignkit.dist import TP
from alignkit.errors import InputError, UnsupportedError
from alignkit.megatron import modules
from alignkit.megatron.models import hybrid_block, hybrid_model, pattern
from alignkit.megatron.supported import MEGATRON_LLAMA3
from alignkit.models.family import EXPERT_BIAS


def transformer_config(
    arch: Architecture, dtype: torch.dtype, *, tp: int = 1, sequence_parallel: bool = False, **overrides
) -> TransformerConfig:
    """Return the TransformerConfig of `arch`.

    Args:
        arch: The model's architecture.
        dtype: torch.float32 or torch.bfloat16.
        tp: Tensor-parallel size.
        sequence_parallel: Use sequence parallelism.
        **overrides: Fields of the TransformerConfig; they override all others.

    Raises:
        InputError: If `dtype` is another type.
    """
    if dtype not in (torch.float32, torch.bfloat16):
        raise InputError(f"dtype: must be torch.float32 or torch.bfloat16, got {dtype}")
    fields = dict(
        num_layers=arch.layers,
        hidden_size=arch.hidden,
        num_attention_heads=arch.heads,
        num_query_groups=arch.kv_heads,
        kv_channels=arch.head_dim,
        ffn_hidden_size=arch.intermediate,
        normalization="RMSNorm",
        layernorm_epsilon=arch.norm_eps,
        qk_layernorm=arch.qk_norm,
        add_bias_linear=False,
        add_qkv_bias=arch.qkv_bias,
        gated_linear_unit=True,
        activation_func=F.silu,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        bf16=dtype == torch.bfloat16,
        tensor_model_parallel_size=tp,
        sequence_parallel=sequence_parallel,
        use_cpu_initialization=True,
        perform_initialization=False,
    )
    if arch.experts:
        fields |= dict(
            num_moe_experts=arch.experts,
            moe_ffn_hidden_size=arch.intermediate,
            moe_router_topk=arch.top_k,
            moe_router_pre_softmax=not arch.normalize_top_k,
            moe_router_load_balancing_type="none",
            moe_router_dtype="fp32",
        )
    if arch.dense_layers:
        fields |= dict(
            ffn_hidden_size=arch.dense_intermediate,
            moe_layer_freq=[int(arch.has_experts(i)) for i in range(arch.layers)],
        )
    if arch.shared_intermediate:
        fields |= dict(
            moe_shared_expert_intermediate_size=arch.shared_intermediate, moe_shared_expert_gate=arch.shared_gate
        )
    if arch.score == "sigmoid":
        fields |= dict(
            moe_router_score_function="sigmoid",
            moe_router_pre_softmax=False,
            moe_router_topk_scaling_factor=arch.routed_scale,
            moe_router_enable_expert_bias=arch.expert_bias,
            moe_router_bias_update_rate=0.0,  # keep the checkpoint's bias unless the caller overrides this
        )
    if arch.groups > 1:
        fields |= dict(moe_router_num_groups=arch.groups, moe_router_group_topk=arch.top_groups)
    config = TransformerConfig(**(fields | overrides))
    if isinstance(scaling := arch.rope_scaling, Yarn):  # GPTModel reads these attributes; they are not fields
        config.yarn_rotary_scaling_factor = scaling.factor
        config.yarn_original_max_position_embeddings = scaling.original_max_position
        config.yarn_beta_fast, config.yarn_beta_slow = scaling.beta_fast, scaling.beta_slow
        config.yarn_mscale = config.yarn_mscale_all_dim = None
        config.yarn_correction_range_round_to_int = scaling.truncate
    return config


def rotary_arguments(arch: Architecture) -> dict[str, Any]:
    """Return GPTModel's arguments for `arch`'s rotary embedding.

    Raises UnsupportedError for a scaling that Megatron-core does not have.
    """
    scaling = arch.rope_scaling
    common = {"rotary_base": arch.rope_base} | (
        {"rotary_percent": arch.rotary_factor} if arch.rotary_factor != 1 else {}
    )
    if not isinstance(scaling, Llama3):
        return common | {"position_embedding_type": "rope" if scaling is None else "yarn"}
    given = (scaling.low_freq_factor, scaling.high_freq_factor, scaling.original_max_position)
    if given != MEGATRON_LLAMA3:
        raise UnsupportedError(
            f"rope_scaling: (low_freq_factor, high_freq_factor, original_max_position_embeddings) must be "
            f"{MEGATRON_LLAMA3}, because Megatron-core hard-codes them, got {given}"
        )
    return common | {"position_embedding_type": "rope", "rope_scaling": True, "rope_scaling_factor": scaling.factor}


def gpt_model(
    model_dir: str | os.PathLike,
    dtype: torch.dtype = torch.bfloat16,
    *,
    sequence_parallel: bool = False,
    transformer_engine: bool = False,
    vp_stage: int | None = None,
    hybrid_layer_pattern: str | None = None,
    weights: Mapping[str, torch.Tensor] | None = None,
    **overrides,
) -> GPTModel:
    """Build a GPTModel, or a HybridModel if there is a pattern, with this rank's shard of the weights.

    `megatron.core.parallel_state` must be initialized; its groups define the sharding, expert parallelism included. The
    model is on the current CUDA device and in evaluation mode. On a machine without a GPU, build and run it inside
    `alignkit.megatron.cpu.cpu_host()`.

    Args:
        model_dir: HF model directory.
        dtype: torch.float32 or torch.bfloat16.
        sequence_parallel: Use sequence parallelism if there are several tensor-parallel ranks.
        transformer_engine: Use TransformerEngine's layer spec, which requires TransformerEngine. False: the local spec.
        vp_stage: Virtual pipeline stage of this rank, if it has several.
        hybrid_layer_pattern: Attention and MLP of each layer, ``*-*-*-*-``, optionally with the boundaries of pipeline
            stages, ``*-*-|*-*-``.
        weights: HF names -> whole tensors, instead of the directory's, which then needs only ``config.json``.
        **overrides: Fields of the TransformerConfig.

    Returns:
        The model.

    Raises:
        UnsupportedError: Naming the first setting of config.json that is not supported, before anything is built.
        InputError: If the weights do not match the model, or the pattern does not match its layers.
    """
    arch = read_architecture(model_dir)
    if hybrid_layer_pattern is not None:
        _check_pattern(hybrid_layer_pattern, arch)
    tp = parallel_state.get_tensor_model_parallel_world_size()
    rank = parallel_state.get_tensor_model_parallel_rank()
    arch.check_tp(tp)
    layout = {
        "context_parallel_size": parallel_state.get_context_parallel_world_size(),
        "pipeline_model_parallel_size": parallel_state.get_pipeline_model_parallel_world_size(),
        "virtual_pipeline_model_parallel_size": parallel_state.get_virtual_pipeline_model_parallel_world_size(),
    }
    if arch.experts:
        layout |= {
            "expert_model_parallel_size": parallel_state.get_expert_model_parallel_world_size(),
            "expert_tensor_parallel_size": parallel_state.get_expert_tensor_parallel_world_size(),
        }
    config = transformer_config(
        arch, dtype, tp=tp, sequence_parallel=sequence_parallel and tp > 1, **(layout | overrides)
    )
    expert_layout = {
        "ep_rank": parallel_state.get_expert_model_parallel_rank(),
        "ep_size": config.expert_model_parallel_size,
        "expert_tp_rank": parallel_state.get_expert_tensor_parallel_rank(),
        "expert_tp_size": config.expert_tensor_parallel_size,
        "grouped_experts": transformer_engine and config.moe_grouped_gemm,
    }
    weights = to_megatron(
        arch,
        Checkpoint(model_dir) if weights is None else weights,
        tp_rank=rank,
        tp_size=tp,
        dtype=dtype,
        fused_norms=transformer_engine,
        **(expert_layout if arch.experts else {}),
    )
    layer_options = {
        "qk_layernorm": arch.qk_norm,
        "num_experts": config.num_moe_experts,
        "moe_grouped_gemm": config.moe_grouped_gemm,
    }
    spec = (
        get_gpt_layer_with_transformer_engine_spec(**layer_options)
        if transformer_engine
        else get_gpt_layer_local_spec(normalization="RMSNorm", **layer_options)
    )
    if arch.dense_layers:  # a block spec has one layer spec for each layer of this stage
        spec = get_gpt_decoder_block_spec(config, transformer_engine, normalization="RMSNorm", vp_stage=vp_stage)
    cls = GPTModel
    if hybrid_layer_pattern is not None:
        config.num_layers = 2 * arch.layers
        cls = functools.partial(hybrid_model.HybridModel, hybrid_layer_pattern=hybrid_layer_pattern)
        spec = hybrid_spec(spec)
    with _sequence_parallel_norms() if config.sequence_parallel else contextlib.nullcontext():
        model = cls(
            config,
            spec,
            vocab_size=arch.padded_vocab(tp),
            max_sequence_length=arch.max_position,
            pre_process=parallel_state.is_pipeline_first_stage(ignore_virtual=False, vp_stage=vp_stage),
            post_process=parallel_state.is_pipeline_last_stage(ignore_virtual=False, vp_stage=vp_stage),
            vp_stage=vp_stage,
            share_embeddings_and_output_weights=arch.tied,
            **rotary_arguments(arch),
        )
    model = model.to(torch.cuda.current_device(), dtype)  # norms are created in fp32
    names = {name: whole_name(model, name) for name, _ in _tensors(model, arch)}
    model.load_state_dict({name: weights[whole] for name, whole in names.items() if whole in weights}, strict=False)
    missing, others = set(names.values()) - set(weights), set(weights) - set(names.values())
    if missing:
        raise InputError(f"weights: must contain all parameters of the model, but {_shown(missing)} are missing")
    if others and config.pipeline_model_parallel_size == 1:
        raise InputError(f"weights: must contain only the parameters of the model, got also {_shown(others)}")
    return model.eval()


def _shown(names: set[str], most: int = 8) -> str:
    """Return the first names as text, and the number of the others."""
    return ", ".join(sorted(names)[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")


def hybrid_spec(layer: ModuleSpec) -> ModuleSpec:
    """Return HybridModel's spec for a GPTModel layer spec; attention and MLP become separate layers."""
    attention = dataclasses.replace(
        layer.submodules, pre_mlp_layernorm=IdentityOp, mlp=IdentityOp, mlp_bda=IdentityFuncOp
    )
    mlp = dataclasses.replace(
        layer.submodules, input_layernorm=IdentityOp, self_attention=IdentityOp, self_attn_bda=IdentityFuncOp
    )
    return ModuleSpec(
        module=hybrid_block.HybridStack,
        submodules=hybrid_block.HybridStackSubmodules(
            attention_layer=ModuleSpec(module=layer.module, submodules=attention),
            mlp_layer=ModuleSpec(module=MLPLayer, submodules=mlp),
        ),
    )


def _check_pattern(letters: str, arch: Architecture) -> None:
    if hybrid_model is None:
        raise UnsupportedError(
            "hybrid_layer_pattern: must be None, because this version of Megatron-core has no HybridModel, got "
            f"{letters!r:.200}. Install megatron-core 0.18.2 or later"
        )
    if isinstance(arch.rope_scaling, Llama3):
        raise UnsupportedError(
            "rope_scaling: must not be llama3 with hybrid_layer_pattern, because HybridModel lacks llama3"
        )
    if arch.experts:
        raise UnsupportedError("hybrid_layer_pattern: must be None for models with experts (MoE)")
    if letters.replace("|", "") != "*-" * arch.layers:
        raise InputError(f"hybrid_layer_pattern: must be '*-' for each of {arch.layers} layers, got {letters!r:.200}")


def whole_name(model: GPTModel, name: str) -> str:
    """Return the name in a GPTModel without pipeline stages of a parameter of a stage or a HybridModel."""
    if name == "output_layer.weight" and model.share_embeddings_and_output_weights:
        return "embedding.word_embeddings.weight"
    hybrid = pattern(model) is not None
    before, found, after = name.partition("decoder.layers.")
    if not found:
        return name.replace("decoder.final_norm.", "decoder.final_layernorm.") if hybrid else name
    place, _, rest = after.partition(".")
    number = model.decoder.layers[int(place)].layer_number - 1
    return f"{before}{found}{number // 2 if hybrid else number}.{rest}"


def hf_weights(model: GPTModel, arch: Architecture) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield a model's weights as whole tensors with HF names, one at a time, as a rollout engine loads them.

    A pipeline stage yields the weights it has, the last stage's copy of a tied embedding included. This is a collective
    of the model's tensor-parallel and expert groups: every rank must exhaust it, and every rank gets every tensor.

    Args:
        model: A GPTModel or HybridModel.
        arch: The model's architecture.
    """
    return whole(model, arch, {name: tensor.detach() for name, tensor in _tensors(model, arch)})


def _tensors(model: GPTModel, arch: Architecture) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the parameters, and the expert biases (buffers) if the checkpoint has them."""
    yield from model.named_parameters()
    if not arch.expert_bias:
        return
    yield from ((name, buffer) for name, buffer in model.named_buffers() if name.endswith(EXPERT_BIAS))


def whole(model: GPTModel, arch: Architecture, parts: dict[str, torch.Tensor]) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield whole tensors with HF names from shards laid out like the weights, such as gradients.

    parts: the model's parameter names -> this rank's shards. A collective like `hf_weights`.
    """
    named = {whole_name(model, name): part for name, part in parts.items()}
    experts = modules.expert_ranks(model)

    def shards(name: str) -> list[torch.Tensor]:
        found = [named[name]]
        for group in experts if ".experts." in name else [TP(model.pg_collection.tp)]:
            found = [part for of_rank in zip(*map(group.all_gather, found), strict=True) for part in of_rank]
        return found

    return to_hf(arch, named, shards, ep_size=experts[-1].size if experts else 1)


@contextlib.contextmanager
def _sequence_parallel_norms() -> Iterator[None]:
    """Let stock Megatron build torch.nn.RMSNorm with sequence parallelism, which it rejects by an assertion.

    The norm is the same. Its weight gets the sequence_parallel mark, so that Megatron sums its gradient over the ranks.
    """

    def norm(cls, config, hidden_size, eps=1e-5, **_):
        module = torch.nn.RMSNorm(hidden_size, eps=eps)
        module.weight.sequence_parallel = True  # pyright: ignore[reportAttributeAccessIssue] - Megatron's mark
        return module

    stock = vars(torch_norm.WrappedTorchNorm)["__new__"]
    torch_norm.WrappedTorchNorm.__new__ = norm
    try:
        yield
    finally:
        torch_norm.WrappedTorchNorm.__new__ = stock
