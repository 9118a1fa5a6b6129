"""Fingerprint of a Megatron model's weights: where a rank's parameters are in the HF tensors. No numerics."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from typing import Any

import torch.distributed as dist
from megatron.core.models.gpt.gpt_model import GPTModel

from alignkit.convert import Architecture, rank_weights, read_architecture, shard_rows
from alignkit.dist import TP
from alignkit.errors import UnsupportedError
from alignkit.identity.weights import Fingerprint, Shard, parts, whole

from . import build, modules


def fingerprint(
    models: GPTModel | Sequence[GPTModel], model_dir: str | os.PathLike, group: dist.ProcessGroup | None = None
) -> Fingerprint:
    """Return the fingerprint of a model's weights. A collective of all ranks of `group`.

    Args:
        models: This rank's GPTModel or HybridModel, or its chunks of a pipeline; unwrapped.
        model_dir: HF directory; only its config.json is read.
        group: All ranks of the model, replicas included, which must be equal; None: all processes.

    Raises:
        InputError: replicas differ, or the ranks do not hold the whole model.
        UnsupportedError: a parameter is none of the architecture's weights.
    """
    arch = read_architecture(model_dir)
    chunks = [models] if isinstance(models, GPTModel) or not isinstance(models, Sequence) else models
    mine = parts(shard for chunk in chunks for shard in shards(chunk, arch))
    ranks: list[Any] = [mine]
    if dist.is_initialized():
        ranks = [None] * dist.get_world_size(group)
        dist.all_gather_object(ranks, mine, group=group)
    return whole(ranks, arch.hf_shapes())


def shards(model: GPTModel, arch: Architecture) -> Iterator[Shard]:
    """Yield this rank's parameters with their places in the HF tensors."""
    tp, experts = TP(model.pg_collection.tp), modules.expert_ranks(model)
    known = rank_weights(arch, experts[-1].size if experts else 1)
    for name, tensor in build._tensors(model, arch):
        full = build.whole_name(model, name)
        if full not in known:
            raise UnsupportedError(f"{name}: must be a weight of {arch.family}, which config.json describes")
        of_expert = ".experts." in full
        weight, shapes = known[full][experts[-1].rank if of_expert else 0]
        ranks = experts[0] if of_expert else tp
        sizes = tuple(shape[0] for shape in shapes.values())
        column = ranks.rank * tensor.shape[1] if weight.sharding == "columns" else 0
        rows = shard_rows(arch, weight, sizes, ranks.rank, ranks.size)
        yield Shard(tensor, tuple(shapes), rows, sizes, column)
