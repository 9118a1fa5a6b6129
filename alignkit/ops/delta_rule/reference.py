"""Reference of the gated delta rule in torch, for all heads at a time (docs/contract.md, "Gated delta rule").

cpu.py has the same bits; its kernel advances row by row.
"""

from __future__ import annotations

import torch

from .._calls import in_torch
from .._common import chain, exp, fma
from .._sequences import sequences
from . import layout
from .layout import CHUNK


def _product(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Return the chains over k of a [H, M, k] and b [H, k, N]."""
    return chain(a, b[:, None], a.new_zeros(a.shape[0], a.shape[1], b.shape[2]))


class _State:
    """State of a sequence's heads: S before the open chunk, and the rows of this chunk in fp32."""

    def __init__(self, k: torch.Tensor, v: torch.Tensor):
        """Start with the state of a sequence's first token, for keys [rows, H, K] and values [rows, HV, V]."""

        def zeros(*shape: int) -> torch.Tensor:
            return torch.zeros(v.shape[1], *shape, dtype=torch.float32, device=v.device)

        self.dtype = v.dtype
        self.s, self.k, self.r = zeros(k.shape[2], v.shape[2]), zeros(CHUNK, k.shape[2]), zeros(CHUNK, v.shape[2])
        self.g, self.d = zeros(CHUNK), zeros(CHUNK, CHUNK)

    def rows(self, page: layout.Page) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Return the parts that hold rows of the open chunk, each with the page's."""
        return [(self.k, page.k), (self.r, page.r), (self.g, page.g), (self.d, page.d)]

    def rounded(self, t: torch.Tensor) -> torch.Tensor:
        return t.to(self.dtype).float()

    def advance(self, at: int, scale: float, q, k, v, g, beta) -> torch.Tensor:
        """Append rows [H, n, ...] at index `at` of the open chunk, which has room for them; return o [H, n, V]."""
        n = q.shape[1]
        end = at + n
        self.k[:, at:end] = k
        for r in range(n):
            self.g[:, at + r] = (self.g[:, at + r - 1] if at + r else torch.zeros_like(g[:, r])) + g[:, r]
        own = self.g[:, at:end, None]
        s, keys, grown = self.rounded(self.s), self.k[:, :end], exp(own)
        index = torch.arange(end, device=g.device)
        later = index > index[at:, None]  # rows that a row does not see
        decay = exp((own - self.g[:, None, :end]).masked_fill(later, 0.0))
        lower = beta[..., None] * (decay * _product(k, keys.mT))
        self.d[:, at:end] = torch.eye(CHUNK, device=g.device, dtype=torch.float32)[at:end]
        for r in range(at, end):
            for i in range(r):
                row = -lower[:, r - at, i, None].expand(-1, i + 1)
                self.d[:, r, : i + 1] = fma(row, self.d[:, i, : i + 1], self.d[:, r, : i + 1])
        self.r[:, at:end] = self.rounded(beta[..., None] * (v - grown * _product(k, s)) + 0.0)
        inverse = self.rounded(self.d)
        u = torch.zeros_like(self.r)
        weights = self.rounded(decay * _product(q, keys.mT))
        out = grown * _product(q, s)
        for i in range(end):
            u[:, i:end] = fma(*torch.broadcast_tensors(inverse[:, i:end, i, None], self.r[:, i, None], u[:, i:end]))
        u = self.rounded(u + 0.0)
        for i in range(end):
            first = max(i - at, 0)
            rows = out[:, first:]
            out[:, first:] = fma(*torch.broadcast_tensors(weights[:, first:, i, None], u[:, i, None], rows))
        if end == CHUNK:
            last = self.g[:, -1:]
            tail = self.rounded(u * exp(last - self.g)[..., None])
            self.s = chain(self.k.mT, tail[:, None], exp(last)[..., None] * self.s)
        return (scale * out + 0.0).to(self.dtype)


def _by_head(q, k, v, g, beta):
    """Return the arguments of rows as fp32 [Hv, rows, ...]; each k head serves consecutive v heads."""
    share = v.shape[1] // k.shape[1]
    q, k = (t.float().repeat_interleave(share, dim=1) for t in (q, k))
    return [t.float().transpose(0, 1).contiguous() for t in (q, k, v, g, beta)]


def _rows(state: _State, position: int, given, scale: float) -> torch.Tensor:
    """Return o [n, Hv, V] of n rows that begin at `position` of the sequence."""
    parts, done, n = [], 0, given[0].shape[1]
    while done < n:
        at = (position + done) % CHUNK
        take = min(CHUNK - at, n - done)
        parts.append(state.advance(at, scale, *(t[:, done : done + take] for t in given)))
        done += take
    return torch.cat(parts, dim=1).transpose(0, 1)


@in_torch
def forward(q, k, v, g, beta, starts, scale: float) -> torch.Tensor:
    out = torch.empty(v.shape, dtype=v.dtype, device=v.device)
    for _, rows in sequences(starts):
        state = _State(k, v)
        out[rows] = _rows(state, 0, _by_head(q[rows], k[rows], v[rows], g[rows], beta[rows]), scale)
    return out


@in_torch
def paged(q, k, v, g, beta, pages, slots, starts, lens, scale: float) -> torch.Tensor:
    """Return o of the new rows; advance the pages of their sequences in place."""
    out = torch.zeros(v.shape, dtype=v.dtype, device=v.device)
    for i, rows in sequences(starts):
        state = _State(k, v)
        page = layout.Page(pages[slots[i]], k.shape[2], v.shape[2], v.dtype)
        position = int(lens[i]) - (rows.stop - rows.start)
        if position:
            state.s = page.s.clone()
        for mine, cached in state.rows(page):
            mine[:] = cached.float()
        out[rows] = _rows(state, position, _by_head(q[rows], k[rows], v[rows], g[rows], beta[rows]), scale)
        for mine, cached in state.rows(page):
            cached[:] = mine.to(cached.dtype)
        page.s[:] = state.s
    return out
