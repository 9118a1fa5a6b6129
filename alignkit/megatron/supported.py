"""What alignkit keeps aligned of a built GPTModel: its settings, its rotary embedding, each of its modules.

The rest is refused by name: `policy` does so for its configuration, `calls` for what it is called with.
"""

from __future__ import annotations

import dataclasses
import weakref
from fractions import Fraction
from typing import TYPE_CHECKING

import torch
from megatron.core.transformer.identity_op import IdentityFuncOp, IdentityOp

from alignkit.contract.rope import Llama3, Scaling, Yarn, plain, yarn_attention_factor
from alignkit.dist import strict
from alignkit.errors import BackendError, UnsupportedError
from alignkit.runtime import dispatch
from alignkit.runtime.families import on_host

if TYPE_CHECKING:
    from . import te

from . import models, modules

MEGATRON_LLAMA3 = (1.0, 4.0, 8192)
"""Of Llama 3.1's scaling, what Megatron-core has as constants: low and high factor, and the original length."""


def check_model(model) -> None:
    """UnsupportedError for a model whose own settings alignkit does not keep aligned."""
    if (why := models.refused_layers(models.pattern(model))) is not None:
        raise UnsupportedError(why)
    whole = model.config.pipeline_model_parallel_size == 1
    if whole and not (model.pre_process and model.post_process):
        raise UnsupportedError("pre_process / post_process: a part of a model, with pipeline_model_parallel_size 1")
    ranks = _ranks(getattr(model.pg_collection, "cp", None))
    if ranks != model.config.context_parallel_size:
        raise UnsupportedError(
            f"context_parallel_size: {model.config.context_parallel_size}, of a group of {ranks} ranks"
        )
    if model.mtp_process:
        raise UnsupportedError("mtp_block_spec: multi-token prediction (MTP) is not supported")
    if model.position_embedding_type not in ("rope", "yarn"):
        raise UnsupportedError(f"position_embedding_type: {model.position_embedding_type!r} is not supported")
    if not 0 < (percent := _rotary_percent(model)) <= 1 or rotary_dim(model) % 2 or not rotary_dim(model):
        raise UnsupportedError(f"rotary_percent: {percent} of a head of {model.config.kv_channels} is not supported")
    if whole and model.config.num_moe_experts is not None and not modules.expert_ranks(model):
        raise UnsupportedError("num_moe_experts (MoE): set for a model without a MoELayer")
    if model.config.sequence_parallel and model.pre_process and not model.embedding.scatter_to_sequence_parallel:
        raise UnsupportedError("scatter_embedding_sequence_parallel: False is not supported")


def _rotary_percent(model) -> float:
    return vars(model).get("rotary_percent", 1.0)  # of a HybridModel the frequencies tell


def rotary_dim(model) -> int:
    """How many of a head's dimensions are rotated; as Megatron has it."""
    return int(model.config.kv_channels * _rotary_percent(model))


def left_stock(model) -> str | None:
    """Why a model's output layer stays as it is, if it does: a linear layer that gives one number for each token, as a
    critic's or a reward model's, is no vocabulary's, whatever else it is."""
    head = getattr(model, "output_layer", None)  # of the last stage of a pipeline alone
    if isinstance(head, torch.nn.Linear) and head.out_features == 1 and not list(head.children()):
        cls = type(head)
        return f"{cls.__module__}.{cls.__qualname__} gives one number for each token: no logprobs come from it"
    return None


def _ranks(group) -> int:
    return 1 if group is None else group.size()


_frequencies: weakref.WeakKeyDictionary[
    torch.nn.Module, tuple[list[tuple[torch.Tensor, int]], float, Scaling | None]
] = weakref.WeakKeyDictionary()
"""By rotary embedding: its frequencies, their versions, and the base and scaling that they were found to have."""


def check_rotary(model) -> tuple[float, Scaling | None]:
    """The base and scaling that a model's rotary embedding asks for. UnsupportedError unless its frequencies are those of one that
    alignkit knows. They are not used, but a model whose frequencies were changed asks for other rotations; where the
    powers were taken may change their last bits."""
    rotary, given, head_dim = model.rotary_pos_emb, vars(model).get("rotary_base"), rotary_dim(model)
    if rotary.rotary_interleaved or rotary.seq_len_interpolation_factor is not None:
        raise UnsupportedError("rotary_interleaved / seq_len_interpolation_factor: neither is supported")
    yarn = model.position_embedding_type == "yarn"
    held = [rotary.inv_freq, *((rotary.inv_freq_extra, rotary.inv_freq_inter) if yarn else ())]
    seen = _frequencies.get(rotary)
    # Reading them from a device waits for it: done once, and again when they have changed.
    remember = all(not on_host(t.device) and not t.is_inference() for t in held) and not strict()
    if not (
        remember
        and seen is not None
        and all(old is t and version == t._version for (old, version), t in zip(seen[0], held, strict=True))
    ):
        base = float(given) if given is not None else float(rotary.rotary_base) if yarn else _base(rotary, head_dim)
        scaled = vars(model).get("rotary_scaling", False)  # a HybridModel has no way to ask for it
        scaling = _yarn(rotary, base, head_dim) if yarn else _llama3(rotary, base, head_dim, scaled)
        seen = [(t, t._version) for t in held] if remember else [], base, scaling
        if remember:
            _frequencies[rotary] = seen
    _, base, scaling = seen
    if given is not None and float(given) != base:  # the frequencies are another's
        raise UnsupportedError(f"rotary_base: {given}, but rotary_pos_emb was made with {base}")
    expected = 1.0 if scaling is None else scaling.attention_factor
    if (factor := modules.attention_factor(model.config)) != expected:
        raise UnsupportedError(
            f"yarn_rotary_scaling_factor / yarn_mscale: rotations are multiplied by {factor}, but a "
            f"{type(rotary).__name__} of these settings has {expected}"
        )
    return base, scaling


