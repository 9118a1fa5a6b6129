"""HF safetensors weights to Megatron-core's GPTModel layout, and back.

Pure tensor bookkeeping: neither engine is imported and no number is changed, except by an explicit dtype. Which tensors
there are, and how they are cut, is data of the families in `alignkit.models`.

Megatron's layout, per tensor-parallel rank:

- ``linear_qkv`` rows go by KV group: the queries of group 0, its key, its value, then group 1, ...
  A rank owns whole groups.
- ``linear_fc1`` rows are ``[gate | up]`` of the rank's slice of the intermediate size.
- ``linear_proj`` and ``linear_fc2`` are cut along their columns.
- The vocabulary is padded with zero rows to a multiple of ``128 * tp``, then cut along its rows.
- An expert-parallel rank has neighbouring experts, numbered from 0 on each; its expert-tensor-parallel ranks cut them as
  tensor-parallel ranks do the MLP of a dense model.
"""

from __future__ import annotations

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
    "merge_qkv",
    "read_architecture",
    "split_qkv",
    "to_hf",
    "to_megatron",
]

_FLOATS = frozenset(("F64", "F32", "F16", "BF16"))


def check_weights(arch: Architecture, weights: Mapping[str, torch.Tensor]) -> None:
    """That `weights`, HF names to whole tensors, are those of `arch`: all of them, of their shapes, and no others.

    Of a `Checkpoint` only headers are read, and the two copies of a tied head.
    Raises UnsupportedError for a tensor of something else, InputError for one that is missing or not what it should be.
    """
    names = set()
    for name, shape in ((n, s) for _, shapes, _ in arch.weights() for n, s in shapes.items()):
        if name not in weights:
            raise InputError(f"model: the checkpoint has no tensor {name!r}")
        _check_tensor(weights, name, shape)
        names.add(name)
    foreign = sorted(name for name in weights if name not in names and not _ignored(arch, name))
    if foreign:
        raise UnsupportedError(f"model: {len(foreign)} tensors are not {arch.family}'s, first {foreign[0]!r}")
    if arch.tied and "lm_head.weight" in weights:
        head, embedding = weights["lm_head.weight"], weights["model.embed_tokens.weight"]
        if (head.dtype, head.shape) != (embedding.dtype, embedding.shape) or not torch.equal(
            head.contiguous().view(torch.uint8), embedding.contiguous().view(torch.uint8)
        ):
            raise InputError(
                "tie_word_embeddings: config.json says that the head is the embedding, but the checkpoint "
                "carries another lm_head.weight; with false it is a head of its own"
            )


