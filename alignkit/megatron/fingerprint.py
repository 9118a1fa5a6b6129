"""Fingerprint of a Megatron model's weights: where a rank's parameters are in the HF tensors. No numerics."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.models.gpt.gpt_model import GPTModel

from alignkit.convert import Architecture, rank_weights, read_architecture, shard_runs
from alignkit.dist import TP
from alignkit.errors import UnsupportedError
from alignkit.identity import sync
from alignkit.identity.weights import Fingerprint, Run, Shard, parts, whole
from alignkit.models.config import find_architecture

from . import build, modules
from .forward import unwrapped


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
    chunks = [models] if isinstance(models, GPTModel) or not isinstance(models, Sequence) else models
    return _of_chunks(chunks, read_architecture(model_dir), group)


def append_fingerprint(
    weights: Iterable[tuple[str, torch.Tensor]], models: Iterable[torch.nn.Module], config: str | os.PathLike
) -> Iterator[tuple[str, torch.Tensor]]:
    """Return the (HF name, tensor) pairs of a weight sync, followed by the model's fingerprint now.

    A collective of all processes, before it returns. `identity.sync` has the receiver's side.

    Args:
        weights: The pairs that a framework sends.
        models: This rank's model or chunks of a pipeline, as wrapped.
        config: Folder or Hugging Face Hub repository with the model's config.json.

    Raises:
        InputError, UnsupportedError: as `fingerprint`.
    """
    chunks: list[Any] = [unwrapped(model) for model in models]
    device = next(chunks[0].parameters()).device
    return sync.append(weights, _of_chunks(chunks, find_architecture(config), None), device)


def _of_chunks(chunks: Iterable[GPTModel], arch: Architecture, group: dist.ProcessGroup | None) -> Fingerprint:
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
        column = ranks.rank * tensor.shape[1] if weight.sharding == "columns" else 0
        sizes = tuple(shape[0] for shape in shapes.values())
        runs = shard_runs(arch, weight.sharding, sizes, ranks.rank, ranks.size)
        yield Shard(tensor, tuple(shapes), list(itertools.starmap(Run, runs)), column)
