"""The named points of a model, in the order of computation; the same names for every engine."""

from __future__ import annotations

import math
from dataclasses import dataclass

from ...convert import Architecture

OPS = ("rms_norm", "linear", "rope", "attention", "silu_mul", "head")
"""What `--swap` exchanges."""
ROUTER_CHOICE = "router_choice"
"""A point of a mixture of experts: fp32, for each expert 1 if a token goes to it, or 0."""


@dataclass(frozen=True)
class Point:
    """width: of a token's row, over all ranks. pieces: in how many a row is digested, so that each tensor-parallel rank
    has whole ones, whatever their number; 1: every rank holds the whole row. op: which made it, "" where only a sum or
    a lookup is."""

    name: str
    width: int
    pieces: int
    op: str
    sharded: bool = False


def _layer(before: str, arch: Architecture, q: int, kv: int, mlp: int) -> list[Point]:
    """The points of a layer whose names begin with `before`."""

    def whole(name: str, op: str) -> Point:
        return Point(before + name, arch.hidden, 1, op)

    def heads(name: str, width: int, op: str) -> Point:
        return Point(before + name, width, arch.kv_heads, op, sharded=True)

    def columns(name: str, op: str) -> Point:
        return Point(before + name, arch.intermediate, mlp, op, sharded=True)

    found = [
        whole("input_norm", "rms_norm"),
        heads("q", q, "linear"),
        heads("k", kv, "linear"),
        heads("v", kv, "linear"),
    ]
    if arch.qk_norm:
        found += [heads("q_norm", q, "rms_norm"), heads("k_norm", kv, "rms_norm")]
    found += [
        heads("q_rope", q, "rope"),
        heads("k_rope", kv, "rope"),
        heads("attention", q, "attention"),
        whole("attention_proj", "linear"),
        whole("attention_residual", ""),
        whole("post_norm", "rms_norm"),
    ]
    if arch.experts:
        found += [Point(before + ROUTER_CHOICE, arch.experts, 1, "moe_router"), whole("experts", "moe_experts")]
    else:
        found += [
            columns("gate", "linear"),
            columns("up", "linear"),
            columns("activation", "silu_mul"),
            whole("down", "linear"),
        ]
    return [*found, whole("residual", "")]


def points(arch: Architecture) -> list[Point]:
    """All points of a model of this architecture."""
    q, kv = arch.heads * arch.head_dim, arch.kv_heads * arch.head_dim
    mlp = math.gcd(arch.kv_heads, arch.intermediate)
    found = [Point("embedding", arch.hidden, 1, "")]
    for i in range(arch.layers):
        found += _layer(f"layers.{i}.", arch, q, kv, mlp)
    return [
        *found,
        Point("final_norm", arch.hidden, 1, "rms_norm"),
        Point("logits", arch.vocab, 1, "head"),
        Point("logprob", 1, 1, "head"),
    ]