def _base(rotary, head_dim: int) -> float:
    """HybridModel does not keep its base, which is read off the lowest frequency, as a number of six digits."""
    lowest = float(rotary.inv_freq.flatten()[-1])
    read = lowest ** (-head_dim / (head_dim - 2)) if head_dim > 2 and 0 < lowest < 1 else 0.0
    base = float(f"{read:.6g}")
    if not 1 < base < 2**40 or abs(read / base - 1) > 2.0**-21:
        raise UnsupportedError("rotary_pos_emb: the base of its frequencies is not known")
    return base


def _yarn(rotary, base: float, head_dim: int) -> Yarn:
    factor, mscales = rotary.scaling_factor, (rotary.mscale, rotary.mscale_all_dim)
    if None not in mscales and 0 in mscales and mscales != (1, 0):
        raise UnsupportedError(f"yarn_mscale / yarn_mscale_all_dim: {mscales} is not supported")
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


def _llama3(rotary, base: float, head_dim: int, scaled: bool) -> Llama3 | None:
    """Megatron keeps whether there is scaling, not its factor, which is read off the longest wave. The other settings of
    Llama 3.1 are constants there."""
    if not scaled:
        _require_near(rotary.inv_freq, plain(head_dim, base))
        return None
    longest = plain(head_dim, base)[-1] / float(rotary.inv_freq.flatten()[-1])
    factor = float(Fraction(longest).limit_denominator(64)) if 0 < longest < 2**20 else 0.0
    if factor < 1:
        raise UnsupportedError("rotary_pos_emb: frequencies that were scaled otherwise than by rope_scaling")
    scaling = Llama3(factor, *MEGATRON_LLAMA3)
    _require_near(rotary.inv_freq, scaling.frequencies(head_dim, base))
    return scaling


def _require_near(actual: torch.Tensor, expected: list[float]) -> None:
    actual = actual.cpu()
    wanted = torch.tensor(expected, dtype=torch.float64, device="cpu").float()
    if actual.shape != wanted.shape or not torch.allclose(actual, wanted, rtol=2.0**-18, atol=0.0):
        raise UnsupportedError("rotary_pos_emb: its frequencies are not those of its settings")


def check_module(
    path: str, module: torch.nn.Module, config, devices: set[torch.device] | None, in_mixture: bool = False
) -> None:
    """UnsupportedError for what is not supported of one known module, told apart by its attributes.

    devices: those of parameters that are known to be supported, this module's are added; None while the model is built,
    when neither they nor dropout matter yet. in_mixture: whether it is below a MoELayer.

    Runs on every module before every forward, so it looks into the dictionaries: asking a torch module for an
    attribute that it lacks takes microseconds."""
    own, parameters = module.__dict__, module._parameters
    if any(_given(d.get("bias")) for d in (own, parameters)) and not path.endswith("linear_qkv"):
        raise UnsupportedError(f"{path}.bias: only QKV bias is supported")
    if own.get("weight") is not None:  # torch.nn.utils.weight_norm and its like compute it in a hook
        raise UnsupportedError(f"{path}.weight: not a parameter")
    if own.get("disable_grad_reduce"):
        raise UnsupportedError(f"{path}: disable_grad_reduce (LoRA) is not supported")
    if own.get("is_expert") and not in_mixture:
        raise UnsupportedError(f"{path}: is_expert (MoE) outside of a MoELayer is not supported")
    if not own.get("input_is_parallel", True):
        raise UnsupportedError(f"{path}.input_is_parallel: False is not supported")
    if own.get("gtp_remat_size", 1) > 1:
        raise UnsupportedError(f"{path}.gtp_remat_size: {module.gtp_remat_size} is not supported, only 1")
    if own.get("config", config) is not config and not (in_mixture and _narrower(own["config"], config)):
        raise UnsupportedError(f"{path}.config: not the model's")
    if isinstance(module, torch.nn.RMSNorm) and (parameters.get("weight") is None or own["eps"] is None):
        raise UnsupportedError(f"{path}: RMSNorm without weight or eps is not supported")
    mask = own.get("attn_mask_type")
    if mask is not None and (name := getattr(mask, "name", mask)) not in ("causal", "padding_causal"):
        raise UnsupportedError(f"{path}.attn_mask_type: {name} is not supported, only causal")
    if devices is None:
        return
    dropout = module.p if isinstance(module, torch.nn.Dropout) else own.get("attention_dropout")
    if dropout and module.training:
        raise UnsupportedError(f"{path}: dropout of {dropout} in training is not supported")
    for name, parameter in parameters.items():
        if parameter is None:
            continue
        if type(parameter) is not torch.nn.Parameter:  # sharded (FSDP), quantised
            raise UnsupportedError(
                f"{path}.{name}: a parameter of class {type(parameter).__qualname__} is not supported"
            )
        if parameter.device in devices:
            continue
        try:
            dispatch.name(parameter.device)
        except BackendError as e:
            raise UnsupportedError(f"{path}.{name}: {e}") from None
        devices.add(parameter.device)


