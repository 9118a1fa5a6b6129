"""Checks of a built model: its settings, its rotary embedding and each of its modules.

Anything unsupported is rejected by name. `policy` checks the configuration, and `calls` checks the arguments of a
forward. A module attribute that a check reads must also be in `CHECKED`.
"""

from __future__ import annotations

import dataclasses
from fractions import Fraction
from typing import TYPE_CHECKING

import torch
from megatron.core.transformer.identity_op import IdentityFuncOp, IdentityOp

from alignkit.contract.rope import Llama3, Scaling, Yarn, plain, yarn_attention_factor
from alignkit.dist import strict
from alignkit.engines.hook_points import relies_on
from alignkit.errors import BackendError, UnsupportedError
from alignkit.runtime import dispatch
from alignkit.runtime.families import on_host

if TYPE_CHECKING:
    from . import te

from . import models, modules, state

CHECKED = frozenset(
    """
    _modules _parameters _buffers _forward_hooks _forward_pre_hooks training config p eps bias weight
    sequence_parallel gather_output input_is_parallel is_expert disable_grad_reduce gtp_remat_size attn_mask_type
    attention_dropout tp_group tp_size self_attn_bda mlp_bda bias_dropout_add_exec_handler off_interface topk
    score_function routing_type enable_expert_bias router_replay ep_group num_local_experts use_shared_expert
    use_shared_expert_gate
    pre_process post_process mtp_process position_embedding_type rotary_percent rotary_base rotary_scaling
    pg_collection share_embeddings_and_output_weights vocab_size hybrid_layer_pattern scatter_to_sequence_parallel
    rotary_interleaved seq_len_interpolation_factor inv_freq inv_freq_extra inv_freq_inter scaling_factor
    original_max_position_embeddings beta_fast beta_slow mscale mscale_all_dim correction_range_round_to_int
    layer_number out_features in_features input_size output_size input_size_per_partition output_size_per_partition
    num_embeddings_per_partition embedding_dim
    """.split()
)
"""Attributes of modules that the inspection of a model reads, here and in `facts`.

Classes in `te` add theirs by `required`. A missing attribute lets its later changes pass unchecked.
"""

_SIZES = (
    ("output_size_per_partition", "input_size"),
    ("output_size", "input_size_per_partition"),
    ("num_embeddings_per_partition", "embedding_dim"),
    ("out_features", "in_features"),
)
"""Attributes with the rows and columns of a module's matrices: linear layers, embeddings, TransformerEngine's linears.

The first pair that a module has counts.
"""

MEGATRON_LLAMA3 = (1.0, 4.0, 8192)
"""Llama 3.1's low and high frequency factors and original length, which Megatron-core hard-codes."""


def check_model(model) -> None:
    """Raise UnsupportedError if a setting of the model itself is not supported."""
    if (why := models.unsupported_layers(models.pattern(model))) is not None:
        raise UnsupportedError(why)
    whole = model.config.pipeline_model_parallel_size == 1
    if whole and not (model.pre_process and model.post_process):
        raise UnsupportedError(
            "pre_process, post_process: must both be True with pipeline_model_parallel_size = 1, got "
            f"{model.pre_process} and {model.post_process}"
        )
    ranks = _group_size(getattr(model.pg_collection, "cp", None))
    if ranks != model.config.context_parallel_size:
        raise UnsupportedError(
            f"context_parallel_size: must be {ranks}, the size of the model's context-parallel group, got "
            f"{model.config.context_parallel_size}"
        )
    if model.mtp_process:
        raise UnsupportedError(
            "mtp_num_layers (multi-token prediction, MTP): must be None or 0, with mtp_block_spec = None, got a model "
            "with MTP layers"
        )
    if model.position_embedding_type not in ("rope", "yarn"):
        raise UnsupportedError(
            f"position_embedding_type: must be 'rope' or 'yarn', got {model.position_embedding_type!r}"
        )
    if not 0 < (percent := _rotary_percent(model)) <= 1:
        raise UnsupportedError(f"rotary_percent: must be in (0, 1], got {percent}")
    if (head_dim := model.config.kv_channels) % 2:
        raise UnsupportedError(f"kv_channels: must be even, because RoPE rotates pairs of dimensions, got {head_dim}")
    if rotary_dim(model) % 2 or not rotary_dim(model):
        raise UnsupportedError(
            "kv_channels, rotary_percent: int(kv_channels * rotary_percent) must be a positive even number, got "
            f"int({head_dim} * {percent}) = {rotary_dim(model)}"
        )
    if whole and model.config.num_moe_experts is not None and not modules.expert_ranks(model):
        raise UnsupportedError(
            f"num_moe_experts (MoE): must be None for a model without a MoELayer, got {model.config.num_moe_experts}"
        )
    if model.config.sequence_parallel and model.pre_process and not model.embedding.scatter_to_sequence_parallel:
        raise UnsupportedError("scatter_embedding_sequence_parallel: must be True with sequence_parallel, got False")


