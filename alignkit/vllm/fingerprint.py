"""Fingerprint of a vLLM engine's weights: where a worker's parameters are in the HF tensors. No numerics."""

from __future__ import annotations

import inspect
import itertools
import operator
from collections.abc import Awaitable, Iterator, Sequence
from typing import Any

from alignkit.convert import Architecture, expert_index
from alignkit.engines.hook_points import relies_on
from alignkit.errors import UnsupportedError
from alignkit.identity.weights import Fingerprint, Part, Run, Shard, Sums, whole
from alignkit.models import FAMILIES
from alignkit.models.family import Weight
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


class Weights:
    """The parameters of a worker's model. Their places in the HF tensors are found anew only if a shape changes."""

    def __init__(self, model: Any, arch: Architecture) -> None:
        self._model, self._arch = model, arch
        self._getters: list[operator.attrgetter] = []
        self._sums: Sums | None = None

    def parts(self) -> dict[str, Part]:
        """Return what the model holds of each HF tensor, read now."""
        tensors = [get(self._model) for get in self._getters]
        if self._sums is None or not self._sums.fit(tensors):
            found = dict(shards(self._model, self._arch))
            self._getters, self._sums = [operator.attrgetter(name) for name in found], Sums(found.values())
            tensors = [shard.tensor for shard in found.values()]
        return self._sums.parts(tensors)


@relies_on("model_executor/layers/linear.py:LinearBase.__init__", mentions="tp_rank tp_size")
@relies_on(
    "model_executor/layers/vocab_parallel_embedding.py:VocabParallelEmbedding.__init__", mentions="shard_indices"
)
@relies_on(
    "model_executor/layers/vocab_parallel_embedding.py:VocabParallelEmbeddingShardIndices",
    members="org_vocab_start_index org_vocab_end_index",
)
def shards(model: Any, arch: Architecture) -> Iterator[tuple[str, Shard]]:
    """Yield the names of a worker's parameters, and the parameters with their places in the HF tensors."""
    modules = dict(model.named_modules())
    for name, weights in itertools.groupby(arch.weights(), key=_parameter):
        found = list(weights)
        weight = found[0][0]
        if expert_index(found[0][2]) is not None:
            yield from _experts(modules, arch, weight.sharding, [shapes for _, shapes, _ in found])
            continue
        ((_, shapes, _),) = found
        path, _, attribute = name.rpartition(".")
        module: Any = modules[path]
        tensor = getattr(module, attribute)
        column = module.tp_rank * tensor.shape[1] if weight.sharding == "columns" else 0
        runs = _runs(module, arch, weight.sharding, [shape[0] for shape in shapes.values()], len(tensor))
        yield name, Shard(tensor, tuple(shapes), runs, column)


def _parameter(weight: tuple[Weight, dict[str, tuple[int, ...]], str]) -> str:
    """Return the name of vLLM's parameter, or for an expert's weight a name that all experts of its layer share."""
    kind, (first, *_), full = weight
    if (expert := expert_index(full)) is not None:
        return first.replace(f".experts.{expert}.", ".experts.")
    return first.replace(*_PACKED.get(kind.sharding, ("", "")))


def _runs(module: Any, arch: Architecture, sharding: str, sizes: Sequence[int], held: int) -> list[Run]:
    """Return where a parameter's rows are in HF tensors of `sizes` rows. held: rows of the parameter."""
    if sharding in ("whole", "columns"):
        return [Run(0, 0, held)]
    if sharding == "vocabulary":
        first, end = module.shard_indices.org_vocab_start_index, module.shard_indices.org_vocab_end_index
        return [Run(0, first, end - first)] if end > first else []
    rank, size = module.tp_rank, module.tp_size
    if sharding == "gate and up":
        return _slices(sizes, [rank] * 2, [size] * 2)
    kv = min(size, arch.kv_heads)  # with more ranks than KV heads, several ranks have the same head
    of_kv = rank * kv // size
    return _slices(sizes, [rank, of_kv, of_kv], [size, kv, kv])


def _slices(sizes: Sequence[int], parts: list[int], counts: list[int]) -> list[Run]:
    """Return the rows of part `parts[n]` of `counts[n]` equal parts of each HF tensor n."""
    each = [rows // count for rows, count in zip(sizes, counts, strict=True)]
    return [Run(n, part * rows, rows) for n, (part, rows) in enumerate(zip(parts, each, strict=True))]


@relies_on("model_executor/layers/fused_moe/config.py:FusedMoEConfig", members="tp_rank tp_size ep_rank")
def _experts(
    modules: dict[str, Any], arch: Architecture, sharding: str, shapes: list[dict[str, tuple[int, ...]]]
) -> Iterator[tuple[str, Shard]]:
    """Yield the weights of this worker's experts as one tensor. shapes: of each expert's HF tensors."""
    path = ".".join([*next(iter(shapes[0])).split(".")[:3], FAMILIES[arch.family].mlp, "experts"])
    runner = modules[path]
    ranks, count = runner.moe_config, runner.routed_experts.local_num_experts
    mine = shapes[ranks.ep_rank * count :][:count]
    names = [name for expert in mine for name in expert]
    if sharding == "columns":
        name, tensor = "w2_weight", runner.routed_experts.w2_weight
        runs, column = [Run(0, 0, tensor.shape[1])], ranks.tp_rank * tensor.shape[2]
    else:
        name, tensor, column = "w13_weight", runner.routed_experts.w13_weight, 0
        sizes = [shape[0] for shape in mine[0].values()]
        runs = _slices(sizes, [ranks.tp_rank] * 2, [ranks.tp_size] * 2)
    of_all = [Run(e * len(runs) + which, row, rows) for e in range(count) for which, row, rows in runs]
    yield f"{path}.routed_experts.{name}", Shard(tensor, names, of_all, column)
