"""Validation of vLLM's engine configuration, requests and built models: unsupported features raise an error by name.

`policy` holds the tables of single fields. This file has the checks across fields, and those of environment variables,
requests and modules; `live` checks a running engine. Each reason names the setting that the user can change.
tests/vllm/test_rejections.py and test_experts.py match the texts.
"""

from __future__ import annotations

import dataclasses
import functools
import operator
import os
from typing import Any

import msgspec
import torch

from alignkit.contract import k_leaves
from alignkit.contract.experts import ExpertTree
from alignkit.contract.rope import Yarn
from alignkit.convert import Architecture
from alignkit.engines.hook_points import relies_on
from alignkit.engines.policy import REQUIRED, Policy, Row, default, refusals
from alignkit.engines.versions import rollout_check
from alignkit.errors import AlignkitError, UnsupportedError
from alignkit.models import ARCHITECTURES, FAMILIES
from alignkit.models.config import ROPE_TYPES
from alignkit.vllm.built import architecture
from alignkit.vllm.policy import PARTS, REQUEST, Asked, Request
from alignkit.vllm.versions import installed

STRUCTURE = frozenset(("ModuleList", "Attention", "ApplyRotaryEmb", "RoutedExperts")).union(
    *(f.structure for f in FAMILIES.values())
)
"""Classes of container modules in a built model. Every other module must be of an aligned class."""