def _narrower(config, of_model) -> bool:
    """Whether a configuration is the copy that Megatron makes of the model's for experts of another width."""
    fields = (field.name for field in dataclasses.fields(of_model) if field.name != "ffn_hidden_size")
    pairs = ((getattr(config, name, None), getattr(of_model, name)) for name in fields)
    return type(config) is type(of_model) and all(
        ours is theirs or ours == theirs or (callable(ours) and callable(theirs)) for ours, theirs in pairs
    )


def check_mixture(path: str, layer, runs: bool) -> None:
    """UnsupportedError for a MoELayer whose attributes are not what its configuration says. runs: not while it is built."""
    config, router = layer.config, layer.router
    if runs and layer.training and config.tensor_model_parallel_size > 1 and not config.sequence_parallel:
        raise UnsupportedError(
            "sequence_parallel: False is not supported in training a mixture of experts (MoE) with tensor parallelism, "
            "nor does Megatron-core take it"
        )
    if runs and layer.training and layer.experts.tp_group.size() != config.tensor_model_parallel_size:
        weight = next(layer.experts.parameters())
        if getattr(weight, "allreduce", True):  # Megatron's mark of those that it adds over the experts' own ranks
            raise UnsupportedError(
                f"expert_tensor_parallel_size: {config.expert_tensor_parallel_size} is not supported in training with "
                f"{config.tensor_model_parallel_size} tensor-parallel ranks and no expert parallelism: Megatron-core does "
                "not add these experts' gradients"
            )
    said = {
        "router.topk": (router.topk, config.moe_router_topk),
        "router.score_function": (router.score_function, config.moe_router_score_function),
        "router.routing_type": (router.routing_type, config.moe_router_load_balancing_type),
        "router.enable_expert_bias": (router.enable_expert_bias, config.moe_router_enable_expert_bias),
        "router.router_replay": (router.router_replay, None),
        "ep_group": (_ranks(layer.ep_group), config.expert_model_parallel_size),
        "experts.tp_group": (_ranks(layer.experts.tp_group), config.expert_tensor_parallel_size),
        "use_shared_expert": (layer.use_shared_expert, config.moe_shared_expert_intermediate_size is not None),
        "num_local_experts": (layer.num_local_experts * config.expert_model_parallel_size, config.num_moe_experts),
    }
    if layer.use_shared_expert:
        gated = layer.shared_experts.use_shared_expert_gate
        said["shared_experts.use_shared_expert_gate"] = gated, config.moe_shared_expert_gate
    for name, (value, wanted) in said.items():
        if value != wanted:
            raise UnsupportedError(f"{path}.{name}: {value!r}, where the configuration says {wanted!r}")


def _given(bias) -> bool:
    """Whether there is one: TransformerEngine's linear without a bias has an empty tensor."""
    return bias is not None and not (isinstance(bias, torch.Tensor) and not bias.numel())


def check_te(path: str, module: torch.nn.Module, cls: type[te.Replacement]) -> None:
    """UnsupportedError for what `cls`, which takes the place of a module of TransformerEngine's, does not do of it."""
    own = module.__dict__
    for name, wanted in cls.must.items():
        if own.get(name, wanted) != wanted:
            raise UnsupportedError(f"{path}.{name}: {own[name]!r} is not supported, only {wanted!r}")
    if own.get("tp_group") is None and own.get("tp_size", 1) > 1:
        raise UnsupportedError(f"{path}.tp_group: none, for {own['tp_size']} tensor-parallel ranks")


def check_layer(path: str, layer: torch.nn.Module, bda: tuple) -> None:
    """UnsupportedError unless the functions that a TransformerLayer keeps are Megatron's: `bda` are those that its
    residual additions may be."""
    own, children = layer.__dict__, layer._modules
    for half, adds in (("self_attention", "self_attn_bda"), ("mlp", "mlp_bda")):
        if isinstance(children.get(half), IdentityOp) and isinstance(children.get(adds), IdentityFuncOp):
            continue  # half a layer, as HybridModel's are
        if own.get(adds) not in bda:
            raise UnsupportedError(f"{path}.self_attn_bda / mlp_bda: not Megatron's get_bias_dropout_add")
    for name in ("bias_dropout_add_exec_handler", "off_interface"):
        if not getattr(own.get(name), "__module__", "torch.").startswith(("torch.", "megatron.core.")):
            raise UnsupportedError(f"{path}.{name}: has been replaced")