def _rotary_percent(model) -> float:
    # HybridModel does not store it. 1.0 is assumed; `check_rotary` then rejects frequencies of any other percentage.
    return vars(model).get("rotary_percent", 1.0)


def rotary_dim(model) -> int:
    """Return the number of rotated dimensions of a head, rounded like in Megatron."""
    return int(model.config.kv_channels * _rotary_percent(model))


def stock_head_reason(model) -> str | None:
    """Return the reason why a model's output layer stays stock, or None.

    The output layer of a critic or reward model, a linear layer to one number for each token, has no vocabulary.
    """
    head = getattr(model, "output_layer", None)  # absent except on the last pipeline stage
    if isinstance(head, torch.nn.Linear) and head.out_features == 1 and not list(head.children()):
        cls = type(head)
        return f"{cls.__module__}.{cls.__qualname__} returns one number for each token, so it has no logprobs"
    return None


def _group_size(group) -> int:
    return 1 if group is None else group.size()


def reads_frequencies(record: state.State) -> bool:
    """Return whether each forward reads the frequencies of the rotary embedding: changes on a host leave no trace."""
    cached, _, _ = record.frequencies or ([], 0.0, None)
    return not cached or any(version != t._version for t, version in cached)


def check_rotary(model) -> tuple[float, Scaling | None]:
    """Return the base and scaling of a model's rotary embedding.

    alignkit computes its own frequencies from both. Raises UnsupportedError unless the model's frequencies equal
    alignkit's: other frequencies mean that the model expects other rotations. A tolerance covers devices whose pow
    differs.
    """
    rotary, given, head_dim = model.rotary_pos_emb, vars(model).get("rotary_base"), rotary_dim(model)
    if rotary.rotary_interleaved:
        raise UnsupportedError(f"rotary_interleaved: must be False, got {rotary.rotary_interleaved!r}")
    if rotary.seq_len_interpolation_factor is not None:
        raise UnsupportedError(
            f"seq_len_interpolation_factor: must be None, got {rotary.seq_len_interpolation_factor!r}"
        )
    yarn = model.position_embedding_type == "yarn"
    frequencies = [rotary.inv_freq, *((rotary.inv_freq_extra, rotary.inv_freq_inter) if yarn else ())]
    record = state.of_model(model)
    cached = record.frequencies
    # Reading from a device synchronizes, so results are cached until the frequencies change.
    cacheable = all(not on_host(t.device) and not t.is_inference() for t in frequencies) and not strict()
    if not (
        cacheable
        and cached is not None
        and len(cached[0]) == len(frequencies)
        and all(old is t and version == t._version for (old, version), t in zip(cached[0], frequencies, strict=True))
    ):
        if given is not None:
            base = float(given)
        elif yarn:
            base = float(rotary.rotary_base)
        else:
            base = _base(rotary, head_dim)
        scaled = vars(model).get("rotary_scaling", False)  # not an option of HybridModel
        scaling = _yarn(rotary, base, head_dim) if yarn else _llama3(rotary, base, head_dim, scaled)
        cached = [(t, t._version) for t in frequencies] if cacheable else [], base, scaling
        record.frequencies = cached
    _, base, scaling = cached
    if given is not None and float(given) != base:  # the model's rotary_base has changed since the result was cached
        raise UnsupportedError(f"rotary_base: must be {base}, the base that rotary_pos_emb was built with, got {given}")
    expected = 1.0 if scaling is None else scaling.attention_factor
    if (factor := modules.attention_factor(model.config)) != expected:
        raise UnsupportedError(
            "yarn_rotary_scaling_factor, yarn_mscale, yarn_mscale_all_dim: must give the same attention factor as the "
            f"model's {type(rotary).__name__}, {expected}, got {factor}"
        )
    return base, scaling


