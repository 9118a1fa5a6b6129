"""Facts of a model, as short strings, that all ranks sharing the model must agree on. No numerics.

`forward` compares the facts in its collective checks. The keys appear in error messages only and may change.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterable

import torch

from . import state, versions
from .models import pattern

FIELDS = (
    "num_layers",
    "hidden_size",
    "num_attention_heads",
    "num_query_groups",
    "kv_channels",
    "ffn_hidden_size",
    "params_dtype",
    "tensor_model_parallel_size",
    "pipeline_model_parallel_size",
    "virtual_pipeline_model_parallel_size",
    "context_parallel_size",
    "sequence_parallel",
    "recompute_granularity",
    "recompute_method",
    "recompute_num_layers",
    "recompute_modules",
    "distribute_saved_activations",
    "num_moe_experts",
    "moe_ffn_hidden_size",
    "moe_shared_expert_intermediate_size",
    "moe_shared_expert_gate",
    "moe_layer_freq",
    "moe_router_topk",
    "moe_router_score_function",
    "moe_router_pre_softmax",
    "moe_router_num_groups",
    "moe_router_group_topk",
    "moe_router_topk_scaling_factor",
    "moe_router_load_balancing_type",
    "moe_aux_loss_coeff",
    "moe_z_loss_coeff",
    "expert_model_parallel_size",
    "expert_tensor_parallel_size",
)
"""Fields of the TransformerConfig that affect numerics or the sequence of collectives.

A field that `policy` allows several values for and that has such an effect belongs here. Fields that `policy`
restricts to their defaults need no comparison.
"""


def settings(model) -> dict[str, str]:
    """Return the settings of a checked model that must be the same on every rank, by the names for errors."""
    config, rotations = model.config, state.of_model(model).rotations
    return {
        "rotary_base": repr(rotations.base),
        "kv_channels * rotary_percent": repr(rotations.rotary_dim),
        "hybrid_layer_pattern": repr(pattern(model)),
        "padded vocab_size": repr(model.vocab_size),
        "share_embeddings_and_output_weights": repr(bool(model.share_embeddings_and_output_weights)),
        # Recomputation runs the forward's collectives again in the backward pass, but only in training.
        "training with recomputation": repr(model.training and config.recompute_granularity is not None),
        "Megatron-core": versions.evidence(),
    } | {name: str(getattr(config, name)) for name in FIELDS}


def stage(model) -> dict[str, str]:
    """Return the pipeline-stage settings, which must be the same on the ranks of one stage."""
    return {
        "pre_process": repr(bool(model.pre_process)),
        "post_process": repr(bool(model.post_process)),
        "layers": repr(layers(model)),
    }


def layers(model) -> list[int]:
    """Return the layer numbers of this stage; the model's first layer is 1."""
    return [layer.layer_number for layer in model.decoder.layers]


def modules(found: Iterable[tuple[str, torch.nn.Module]]) -> dict[str, str]:
    """Return the facts of a model's modules, given as (path, module).

    Each string has the count of every value and a digest of (path, value) pairs. The computation takes milliseconds.
    Facts depend only on what a `guards.Snapshot` records, so they can be cached while it is current.
    """
    facts: dict[str, list[tuple[str, str]]] = {
        name: []
        for name in (
            "classes of modules",
            "eps of norms",
            "sequence_parallel of modules",
            "gather_output of modules",
            "types of parameters",
            "shapes of parameters",
            "sequence_parallel marks of parameters",
        )
    }
    classes, eps, sequence_parallel, gather, dtypes, shapes, marks = facts.values()
    for path, module in found:
        own = module.__dict__
        classes.append((path, type(module).__qualname__))
        for values, name in ((eps, "eps"), (sequence_parallel, "sequence_parallel"), (gather, "gather_output")):
            if own.get(name) is not None:
                values.append((path, repr(own[name])))
        for name, t in (*own["_parameters"].items(), *own["_buffers"].items()):
            if t is not None:
                dtypes.append((f"{path}.{name}", str(t.dtype)))
                shapes.append((f"{path}.{name}", str(tuple(t.shape))))
                marks.append((f"{path}.{name}", repr(bool(getattr(t, "sequence_parallel", False)))))
    return {name: _counted(values) for name, values in facts.items()}


def _counted(values: list[tuple[str, str]]) -> str:
    counts = ", ".join(f"{n} x {value}" for value, n in sorted(Counter(v for _, v in values).items()))
    return f"{counts} ({hashlib.blake2b(repr(values).encode(), digest_size=6).hexdigest()})"