def _check_tensor(weights: Mapping[str, torch.Tensor], name: str, shape: tuple[int, ...]) -> None:
    if isinstance(weights, Checkpoint):
        dtype, found = weights.header(name)
        floating = dtype in _FLOATS
    else:
        dtype, found = weights[name].dtype, tuple(weights[name].shape)
        floating = dtype in (torch.float64, torch.float32, torch.float16, torch.bfloat16)
    if found != shape:
        raise InputError(f"model: {name} has shape {found}, not {shape}")
    if not floating:
        raise UnsupportedError(f"model: {name} is of type {dtype}")


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
    """One rank's GPTModel state dict.

    weights: HF names to whole tensors, for instance a `Checkpoint`.
    ep_rank, ep_size: among the expert-parallel ranks. expert_tp_rank, expert_tp_size: among those that share each expert;
        None: as `tp_rank` and `tp_size`.
    fused_norms: name the norms as the TransformerEngine layer spec does, in the linears after them; else as the local one.
    grouped_experts: name experts' weights as TEGroupedMLP does, in one module for all; else as SequentialMLP.
    dtype: type of the result; None keeps each tensor's own.
    Raises UnsupportedError if `tp_size` does not divide the heads, or `ep_size` the experts, or if the checkpoint holds tensors of
    something else, InputError for one that is missing or not what it should be; before anything is made.
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
            raise InputError(f"{name}: {rank} is not in [0, {size})")
    check_ep(arch, ep_size)
    check_weights(arch, weights)

    def cut(weight: Weight, tensors: list[torch.Tensor], rank: int, size: int) -> torch.Tensor:
        def take(tensor: torch.Tensor, dim: int = 0) -> torch.Tensor:
            return tensor.chunk(size, dim)[rank].contiguous().to(dtype or tensor.dtype)

        first = tensors[0]
        if weight.cut == "vocabulary":
            padding = first.new_zeros(arch.padded_vocab(size) - arch.vocab, arch.hidden)
            return take(torch.cat([first, padding]))
        if weight.cut == "kv groups":
            return take(merge_qkv(arch, *tensors))
        if weight.cut == "gate and up":
            return torch.cat([take(tensor) for tensor in tensors])
        if weight.cut == "columns":
            return take(first, 1)
        return first.float() if weight.fp32 else first.to(dtype or first.dtype)

    made = {}
    for weight, shapes, name in arch.weights():
        rank, size = tp_rank, tp_size
        if (expert := _expert(name)) is not None:
            holder, number = divmod(expert, arch.experts // ep_size)
            if holder != ep_rank:
                continue
            name, rank, size = _of_rank(name, number, grouped_experts), expert_tp_rank, expert_tp_size
        made[_fused(arch, weight, name) if fused_norms else name] = cut(
            weight, [weights[hf] for hf in shapes], rank, size
        )
    return made


def to_hf(
    arch: Architecture, names: Iterable[str], shards: Callable[[str], list[torch.Tensor]], *, ep_size: int = 1
) -> Iterator[tuple[str, torch.Tensor]]:
    """Whole HF tensors, one at a time, from Megatron's shards: the inverse of `to_megatron`.

    names: the Megatron names to convert, of either layer spec, the same in the same order on every rank.
    shards: gives the tensors of all tensor-parallel ranks for a name; called once a name. For an expert's, those of all
        expert-tensor-parallel ranks of the first of `ep_size` expert-parallel ranks, then of the second, ...
    Raises UnsupportedError for a name that `to_megatron` does not make.
    """
    check_ep(arch, ep_size)
    known: dict[str, list[tuple[Weight, list[str]]]] = {}
    for weight, shapes, name in arch.weights():
        whole = weight, list(shapes)
        if (expert := _expert(name)) is None:
            known[name] = known[_fused(arch, weight, name)] = [whole]
            continue
        for grouped in (False, True):
            known.setdefault(_of_rank(name, expert % (arch.experts // ep_size), grouped), []).append(whole)
    for name in names:
        if name not in known:
            raise UnsupportedError(f"model: {name!r} is not a weight of {arch.family}")
        parts = shards(name)
        each = len(parts) // len(known[name])
        for i, (weight, hf) in enumerate(known[name]):
            yield from zip(hf, _joined(arch, weight, parts[i * each : (i + 1) * each]), strict=True)


def check_ep(arch: Architecture, ep_size: int) -> None:
    """UnsupportedError unless each of `ep_size` expert-parallel ranks gets as many experts."""
    if ep_size < 1 or (ep_size > 1 and (not arch.experts or arch.experts % ep_size)):
        raise UnsupportedError(f"ep: {ep_size} expert-parallel ranks do not divide {arch.experts} experts")


_OF_EXPERT = re.compile(r"\.local_experts\.(\d+)\.(\w+)\.weight$")


def _expert(name: str) -> int | None:
    """The number of the expert that a weight of the whole model is of, if it is of one."""
    found = _OF_EXPERT.search(name)
    return None if found is None else int(found[1])


def _of_rank(name: str, number: int, grouped: bool) -> str:
    """The name of an expert's weight on the rank that counts it as `number`."""
    return _OF_EXPERT.sub(rf".\g<2>.weight{number}" if grouped else rf".local_experts.{number}.\g<2>.weight", name)


def _fused(arch: Architecture, weight: Weight, name: str) -> str:
    """The whole `name` of a weight with the TransformerEngine layer spec. The norm before experts is by itself there too."""
    if weight.megatron not in FUSED_NORMS:
        return name
    if weight.megatron == "pre_mlp_layernorm.weight" and arch.has_experts(int(name.split(".")[2])):
        return name
    return name.removesuffix(weight.megatron) + FUSED_NORMS[weight.megatron]


def _joined(arch: Architecture, weight: Weight, parts: list[torch.Tensor]) -> tuple[torch.Tensor, ...]:
    """The HF tensors of a weight, from its `parts` by rank."""
    if weight.cut == "vocabulary":
        return (torch.cat(parts)[: arch.vocab],)
    if weight.cut == "kv groups":
        return split_qkv(arch, torch.cat(parts))
    if weight.cut == "gate and up":
        gates, ups = zip(*(part.chunk(2) for part in parts), strict=True)
        return torch.cat(gates), torch.cat(ups)
    if weight.cut == "columns":
        return (torch.cat(parts, 1),)
    return (parts[0],)


def merge_qkv(arch: Architecture, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """q ``[heads * D, ...]``, k and v ``[kv_heads * D, ...]`` (weights or biases) to rows by KV group."""
    groups = [x.unflatten(0, (arch.kv_heads, -1)) for x in (q, k, v)]
    return torch.cat(groups, 1).flatten(0, 1)


def split_qkv(arch: Architecture, qkv: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The inverse of `merge_qkv`."""
    width = arch.head_dim * arch.heads // arch.kv_heads
    parts = qkv.unflatten(0, (arch.kv_heads, -1)).split([width, arch.head_dim, arch.head_dim], 1)
    q, k, v = (x.flatten(0, 1).contiguous() for x in parts)
    return q, k, v


def _ignored(arch: Architecture, name: str) -> bool:
    """Tensors some checkpoints carry beside the weights: rotary tables, a copy of a tied head, and layers for multi-token
    prediction."""
    further = tuple(f"model.layers.{arch.layers + i}." for i in range(arch.mtp_layers))
    if name.startswith(further) and further:
        return True
    return name.endswith("rotary_emb.inv_freq") or (arch.tied and name == "lm_head.weight")