_EXPERT_COUNTS = frozenset(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"))
"""Fields of HF configurations that hold the number of experts."""


@relies_on("config/parallel.py:ParallelConfig", members="use_ubatching enable_expert_parallel")
def refuse_config(config) -> None:
    """Raise UnsupportedError with all settings of a `VllmConfig` that alignkit does not support."""
    asked, model = Asked(installed(), config), config.model_config
    reasons = [reason for part, table in PARTS for reason in part_reasons(asked, part, table)]
    parallel = config.parallel_config
    ray_v1 = parallel.distributed_executor_backend == "ray" and not _is_set(
        "VLLM_USE_RAY_V2_EXECUTOR_BACKEND", default="1"
    )
    reasons += [
        reason
        for reason, present in (
            (
                "VLLM_USE_V2_MODEL_RUNNER (V2 model runner): must be 0 with this version of vLLM, got 1",
                config.use_v2_model_runner and not asked.version.graphs,
            ),
            (
                "enable_dbo, ubatch_size (overlapping micro-batches): must be False and at most 1, got "
                f"{getattr(parallel, 'enable_dbo', None)} and {getattr(parallel, 'ubatch_size', None)}",
                parallel.use_ubatching,
            ),
            (f"runner: must be generate, got {model.runner_type}", model.runner_type != "generate"),
            (
                "VLLM_BATCH_INVARIANT: must be 0 or unset, because it makes vLLM select other kernels",
                _is_set("VLLM_BATCH_INVARIANT"),
            ),
            (
                "VLLM_USE_RUST_FRONTEND: must be 0 or unset, because the Rust front end accepts unsupported requests",
                _is_set("VLLM_USE_RUST_FRONTEND"),
            ),
            (
                "VLLM_USE_RAY_V2_EXECUTOR_BACKEND: must be 1, because Ray's V1 executor bypasses the worker's checks",
                ray_v1,
            ),
            (
                "VLLM_USE_BREAKABLE_CUDAGRAPH (breakable CUDA graphs): must be 0 or unset",
                _is_set("VLLM_USE_BREAKABLE_CUDAGRAPH"),
            ),
        )
        if present
    ]
    reasons += _model_reasons(model.hf_config, config.cache_config.sliding_window) or _config_reasons(
        model, config.parallel_config
    )
    if reasons:
        raise UnsupportedError(f"vLLM engine: unsupported settings: {'; '.join(dict.fromkeys(reasons))}")
    family = ARCHITECTURES[model.hf_config.architectures[0]].name
    sizes = {"tp": parallel.tensor_parallel_size, "dp": parallel.data_parallel_size}
    installed(rollout_check(family, ep=parallel.enable_expert_parallel, **sizes))


def part_reasons(asked: Asked, part: str, table: Policy) -> list[str]:
    """Return the reasons of `table` against one part of a configuration, given by its dotted name."""
    value = operator.attrgetter(part)(asked.config) if part else asked.config
    return list(refusals(value, _rows(table, type(value)), asked))


@functools.cache
def _rows(table: Policy, config: type) -> tuple[Row, ...]:
    return table.rows_for([f.name for f in dataclasses.fields(config)], functools.partial(default, config))


def _is_set(variable: str, default: str = "0") -> bool:
    return os.environ.get(variable, default) not in ("", "0")


def _model_reasons(hf, sliding_window: int | None) -> list[str]:
    architectures = tuple(hf.architectures or ())
    if len(architectures) != 1 or architectures[0] not in ARCHITECTURES:
        moe = " (MoE)" if _EXPERT_COUNTS & vars(hf).keys() else ""
        given = f"{', '.join(architectures) or 'none'}{moe}"
        return [f"architectures: must be one of {', '.join(ARCHITECTURES)}, got {given}"]
    rope = dict(getattr(hf, "rope_parameters", None) or {})
    reasons = []
    known = ROPE_TYPES.get(rope.pop("rope_type", "default"))
    if known is None:
        types, given = ", ".join(ROPE_TYPES), hf.rope_parameters["rope_type"]
        reasons.append(f"rope_parameters (RoPE scaling): rope_type must be one of {types}, got {given!r:.200}")
    elif others := rope.keys() - {"type", "rope_theta", "partial_rotary_factor", *known}:
        reasons.append(f"rope_parameters (RoPE scaling): unsupported fields: {', '.join(sorted(others))}")
    if rope.get("partial_rotary_factor", 1.0) != 1.0 and ARCHITECTURES[architectures[0]].rotary_factor is None:
        factor = rope["partial_rotary_factor"]
        reasons.append(f"partial_rotary_factor: must be 1 for {architectures[0]}, got {factor}")
    layer_types = set(getattr(hf, "layer_types", None) or ())
    if sliding_window is not None:
        reasons.append(f"sliding_window: must be null, got {sliding_window}")
    elif others := layer_types - {"full_attention"}:
        reasons.append(f"layer_types: must be full_attention for every layer, got {', '.join(map(str, others)):.200}")
    if not getattr(hf, "is_causal", True):
        reasons.append("is_causal: must be true, got false")
    if getattr(hf, "dual_chunk_attention_config", None) is not None:
        reasons.append("dual_chunk_attention_config: must be null, got an object")
    return reasons


def _config_reasons(model_config, parallel) -> list[str]:
    """Return the reasons against config.json, from which the training side is built."""
    try:
        read = architecture(model_config)
    except AlignkitError as e:
        return [f"config.json: {e}"]
    return _length_reasons(read, model_config) + (_expert_reasons(read, parallel) if read.experts else [])


def _length_reasons(read: Architecture, model_config) -> list[str]:
    """Return the reason against a length beyond the rotary table, whose rows a step's tokens read."""
    scaling, longest = read.rope_scaling, model_config.max_model_len
    rows, why = model_config.hf_config.max_position_embeddings, "max_position_embeddings"
    if isinstance(scaling, Yarn):
        rows, why = scaling.positions, "original_max_position_embeddings * factor of YaRN"
    if longest <= rows:
        return []
    return [f"max_model_len: must be at most {rows}, the model's {why}, got {longest}"]


def _expert_reasons(read: Architecture, parallel) -> list[str]:
    """Return the parallel sizes that do not divide the contract's tree over an expert's features, or over experts."""
    ranks, replicas = parallel.tensor_parallel_size, parallel.data_parallel_size
    by_rank = "tensor_parallel_size"
    by_all = by_rank + (" * data_parallel_size" if replicas > 1 else "")
    if parallel.enable_expert_parallel:
        cuts = [(by_all, ranks * replicas, f"{read.experts} experts", ExpertTree.of(read.experts).groups)]
    else:
        features = f"{read.intermediate} features of an expert"
        cuts = [(by_all, ranks * replicas, features, k_leaves(read.intermediate))]
    for width, layer in (
        (read.shared_intermediate, "a shared expert"),
        (read.dense_intermediate if read.dense_layers else 0, "a layer without experts"),
    ):
        if width:
            cuts.append((by_rank, ranks, f"{width} features of {layer}", k_leaves(width)))
    return [
        f"{asked}: must divide {parts}, because the contract splits the {what} into {parts} parts, got {size}"
        for asked, size, what, parts in cuts
        if parts % size
    ]


def request_rejection(params, logprobs_mode: str, vocab_size: int) -> str | None:
    """Return why a request with these `SamplingParams` is rejected, or None.

    Training recomputes logprobs from the tokens alone, so a setting that changes the returned logprobs is rejected. A
    field that `policy.REQUEST` does not know must have its default.
    """
    if params.prompt_logprobs is not None and params.skip_reading_prefix_cache is False:
        return (
            "skip_reading_prefix_cache: must be None or True with prompt_logprobs, because vLLM computes no logprobs "
            "of cached tokens, got False"
        )
    for field in ("logprobs", "prompt_logprobs"):
        count = getattr(params, field)
        if count is not None and (not isinstance(count, int) or count > vocab_size):
            return (
                f"{field}: must be an integer of at most {vocab_size}, the model's vocabulary size, or -1 for all ids, "
                f"got {count!r:.200}"
            )
    wanted = (params.logprobs, params.logprob_token_ids or None, params.prompt_logprobs)
    asked = Request(logprobs_mode, logprobs=any(value is not None for value in wanted))
    known, unknown = [], []
    for row in _request_rows(type(params)):
        if (refusal := row.refusal(getattr(params, row.field), asked)) is not None:
            (known if row.field in REQUEST.restricted else unknown).append(refusal)
    if unknown:
        return f"SamplingParams: {'; '.join(unknown)}"
    if known:
        return (
            f"logprobs: must not be requested together with {', '.join(known)}, because training recomputes logprobs "
            "from the tokens alone"
        )
    return None


@functools.cache
def _request_rows(params: type) -> tuple[Row, ...]:
    fields = {field.name: field for field in msgspec.structs.fields(params)}
    return REQUEST.rows_for(fields, lambda name: _struct_default(fields[name]))


def _struct_default(field: msgspec.structs.FieldInfo) -> Any:
    """Return the default of a msgspec field."""
    if field.default_factory is not msgspec.NODEFAULT:
        return field.default_factory()
    return REQUIRED if field.default is msgspec.NODEFAULT else field.default


def refuse_model(model: torch.nn.Module, aligned: tuple[type, ...]) -> dict[str, int]:
    """Return the number of modules of each class in `aligned` in the built model.

    Raises UnsupportedError with the other modules, except the containers in `STRUCTURE`.
    """
    counts: dict[str, int] = {}
    unsupported = []
    for path, module in model.named_modules():
        name = type(module).__name__
        if type(module) in aligned:
            counts[name] = counts.get(name, 0) + 1
            if not getattr(module, "reduce_results", True):
                raise UnsupportedError(
                    f"{path}.reduce_results: must be True, because the layer must return complete sums, got False"
                )
        elif name not in STRUCTURE or not type(module).__module__.startswith(("vllm.", "torch.")):
            unsupported.append(f"{path or 'the model'} ({name})")
    if unsupported:
        raise UnsupportedError(
            f"vLLM model: must have only modules of supported classes, got {', '.join(unsupported[:8])}"
            + (f" and {len(unsupported) - 8} more" if len(unsupported) > 8 else "")
        )
    return counts
