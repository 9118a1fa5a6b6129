"""Rotary position embedding (neox halves). docs/contract.md, "RoPE"."""
from __future__ import annotations

import functools

import torch

from ... import backends
from .._common import check_tensor, looks, require, unit


class _Rope(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, positions, table):
        ctx.save_for_backward(positions, table)
        return _apply(x, positions, table, False)

    @staticmethod
    def backward(ctx, dy):
        return _apply(dy, *ctx.saved_tensors, True), None, None


def _apply(x, positions, table, inverse):
    return backends.select("rope", x.device).apply(unit(x), positions, table, inverse)


@functools.lru_cache(maxsize=8)
def rope_table(head_dim: int, max_position: int, base: float, device: torch.device | str = "cpu") -> torch.Tensor:
    """Cosines and sines of every position: fp32 [max_position, head_dim] on `device`, the cosines in the first half.

    Angles are ``position * base ** (-2 j / head_dim)`` in double precision, rounded once at the end; a position's row
    does not depend on `max_position`. The table is cached: do not write to it.

    Raises:
        InputError: head_dim is not a positive even number, max_position or base not positive.
    """
    require(head_dim > 0 and head_dim % 2 == 0, f"head_dim: {head_dim} is not a positive even number")
    require(max_position > 0, f"max_position: {max_position} is not positive")
    require(base > 0, f"base: {base} is not positive")
    return backends.select("rope", "cpu").table(head_dim, max_position, float(base)).to(device)


def rope(x: torch.Tensor, positions: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
    """Rotate x by its positions: with halves a, b of a head, ``(a cos - b sin, b cos + a sin)``; one rounding.

    Args:
        x: [T, H, D], fp32 or bf16.
        positions: int64 [T], in [0, max_position).
        table: fp32 [max_position, D] of `rope_table`.

    Returns:
        [T, H, D], x's type. Differentiable in x.

    Raises:
        InputError: shapes or types do not fit, or a position is outside the table. A GPU is not waited for to find the
            latter, unless ``ALIGNKIT_STRICT=1``: the rows of such a token are NaN.
    """
    check(x, positions, table)
    return _Rope.apply(x, positions.contiguous(), table.contiguous())


def check(x, positions, table) -> None:
    """Raise InputError unless `rope` takes these arguments."""
    check_tensor("x", x, 3)
    check_tensor("positions", positions, 1, (torch.int64,))
    check_tensor("table", table, 2, (torch.float32,))
    require(positions.shape[0] == x.shape[0], f"positions: {positions.shape[0]} entries for {x.shape[0]} tokens")
    require(table.shape[1] == x.shape[2], f"table: head_dim {table.shape[1]} differs from x's {x.shape[2]}")
    if positions.numel() and looks(positions.device):
        low, high = int(positions.min()), int(positions.max())
        require(0 <= low and high < table.shape[0],
                f"positions: {low} to {high} leave the table of {table.shape[0]} positions")
