"""Rotary position embedding (neox halves). docs/contract.md, "RoPE"."""

from __future__ import annotations

import functools
from dataclasses import fields

import torch

from ...contract.rope import Llama3, Scaling, plain
from ...runtime import dispatch, families
from .._calls import differentiable_once, op
from .._common import InputError, check_device, check_int, check_number, check_tensor, looks, require, unit


@differentiable_once("rope")
class _Rope(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, positions, table):
        ctx.save_for_backward(positions, table)
        return _apply(x, positions, table, False)

    @staticmethod
    def backward(ctx, dy):
        positions, table = ctx.saved_tensors
        return _apply(dy, positions.contiguous(), table.contiguous(), True), None, None


def _apply(x, positions, table, inverse):
    return dispatch.select("rope", x.device).apply(unit(x), positions, table, inverse)


@functools.lru_cache(maxsize=8)
def _table(
    head_dim: int, max_position: int, base: float, device: torch.device, scaling: Scaling | None
) -> torch.Tensor:
    """Never handed out: whoever wrote to it would change the results of all others."""
    with torch.inference_mode(False), dispatch.for_tables():
        host = dispatch.select("rope", families.CPU.device_type)
        if scaling is None:
            frequencies, factor = plain(head_dim, base), 1.0
        else:
            frequencies, factor = scaling.frequencies(head_dim, base), scaling.attention_factor
        return host.table(frequencies, max_position, factor).to(device)


@op
def rope_table(
    head_dim: int, max_position: int, base: float, device: torch.device | str = "cpu", scaling: Scaling | None = None
) -> torch.Tensor:
    """Cosines and sines of every position: fp32 [max_position, head_dim] on `device`, the cosines in the first half.

    Angles are ``position * base ** (-2 j / head_dim)`` in double precision, rounded once at the end; a position's row
    does not depend on `max_position`. Tables are computed once, and each call gets a copy of its own.

    scaling: an `alignkit.contract.rope.Llama3` or `Yarn`, which scales the frequencies, and YaRN's the table.

    Raises:
        InputError: head_dim is not a positive even number, max_position or base not positive, no such device, or
            another scaling, or one whose numbers scale nothing.
    """
    head_dim, max_position = check_int("head_dim", head_dim, 1), check_int("max_position", max_position, 1)
    require(head_dim % 2 == 0, f"head_dim: {head_dim} is not a positive even number")
    base = check_number("base", base)
    require(
        scaling is None or isinstance(scaling, Scaling),
        f"scaling: a {type(scaling).__name__} is not alignkit.contract.rope.Llama3 or Yarn",
    )
    if scaling is not None:
        _check_scaling(scaling, base)
    try:
        device = torch.device(device)
        torch.empty(0, device=device)
    except (RuntimeError, TypeError, AssertionError) as e:
        raise InputError(f"device: {device!r} is none: {e}") from None
    with torch.inference_mode(False):  # so that a table from a rollout may also train
        return _table(head_dim, max_position, base, device, scaling).clone()


def _check_scaling(scaling: Scaling, base: float) -> None:
    for field in fields(scaling):
        if field.name != "truncate":
            check_number(f"scaling.{field.name}", getattr(scaling, field.name))
    if isinstance(scaling, Llama3):
        require(
            scaling.low_freq_factor < scaling.high_freq_factor,
            f"scaling.low_freq_factor: {scaling.low_freq_factor} is not below {scaling.high_freq_factor}",
        )
    else:
        require(base > 1, f"base: {base} is not above 1, as YaRN needs it")


@op
def rope(
    x: torch.Tensor, positions: torch.Tensor, table: torch.Tensor, *, rotary_dim: int | None = None
) -> torch.Tensor:
    """Rotate x by its positions: with halves a, b of a head, ``(a cos - b sin, b cos + a sin)``; one rounding.

    Args:
        x: [T, H, D], fp32 or bf16.
        positions: int64 [T], in [0, max_position).
        table: fp32 [max_position, D] of `rope_table`, or [max_position, rotary_dim].
        rotary_dim: how many of a head's dimensions, from the first on, are rotated, as a smaller head's would be; the others
            stay as they are. None: all.

    Returns:
        [T, H, D], x's type. Differentiable in x.

    Raises:
        InputError: shapes or types do not fit, or a position is outside the table. A GPU is not waited for to find the
            latter, unless ``ALIGNKIT_STRICT=1``: what is rotated of such a token is NaN.
    """
    check(x, positions, table, rotary_dim=rotary_dim)
    return _Rope.apply(x, positions.contiguous(), table.contiguous())


def check(x, positions, table, name: str = "x", rotary_dim: int | None = None) -> None:
    """Raise InputError unless `rope` takes these arguments; `name` is what the caller calls x."""
    check_tensor(name, x, 3)
    check_device(name, x)
    check_tensor("positions", positions, 1, (torch.int64,))
    check_tensor("table", table, 2, (torch.float32,))
    for other_name, t in (("positions", positions), ("table", table)):
        require(t.device == x.device, f"{other_name}: device {t.device} differs from {name}'s {x.device}")
    require(positions.shape[0] == x.shape[0], f"positions: {positions.shape[0]} entries for {x.shape[0]} tokens")
    require(x.shape[2] > 0 and x.shape[2] % 2 == 0, f"{name}: head_dim {x.shape[2]} is not a positive even number")
    if rotary_dim is None:
        require(table.shape[1] == x.shape[2], f"table: head_dim {table.shape[1]} differs from {name}'s {x.shape[2]}")
    else:
        rotary_dim = check_int("rotary_dim", rotary_dim, 1)
        require(
            rotary_dim % 2 == 0 and rotary_dim <= x.shape[2],
            f"rotary_dim: {rotary_dim} is not an even number up to {name}'s head_dim, {x.shape[2]}",
        )
        require(table.shape[1] == rotary_dim, f"table: {table.shape[1]} columns, for a rotary_dim of {rotary_dim}")
    if positions.numel() and looks(positions.device):
        low, high = int(positions.min()), int(positions.max())
        require(
            0 <= low and high < table.shape[0],
            f"positions: {low} to {high} leave the table of {table.shape[0]} positions",
        )
