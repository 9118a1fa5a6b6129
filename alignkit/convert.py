"""Conversion of HF safetensors weights to Megatron-core's GPTModel layout, and back.

The conversion only slices and concatenates tensors. Values change only through an explicit dtype, and neither engine is
imported. The families in `alignkit.models` define the tensors and their sharding. Public: the names in `__all__`.

Megatron's layout, per tensor-parallel rank:

- ``linear_qkv`` rows are ordered by KV group: the queries of group 0, its key, its value, then group 1, ...
  A rank owns whole groups.
- ``linear_fc1`` rows are ``[gate | up]`` of the rank's slice of the intermediate size.
- ``linear_proj`` and ``linear_fc2`` are sharded along their columns.
- The vocabulary is padded with zero rows to a multiple of ``128 * tp``, then sharded along its rows.
- An expert-parallel rank owns consecutive experts, numbered from 0 on each rank. Expert-tensor-parallel ranks shard
  each expert like tensor-parallel ranks shard a dense MLP.
"""

from __future__ import annotations

import bisect
import functools
import itertools
import re
from collections.abc import Callable, Iterable, Iterator, Mapping

import torch

from alignkit.errors import InputError, UnsupportedError
from alignkit.models.checkpoint import Checkpoint
from alignkit.models.config import VOCAB_MULTIPLE, Architecture, read_architecture
from alignkit.models.family import FUSED_NORMS, Weight

__all__ = [
    "VOCAB_MULTIPLE",
    "Architecture",
    "Checkpoint",
    "check_ep",
    "check_weights",
    "expert_index",
    "merge_qkv",
    "rank_weights",
    "read_architecture",
    "shard_runs",
    "split_qkv",
    "to_hf",
    "to_megatron",
]

_FLOATS = frozenset(("F64", "F32", "F16", "BF16"))


def check_weights(arch: Architecture, weights: Mapping[str, torch.Tensor]) -> None:
    """Check that `weights` has exactly the tensors of `arch`, with their shapes and floating-point types.

    Reads only the headers of a `Checkpoint`, and both copies of a tied head.

    Args:
        arch: The model's architecture.
        weights: HF names -> whole tensors.

    Raises:
        InputError: If a tensor is missing or has another shape, or if two copies of a tied head differ.
        UnsupportedError: If a tensor is not one of the family's, or is not floating-point.
    """
    names = set()
    for name, shape in arch.hf_tensors():
        if name not in weights:
            raise InputError(
                f"model: the checkpoint has no tensor {name!r}, which config.json requires ({arch.family})"
            )
        _check_tensor(weights, name, shape)
        names.add(name)
    unknown = sorted(name for name in weights if name not in names and not _is_ignored(arch, name))
    if unknown:
        raise UnsupportedError(
            f"model: the checkpoint must have only the tensors of {arch.family} with this config.json, got "
            f"{len(unknown)} others, first {unknown[0]!r}"
        )
    if arch.tied and "lm_head.weight" in weights:
        head, embedding = weights["lm_head.weight"], weights["model.embed_tokens.weight"]
        if (head.dtype, head.shape) != (embedding.dtype, embedding.shape) or not torch.equal(
            head.contiguous().view(torch.uint8), embedding.contiguous().view(torch.uint8)
        ):
            raise InputError(
                "tie_word_embeddings: must be false in config.json, because the checkpoint's lm_head.weight differs "
                "from its model.embed_tokens.weight, got true"
            )


def _check_tensor(weights: Mapping[str, torch.Tensor], name: str, shape: tuple[int, ...]) -> None:
    if isinstance(weights, Checkpoint):
        dtype, found = weights.header(name)
        floating = dtype in _FLOATS
    else:
        dtype, found = weights[name].dtype, tuple(weights[name].shape)
        floating = dtype in (torch.float64, torch.float32, torch.float16, torch.bfloat16)
    if found != shape:
        raise InputError(f"model: {name}: must have shape {shape}, computed from config.json, got {found}")
    if not floating:
        raise UnsupportedError(f"model: {name}: must be fp64, fp32, fp16 or bf16, got {dtype}")


