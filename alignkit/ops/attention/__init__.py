"""Causal attention with grouped-query heads (GQA).

Contract: docs/contract.md, "Attention".

Keys are visited in leaves and blocks of fixed length, counted from position 0 of the sequence. A query's result
therefore depends only on its own sequence up to its own position.

Public: `attention` and `paged_attention` (docs/api/ops.md). alignkit/vllm/attention.py calls `PagedAttention` and
`reserve`.
"""

from __future__ import annotations

from types import ModuleType

import torch

from ...errors import InputError
from ...runtime import dispatch, families
from ...runtime.operands import operand
from .._calls import differentiable_once, op
from .._common import (
    check_device,
    check_like,
    check_no_overlap,
    check_number,
    check_tensor,
    checks_values,
    require,
    unit,
)
from .._sequences import check_first_rows, check_ints
from .paging import check_pages
from .problem import Attention, Relaunch


def _kernel(op: str, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *sizes: int) -> ModuleType:
    """Return the module that computes `op`; `sizes`: sequences, rows per page, pages per sequence."""
    backend = dispatch.backend_of(q.device)
    return dispatch.static_kernel(op, backend) or dispatch.choose(op, Attention.of(backend, q, k, v, *sizes)).load()


@differentiable_once("attention")
class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, starts, scale):
        out, *statistics = _kernel("attention", q, k, v, starts.numel() - 1).forward(q, k, v, starts, scale)
        ctx.save_for_backward(q, k, v, starts, out, *statistics)
        ctx.scale = scale
        return out

    @staticmethod
    def backward(ctx, d_out):
        q, k, v, *others = ctx.saved_tensors  # saved-tensor hooks may change strides
        q, k, v = unit(q), unit(k), unit(v)
        starts, *others = (t.contiguous() for t in (*others, d_out))
        kernel = _kernel("attention_backward", q, k, v, starts.numel() - 1)
        grads = kernel.backward(q, k, v, starts, *others, ctx.scale)
        return *grads, None, None


def _check(q, k, v, scale, k_name: str = "k", v_name: str = "v") -> float:
    """Check q [T, Hq, D] against k and v [..., Hkv, D], and return the scale of the scores."""
    check_device("q", q)
    for name, t in ((k_name, k), (v_name, v)):
        check_like(name, t, "q", q)
    (q_heads, dim), (heads, k_dim) = q.shape[-2:], k.shape[-2:]
    require(k.shape == v.shape, f"{v_name}: shape must equal {k_name}'s {tuple(k.shape)}, got {tuple(v.shape)}")
    require(dim > 0 and q_heads > 0, f"q: number of heads and head_dim must be at least 1, got shape {tuple(q.shape)}")
    require(dim == k_dim, f"{k_name}: head_dim must equal q's {dim}, got {k_dim}")
    require(heads > 0 and q_heads % heads == 0, f"{k_name}: number of heads must divide q's {q_heads}, got {heads}")
    return dim**-0.5 if scale is None else check_number("scale", scale)


@op
def attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cu_seqlens: torch.Tensor, scale: float | None = None
) -> torch.Tensor:
    """Compute causal self-attention over packed sequences, for training.

    Args:
        q: [T, Hq, D], fp32 or bf16. Any strides; q, k and v are copied only if D is not the unit-stride dimension.
        k: [T, Hkv, D], q's dtype and device. Hkv divides Hq.
        v: k's shape, q's dtype and device.
        cu_seqlens: int32 or int64 [B + 1] on q's device: the first row of each sequence, then T. Padded sequences of S
            rows have ``cu_seqlens = arange(B + 1) * S``; padding after a sequence does not affect its other rows. A
            micro-batch in [S, B, H, D] layout can be passed without a copy, as one sequence of S rows and B * H heads.
        scale: factor of the scores, positive; default ``D ** -0.5``.

    Returns:
        [T, Hq, D], q's dtype, contiguous. Differentiable once in q, k and v.

    Raises:
        InputError: a shape, dtype or device is invalid; or cu_seqlens does not begin with 0, decreases or does not end
            at T. On a GPU the values of cu_seqlens are checked only under ``ALIGNKIT_STRICT=1``, because reading them
            synchronizes. Unchecked, all results and gradients are NaN if cu_seqlens does not begin with 0 or end at T,
            and rows are undefined where it decreases.
        UnsupportedError: a gradient is differentiated again.
    """
    for name, t in (("q", q), ("k", k), ("v", v)):
        check_tensor(name, t, 3)
    scale = _check(q, k, v, scale)
    require(k.shape[0] == q.shape[0], f"k: number of rows must equal q's {q.shape[0]}, got {k.shape[0]}")
    starts = check_first_rows("cu_seqlens", cu_seqlens, "q", q, padded=False)
    return _Attention.apply(unit(q), unit(k), unit(v), starts, scale)


