"""Fingerprint of a vLLM engine's weights: where a worker's parameters are in the HF tensors. No numerics."""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Iterator
from typing import Any

import torch

from alignkit.convert import Architecture, expert_index
from alignkit.engines.hook_points import relies_on
from alignkit.errors import UnsupportedError
from alignkit.identity.weights import Fingerprint, Shard, whole
from alignkit.models import FAMILIES
from alignkit.vllm import epochs
from alignkit.vllm.built import architecture
from alignkit.vllm.worker_class import is_aligned

_PACKED = {"kv groups": (".q_proj.", ".qkv_proj."), "gate and up": (".gate_proj.", ".gate_up_proj.")}
"""Sharding -> part of the first HF tensor's name, and what replaces it in the name of vLLM's parameter."""


def fingerprint(llm) -> Fingerprint | Awaitable[Fingerprint]:
    """Return the fingerprint of the weights of a running aligned engine.

    Args:
        llm: A `vllm.LLM`, an `LLMEngine` or an `AsyncLLM`. For an `AsyncLLM`, await the result.

    Raises:
        UnsupportedError: the engine is not aligned.
        InputError: workers hold different replicas of a weight, or not the whole model.
    """
    engine = getattr(llm, "llm_engine", llm)
    if not is_aligned(engine.vllm_config):
        raise UnsupportedError("llm: must be an aligned engine, got a stock one. Call alignkit.patch_vllm() before")
    shapes = architecture(engine.vllm_config.model_config).hf_shapes()
    state = epochs.of(engine.vllm_config)

    def known(epoch: int, parts: list) -> Fingerprint:
        found = whole(parts, shapes)
        if epoch == state.epoch:  # no change since the workers were asked
            state.weights[epoch] = found.digest
        return found

    if not inspect.iscoroutinefunction(engine.collective_rpc):
        return known(state.epoch, engine.collective_rpc("alignkit_weights"))

    async def ask() -> Fingerprint:
        return known(state.epoch, await engine.collective_rpc("alignkit_weights"))

    return ask()


@relies_on("model_executor/layers/linear.py:LinearBase.__init__", mentions="tp_rank tp_size")
@relies_on(
    "model_executor/layers/vocab_parallel_embedding.py:VocabParallelEmbedding.__init__", mentions="shard_indices"
)
@relies_on(
    "model_executor/layers/vocab_parallel_embedding.py:VocabParallelEmbeddingShardIndices",
    members="org_vocab_start_index org_vocab_end_index",
)
def shards(model: Any, arch: Architecture) -> Iterator[Shard]:
    """Yield a worker's parameters with their places in the HF tensors."""
    modules = dict(model.named_modules())
    for weight, shapes, full in arch.weights():
        names, sizes = tuple(shapes), tuple(shape[0] for shape in shapes.values())
        if (expert := expert_index(full)) is not None:
            yield from _expert(modules, arch, weight.sharding, names, sizes, expert)
            continue
        name = names[0].replace(*_PACKED.get(weight.sharding, ("", "")))
        path, _, attribute = name.rpartition(".")
        module: Any = modules[path]
        tensor = getattr(module, attribute)
        column = module.tp_rank * tensor.shape[1] if weight.sharding == "columns" else 0
        yield Shard(tensor, names, _rows(module, arch, weight.sharding, sizes, len(tensor)), sizes, column)


def _rows(module: Any, arch: Architecture, sharding: str, sizes: tuple[int, ...], held: int) -> torch.Tensor:
    """Return the numbers of a parameter's rows, as `Shard` counts them."""
    if sharding in ("whole", "columns"):
        return torch.arange(held)
    if sharding == "vocabulary":
        indices = module.shard_indices
        rows = torch.arange(indices.org_vocab_start_index, indices.org_vocab_end_index)
        return torch.cat([rows, torch.full((held - len(rows),), -1)])
    rank, size = module.tp_rank, module.tp_size
    if sharding == "gate and up":
        return _slices(sizes, [rank] * 2, [size] * 2)
    kv = min(size, arch.kv_heads)  # with more ranks than KV heads, several ranks have the same head
    of_kv = rank * kv // size
    return _slices(sizes, [rank, of_kv, of_kv], [size, kv, kv])


def _slices(sizes: tuple[int, ...], parts: list[int], counts: list[int]) -> torch.Tensor:
    """Return the numbers of the rows of part `parts[n]` of `counts[n]` equal parts of each HF tensor n."""
    found, first = [], 0
    for rows, part, count in zip(sizes, parts, counts, strict=True):
        each = rows // count
        found.append(torch.arange(first + part * each, first + (part + 1) * each))
        first += rows + 1
    return torch.cat(found)


@relies_on("model_executor/layers/fused_moe/config.py:FusedMoEConfig", members="tp_rank tp_size ep_rank")
def _expert(
    modules: dict[str, Any],
    arch: Architecture,
    sharding: str,
    names: tuple[str, ...],
    sizes: tuple[int, ...],
    index: int,
) -> Iterator[Shard]:
    """Yield an expert's weight, if this worker has the expert."""
    layer = ".".join(names[0].split(".")[:3])
    runner = getattr(modules[layer], FAMILIES[arch.family].mlp).experts
    experts, ranks = runner.routed_experts, runner.moe_config
    local = index - ranks.ep_rank * experts.local_num_experts
    if not 0 <= local < experts.local_num_experts:
        return
    if sharding == "columns":
        tensor = experts.w2_weight[local]
        yield Shard(tensor, names, torch.arange(len(tensor)), sizes, ranks.tp_rank * tensor.shape[1])
    else:
        rows = _slices(sizes, [ranks.tp_rank] * 2, [ranks.tp_size] * 2)
        yield Shard(experts.w13_weight[local], names, rows, sizes)
