"""Helpers shared by the Triton kernels: exponential, fixed-point rounding and sums in the contract's order.

Every operation decides bits of the sm90 family. `launch` disables fusion, so `a * b + c` has two roundings.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ..runtime.launch import launch

LOG2E = tl.constexpr(1.4426950408889634)  # contract: factor of exp


@triton.jit
def exp(x):
    """Compute e^x as ex2(x * log2 e)."""
    return tl.exp2(x * LOG2E)


@triton.jit
def sigmoid(x):
    """Compute 1 / (1 + e^-x)."""
    return tl.div_rn(tl.zeros_like(x) + 1.0, 1.0 + exp(-x))


@triton.jit
def to_fixed_point(v):
    """Return rint(2^23 v) of v in [0, 1] as int32: adding 1 rounds v and leaves the integer in the mantissa."""
    return (v + 1.0).to(tl.int32, bitcast=True) - 0x3F800000


@triton.jit
def tree_sum(x, LEVELS: tl.constexpr):
    """Sum x [R, 2^LEVELS] over its last axis by the balanced tree, neighbors first.

    Each reduction adds two values, so register layouts cannot change the order.
    """
    for _ in tl.static_range(LEVELS):
        x = tl.sum(tl.reshape(x, (x.shape[0], x.shape[1] // 2, 2)), axis=2)
    return tl.reshape(x, (x.shape[0],))


def next_power_of_2(n: int) -> int:
    """Return the least power of two that is at least n."""
    return 1 << max(n - 1, 0).bit_length()


@triton.jit
def _exp_of(X, Y, n, BLOCK: tl.constexpr):
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    tl.store(Y + i, exp(tl.load(X + i, mask=i < n, other=0.0)), mask=i < n)


def exp_of(x: torch.Tensor) -> torch.Tensor:
    """Return `exp` of each element of fp32 x."""
    x = x.contiguous()
    y = torch.empty_like(x)
    if n := x.numel():
        launch(_exp_of, (triton.cdiv(n, 1024),), (x, y, n), {"num_warps": 4}, BLOCK=1024)
    return y


def sum_of_products(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Sum a * b over the last dim in RMSNorm's sm90 order.

    The rounded products, padded with zeros to a power of two, are added by the balanced tree.
    """
    n = a.shape[-1]
    parts = torch.nn.functional.pad(a * b, (0, next_power_of_2(n) - n))
    while parts.shape[-1] > 1:
        parts = parts[..., ::2] + parts[..., 1::2]
    return parts[..., 0]
