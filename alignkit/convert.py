"""HF safetensors weights of a dense model to Megatron-core's GPTModel layout, and back.

Pure tensor bookkeeping: neither engine is imported and no number is changed, except by an explicit dtype. Which tensors
there are, and how they are cut, is data of the families in `alignkit.models`.

Megatron's layout, per tensor-parallel rank:

- ``linear_qkv`` rows go by KV group: the queries of group 0, its key, its value, then group 1, ...
  A rank owns whole groups.
- ``linear_fc1`` rows are ``[gate | up]`` of the rank's slice of the intermediate size.
- ``linear_proj`` and ``linear_fc2`` are cut along their columns.
- The vocabulary is padded with zero rows to a multiple of ``128 * tp``, then cut along its rows.
"""

from __future__ import annotations

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
    dtype: torch.dtype | None = None,
    fused_norms: bool = False,
) -> dict[str, torch.Tensor]:
    """One rank's GPTModel state dict.

    weights: HF names to whole tensors, for instance a `Checkpoint`.
    fused_norms: name the norms as the TransformerEngine layer spec does, in the linears after them; else as the local one.
    dtype: type of the result; None keeps each tensor's own.
    Raises UnsupportedError if `tp_size` does not divide the heads or if the checkpoint holds tensors of
    something else, InputError for one that is missing or not what it should be; before anything is made.
    """
    arch.check_tp(tp_size)
    if not 0 <= tp_rank < tp_size:
        raise InputError(f"tp_rank: {tp_rank} is not in [0, {tp_size})")
    check_weights(arch, weights)

    def take(tensor: torch.Tensor, dim: int = 0) -> torch.Tensor:
        return tensor.chunk(tp_size, dim)[tp_rank].contiguous().to(dtype or tensor.dtype)

    def cut(weight: Weight, tensors: list[torch.Tensor]) -> torch.Tensor:
        first = tensors[0]
        if weight.cut == "vocabulary":
            padding = first.new_zeros(arch.padded_vocab(tp_size) - arch.vocab, arch.hidden)
            return take(torch.cat([first, padding]))
        if weight.cut == "kv groups":
            return take(merge_qkv(arch, *tensors))
        if weight.cut == "gate and up":
            return torch.cat([take(tensor) for tensor in tensors])
        if weight.cut == "columns":
            return take(first, 1)
        return first.to(dtype or first.dtype)

    return {
        _fused(weight, name) if fused_norms else name: cut(weight, [weights[hf] for hf in shapes])
        for weight, shapes, name in arch.weights()
    }


def to_hf(
    arch: Architecture, names: Iterable[str], shards: Callable[[str], list[torch.Tensor]]
) -> Iterator[tuple[str, torch.Tensor]]:
    """Whole HF tensors, one at a time, from Megatron's shards: the inverse of `to_megatron`.

    names: the Megatron names to convert, of either layer spec, the same in the same order on every rank.
    shards: gives the tensors of all tensor-parallel ranks for a name; called once a name.
    Raises UnsupportedError for a name that `to_megatron` does not make.
    """
    known = {}
    for weight, shapes, name in arch.weights():
        known[name] = known[_fused(weight, name)] = weight, list(shapes)
    for name in names:
        if name not in known:
            raise UnsupportedError(f"model: {name!r} is not a weight of a dense {arch.family}")
        weight, hf = known[name]
        yield from zip(hf, _joined(arch, weight, shards(name)), strict=True)


def _fused(weight: Weight, name: str) -> str:
    """The whole `name` of a weight with the TransformerEngine layer spec."""
    return name.removesuffix(weight.megatron) + FUSED_NORMS.get(weight.megatron, weight.megatron)


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
    """Tensors some checkpoints carry beside the weights: rotary tables, and a copy of a tied head."""
    return name.endswith("rotary_emb.inv_freq") or (arch.tied and name == "lm_head.weight")