def _base(rotary, head_dim: int) -> float:
    """Return HybridModel's rotary base, derived from the lowest frequency and rounded to six digits."""
    lowest = float(rotary.inv_freq.flatten()[-1])
    # Six-digit numbers are at least 10^-6 apart (relative). 2^-21 is slightly less than half of that, and exceeds the
    # effect of the rounding of an fp32 frequency: a base with more digits is rejected.
    derived = lowest ** (-head_dim / (head_dim - 2)) if head_dim > 2 and 0 < lowest < 1 else 0.0
    base = float(f"{derived:.6g}")
    if not 1 < base < 2**40 or abs(derived / base - 1) > 2.0**-21:
        raise UnsupportedError(
            "rotary_pos_emb: the rotary_base derived from its lowest frequency must be in (1, 2^40) and have at most "
            f"six significant digits, got {derived} from the frequency {lowest}"
        )
    return base


@relies_on(
    "models/common/embeddings/yarn_rotary_pos_embedding.py:YarnRotaryEmbedding.__init__",
    "scaling_factor original_max_position_embeddings beta_fast beta_slow mscale mscale_all_dim",
    mentions="inv_freq_extra inv_freq_inter correction_range_round_to_int",
)
def _yarn(rotary, base: float, head_dim: int) -> Yarn:
    factor, mscales = rotary.scaling_factor, (rotary.mscale, rotary.mscale_all_dim)
    if None not in mscales and 0 in mscales and mscales != (1, 0):
        raise UnsupportedError(
            f"yarn_mscale, yarn_mscale_all_dim: must both be nonzero, or be 1 and 0, got {mscales[0]} and {mscales[1]}"
        )
    _require_near(rotary.inv_freq, plain(head_dim, base))
    _require_near(rotary.inv_freq_extra, plain(head_dim, base))
    _require_near(rotary.inv_freq_inter, [f / factor for f in plain(head_dim, base)])
    return Yarn(
        float(factor),
        int(rotary.original_max_position_embeddings),
        float(rotary.beta_fast),
        float(rotary.beta_slow),
        yarn_attention_factor(factor, *mscales),
        bool(rotary.correction_range_round_to_int),
    )


@relies_on(
    "models/common/embeddings/rotary_pos_embedding.py:RotaryEmbedding.__init__",
    "rope_scaling rope_scaling_factor seq_len_interpolation_factor",
)
def _llama3(rotary, base: float, head_dim: int, scaled: bool) -> Llama3 | None:
    """Return Llama 3.1's scaling, or None; Megatron stores only whether there is one.

    The factor is derived from the lowest frequency. The other parameters are Megatron's constants.
    """
    if not scaled:
        _require_near(rotary.inv_freq, plain(head_dim, base))
        return None
    ratio = plain(head_dim, base)[-1] / float(rotary.inv_freq.flatten()[-1])
    factor = float(Fraction(ratio).limit_denominator(64)) if 0 < ratio < 2**20 else 0.0
    if factor < 1:
        raise UnsupportedError(
            "rotary_pos_emb: the rope_scaling_factor derived from its lowest frequency must be in [1, 2^20), got "
            f"{ratio}"
        )
    scaling = Llama3(factor, *MEGATRON_LLAMA3)
    _require_near(rotary.inv_freq, scaling.frequencies(head_dim, base))
    return scaling


def _require_near(actual: torch.Tensor, expected: list[float]) -> None:
    """Raise UnsupportedError unless the frequencies `actual` are near `expected`.

    The tolerance of 2^-18 is 32 to 64 fp32 ulps. It covers the rounding of exponents to fp32, which pow amplifies by
    ln(base), and the difference between devices' pow.
    """
    actual = actual.cpu()
    wanted = torch.tensor(expected, dtype=torch.float64, device="cpu").float()
    if actual.shape != wanted.shape:
        raise UnsupportedError(f"rotary_pos_emb: must have {len(wanted)} frequencies, got shape {tuple(actual.shape)}")
    if not torch.allclose(actual, wanted, rtol=2.0**-18, atol=0.0):
        i = int(((actual - wanted) / wanted).abs().argmax())  # a NaN counts as the maximum
        raise UnsupportedError(
            f"rotary_pos_emb: inv_freq[{i}] must be {wanted[i].item()}, computed from rotary_base and the scaling, got "
            f"{actual[i].item()}"
        )


