"""Builds a Megatron-core GPTModel or HybridModel from an HF model directory, with one of the stock layer specs."""

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
from alignkit.models.family import CHOICE_BIAS


def transformer_config(
    arch: Architecture, dtype: torch.dtype, *, tp: int = 1, sequence_parallel: bool = False, **overrides
) -> TransformerConfig:
    """The TransformerConfig of `arch`; `overrides` are TransformerConfig fields, taken as they are.

    dtype: torch.float32 or torch.bfloat16. Raises InputError for another type.
    """
    if dtype not in (torch.float32, torch.bfloat16):
        raise InputError(f"dtype: {dtype} is not torch.float32 or torch.bfloat16")
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
            moe_router_enable_expert_bias=arch.choice_bias,
            moe_router_bias_update_rate=0.0,  # the bias is the checkpoint's, unless the caller wants it to move
        )
    if arch.groups > 1:
        fields |= dict(moe_router_num_groups=arch.groups, moe_router_group_topk=arch.top_groups)
    config = TransformerConfig(**(fields | overrides))
    if isinstance(scaling := arch.rope_scaling, Yarn):  # GPTModel reads them there, though they are no fields
        config.yarn_rotary_scaling_factor = scaling.factor
        config.yarn_original_max_position_embeddings = scaling.original_max_position
        config.yarn_beta_fast, config.yarn_beta_slow = scaling.beta_fast, scaling.beta_slow
        config.yarn_mscale = config.yarn_mscale_all_dim = None
        config.yarn_correction_range_round_to_int = scaling.truncate
    return config


def rotary_arguments(arch: Architecture) -> dict[str, Any]:
    """GPTModel's arguments for `arch`'s rotary embedding. Raises UnsupportedError for one that Megatron-core lacks."""
    scaling = arch.rope_scaling
    usual = {"rotary_base": arch.rope_base} | (
        {"rotary_percent": arch.rotary_factor} if arch.rotary_factor != 1 else {}
    )
    if not isinstance(scaling, Llama3):
        return usual | {"position_embedding_type": "rope" if scaling is None else "yarn"}
    given = (scaling.low_freq_factor, scaling.high_freq_factor, scaling.original_max_position)
    if given != MEGATRON_LLAMA3:
        raise UnsupportedError(
            f"rope_scaling: low_freq_factor, high_freq_factor and original_max_position_embeddings are {given}; "
            f"Megatron-core only has {MEGATRON_LLAMA3}"
        )
    return usual | {"position_embedding_type": "rope", "rope_scaling": True, "rope_scaling_factor": scaling.factor}


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
    """GPTModel, or with a pattern HybridModel, with the weights of the HF directory `model_dir`, cut for this rank, in evaluation mode.

    `megatron.core.parallel_state` must be initialised; its tensor- and pipeline-parallel groups say how the weights are
    cut. vp_stage: which of this rank's virtual pipeline stages, if it has several. The model is on the current CUDA device; on a machine without a GPU, build and run inside
    `alignkit.megatron.cpu.cpu_host()`.

    transformer_engine: take the layer spec of that name, for which TransformerEngine must be installed, in place of the
        local one. hybrid_layer_pattern: an attention and an MLP for each layer, ``*-*-*-*-``, with the borders of a pipeline's
        stages where it has some, ``*-*-|*-*-``. weights: HF names to whole tensors, in place of the directory's; it then needs
        no more than its ``config.json``. overrides: fields of the TransformerConfig.

    A model with experts has its expert-parallel and expert-tensor-parallel groups from there too.
    Raises UnsupportedError naming what is not of a model of a known family, before anything is built.
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
    of_experts = {
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
        **(of_experts if arch.experts else {}),
    )
    of_layer = {
        "qk_layernorm": arch.qk_norm,
        "num_experts": config.num_moe_experts,
        "moe_grouped_gemm": config.moe_grouped_gemm,
    }
    spec = (
        get_gpt_layer_with_transformer_engine_spec(**of_layer)
        if transformer_engine
        else get_gpt_layer_local_spec(normalization="RMSNorm", **of_layer)
    )
    if arch.dense_layers:  # the block's spec has one for each layer of this stage
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
    missing = set(names.values()) - set(weights)
    if config.pipeline_model_parallel_size == 1:
        missing |= set(weights) - set(names.values())
    if missing:
        raise InputError(f"model: weights and model do not match: {', '.join(sorted(missing))}")
    return model.eval()


def hybrid_spec(layer: ModuleSpec) -> ModuleSpec:
    """HybridModel's spec with the modules of a GPTModel's layer, whose halves are layers of their own there."""
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
        raise UnsupportedError("hybrid_layer_pattern: this version of Megatron-core has no HybridModel")
    if isinstance(arch.rope_scaling, Llama3):
        raise UnsupportedError("rope_scaling: HybridModel has no Llama 3 scaling")
    if arch.experts:
        raise UnsupportedError("hybrid_layer_pattern: a HybridModel with experts is not supported")
    if letters.replace("|", "") != "*-" * arch.layers:
        raise InputError(f"hybrid_layer_pattern: {letters!r} is not an attention and an MLP for each of {arch.layers}")


def whole_name(model: GPTModel, name: str) -> str:
    """What a parameter of a pipeline stage or of a HybridModel is called in a GPTModel that is in one piece."""
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
    """The weights of a model that is `arch`, as whole tensors with HF names, one at a time; what a rollout engine loads.
    Of a pipeline stage those that it holds, the last one's copy of a tied embedding included.

    A collective of the model's tensor-parallel group, and of those that share experts: every rank must run it to its end,
    and every rank gets every tensor.
    """
    return whole(model, arch, {name: tensor.detach() for name, tensor in _tensors(model, arch)})


def _tensors(model: GPTModel, arch: Architecture) -> Iterator[tuple[str, torch.Tensor]]:
    """The parameters, and the biases of the choice of experts where the checkpoint has them, which are buffers."""
    yield from model.named_parameters()
    if not arch.choice_bias:
        return
    yield from ((name, buffer) for name, buffer in model.named_buffers() if name.endswith(CHOICE_BIAS))


def whole(model: GPTModel, arch: Architecture, parts: dict[str, torch.Tensor]) -> Iterator[tuple[str, torch.Tensor]]:
    """`hf_weights` of other tensors that are cut as the weights are, by the model's names: gradients, for one."""
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
    """Lets stock Megatron build its torch RMSNorm with sequence parallelism, which it refuses by an assert.

    The norm is the same; its weight is marked, so that Megatron sums its gradient over the ranks.
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
