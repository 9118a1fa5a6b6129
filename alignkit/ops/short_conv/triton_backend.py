"""Triton short_conv: a tile of rows and channels per program; dweight by chains of rows, summed by the tree.

Each operation is the contract's (docs/contract.md, "Gated DeltaNet"); tiles are free.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ...runtime.launch import launch
from .._triton import next_power_of_2, sigmoid
from ..rms_norm.triton_backend import sum_partials
from ..silu_mul.triton_backend import silu_times

DW_ROWS = 64
"""contract: rows per chain of dweight. Each chain ends with + 0; the balanced tree sums the chains in row order."""
ROWS, CHANNELS = 16, 64  # schedule: a tile


@triton.jit
def _sequence(STARTS, r, seqs, LEVELS: tl.constexpr):
    """Return the index of the sequence that has row r; sequences without rows are passed over."""
    low, high = r * 0, r * 0 + seqs
    for _ in range(LEVELS):
        middle = (low + high) // 2
        right = (tl.load(STARTS + middle) <= r) & (high - low > 1)
        low = tl.where(right, middle, low)
        high = tl.where(right, high, middle)
    return low


@triton.jit(do_not_specialize=["rows", "seqs"])
def _short_conv(
    X,
    W,
    STARTS,
    Y,
    STATE,
    SLOTS,
    LENS,
    rows,
    seqs,
    channels,
    slots,
    sx,
    ss,
    sr,
    TAPS: tl.constexpr,
    LEVELS: tl.constexpr,
    ROWS: tl.constexpr,
    CHANNELS: tl.constexpr,
):
    """Compute rows; those before the new rows of a sequence come from STATE, or are 0 if that is None."""
    r = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    c = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
    s = _sequence(STARTS, r, seqs, LEVELS)
    first = tl.load(STARTS + s).to(tl.int64)
    inside = (r < tl.load(STARTS + seqs)) & (r < rows) & (r >= first) & (first >= 0)
    ok = inside[:, None] & (c < channels)[None, :]
    acc = tl.zeros((ROWS, CHANNELS), tl.float32)
    if STATE is not None:
        slot = tl.load(SLOTS + s).to(tl.int64)
        before = tl.load(LENS + s) - (tl.load(STARTS + s + 1) - first)  # tokens before the new rows
        valid = (slot >= 0) & (slot < slots)
    for j in tl.static_range(TAPS):
        i = r - (TAPS - 1) + j
        x = tl.load(X + i[:, None] * sx + c[None, :], mask=(i >= first)[:, None] & ok, other=0.0)
        if STATE is not None:
            cached = (i < first) & (before + i - first >= 0) & valid
            at = STATE + (slot * ss + (TAPS - 1 + i - first) * sr)[:, None] + c[None, :]
            x = tl.where((i < first)[:, None], tl.load(at, mask=cached[:, None] & ok, other=0.0), x)
        w = tl.load(W + c * TAPS + j, mask=c < channels, other=0.0).to(tl.float32)
        acc = tl.fma(x.to(tl.float32), tl.broadcast_to(w[None, :], acc.shape), acc)
    y = tl.where(inside[:, None], silu_times(acc, 1.0), 0.0)
    tl.store(
        Y + r[:, None] * channels + c[None, :], y.to(Y.dtype.element_ty), mask=(r < rows)[:, None] & (c < channels)
    )


@triton.jit(do_not_specialize=["rows"])
def _update(
    X, STARTS, STATE, SLOTS, LENS, rows, channels, slots, sx, ss, sr, TAPS: tl.constexpr, CHANNELS: tl.constexpr
):
    """Write the last rows of a sequence to its slot."""
    s = tl.program_id(0)
    c = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
    first = tl.load(STARTS + s).to(tl.int64)
    n = tl.load(STARTS + s + 1).to(tl.int64) - first
    slot = tl.load(SLOTS + s).to(tl.int64)
    before = tl.load(LENS + s) - n
    ok = (c < channels) & (n > 0) & (first >= 0) & (first + n <= rows) & (slot >= 0) & (slot < slots)
    state = STATE + slot * ss + c
    for j in tl.static_range(TAPS - 1):
        i = n - (TAPS - 1) + j  # row of the new ones; negative for a cached row
        new = tl.load(X + (first + i) * sx + c, mask=ok & (i >= 0), other=0.0)
        old = tl.load(state + (n + j) * sr, mask=ok & (i < 0) & (before + i >= 0), other=0.0)
        tl.debug_barrier()  # all threads have read row n + j before any writes it
        tl.store(state + j * sr, tl.where(i >= 0, new, old), mask=ok)


@triton.jit(do_not_specialize=["rows", "seqs"])
def _firsts(STARTS, FIRST, rows, seqs, LEVELS: tl.constexpr, BLOCK: tl.constexpr):
    """Write the first row of each row's sequence."""
    r = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    tl.store(FIRST + r, tl.load(STARTS + _sequence(STARTS, r, seqs, LEVELS)).to(tl.int64), mask=r < rows)