def check_module(
    path: str, module: torch.nn.Module, config, devices: set[torch.device] | None, in_moe_layer: bool = False
) -> None:
    """Raise UnsupportedError if an attribute or parameter of one allowed module is not supported.

    Attributes are read from the module's dictionaries, because a failing getattr of a torch module takes microseconds.

    devices: parameter devices that have passed the check, extended by this module's; None while the model is built,
    when devices and dropout are not checked. in_moe_layer: the module is below a MoELayer.
    """
    own, parameters = module.__dict__, module._parameters
    if any(_has_bias(d.get("bias")) for d in (own, parameters)) and not path.endswith("linear_qkv"):
        raise UnsupportedError(f"{path}.bias: must be None; only linear_qkv may have a bias")
    if own.get("weight") is not None:  # computed in a hook, for example by torch.nn.utils.weight_norm
        raise UnsupportedError(f"{path}.weight: must be a parameter, got an attribute, as created by weight_norm")
    if own.get("disable_grad_reduce"):
        raise UnsupportedError(f"{path}.disable_grad_reduce (LoRA): must be False, got True")
    if own.get("is_expert") and not in_moe_layer:
        raise UnsupportedError(f"{path}.is_expert (MoE): must be False outside of a MoELayer, got True")
    if not own.get("input_is_parallel", True):
        raise UnsupportedError(f"{path}.input_is_parallel: must be True, got False")
    if own.get("gtp_remat_size", 1) > 1:
        raise UnsupportedError(f"{path}.gtp_remat_size: must be 1, got {module.gtp_remat_size}")
    if own.get("config", config) is not config and not (in_moe_layer and _is_expert_copy(own["config"], config)):
        raise UnsupportedError(f"{path}.config: must be the model's config object, got another one")
    if isinstance(module, torch.nn.RMSNorm) and (parameters.get("weight") is None or own["eps"] is None):
        name = "weight" if parameters.get("weight") is None else "eps"
        raise UnsupportedError(f"{path}.{name}: must be set for an RMSNorm, got None")
    mask = own.get("attn_mask_type")
    if mask is not None and (name := getattr(mask, "name", mask)) not in ("causal", "padding_causal"):
        raise UnsupportedError(f"{path}.attn_mask_type: must be causal or padding_causal, got {name}")
    if devices is None:
        return
    dropout = module.p if isinstance(module, torch.nn.Dropout) else own.get("attention_dropout")
    if dropout and module.training:
        raise UnsupportedError(f"{path}: the dropout probability must be 0 in training, got {dropout}")
    matrix = _matrix(own)
    for name, parameter in parameters.items():
        if parameter is None:
            continue
        if type(parameter) is not torch.nn.Parameter:  # sharded (FSDP) or quantized
            raise UnsupportedError(
                f"{path}.{name}: must be a torch.nn.Parameter (not sharded by FSDP, not quantized), got a "
                f"{type(parameter).__qualname__}"
            )
        if matrix is not None and parameter.dim() == 2 and tuple(parameter.shape) != matrix:
            raise UnsupportedError(
                f"{path}.{name}: must have the shape {list(matrix)}, with which the module was built, got "
                f"{list(parameter.shape)}"
            )
        if parameter.device in devices:
            continue
        try:
            dispatch.backend_of(parameter.device)
        except BackendError as e:
            raise UnsupportedError(f"{path}.{name}: {e}") from None
        devices.add(parameter.device)


def _matrix(own: dict) -> tuple[int, int] | None:
    """Return the shape of a module's matrices by the sizes that it was built with, or None if it stores no sizes."""
    for sizes in _SIZES:
        if all(name in own for name in sizes):
            rows, columns = sizes
            return own[rows], own[columns]
    return None


def _is_expert_copy(config, of_model) -> bool:
    """Return whether `config` is the copy of the model's that Megatron makes for experts of another width."""
    fields = (field.name for field in dataclasses.fields(of_model) if field.name != "ffn_hidden_size")
    pairs = ((getattr(config, name, None), getattr(of_model, name)) for name in fields)
    return type(config) is type(of_model) and all(a is b or a == b or (callable(a) and callable(b)) for a, b in pairs)


