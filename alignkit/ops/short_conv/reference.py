"""Reference short_conv in torch; every operation is the CPU family's contract (docs/contract.md, "Gated DeltaNet").

cpu.py has the same bits. triton_backend.py has those of Hopper GPUs, whose `exp` and sums over rows differ.
"""

from __future__ import annotations

import torch

from .._calls import in_torch
from .._common import exp, fma
from .._sequences import sequences


def _conv(x: torch.Tensor, weight: torch.Tensor, before: torch.Tensor) -> torch.Tensor:
    """Return the fp32 convolution of the rows of a sequence, given the taps - 1 rows before them."""
    rows, w = torch.cat([before.float(), x.float()]), weight.float()
    acc = torch.zeros_like(x, dtype=torch.float32)
    for j in range(w.shape[1]):
        acc = fma(rows[j : j + len(x)], w[:, j].expand_as(acc), acc)
    return acc


def _silu(c: torch.Tensor) -> torch.Tensor:
    return c / (1.0 + exp(-c))


@in_torch
def forward(x: torch.Tensor, weight: torch.Tensor, starts: torch.Tensor) -> torch.Tensor:
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    before = x.new_zeros(weight.shape[1] - 1, x.shape[1])
    for _, rows in sequences(starts):
        y[rows] = _silu(_conv(x[rows], weight, before)).to(x.dtype)
    return y


@in_torch
def backward(dy, x, weight, starts) -> tuple[torch.Tensor, torch.Tensor]:
    """Return dx [T, C] and fp32 dweight [C, taps], for contiguous dy."""
    dx, w, taps = torch.empty(x.shape, dtype=x.dtype, device=x.device), weight.float(), weight.shape[1]
    dw = torch.zeros(w.shape, dtype=torch.float32, device=x.device)
    before = x.new_zeros(taps - 1, x.shape[1])
    for _, rows in sequences(starts):
        c = _conv(x[rows], weight, before)
        s = 1.0 / (1.0 + exp(-c))
        dc = dy[rows].float() * (s * fma(c, 1.0 - s, torch.ones_like(c)))
        later = torch.cat([dc, dc.new_zeros(taps - 1, x.shape[1])])
        acc = torch.zeros_like(dc)
        for i in range(taps):
            acc = fma(later[i : i + len(dc)], w[:, taps - 1 - i].expand_as(acc), acc)
        dx[rows] = acc.to(x.dtype)
        given = torch.cat([before, x[rows]]).float()
        for r in range(len(dc)):
            dw = fma(dc[r][:, None].expand_as(dw), given[r : r + taps].T, dw)
    return dx, dw


@in_torch
def paged(x, weight, state, slots, starts, lens) -> torch.Tensor:
    """Return the result of the new rows, and write the last rows of each sequence to its slot."""
    y, last = torch.zeros(x.shape, dtype=x.dtype, device=x.device), weight.shape[1] - 1
    for i, rows in sequences(starts):
        n = rows.stop - rows.start
        before = state[slots[i]].clone()
        before[: max(0, last - (int(lens[i]) - n))] = 0  # tokens before the sequence
        y[rows] = _silu(_conv(x[rows], weight, before)).to(x.dtype)
        state[slots[i]] = torch.cat([before, x[rows]])[n:]
    return y