def to_megatron(
    arch: Architecture,
    weights: Mapping[str, torch.Tensor],
    *,
    tp_rank: int = 0,
    tp_size: int = 1,
    ep_rank: int = 0,
    ep_size: int = 1,
    expert_tp_rank: int | None = None,
    expert_tp_size: int | None = None,
    dtype: torch.dtype | None = None,
    fused_norms: bool = False,
    grouped_experts: bool = False,
) -> dict[str, torch.Tensor]:
    """Return one rank's GPTModel state dict.

    All checks run before any tensor is created.

    Args:
        arch: The model's architecture.
        weights: HF names -> whole tensors, for instance a `Checkpoint`.
        tp_rank: Tensor-parallel rank.
        tp_size: Tensor-parallel size.
        ep_rank: Expert-parallel rank.
        ep_size: Expert-parallel size.
        expert_tp_rank: Expert-tensor-parallel rank; None: `tp_rank`.
        expert_tp_size: Expert-tensor-parallel size; None: `tp_size`.
        dtype: Type of the result; None keeps each tensor's own.
        fused_norms: Name the norms like TransformerEngine's layer spec, inside of the linears that follow them. False:
            like the local layer spec.
        grouped_experts: Name experts' weights like TEGroupedMLP, one module for all. False: like SequentialMLP.

    Returns:
        Megatron's parameter names -> this rank's shards.

    Raises:
        UnsupportedError: If `tp_size` does not divide the heads or widths, or `ep_size` the experts, or if a tensor is
            not one of the family's.
        InputError: If a rank is out of range, or a tensor is missing or has another shape.
    """
    arch.check_tp(tp_size)
    expert_tp_rank = tp_rank if expert_tp_rank is None else expert_tp_rank
    expert_tp_size = tp_size if expert_tp_size is None else expert_tp_size
    arch.check_tp(expert_tp_size)
    for name, rank, size in (
        ("tp_rank", tp_rank, tp_size),
        ("ep_rank", ep_rank, ep_size),
        ("expert_tp_rank", expert_tp_rank, expert_tp_size),
    ):
        if not 0 <= rank < size:
            raise InputError(f"{name}: must be in [0, {size}), got {rank}")
    check_ep(arch, ep_size)
    check_weights(arch, weights)

    def shard(weight: Weight, tensors: list[torch.Tensor], rank: int, size: int) -> torch.Tensor:
        found = _shard(arch, weight.sharding, tensors, rank, size)
        return found.float() if weight.fp32 else found.to(dtype or found.dtype)

    state_dict = {}
    for weight, shapes, name in arch.weights():
        rank, size = tp_rank, tp_size
        if (expert := expert_index(name)) is not None:
            owner, number = divmod(expert, arch.experts // ep_size)
            if owner != ep_rank:
                continue
            name, rank, size = _rank_name(name, number, grouped_experts), expert_tp_rank, expert_tp_size
        state_dict[_fused_name(arch, weight, name) if fused_norms else name] = shard(
            weight, [weights[hf] for hf in shapes], rank, size
        )
    return state_dict


def _shard(arch: Architecture, sharding: str, tensors: list[torch.Tensor], rank: int, size: int) -> torch.Tensor:
    """Return a rank's shard of a weight from its whole HF tensors."""

    def chunk(tensor: torch.Tensor, dim: int = 0) -> torch.Tensor:
        return tensor.chunk(size, dim)[rank].contiguous()

    first = tensors[0]
    if sharding == "vocabulary":
        return chunk(torch.cat([first, first.new_zeros(arch.padded_vocab(size) - arch.vocab, *first.shape[1:])]))
    if sharding == "kv groups":
        return chunk(merge_qkv(arch, *tensors))
    if sharding == "gate and up":
        return torch.cat([chunk(tensor) for tensor in tensors])
    return chunk(first, 1) if sharding == "columns" else first


@functools.lru_cache(1024)
def shard_runs(
    arch: Architecture, sharding: str, sizes: tuple[int, ...], rank: int, size: int
) -> tuple[tuple[int, int, int], ...]:
    """Return where the rows of a rank's shard are in the HF tensors, as `identity.weights.Run` says it.

    Args:
        arch: The model's architecture.
        sharding: Of the weight. By columns, each rank has all rows.
        sizes: Rows of its HF tensors.
        rank: Tensor-parallel rank.
        size: Tensor-parallel size.
    """
    # 0 marks padding. A number between two tensors belongs to neither.
    first = list(itertools.accumulate((rows + 1 for rows in sizes), initial=1))
    numbers = [torch.arange(start, start + rows, device="cpu") for start, rows in zip(first, sizes, strict=False)]
    held = numbers[0] if sharding == "columns" else _shard(arch, sharding, numbers, rank, size)
    rows = held[held > 0]
    assert not held[len(rows) :].any(), "padding rows must be the last ones"
    starts = (rows.diff(prepend=rows[:1] - 2) != 1).nonzero().flatten()
    counts = starts.diff(append=torch.tensor([len(rows)], device="cpu"))
    runs = []
    for number, count in zip(rows[starts].tolist(), counts.tolist(), strict=True):
        which = bisect.bisect_right(first, number) - 1
        runs.append((which, number - first[which], count))
    return tuple(runs)


def to_hf(
    arch: Architecture, names: Iterable[str], shards: Callable[[str], list[torch.Tensor]], *, ep_size: int = 1
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield whole HF tensors, one at a time, from Megatron's shards: the inverse of `to_megatron`.

    Args:
        arch: The model's architecture.
        names: Megatron names to convert, of either layer spec, in the same order on every rank.
        shards: Maps a name to the tensors of all tensor-parallel ranks; called once for each name. For an expert's
            weight: the tensors of all expert-tensor-parallel ranks of expert-parallel rank 0, then of rank 1, ...
        ep_size: Expert-parallel size.

    Yields:
        HF name and whole tensor.

    Raises:
        UnsupportedError: If a name is not one that `to_megatron` returns.
    """
    known = rank_weights(arch, ep_size)
    for name in names:
        if name not in known:
            raise UnsupportedError(f"names: must be Megatron's names of {arch.family} weights, got {name!r}")
        parts = shards(name)
        each = len(parts) // len(known[name])
        for i, (weight, hf) in enumerate(known[name]):
            yield from zip(hf, _merge_shards(arch, weight, parts[i * each : (i + 1) * each]), strict=True)


def rank_weights(arch: Architecture, ep_size: int = 1) -> dict[str, list[tuple[Weight, dict[str, tuple[int, ...]]]]]:
    """Return Megatron's names of both layer specs -> weights with the shapes of their HF tensors.

    An expert's weight has an entry for each expert-parallel rank, in rank order; any other weight has one.
    """
    check_ep(arch, ep_size)
    known: dict[str, list[tuple[Weight, dict[str, tuple[int, ...]]]]] = {}
    for weight, shapes, name in arch.weights():
        if (expert := expert_index(name)) is None:
            known[name] = known[_fused_name(arch, weight, name)] = [(weight, shapes)]
            continue
        for grouped in (False, True):
            own = _rank_name(name, expert % (arch.experts // ep_size), grouped)
            known.setdefault(own, []).append((weight, shapes))
    return known


def check_ep(arch: Architecture, ep_size: int) -> None:
    """Raise UnsupportedError unless `ep_size` expert-parallel ranks divide the number of experts."""
    if ep_size < 1 or (ep_size > 1 and (not arch.experts or arch.experts % ep_size)):
        requirement = f"must divide the {arch.experts} experts" if arch.experts else "must be 1 for a dense model"
        raise UnsupportedError(f"ep: {requirement}, got {ep_size}")


_EXPERT_WEIGHT = re.compile(r"\.local_experts\.(\d+)\.(\w+)\.weight$")


def expert_index(name: str) -> int | None:
    """Return the index of the expert that a whole model's weight belongs to, or None."""
    found = _EXPERT_WEIGHT.search(name)
    return None if found is None else int(found[1])


def _rank_name(name: str, number: int, grouped: bool) -> str:
    """Return the name of an expert's weight on the rank that owns the expert as its local expert `number`."""
    return _EXPERT_WEIGHT.sub(rf".\g<2>.weight{number}" if grouped else rf".local_experts.{number}.\g<2>.weight", name)


def _fused_name(arch: Architecture, weight: Weight, name: str) -> str:
    """Return a weight's full name in TransformerEngine's layer spec; a norm before experts remains a module."""
    if weight.megatron not in FUSED_NORMS:
        return name
    if weight.megatron == "pre_mlp_layernorm.weight" and arch.has_experts(int(name.split(".")[2])):
        return name
    return name.removesuffix(weight.megatron) + FUSED_NORMS[weight.megatron]


def _merge_shards(arch: Architecture, weight: Weight, parts: list[torch.Tensor]) -> tuple[torch.Tensor, ...]:
    """Return the HF tensors of a weight from its shards, in rank order."""
    if weight.sharding == "vocabulary":
        return (torch.cat(parts)[: arch.vocab],)
    if weight.sharding == "kv groups":
        return split_qkv(arch, torch.cat(parts))
    if weight.sharding == "gate and up":
        gates, ups = zip(*(part.chunk(2) for part in parts), strict=True)
        return torch.cat(gates), torch.cat(ups)
    if weight.sharding == "columns":
        return (torch.cat(parts, 1),)
    return (parts[0],)


def merge_qkv(arch: Architecture, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Interleave q, k and v by KV group, as in Megatron's ``linear_qkv``.

    Args:
        arch: The model's architecture.
        q: Weight or bias ``[heads * D, ...]``.
        k: Weight or bias ``[kv_heads * D, ...]``.
        v: Like k.

    Returns:
        ``[(heads + 2 * kv_heads) * D, ...]``.
    """
    groups = [x.unflatten(0, (arch.kv_heads, -1)) for x in (q, k, v)]
    return torch.cat(groups, 1).flatten(0, 1)


def split_qkv(arch: Architecture, qkv: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return q, k and v: the inverse of `merge_qkv`."""
    width = arch.head_dim * arch.heads // arch.kv_heads
    parts = qkv.unflatten(0, (arch.kv_heads, -1)).split([width, arch.head_dim, arch.head_dim], 1)
    q, k, v = (x.flatten(0, 1).contiguous() for x in parts)
    return q, k, v


def _is_ignored(arch: Architecture, name: str) -> bool:
    """Return whether a tensor is a redundant extra: a rotary table, a tied head's copy, or part of an MTP layer."""
    mtp_prefixes = tuple(f"model.layers.{arch.layers + i}." for i in range(arch.mtp_layers))
    return (
        name.startswith(mtp_prefixes)
        or name.endswith("rotary_emb.inv_freq")
        or (arch.tied and name == "lm_head.weight")
    )
