"""Causal attention with grouped heads. docs/contract.md, "Attention".

Keys are visited in blocks of `contract.KV_BLOCK` positions from position 0 of the sequence, so a query's result
depends on its own sequence up to its own position and on nothing else.
"""
from __future__ import annotations

import torch

from ... import backends
from .._common import check_like, check_tensor, require

INTS = (torch.int32, torch.int64)


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, starts, scale):
        out, m, l = backends.select("attention", q.device).forward(q, k, v, starts, scale)
        ctx.save_for_backward(q, k, v, starts, out, m, l)
        ctx.scale = scale
        return out

    @staticmethod
    def backward(ctx, d_out):
        grads = backends.select("attention", d_out.device).backward(*ctx.saved_tensors, d_out.contiguous(), ctx.scale)
        return *grads, None, None


def _unit(t: torch.Tensor) -> torch.Tensor:
    return t if t.stride(-1) == 1 else t.contiguous()


def _check(q, k, v, scale) -> float:
    for name, t in (("q", q), ("k", k), ("v", v)):
        check_tensor(name, t, 3)
        check_like(name, t, "q", q)
    require(k.shape == v.shape, f"v: shape {tuple(v.shape)} differs from k's {tuple(k.shape)}")
    require(q.shape[2] == k.shape[2] > 0, f"k: head_dim {k.shape[2]} differs from q's {q.shape[2]}")
    require(k.shape[1] > 0 and q.shape[1] % k.shape[1] == 0,
            f"k: {k.shape[1]} heads do not divide q's {q.shape[1]}")
    scale = q.shape[2] ** -0.5 if scale is None else float(scale)
    require(scale > 0, f"scale: {scale} is not positive")
    return scale


def _check_starts(name: str, starts, total: int) -> torch.Tensor:
    """Values are looked at on the host only: elsewhere that would wait for the device."""
    check_tensor(name, starts, 1, INTS)
    require(starts.numel() >= 1, f"{name}: must begin with 0")
    if starts.device.type == "cpu":
        starts = starts.to(torch.int64).contiguous()
        require(int(starts[0]) == 0, f"{name}: must begin with 0")
        require(bool((starts[1:] >= starts[:-1]).all()), f"{name}: must not decrease")
        require(int(starts[-1]) == total, f"{name}: ends at {int(starts[-1])}, q has {total} rows")
    return starts


def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cu_seqlens: torch.Tensor,
              scale: float | None = None) -> torch.Tensor:
    """Causal self-attention over packed sequences, for training.

    Args:
        q: [T, Hq, D], fp32 or bf16.
        k, v: [T, Hkv, D], q's type; Hkv divides Hq.
        cu_seqlens: int [B + 1] on q's device, the first row of each sequence, then T. A padded micro-batch of
            B sequences of S rows is ``arange(B + 1) * S``: rows of padding after a sequence change nothing before.
        scale: factor of the scores; default ``D ** -0.5``.

    Returns:
        [T, Hq, D], q's type. Differentiable in q, k and v.

    Raises:
        InputError: shapes, types or devices do not fit; on the CPU also if cu_seqlens decreases or does not end at T.
    """
    scale = _check(q, k, v, scale)
    require(k.shape[0] == q.shape[0], f"k: {k.shape[0]} rows differ from q's {q.shape[0]}")
    starts = _check_starts("cu_seqlens", cu_seqlens, q.shape[0])
    return _Attention.apply(_unit(q), _unit(k), _unit(v), starts, scale)


def paged_attention(q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, block_table: torch.Tensor,
                    query_start_loc: torch.Tensor, seq_lens: torch.Tensor, scale: float | None = None) -> torch.Tensor:
    """Causal attention of new queries over a paged cache, for rollout: prefill, chunked prefill and decode alike.

    Args:
        q: [T, Hq, D], fp32 or bf16; the queries of a sequence are its last positions.
        k_cache, v_cache: [num_blocks, block_size, Hkv, D], q's type; the keys of the queries are in them.
        block_table: int [B, max_blocks], the cache blocks of each sequence in order.
        query_start_loc: int [B + 1], the first query of each sequence, then T.
        seq_lens: int [B], positions of each sequence, its queries included.
        scale: factor of the scores; default ``D ** -0.5``.

    Returns:
        [T, Hq, D], q's type. Not differentiable.

    Raises:
        InputError: shapes, types or devices do not fit; on the CPU also if a length or block is out of range.
    """
    check_tensor("k_cache", k_cache, 4)
    check_tensor("v_cache", v_cache, 4)
    require(k_cache.shape == v_cache.shape,
            f"v_cache: shape {tuple(v_cache.shape)} differs from k_cache's {tuple(k_cache.shape)}")
    block_size = k_cache.shape[1]
    require(block_size > 0, "k_cache: block_size is 0")
    scale = _check(q, k_cache[:, 0], v_cache[:, 0], scale)
    starts = _check_starts("query_start_loc", query_start_loc, q.shape[0])
    check_tensor("seq_lens", seq_lens, 1, INTS)
    check_tensor("block_table", block_table, 2, INTS)
    batch = starts.numel() - 1
    require(seq_lens.shape[0] == batch, f"seq_lens: {seq_lens.shape[0]} entries for {batch} sequences")
    require(block_table.shape[0] == batch, f"block_table: {block_table.shape[0]} rows for {batch} sequences")
    k, v = (_rows_view(c) for c in (k_cache, v_cache))
    return backends.select("attention", q.device).paged(_unit(q), k, v, block_table, starts, seq_lens, block_size, scale)


def _rows_view(cache: torch.Tensor) -> torch.Tensor:
    """[num_blocks, block_size, H, D] as [rows, H, D] without a copy."""
    require(cache.stride(3) == 1 and (cache.shape[0] <= 1 or cache.stride(0) == cache.shape[1] * cache.stride(1)),
            f"k_cache, v_cache: strides {cache.stride()} cannot be viewed as rows")
    return cache.as_strided((cache.shape[0] * cache.shape[1], *cache.shape[2:]), cache.stride()[1:],
                            cache.storage_offset())