@op
def paged_attention(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_table: torch.Tensor,
    query_start_loc: torch.Tensor,
    seq_lens: torch.Tensor,
    scale: float | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Compute causal attention of new queries over a paged KV cache: prefill, chunked prefill and decode.

    Args:
        q: [T, Hq, D], fp32 or bf16. The queries of a sequence are its last positions.
        k_cache: [num_blocks, block_size, Hkv, D], q's dtype and device; already contains the keys of the queries. Hkv
            divides Hq. D has unit stride, and blocks follow each other: ``stride(0) == block_size * stride(1)``.
        v_cache: like k_cache, for the values.
        block_table: int32 or int64 [B, max_blocks], the cache blocks of each sequence in order.
        query_start_loc: int32 or int64 [B + 1]: the first query of each sequence, then the number of queries. Later
            rows of q are padding. A sequence may have no query.
        seq_lens: int32 or int64 [B]: the length of each sequence, its queries included.
        scale: factor of the scores, positive; default ``D ** -0.5``.
        out: optional result tensor: q's shape and dtype, contiguous, without memory shared with q or the caches.

    Returns:
        [T, Hq, D], q's dtype: `out`, or a new tensor; 0 in padding rows. Not differentiable. The call can be captured
        in a CUDA graph; replays may change lengths, starts and blocks, but not shapes.

    Raises:
        InputError: a shape, dtype, device or stride is invalid; or a start, length or block is out of range. On a GPU
            these values are checked only under ``ALIGNKIT_STRICT=1``, because reading them synchronizes. Unchecked, all
            results are NaN if query_start_loc does not begin with 0 or exceeds T; the results of a sequence are NaN if
            it is longer than its blocks or shorter than its queries; rows are undefined where query_start_loc
            decreases; and a block outside the cache is clamped to the first or last one.
    """
    checked = _check_paged(q, k_cache, v_cache, block_table, query_start_loc, seq_lens, scale, out)
    _paged(*checked)
    return checked[-1]


def _check_paged(q, k_cache, v_cache, block_table, query_start_loc, seq_lens, scale, out) -> tuple:
    """Check the arguments of `paged_attention` and return the arguments of `_paged`."""
    check_tensor("q", q, 3)
    check_tensor("k_cache", k_cache, 4)
    check_tensor("v_cache", v_cache, 4)
    scale = _check(q, k_cache, v_cache, scale, "k_cache", "v_cache")
    block_size = k_cache.shape[1]
    require(block_size > 0, "k_cache: block_size must be positive, got 0")
    starts = check_first_rows("query_start_loc", query_start_loc, "q", q, padded=True)
    seq_lens = check_ints("seq_lens", seq_lens, 1, "q", q)
    block_table = check_ints("block_table", block_table, 2, "q", q)
    batch = starts.numel() - 1
    require(
        seq_lens.shape[0] == batch, f"seq_lens: must have {batch} entries, one per sequence, got {seq_lens.shape[0]}"
    )
    require(
        block_table.shape[0] == batch,
        f"block_table: must have {batch} rows, one per sequence, got {block_table.shape[0]}",
    )
    if checks_values(seq_lens.device):
        check_pages(block_table, seq_lens, starts.diff(), block_size, k_cache.shape[0])
    if out is None:
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    else:
        check_tensor("out", out, 3)
        check_like("out", out, "q", q)
        require(out.shape == q.shape, f"out: shape must equal q's {tuple(q.shape)}, got {tuple(out.shape)}")
        require(out.is_contiguous(), f"out: must be contiguous, got strides {out.stride()}")
        check_no_overlap("out", out, {"q": q, "k_cache": k_cache, "v_cache": v_cache})
    return q, k_cache, v_cache, block_table, starts, seq_lens, scale, out


def _paged(q, k_cache, v_cache, block_table, starts, seq_lens, scale: float, out) -> Relaunch | None:
    """Compute `paged_attention` from the result of `_check_paged`; on a GPU, return the relaunch."""
    k, v = _rows_view("k_cache", k_cache), _rows_view("v_cache", v_cache)
    q, page = unit(q), k_cache.shape[1]
    kernel = _kernel("paged_attention", q, k, v, *block_table.shape[:1], page, *block_table.shape[1:])
    return kernel.paged(q, k, v, block_table, starts, seq_lens, page, scale, out)


class PagedAttention:
    """`paged_attention` for the layers of one engine step, which share their sequences.

    Decoding is host-bound, so the checks and launch parameters that depend on shapes and on the integer tensors are
    computed once per distinct problem and reused by all layers with the same shapes, strides, dtypes and scale.
    """

    def __init__(self, block_table: torch.Tensor, query_start_loc: torch.Tensor, seq_lens: torch.Tensor):
        self._integers = block_table, query_start_loc, seq_lens
        self._relaunches: dict[tuple, Relaunch] = {}

    def __call__(
        self, q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, scale: float, out: torch.Tensor
    ) -> None:
        """Write the result to `out`; arguments and errors are those of `paged_attention`.

        Only the first layer of a problem checks that `out` shares no memory with q and the caches.
        """
        if families.on_host(q.device):
            paged_attention(q, k_cache, v_cache, *self._integers, scale, out)
            return
        key = scale, *(operand(t) for t in (q, k_cache, v_cache, out))
        relaunch = self._relaunches.get(key)
        if relaunch is None:
            self._relaunches[key] = self._first(q, k_cache, v_cache, *self._integers, scale, out)
        else:
            relaunch(unit(q), k_cache, v_cache, out)

    @staticmethod
    @op
    def _first(*arguments) -> Relaunch:
        relaunch = _paged(*_check_paged(*arguments))
        assert relaunch is not None  # every GPU backend returns one
        return relaunch


def reserve(q: torch.Tensor, kv_heads: int, positions: int) -> None:
    """Allocate and free the largest workspace of `paged_attention`, for an engine that profiles its peak memory.

    Valid for at most as many queries as q [T, Hq, D], over kv_heads KV heads and sequences of up to `positions`.
    """
    if not families.on_host(q.device):
        from .cuda_backend import spill_bytes
        from .sharing import workspace

        # The maximum suffices: the decode workspace is freed before the prefill kernel allocates.
        size = max(4 * workspace(q, kv_heads, positions), spill_bytes(q.shape[2]))
        torch.empty(size, dtype=torch.uint8, device=q.device)


def _rows_view(name: str, cache: torch.Tensor) -> torch.Tensor:
    """View a cache [num_blocks, block_size, H, D] as [num_blocks * block_size, H, D]."""
    (blocks, size, *row), (block_stride, *strides) = cache.shape, cache.stride()
    if strides[-1] != 1:
        raise InputError(f"{name}: stride of head_dim must be 1, got {strides[-1]}")
    if blocks > 1 and block_stride != size * strides[0]:
        raise InputError(
            f"{name}: stride(0) must be block_size * stride(1) = {size} * {strides[0]} = {size * strides[0]}, "
            f"got {block_stride}"
        )
    return cache.as_strided((blocks * size, *row), strides)