@triton.jit(do_not_specialize=["rows"])
def _filter_grad(
    DY,
    X,
    W,
    FIRST,
    DC,
    PART,
    rows,
    channels,
    sx,
    TAPS: tl.constexpr,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    CHANNELS: tl.constexpr,
):
    """Write the gradient of the convolution before SiLU, and the chains of dweight as [chains, TAPS, channels]."""
    chain = tl.program_id(0).to(tl.int64)
    c = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
    j = tl.arange(0, WIDTH)
    dw = tl.zeros((WIDTH, CHANNELS), tl.float32)
    for k in range(ROWS):
        r = chain * ROWS + k
        ok = (c < channels) & (r < rows)
        first = tl.maximum(tl.load(FIRST + r, mask=r < rows, other=0), 0)
        acc = tl.zeros((CHANNELS,), tl.float32)
        for t in tl.static_range(TAPS):
            i = r - (TAPS - 1) + t
            x = tl.load(X + i * sx + c, mask=ok & (i >= first), other=0.0).to(tl.float32)
            acc = tl.fma(x, tl.load(W + c * TAPS + t, mask=c < channels, other=0.0).to(tl.float32), acc)
        d = tl.load(DY + r * channels + c, mask=ok, other=0.0).to(tl.float32)
        s = sigmoid(acc)
        dc = d * (s * tl.fma(acc, 1.0 - s, tl.zeros_like(acc) + 1.0))
        tl.store(DC + r * channels + c, dc, mask=ok)
        i = r - (TAPS - 1) + j
        mask = ((j < TAPS) & (i >= first))[:, None] & ok[None, :]
        taps = tl.load(X + i[:, None] * sx + c[None, :], mask=mask, other=0.0).to(tl.float32)
        dw = tl.fma(tl.broadcast_to(tl.where(ok, dc, 0.0)[None, :], taps.shape), taps, dw)
    # + 0.0: no partial sum is -0, so zero-padding the tree changes no bit.
    at = PART + (chain * TAPS + j)[:, None] * channels + c[None, :]
    tl.store(at, dw + 0.0, mask=(j < TAPS)[:, None] & (c < channels)[None, :])


@triton.jit(do_not_specialize=["rows"])
def _input_grad(DC, W, FIRST, DX, rows, channels, TAPS: tl.constexpr, ROWS: tl.constexpr, CHANNELS: tl.constexpr):
    r = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    c = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
    first = tl.load(FIRST + r, mask=r < rows, other=0)
    acc = tl.zeros((ROWS, CHANNELS), tl.float32)
    for k in tl.static_range(TAPS):
        i = r + k
        mine = (i < rows) & (tl.load(FIRST + i, mask=i < rows, other=0) == first)
        d = tl.load(DC + i[:, None] * channels + c[None, :], mask=mine[:, None] & (c < channels)[None, :], other=0.0)
        w = tl.load(W + c * TAPS + TAPS - 1 - k, mask=c < channels, other=0.0).to(tl.float32)
        acc = tl.fma(d, tl.broadcast_to(w[None, :], acc.shape), acc)
    at = DX + r[:, None] * channels + c[None, :]
    tl.store(at, acc.to(DX.dtype.element_ty), mask=(r < rows)[:, None] & (c < channels)[None, :])


def _run(x, weight, starts, state, slots, lens) -> torch.Tensor:
    (rows, channels), taps, seqs = x.shape, weight.shape[1], starts.numel() - 1
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if not rows:
        return y
    if not seqs:
        return y.zero_()
    strides = (0, 0, 0) if state is None else (state.shape[0], *state.stride()[:2])
    launch(
        _short_conv,
        (triton.cdiv(rows, ROWS), triton.cdiv(channels, CHANNELS)),
        (x, weight, starts, y, state, slots, lens, rows, seqs, channels, strides[0], x.stride(0), *strides[1:]),
        {"num_warps": 4},
        TAPS=taps,
        LEVELS=seqs.bit_length(),
        ROWS=ROWS,
        CHANNELS=CHANNELS,
    )
    return y


def forward(x: torch.Tensor, weight: torch.Tensor, starts: torch.Tensor) -> torch.Tensor:
    return _run(x, weight, starts, None, None, None)


def backward(dy, x, weight, starts) -> tuple[torch.Tensor, torch.Tensor]:
    """Return dx [T, C] and fp32 dweight [C, taps], for contiguous dy."""
    (rows, channels), taps, seqs = x.shape, weight.shape[1], starts.numel() - 1
    dx, dc = (torch.empty(x.shape, dtype=t, device=x.device) for t in (x.dtype, torch.float32))
    if not rows:
        return dx, torch.zeros(weight.shape, dtype=torch.float32, device=x.device)
    first = torch.empty(rows, dtype=torch.int64, device=x.device)
    launch(
        _firsts,
        (triton.cdiv(rows, 256),),
        (starts, first, rows, seqs),
        {"num_warps": 4},
        LEVELS=seqs.bit_length(),
        BLOCK=256,
    )
    chains, blocks = triton.cdiv(rows, DW_ROWS), triton.cdiv(channels, CHANNELS)
    parts = torch.empty(chains, taps * channels, dtype=torch.float32, device=x.device)
    launch(
        _filter_grad,
        (chains, blocks),
        (dy, x, weight, first, dc, parts, rows, channels, x.stride(0)),
        {"num_warps": 2},
        TAPS=taps,
        WIDTH=next_power_of_2(taps),
        ROWS=DW_ROWS,
        CHANNELS=CHANNELS,
    )
    launch(
        _input_grad,
        (triton.cdiv(rows, ROWS), blocks),
        (dc, weight, first, dx, rows, channels),
        {"num_warps": 4},
        TAPS=taps,
        ROWS=ROWS,
        CHANNELS=CHANNELS,
    )
    return dx, sum_partials(parts).view(taps, channels).t().contiguous()


def paged(x, weight, state, slots, starts, lens) -> torch.Tensor:
    """Return the result of the new rows, and write the last rows of each sequence to its slot."""
    y = _run(x, weight, starts, state, slots, lens)
    if (seqs := starts.numel() - 1) and weight.shape[1] > 1:
        channels = x.shape[1]
        launch(
            _update,
            (seqs, triton.cdiv(channels, 256)),
            (x, starts, state, slots, lens, x.shape[0], channels, state.shape[0], x.stride(0), *state.stride()[:2]),
            {"num_warps": 4},
            TAPS=weight.shape[1],
            CHANNELS=256,
        )
    return y
