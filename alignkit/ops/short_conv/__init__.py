"""Causal convolution over the last tokens of a sequence, one filter per channel, then SiLU.

Contract: docs/contract.md, "Gated DeltaNet".
Public: `short_conv` and `paged_short_conv` (docs/api/ops.md).
"""

from __future__ import annotations

import torch

from ...runtime import dispatch
from .._calls import differentiable_once, op
from .._common import as_rows, check_device, check_like, check_no_overlap, check_tensor, require, rounded, unit
from .._sequences import check_cached, check_first_rows

MOST_TAPS = 8
"""schedule: longest filter that the tests cover; the kernels have no limit."""


@differentiable_once("short_conv")
class _ShortConv(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, starts):
        ctx.save_for_backward(x, weight, starts)
        return dispatch.select("short_conv", x.device).forward(as_rows(x), weight.contiguous(), starts)

    @staticmethod
    def backward(ctx, dy):
        x, weight, starts = ctx.saved_tensors
        kernel = dispatch.select("short_conv", dy.device)
        dx, dw = kernel.backward(dy.contiguous(), as_rows(x), weight.contiguous(), starts.contiguous())
        return dx, rounded(dw, weight.dtype), None


def _check(x, weight) -> None:
    check_tensor("x", x, 2)
    check_device("x", x)
    check_tensor("weight", weight, 2)
    check_like("weight", weight, "x", x)
    require(
        weight.shape[0] == x.shape[1] and 1 <= weight.shape[1] <= MOST_TAPS,
        f"weight: shape must be ({x.shape[1]}, taps) to match x, with 1 to {MOST_TAPS} taps, got {tuple(weight.shape)}",
    )
    require(x.shape[1] > 0, f"x: number of channels must be at least 1, got shape {tuple(x.shape)}")


@op
def short_conv(x: torch.Tensor, weight: torch.Tensor, cu_seqlens: torch.Tensor) -> torch.Tensor:
    """Compute ``silu(sum over j of weight[:, j] * x[t - taps + 1 + j])`` over packed sequences, with one rounding.

    Args:
        x: [T, C], fp32 or bf16: tokens and channels. Rows may be part of a wider tensor's.
        weight: [C, taps], x's dtype and device; 1 to 8 taps, the oldest token's first.
        cu_seqlens: int32 or int64 [B + 1] on x's device: the first row of each sequence, then T. Tokens before a
            sequence count as 0.

    Returns:
        [T, C], x's dtype. Differentiable once in x and weight.

    Raises:
        InputError: a shape, dtype or device is invalid; or cu_seqlens does not begin with 0, decreases or does not end
            at T. On a GPU the values of cu_seqlens are checked only under ``ALIGNKIT_STRICT=1``, because reading them
            synchronizes. Unchecked, wrong values give undefined rows.
        UnsupportedError: a gradient is differentiated again.
    """
    _check(x, weight)
    return _ShortConv.apply(x, weight, check_first_rows("cu_seqlens", cu_seqlens, "x", x, padded=False))


@op
def paged_short_conv(
    x: torch.Tensor,
    weight: torch.Tensor,
    state: torch.Tensor,
    slots: torch.Tensor,
    query_start_loc: torch.Tensor,
    seq_lens: torch.Tensor,
) -> torch.Tensor:
    """Compute `short_conv` of the new tokens of sequences whose last tokens are cached, and update the cache.

    Args:
        x: [T, C], fp32 or bf16: the new tokens of all sequences. Rows after the last sequence are padding.
        weight: [C, taps], x's dtype and device; 1 to 8 taps.
        state: [N, taps - 1, C], x's dtype and device, C with unit stride: the last rows of x of the sequence in each
            slot, the newest last. Written in place, for sequences with new tokens.
        slots: int32 or int64 [B] on x's device: the slot of each sequence, in [0, N) and distinct.
        query_start_loc: int32 or int64 [B + 1]: the first new row of each sequence, then their number.
        seq_lens: int32 or int64 [B]: the number of tokens of each sequence, the new ones included. Nothing is read from
            the slot of a sequence that begins with its new tokens.

    Returns:
        [T, C], x's dtype; 0 in padding rows. Without gradients.

    Raises:
        InputError: a shape, dtype or device is invalid, or state shares memory with another argument; or, on a CPU or
            under ``ALIGNKIT_STRICT=1``, values of slots, query_start_loc or seq_lens are invalid. Unchecked, rows of
            such sequences are undefined.
    """
    _check(x, weight)
    check_tensor("state", state, 3)
    check_like("state", state, "x", x)
    taps, channels = weight.shape[1], x.shape[1]
    require(
        tuple(state.shape[1:]) == (taps - 1, channels) and (state.stride(2) == 1 or not state.numel()),
        f"state: shape must be (N, {taps - 1}, {channels}) with unit stride in the last dimension, got "
        f"{tuple(state.shape)} with strides {state.stride()}",
    )
    check_no_overlap("state", state, {"x": x, "weight": weight})
    slots, starts, lens = check_cached(slots, query_start_loc, seq_lens, state.shape[0], "x", x)
    return dispatch.select("paged_short_conv", x.device).paged(unit(x), weight.contiguous(), state, slots, starts, lens)
