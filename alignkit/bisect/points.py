"""Named points of a model in the order of computation, shared by all engines.

Names are keys of recordings and of bisect.json. A point that a ``*_side`` module does not record counts as missing.
`recording.load` rejects unknown names and other widths, so a change of these needs another `recording.FORMAT_VERSION`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from ..convert import Architecture

OPS = ("rms_norm", "linear", "rope", "attention", "silu_mul", "head")
"""Ops that `--swap` can replace."""
ROUTER_CHOICE = "router_choice"
"""Point of an MoE layer: fp32 [experts] per token, 1 for each selected expert and 0 for the others."""


@dataclass(frozen=True)
class Point:
    """A named activation of the model.

    width: values per token over all ranks. pieces: digests per token; a tensor-parallel rank holds whole pieces at any
    TP size, and 1 means that every rank holds the whole row. op: the op that computed the point, "" for a residual sum
    or an embedding lookup. sharded: the row is split over tensor-parallel ranks.
    """

    name: str
    width: int
    pieces: int
    op: str
    sharded: bool = False


def _layer(prefix: str, arch: Architecture, q: int, kv: int, mlp: int) -> list[Point]:
    """Return the points of one layer, their names starting with `prefix`."""

    def replicated(name: str, op: str) -> Point:
        return Point(prefix + name, arch.hidden, 1, op)

    def heads(name: str, width: int, op: str) -> Point:
        return Point(prefix + name, width, arch.kv_heads, op, sharded=True)

    def columns(name: str, op: str) -> Point:
        return Point(prefix + name, arch.intermediate, mlp, op, sharded=True)

    result = [
        replicated("input_norm", "rms_norm"),
        heads("q", q, "linear"),
        heads("k", kv, "linear"),
        heads("v", kv, "linear"),
    ]
    if arch.qk_norm:
        result += [heads("q_norm", q, "rms_norm"), heads("k_norm", kv, "rms_norm")]
    result += [
        heads("q_rope", q, "rope"),
        heads("k_rope", kv, "rope"),
        heads("attention", q, "attention"),
        replicated("attention_proj", "linear"),
        replicated("attention_residual", ""),
        replicated("post_norm", "rms_norm"),
    ]
    if arch.experts:
        result += [Point(prefix + ROUTER_CHOICE, arch.experts, 1, "moe_router"), replicated("experts", "moe_experts")]
    else:
        result += [
            columns("gate", "linear"),
            columns("up", "linear"),
            columns("activation", "silu_mul"),
            replicated("down", "linear"),
        ]
    return [*result, replicated("residual", "")]


def points(arch: Architecture) -> list[Point]:
    """Return all points of a model of this architecture in the order of computation."""
    q, kv = arch.heads * arch.head_dim, arch.kv_heads * arch.head_dim
    mlp = math.gcd(arch.kv_heads, arch.intermediate)
    result = [Point("embedding", arch.hidden, 1, "")]
    for i in range(arch.layers):
        result += _layer(f"layers.{i}.", arch, q, kv, mlp)
    return [
        *result,
        Point("final_norm", arch.hidden, 1, "rms_norm"),
        Point("logits", arch.vocab, 1, "head"),
        Point("logprob", 1, 1, "head"),
    ]
