"""Rotary position embedding in the NeoX (half-split) layout.

Contract: docs/contract.md, "RoPE".
Public: `rope` and `rope_table` (docs/api/ops.md). ops/library.py and qk_norm_rope call `check`.
"""

from __future__ import annotations

import functools
from dataclasses import fields

import torch

from ...contract.rope import Llama3, Scaling, plain
from ...runtime import dispatch, families
from .._calls import differentiable_once, op
from .._common import (
    InputError,
    check_constant,
    check_device,
    check_int,
    check_number,
    check_same_device,
    check_tensor,
    checks_values,
    require,
    unit,
)


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
    """Return the cached table; callers get copies, because writes to it would change later results."""
    with torch.inference_mode(False), dispatch.allow_cpu():
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
    """Return the cosines and sines of all positions as fp32 [max_position, head_dim], the cosines in the first half.

    Angles are ``position * base ** (-2 j / head_dim)`` in double precision, and cosines and sines are rounded to fp32
    once. A position's row does not depend on max_position. Tables are cached; each call returns a copy.

    Args:
        head_dim: number of rotated dimensions; even, positive.
        max_position: number of positions; positive.
        base: base of the frequencies; positive.
        device: torch device of the result. The table is computed on the CPU, so it has the same bits on every device.
        scaling: None, or an `alignkit.contract.rope.Llama3` or `Yarn`, which scales the frequencies; `Yarn` also scales
            the table.

    Returns:
        A new fp32 tensor [max_position, head_dim] on `device`, contiguous.

    Raises:
        InputError: head_dim is not a positive even integer; max_position or base is not positive; the device is not
            available; scaling has another type or invalid parameters, or YaRN's base is not above 1.
    """
    head_dim, max_position = check_int("head_dim", head_dim, 1), check_int("max_position", max_position, 1)
    require(head_dim % 2 == 0, f"head_dim: must be a positive even number, got {head_dim}")
    base = check_number("base", base)
    require(
        scaling is None or isinstance(scaling, Scaling),
        f"scaling: must be None, or an alignkit.contract.rope.Llama3 or Yarn, got {type(scaling).__name__}",
    )
    if scaling is not None:
        _check_scaling(scaling, base)
    try:
        device = torch.device(device)
        torch.empty(0, device=device)
    except (RuntimeError, TypeError, AssertionError) as e:
        raise InputError(f"device: must be an available torch device, got {device!r}: {e}") from None
    with torch.inference_mode(False):  # a table made under inference_mode could not be used in training
        return _table(head_dim, max_position, base, device, scaling).clone()


def _check_scaling(scaling: Scaling, base: float) -> None:
    """Raise InputError for invalid scaling parameters."""
    for field in fields(scaling):
        if field.name != "truncate":
            check_number(f"scaling.{field.name}", getattr(scaling, field.name))
    if isinstance(scaling, Llama3):
        require(
            scaling.low_freq_factor < scaling.high_freq_factor,
            f"scaling.low_freq_factor: must be below high_freq_factor = {scaling.high_freq_factor}, "
            f"got {scaling.low_freq_factor}",
        )
    else:
        require(base > 1, f"base: must be more than 1 for YaRN, got {base}")


@op
def rope(
    x: torch.Tensor, positions: torch.Tensor, table: torch.Tensor, *, rotary_dim: int | None = None
) -> torch.Tensor:
    """Rotate x by its positions: halves a, b of a head become ``(a cos - b sin, b cos + a sin)``, with one rounding.

    Args:
        x: [T, H, D], fp32 or bf16, D even; copied only if D is not the unit-stride dimension.
        positions: int64 [T] on x's device, in [0, max_position).
        table: fp32 [max_position, D] from `rope_table` on x's device, or [max_position, rotary_dim]. It must not
            require a gradient.
        rotary_dim: number of leading head dimensions to rotate, as a head of that size; even, at most D. The others are
            copied. None: all.

    Returns:
        [T, H, D], x's dtype, contiguous. Differentiable once in x.

    Raises:
        InputError: a shape, dtype or device is invalid, or a position is outside the table. On a GPU positions are
            checked only under ``ALIGNKIT_STRICT=1``, because reading them synchronizes; unchecked, the rotated
            dimensions of such a token are NaN.
        UnsupportedError: a gradient is differentiated again.
    """
    check(x, positions, table, rotary_dim=rotary_dim)
    return _Rope.apply(x, positions.contiguous(), table.contiguous())


def check(x, positions, table, name: str = "x", rotary_dim: int | None = None) -> None:
    """Raise InputError for invalid arguments of `rope`; `name`: the caller's name of x in messages."""
    check_tensor(name, x, 3)
    check_device(name, x)
    check_tensor("positions", positions, 1, (torch.int64,))
    check_tensor("table", table, 2, (torch.float32,))
    check_constant("table", table)
    for other_name, t in (("positions", positions), ("table", table)):
        check_same_device(other_name, t, name, x)
    require(positions.shape[0] == x.shape[0], f"positions: must have {x.shape[0]} entries, got {positions.shape[0]}")
    require(x.shape[2] > 0 and x.shape[2] % 2 == 0, f"{name}: head_dim must be even and positive, got {x.shape[2]}")
    head_dim, columns = x.shape[2], table.shape[1]
    if rotary_dim is None:
        require(columns == head_dim, f"table: must have {head_dim} columns, {name}'s head_dim, got {columns}")
    else:
        rotary_dim = check_int("rotary_dim", rotary_dim, 1)
        require(
            rotary_dim % 2 == 0 and rotary_dim <= head_dim,
            f"rotary_dim: must be even and at most {name}'s head_dim {head_dim}, got {rotary_dim}",
        )
        require(columns == rotary_dim, f"table: must have rotary_dim = {rotary_dim} columns, got {columns}")
    if checks_values(positions.device):
        outside = ((positions < 0) | (positions >= table.shape[0])).nonzero()
        if len(outside):
            at = int(outside[0])
            raise InputError(f"positions: must be in [0, {table.shape[0]}), got {int(positions[at])} at index {at}")