@relies_on("transformer/moe/router.py:TopKRouter.__init__", mentions="topk score_function routing_type")
def check_moe_layer(path: str, layer, for_forward: bool) -> None:
    """Raise UnsupportedError if a MoELayer does not match its configuration.

    for_forward: also check what matters only in a forward.
    """
    config, router = layer.config, layer.router
    if for_forward and layer.training and config.tensor_model_parallel_size > 1 and not config.sequence_parallel:
        raise UnsupportedError(
            "sequence_parallel: must be True when training an MoE model with tensor parallelism, as in stock "
            "Megatron-core, got False"
        )
    if for_forward and layer.training and layer.experts.tp_group.size() != config.tensor_model_parallel_size:
        weight = next(layer.experts.parameters())
        # False marks gradients that Megatron reduces over the expert's own data-parallel group.
        if getattr(weight, "allreduce", True):
            raise UnsupportedError(
                "expert_tensor_parallel_size: must equal tensor_model_parallel_size = "
                f"{config.tensor_model_parallel_size} in training without expert parallelism, because Megatron-core "
                f"does not reduce these experts' gradients otherwise, got {config.expert_tensor_parallel_size}"
            )
    shared = config.moe_shared_expert_intermediate_size is not None
    values = [
        ("router.topk", router.topk, "moe_router_topk"),
        ("router.score_function", router.score_function, "moe_router_score_function"),
        ("router.routing_type", router.routing_type, "moe_router_load_balancing_type"),
        ("router.enable_expert_bias", router.enable_expert_bias, "moe_router_enable_expert_bias"),
        ("ep_group", _group_size(layer.ep_group), "expert_model_parallel_size"),
        ("experts.tp_group", _group_size(layer.experts.tp_group), "expert_tensor_parallel_size"),
        (
            "num_local_experts * expert_model_parallel_size",
            layer.num_local_experts * config.expert_model_parallel_size,
            "num_moe_experts",
        ),
    ]
    if layer.use_shared_expert:
        gated = layer.shared_experts.use_shared_expert_gate
        values.append(("shared_experts.use_shared_expert_gate", gated, "moe_shared_expert_gate"))
    expected = [(name, value, getattr(config, field), f"{field} of") for name, value, field in values]
    expected += [
        ("router.router_replay", router.router_replay, None, "in"),
        ("use_shared_expert", layer.use_shared_expert, shared, "moe_shared_expert_intermediate_size of"),
    ]
    tensors = [("router.weight", router.weight, [config.num_moe_experts, config.hidden_size])]
    if getattr(router, "expert_bias", None) is not None:
        tensors.append(("router.expert_bias", router.expert_bias, [config.num_moe_experts]))
    if layer.use_shared_expert and layer.shared_experts.use_shared_expert_gate:
        tensors.append(("shared_experts.gate_weight", layer.shared_experts.gate_weight, [1, config.hidden_size]))
    sizes = "num_moe_experts and hidden_size of"
    expected += [(f"{name}.shape", list(tensor.shape), wanted, sizes) for name, tensor, wanted in tensors]
    for name, value, wanted, where in expected:
        if value != wanted:
            raise UnsupportedError(f"{path}.{name}: must be {wanted!r}, as {where} the model's config, got {value!r}")


def _has_bias(bias) -> bool:
    """Return whether `bias` exists; TransformerEngine's linear without a bias has an empty tensor."""
    return bias is not None and not (isinstance(bias, torch.Tensor) and not bias.numel())


def check_te(path: str, module: torch.nn.Module, cls: type[te.Replacement]) -> None:
    """Raise UnsupportedError if a TransformerEngine module uses a feature that its replacement `cls` lacks."""
    own = module.__dict__
    for name, wanted in cls.required.items():
        if own.get(name, wanted) != wanted:
            raise UnsupportedError(f"{path}.{name}: must be {wanted!r}, got {own[name]!r}")
    if own.get("tp_group") is None and own.get("tp_size", 1) > 1:
        raise UnsupportedError(f"{path}.tp_group: must be set with {own['tp_size']} tensor-parallel ranks, got None")


def check_layer(path: str, layer: torch.nn.Module, bda: tuple) -> None:
    """Raise UnsupportedError unless the functions stored in a TransformerLayer are Megatron's.

    bda: functions allowed as self_attn_bda and mlp_bda, the residual additions.
    """
    own, children = layer.__dict__, layer._modules
    for part, residual_add in (("self_attention", "self_attn_bda"), ("mlp", "mlp_bda")):
        if isinstance(children.get(part), IdentityOp) and isinstance(children.get(residual_add), IdentityFuncOp):
            continue  # an attention or MLP layer of a HybridModel
        if own.get(residual_add) not in bda:
            raise UnsupportedError(
                f"{path}.{residual_add}: must be Megatron's get_bias_dropout_add, got {own.get(residual_add)!r:.200}"
            )
    for name in ("bias_dropout_add_exec_handler", "off_interface"):
        if not getattr(own.get(name), "__module__", "torch.").startswith(("torch.", "megatron.core.")):
            raise UnsupportedError(f"{path}.{name}: must come from PyTorch or Megatron-core, got {own[name]!r:.200}")
