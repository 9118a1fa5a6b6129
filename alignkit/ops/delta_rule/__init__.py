"""The gated delta rule, forward, in chunks of 16 tokens at absolute positions of the sequence.

Contract: docs/contract.md, "Gated delta rule".

A token's result depends on its sequence up to that token alone. Decode, prefill with any borders and training evaluate
the same formula, because the page of a sequence holds the rows of its open chunk (layout.py).

Public: `delta_rule`, `paged_delta_rule` and `delta_page_words` (docs/api/ops.md).
"""

from __future__ import annotations

import torch

from ...runtime import dispatch
from .._calls import op
from .._common import (
    DTYPES,
    check_constant,
    check_device,
    check_int,
    check_like,
    check_no_overlap,
    check_number,
    check_same_device,
    check_tensor,
    require,
)
from .._sequences import check_cached, check_first_rows
from .layout import sizes


def delta_page_words(k_dim: int, v_dim: int, dtype: torch.dtype) -> int:
    """Return the fp32 words that a page of `paged_delta_rule` has per v head.

    Args:
        k_dim: Dimension of the heads of k, at least 1.
        v_dim: Dimension of the heads of v, at least 1.
        dtype: Model type, torch.float32 or torch.bfloat16.

    Raises:
        InputError: a dimension or the dtype is invalid.
    """
    require(dtype in DTYPES, f"dtype: must be one of {', '.join(map(str, DTYPES))}, got {dtype}")
    return sum(sizes(check_int("k_dim", k_dim, 1), check_int("v_dim", v_dim, 1), dtype))


def _check(q, k, v, g, beta, scale: float | None) -> float:
    """Check the rows of sequences; return the scale of q."""
    for name, t in (("q", q), ("k", k), ("v", v)):
        check_tensor(name, t, 3)
        check_constant(name, t)
        if name != "q":
            check_like(name, t, "q", q)
    check_device("q", q)
    (rows, key_heads, k_dim), (v_rows, heads, v_dim) = q.shape, v.shape
    require(k.shape == q.shape, f"k: shape must equal q's {tuple(q.shape)}, got {tuple(k.shape)}")
    require(v_rows == rows, f"v: number of rows must equal q's {rows}, got {v_rows}")
    require(key_heads > 0 and k_dim > 0, f"q: number of heads and head_dim must be at least 1, got {tuple(q.shape)}")
    require(
        heads > 0 and v_dim > 0 and heads % key_heads == 0,
        f"v: number of heads must be a multiple of q's {key_heads}, and head_dim at least 1, got {tuple(v.shape)}",
    )
    for name, t in (("g", g), ("beta", beta)):
        check_tensor(name, t, 2, (torch.float32,))
        check_constant(name, t)
        check_same_device(name, t, "q", q)
        require(tuple(t.shape) == (rows, heads), f"{name}: shape must be {(rows, heads)}, got {tuple(t.shape)}")
    return k_dim**-0.5 if scale is None else check_number("scale", scale)


@op
def delta_rule(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    cu_seqlens: torch.Tensor,
    scale: float | None = None,
) -> torch.Tensor:
    """Compute the gated delta rule over packed sequences.

    ``S = exp(g) S;  u = beta (v - S^T k);  S = S + k u^T;  o = scale S^T q``, for each token and v head.

    Args:
        q: [T, H, K], fp32 or bf16, normalized (`l2_norm`).
        k: q's shape, dtype and device, normalized.
        v: [T, HV, V], q's dtype and device. H divides HV; v head h uses head h // (HV / H) of q and k.
        g: fp32 [T, HV]: logarithms of the decays, at most 0 (`delta_gates`).
        beta: fp32 [T, HV].
        cu_seqlens: int32 or int64 [B + 1] on q's device: the first row of each sequence, then T.
        scale: factor of q, positive; default ``K ** -0.5``.

    Returns:
        o [T, HV, V], q's dtype. Without gradients.

    Raises:
        InputError: a shape, dtype or device is invalid, an argument requires a gradient, or cu_seqlens does not begin
            with 0, decreases or does not end at T. On a GPU the values of cu_seqlens are checked only under
            ``ALIGNKIT_STRICT=1``, because reading them synchronizes. Unchecked, wrong values give undefined rows.
    """
    scale = _check(q, k, v, g, beta, scale)
    starts = check_first_rows("cu_seqlens", cu_seqlens, "q", q, padded=False)
    rows = (t.detach().contiguous() for t in (q, k, v, g, beta))
    return dispatch.select("delta_rule", q.device).forward(*rows, starts, scale)


@op
def paged_delta_rule(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    pages: torch.Tensor,
    slots: torch.Tensor,
    query_start_loc: torch.Tensor,
    seq_lens: torch.Tensor,
    scale: float | None = None,
) -> torch.Tensor:
    """Compute `delta_rule` of the new tokens of sequences whose state is cached, and update the cache.

    Args:
        q: [T, H, K], fp32 or bf16: the new tokens of all sequences. Rows after the last sequence are padding.
        k: q's shape, dtype and device.
        v: [T, HV, V], q's dtype and device.
        g: fp32 [T, HV].
        beta: fp32 [T, HV].
        pages: fp32 [N, HV, W] with W = `delta_page_words` (K, V, dtype), heads and words contiguous: the states.
            Written in place, for sequences with new tokens.
        slots: int32 or int64 [B]: the page of each sequence, in [0, N) and distinct.
        query_start_loc: int32 or int64 [B + 1]: the first new row of each sequence, then their number.
        seq_lens: int32 or int64 [B]: the number of tokens of each sequence, the new ones included. Nothing is read from
            the page of a sequence that begins with its new tokens.
        scale: factor of q, positive; default ``K ** -0.5``.

    Returns:
        o [T, HV, V], q's dtype; 0 in padding rows. Without gradients.

    Raises:
        InputError: a shape, dtype or device is invalid, an argument requires a gradient, or pages share memory with
            another argument; or, on a CPU or under ``ALIGNKIT_STRICT=1``, values of slots, query_start_loc or seq_lens
            are invalid. Unchecked, rows of such sequences are undefined.
    """
    scale = _check(q, k, v, g, beta, scale)
    heads = v.shape[1]
    check_tensor("pages", pages, 3, (torch.float32,))
    check_same_device("pages", pages, "q", q)
    size = sum(sizes(k.shape[2], v.shape[2], v.dtype))
    require(
        tuple(pages.shape[1:]) == (heads, size) and (not pages.numel() or pages.stride()[1:] == (size, 1)),
        f"pages: shape must be (N, {heads}, {size}) with contiguous heads, got {tuple(pages.shape)} with strides "
        f"{pages.stride()}",
    )
    check_no_overlap("pages", pages, {"q": q, "k": k, "v": v, "g": g, "beta": beta})
    slots, starts, lens = check_cached(slots, query_start_loc, seq_lens, pages.shape[0], "q", q)
    rows = (t.detach().contiguous() for t in (q, k, v, g, beta))
    return dispatch.select("paged_delta_rule", q.device).paged(*rows, pages, slots, starts, lens, scale)
