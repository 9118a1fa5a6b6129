"""Causal attention with grouped heads. docs/contract.md, "Attention".

Keys are visited in blocks of so many positions, and blocks belong to leaves, from position 0 of the sequence, so a query's
result depends on its own sequence up to its own position and on nothing else.
"""

from __future__ import annotations

from types import ModuleType

import torch

from ...errors import InputError
from ...runtime import dispatch, families
from ...runtime.operands import operand
from .._calls import differentiable_once, op
from .._common import check_apart, check_device, check_like, check_number, check_tensor, looks, require, unit
from .paging import check_pages
from .problem import Again, Attention

INTS = (torch.int32, torch.int64)


def _kernel(op: str, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *sizes: int) -> ModuleType:
    """What computes it; `sizes`: sequences, rows of a page, pages of a sequence."""
    backend = dispatch.name(q.device)
    return dispatch.sole(op, backend) or dispatch.choose(op, Attention.of(backend, q, k, v, *sizes)).load()


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
        q, k, v, *others = ctx.saved_tensors  # hooks on what is saved may have laid it out anew
        q, k, v = unit(q), unit(k), unit(v)
        starts, *others = (t.contiguous() for t in (*others, d_out))
        kernel = _kernel("attention_backward", q, k, v, starts.numel() - 1)
        grads = kernel.backward(q, k, v, starts, *others, ctx.scale)
        return *grads, None, None


def _check(q, k, v, scale, k_name: str = "k", v_name: str = "v") -> float:
    """The scale of q [T, Hq, D] and k, v [..., Hkv, D], which are of one shape and go together."""
    check_device("q", q)
    for name, t in ((k_name, k), (v_name, v)):
        check_like(name, t, "q", q)
    (q_heads, dim), (heads, k_dim) = q.shape[-2:], k.shape[-2:]
    require(k.shape == v.shape, f"{v_name}: shape {tuple(v.shape)} differs from {k_name}'s {tuple(k.shape)}")
    require(dim > 0 and q_heads > 0, f"q: no heads, or empty ones, shape {tuple(q.shape)}")
    require(dim == k_dim, f"{k_name}: head_dim {k_dim} differs from q's {dim}")
    require(heads > 0 and q_heads % heads == 0, f"{k_name}: {heads} heads do not divide q's {q_heads}")
    return dim**-0.5 if scale is None else check_number("scale", scale)


def _check_ints(name: str, t, ndim: int, q: torch.Tensor) -> torch.Tensor:
    """`t` as the backends take it: its last dimension is dense, and on the CPU it is int64."""
    check_tensor(name, t, ndim, INTS)
    require(t.device == q.device, f"{name}: device {t.device} differs from q's {q.device}")
    return unit(t.to(torch.int64) if families.on_host(t.device) else t)


def _check_starts(name: str, starts, q: torch.Tensor, padded: bool) -> torch.Tensor:
    """`padded`: rows of q may follow the last sequence."""
    starts = _check_ints(name, starts, 1, q)
    require(starts.numel() >= 1, f"{name}: must begin with 0")
    if looks(starts.device):
        last, rows = int(starts[-1]), q.shape[0]
        require(int(starts[0]) == 0, f"{name}: must begin with 0")
        require(bool((starts[1:] >= starts[:-1]).all()), f"{name}: must not decrease")
        require(last == rows or (padded and last < rows), f"{name}: ends at {last}, q has {rows} rows")
    return starts


@op
def attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cu_seqlens: torch.Tensor, scale: float | None = None
) -> torch.Tensor:
    """Causal self-attention over packed sequences, for training.

    Args:
        q: [T, Hq, D], fp32 or bf16.
        k, v: [T, Hkv, D], q's type; Hkv divides Hq.
        cu_seqlens: int [B + 1] on q's device, the first row of each sequence, then T. A padded micro-batch of
            B sequences of S rows is ``arange(B + 1) * S``: rows of padding after a sequence change nothing before. One
            that lies as [S, B, H, D] may stay so: it is one sequence of S rows and B times H heads.
        scale: factor of the scores; default ``D ** -0.5``.

    Returns:
        [T, Hq, D], q's type. Differentiable in q, k and v.

    Raises:
        InputError: shapes, types or devices do not fit; or cu_seqlens does not begin with 0, decreases or does not end
            at T. A GPU is not waited for to find the latter, unless ``ALIGNKIT_STRICT=1``: if cu_seqlens does not begin
            with 0 and end at T, all results and gradients are NaN; where it decreases, rows hold anything.
    """
    for name, t in (("q", q), ("k", k), ("v", v)):
        check_tensor(name, t, 3)
    scale = _check(q, k, v, scale)
    require(k.shape[0] == q.shape[0], f"k: {k.shape[0]} rows differ from q's {q.shape[0]}")
    starts = _check_starts("cu_seqlens", cu_seqlens, q, padded=False)
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
    """Causal attention of new queries over a paged cache, for rollout: prefill, chunked prefill and decode alike.

    Args:
        q: [T, Hq, D], fp32 or bf16; the queries of a sequence are its last positions.
        k_cache, v_cache: [num_blocks, block_size, Hkv, D], q's type; the keys of the queries are in them.
        block_table: int [B, max_blocks], the cache blocks of each sequence in order.
        query_start_loc: int [B + 1], the first query of each sequence, then their number. Rows of q from there on are
            padding, and a sequence may have no query.
        seq_lens: int [B], positions of each sequence, its queries included.
        scale: factor of the scores; default ``D ** -0.5``.
        out: where to write the result; contiguous.

    Returns:
        [T, Hq, D], q's type; zeros for padding. Not differentiable. It may be captured in a CUDA graph: later lengths,
        starts and blocks may be others, the shapes not.

    Raises:
        InputError: shapes, types or devices do not fit; or a start, length or block is out of range. A GPU is not
            waited for to find the latter, unless ``ALIGNKIT_STRICT=1``. NaN are then all results if query_start_loc
            does not begin with 0 or ends beyond T, and those of a sequence that is longer than its blocks or shorter
            than its queries. Where query_start_loc decreases, rows hold anything; a block outside the cache is taken
            for its first or last.
    """
    checked = _check_paged(q, k_cache, v_cache, block_table, query_start_loc, seq_lens, scale, out)
    _paged(*checked)
    return checked[-1]


