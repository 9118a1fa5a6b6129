"""What alignkit keeps aligned of a built GPTModel: its settings, its rotary embedding, each of its modules.

The rest is refused by name: `policy` does so for its configuration, `calls` for what it is called with.
"""

from __future__ import annotations

import weakref

import torch

from alignkit.dist import strict
from alignkit.errors import BackendError, InputError, UnsupportedError
from alignkit.runtime import dispatch


def check_model(model, vocab_size: int) -> None:
    """UnsupportedError for a GPTModel whose own settings alignkit does not keep aligned; InputError for a
    `vocab_size` that is not its own."""
    if model.config.pipeline_model_parallel_size == 1 and not (model.pre_process and model.post_process):
        raise UnsupportedError("pre_process / post_process: a part of a model, with pipeline_model_parallel_size 1")
    ranks = _ranks(getattr(model.pg_collection, "cp", None))
    if ranks != model.config.context_parallel_size:
        raise UnsupportedError(
            f"context_parallel_size: {model.config.context_parallel_size}, of a group of {ranks} ranks"
        )
    if model.mtp_process:
        raise UnsupportedError("mtp_block_spec: multi-token prediction (MTP) is not supported")
    if model.position_embedding_type != "rope":
        raise UnsupportedError(f"position_embedding_type: {model.position_embedding_type!r} is not supported")
    if model.rotary_percent != 1.0:
        raise UnsupportedError(f"rotary_percent: {model.rotary_percent} is not supported, only 1.0")
    if model.rotary_scaling:
        raise UnsupportedError("rope_scaling: scaled rotary embeddings are not supported")
    if model.config.sequence_parallel and model.pre_process and not model.embedding.scatter_to_sequence_parallel:
        raise UnsupportedError("scatter_embedding_sequence_parallel: False is not supported")
    if not 0 < vocab_size <= model.vocab_size:
        raise InputError(f"vocab_size: {vocab_size} is not in [1, {model.vocab_size}], the padded size")


def _ranks(group) -> int:
    return 1 if group is None else group.size()


_frequencies: weakref.WeakKeyDictionary[torch.nn.Module, tuple[torch.Tensor, int]] = weakref.WeakKeyDictionary()
"""By rotary embedding: its frequencies, and their version, that were found to be right."""


def check_rotary(rotary, base: float, head_dim: int) -> None:
    """UnsupportedError unless the module's frequencies are the default ones. They are not used, but a model whose
    frequencies were scaled asks for other rotations; where the powers were taken may change their last bits."""
    if rotary.rotary_interleaved or rotary.seq_len_interpolation_factor is not None:
        raise UnsupportedError("rotary_interleaved / seq_len_interpolation_factor: neither is supported")
    frequencies, seen = rotary.inv_freq, _frequencies.get(rotary)
    # Reading them from a device waits for it: done once, and again when they have changed.
    remember = frequencies.device.type != "cpu" and not frequencies.is_inference() and not strict()
    if remember and seen is not None and seen[0] is frequencies and seen[1] == frequencies._version:
        return
    expected = 1.0 / base ** (torch.arange(0, head_dim, 2, dtype=torch.float32, device="cpu") / head_dim)
    actual = frequencies.cpu()
    if actual.shape != expected.shape or not torch.allclose(actual, expected, rtol=2.0**-18, atol=0.0):
        raise UnsupportedError("rotary_pos_emb: scaled rotary embeddings are not supported")
    if remember:
        _frequencies[rotary] = (frequencies, frequencies._version)


def check_module(path: str, module: torch.nn.Module, config, devices: set[torch.device] | None) -> None:
    """UnsupportedError for what is not supported of one known module, told apart by its attributes.

    devices: those of parameters that are known to be supported, this module's are added; None while the model is built,
    when neither they nor dropout matter yet.

    Runs on every module before every forward, so it looks into the dictionaries: asking a torch module for an
    attribute that it lacks takes microseconds."""
    own, parameters = module.__dict__, module._parameters
    if (own.get("bias") is not None or parameters.get("bias") is not None) and not path.endswith("linear_qkv"):
        raise UnsupportedError(f"{path}.bias: only QKV bias is supported")
    if own.get("weight") is not None:  # torch.nn.utils.weight_norm and its like compute it in a hook
        raise UnsupportedError(f"{path}.weight: not a parameter")
    if own.get("disable_grad_reduce") or own.get("is_expert"):
        raise UnsupportedError(f"{path}: disable_grad_reduce (LoRA) and is_expert (MoE) are not supported")
    if not own.get("input_is_parallel", True):
        raise UnsupportedError(f"{path}.input_is_parallel: False is not supported")
    if own.get("gtp_remat_size", 1) > 1:
        raise UnsupportedError(f"{path}.gtp_remat_size: {module.gtp_remat_size} is not supported, only 1")
    if own.get("config", config) is not config:
        raise UnsupportedError(f"{path}.config: not the model's")
    if isinstance(module, torch.nn.RMSNorm) and (parameters.get("weight") is None or own["eps"] is None):
        raise UnsupportedError(f"{path}: RMSNorm without weight or eps is not supported")
    mask = own.get("attn_mask_type")
    if mask is not None and mask.name not in ("causal", "padding_causal"):
        raise UnsupportedError(f"{path}.attn_mask_type: {mask.name} is not supported, only causal")
    if devices is None:
        return
    if isinstance(module, torch.nn.Dropout) and module.p > 0 and module.training:
        raise UnsupportedError(f"{path}: dropout of {module.p} in training is not supported")
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


def check_layer(path: str, layer: torch.nn.Module, bda: tuple) -> None:
    """UnsupportedError unless the functions that a TransformerLayer keeps are Megatron's: `bda` are those that its
    residual additions may be."""
    own = layer.__dict__
    if own["self_attn_bda"] not in bda or own["mlp_bda"] not in bda:
        raise UnsupportedError(f"{path}.self_attn_bda / mlp_bda: not Megatron's get_bias_dropout_add")
    for name in ("bias_dropout_add_exec_handler", "off_interface"):
        if not getattr(own.get(name), "__module__", "torch.").startswith(("torch.", "megatron.core.")):
            raise UnsupportedError(f"{path}.{name}: has been replaced")
