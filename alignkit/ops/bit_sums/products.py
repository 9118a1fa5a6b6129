"""bit_sums as a product of bytes on the tensor core, at the speed of reading x.

A byte u of x counts as the signed u - 128. A weight, shifted to the byte's place, counts as eight signed digits of base
256. The products of bytes and digits are summed exactly in int32, and the row's sum is

    sum over digits b of 256^b * (sum over bytes k of (u_k - 128) * digit_kb)  +  128 * sum of the shifted weights.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ...runtime.launch import launch
from .triton_backend import addresses

ROWS, BYTES, STAGES = 64, 256, 3
"""schedule: rows and bytes of a tile, and tiles in flight."""
DIGITS = 16
"""hardware: columns of a product; the eight digits and zeros."""
EXACT_BYTES = 1 << 16
"""schedule: limit of _byte_products: bytes of a row whose products are summed in int32; each is at most 2^14."""


@triton.jit
def _byte_products(
    ADDRESSES,
    WEIGHTS,
    REST,
    OUT,
    rows,
    n,
    sx,
    ALIGNED: tl.constexpr,
    ROWS: tl.constexpr,
    BYTES: tl.constexpr,
    DIGITS: tl.constexpr,
    EXACT_BYTES: tl.constexpr,
    STAGES: tl.constexpr,
):
    tensor = tl.program_id(1).to(tl.int64)
    x_ptr = tl.load(ADDRESSES + tensor).to(tl.pointer_type(tl.uint8))
    if ALIGNED:
        x_ptr = tl.multiple_of(x_ptr, 16)
    r = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    x_ptr += r[:, None] * sx
    digit = tl.arange(0, DIGITS)
    total = tl.load(REST + tl.zeros((ROWS,), tl.int32))
    for start in range(0, n, EXACT_BYTES):
        end = tl.minimum(start + EXACT_BYTES, n)
        sums = tl.zeros((ROWS, DIGITS), tl.int32)
        for first in tl.range(start, end, BYTES, num_stages=STAGES):
            k = first + tl.arange(0, BYTES)
            x = tl.load(x_ptr + k[None, :], mask=(r < rows)[:, None] & (k < end)[None, :], other=0)
            w = tl.load(WEIGHTS + digit[None, :] * n + k[:, None], mask=(k < end)[:, None], other=0)
            sums = tl.dot((x ^ 128).to(tl.int8, bitcast=True), w, sums, out_dtype=tl.int32)
        total += tl.sum(sums.to(tl.int64) << (8 * (digit % 8)).to(tl.int64)[None, :], axis=1)
    tl.store(OUT + tensor * rows + r, total, mask=r < rows)


def sums(bits: list[torch.Tensor], weights: torch.Tensor) -> torch.Tensor:
    first = bits[0]
    out = torch.zeros(len(bits), first.shape[0], dtype=torch.int64, device=first.device)
    if first.numel():
        size = first.element_size()
        shifted = (weights[:, None] << 8 * torch.arange(size, device=first.device)).flatten()
        digits = shifted.new_zeros(DIGITS, len(shifted), dtype=torch.int8)
        digits[:8] = _digits(shifted).T
        pointers, aligned = addresses(bits)
        launch(
            _byte_products,
            (triton.cdiv(first.shape[0], ROWS), len(bits)),
            (pointers, digits, 128 * shifted.sum(), out, first.shape[0], size * first.shape[1], size * first.stride(0)),
            {"num_warps": 4},
            ALIGNED=aligned,
            ROWS=ROWS,
            BYTES=BYTES,
            DIGITS=DIGITS,
            EXACT_BYTES=EXACT_BYTES,
            STAGES=STAGES,
        )
    return out


def _digits(x: torch.Tensor) -> torch.Tensor:
    """Return the digits in [-128, 127] of base 256 of int64 numbers modulo 2^64, lowest first: int8 [len(x), 8]."""
    halves = int.from_bytes(8 * b"\x80", "little", signed=True)  # 128 in each byte
    return ((x + halves).view(torch.uint8).view(-1, 8) ^ 128).view(torch.int8)