def _check_paged(q, k_cache, v_cache, block_table, query_start_loc, seq_lens, scale, out) -> tuple:
    """Arguments of `_paged` from those of `paged_attention`."""
    check_tensor("q", q, 3)
    check_tensor("k_cache", k_cache, 4)
    check_tensor("v_cache", v_cache, 4)
    scale = _check(q, k_cache, v_cache, scale, "k_cache", "v_cache")
    block_size = k_cache.shape[1]
    require(block_size > 0, "k_cache: block_size is 0")
    starts = _check_starts("query_start_loc", query_start_loc, q, padded=True)
    seq_lens, block_table = _check_ints("seq_lens", seq_lens, 1, q), _check_ints("block_table", block_table, 2, q)
    batch = starts.numel() - 1
    require(seq_lens.shape[0] == batch, f"seq_lens: {seq_lens.shape[0]} entries for {batch} sequences")
    require(block_table.shape[0] == batch, f"block_table: {block_table.shape[0]} rows for {batch} sequences")
    if looks(seq_lens.device):
        check_pages(block_table, seq_lens, starts.diff(), block_size, k_cache.shape[0])
    if out is None:
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    else:
        check_tensor("out", out, 3)
        check_like("out", out, "q", q)
        require(out.shape == q.shape and out.is_contiguous(), "out: not contiguous or not of q's shape")
        check_apart("out", out, {"q": q, "k_cache": k_cache, "v_cache": v_cache})
    return q, k_cache, v_cache, block_table, starts, seq_lens, scale, out


def _paged(q, k_cache, v_cache, block_table, starts, seq_lens, scale: float, out) -> Again | None:
    """`paged_attention` of what `_check_paged` gives: the integers dense in their last dim, and int64 on the CPU. On a GPU, what
    does it again."""
    k, v = _rows_view("k_cache", k_cache), _rows_view("v_cache", v_cache)
    q, page = unit(q), k_cache.shape[1]
    kernel = _kernel("paged_attention", q, k, v, *block_table.shape[:1], page, *block_table.shape[1:])
    return kernel.paged(q, k, v, block_table, starts, seq_lens, page, scale, out)


class PagedAttention:
    """`paged_attention` of the same sequences by one layer after the other, as in an engine's step. What follows from the integers
    and from shapes is found out once for all layers that are alike: between two of them a GPU waits for the host.

    The integers are looked at once for such layers.
    """

    def __init__(self, block_table: torch.Tensor, query_start_loc: torch.Tensor, seq_lens: torch.Tensor):
        self._integers = block_table, query_start_loc, seq_lens
        self._again: dict[tuple, Again] = {}

    def __call__(
        self, q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, scale: float, out: torch.Tensor
    ) -> None:
        """`out` gets the result. Arguments and errors are those of `paged_attention`; that `out` shares no memory with the
        others is asked of the first layer alone."""
        if families.on_host(q.device):
            paged_attention(q, k_cache, v_cache, *self._integers, scale, out)
            return
        like = scale, *(operand(t) for t in (q, k_cache, v_cache, out))
        again = self._again.get(like)
        if again is None:
            self._again[like] = self._first(q, k_cache, v_cache, *self._integers, scale, out)
        else:
            again(unit(q), k_cache, v_cache, out)

    @staticmethod
    @op
    def _first(*arguments) -> Again:
        again = _paged(*_check_paged(*arguments))
        assert again is not None  # of a GPU
        return again


def reserve(q: torch.Tensor, kv_heads: int, positions: int) -> None:
    """Takes the memory that `paged_attention` needs beside its arguments, at most, for no more queries than q's over `kv_heads`
    heads of keys and sequences of up to `positions`, and gives it back: for an engine that finds out by a trial how much a step
    takes. q: [T, Hq, D]."""
    if not families.on_host(q.device):
        from .cuda import joined_bytes
        from .sharing import workspace

        # One after the other: the former is free again when the latter is taken.
        most = max(4 * workspace(q, kv_heads, positions), joined_bytes(q.shape[2]))
        torch.empty(most, dtype=torch.uint8, device=q.device)


def _rows_view(name: str, cache: torch.Tensor) -> torch.Tensor:
    """[num_blocks, block_size, H, D] as [rows, H, D] without a copy."""
    (blocks, size, *row), (block_stride, *strides) = cache.shape, cache.stride()
    if strides[-1] != 1 or (blocks > 1 and block_stride != size * strides[0]):
        raise InputError(f"{name}: strides {cache.stride()} cannot be viewed as rows")
    return cache.as_strided((blocks * size, *row), strides)
