"""Linear layers of the contract: one chain per output, or a k-tree for row-parallel layers.

Contract: docs/contract.md, "Linear". Public: `linear` and `row_parallel_linear` (docs/api/ops.md). Other ops call
`matmul`, `matmul_into` and `row_sum`.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from ...contract import k_leaves
from ...dist import TP
from ...runtime import dispatch
from .._calls import differentiable_once, op
from .._common import WITH_FP16, check_flag, check_tp, check_weight, require, rounded
from .problem import Product


def matmul(
    a: torch.Tensor,
    b: torch.Tensor,
    *,
    leaves: int = 1,
    bias: torch.Tensor | None = None,
    out_dtype: torch.dtype = torch.float32,
    out: torch.Tensor | None = None,
    to: torch.Tensor | None = None,
    spare: int = 0,
) -> torch.Tensor:
    """Return a . b^T in the contract's order, plus a bias, rounded once.

    Args:
        a: [M, K], any strides.
        b: [N, K], any strides.
        leaves: Chains over ascending k per output; their sums are added by the balanced tree.
        bias: [N] or None; added in fp32.
        out_dtype: Result dtype, if neither `out` nor `to` is given.
        out: fp32 [M, N] to accumulate into, unit column stride, one leaf. The chains continue from its values on a
            CPU and are added to it on a GPU.
        to: [M, N] to overwrite with the result, in its own dtype.
        spare: SMs to leave to concurrent kernels, for kernels that support it.

    Returns:
        [M, N]: `out`, `to`, or a new tensor. Not differentiable.
    """
    accumulate = out is not None
    if out is None:
        out = to if to is not None else torch.empty(a.shape[0], b.shape[0], dtype=out_dtype, device=a.device)
    if out.numel():
        matmul_into(a, b, leaves, bias, out, accumulate, spare)
    return out


_launches: dict[Product, Callable] = {}
"""Cached launchers by problem."""


def matmul_into(
    a: torch.Tensor,
    b: torch.Tensor,
    leaves: int,
    bias: torch.Tensor | None,
    out: torch.Tensor,
    accumulate: bool,
    spare: int = 0,
) -> None:
    """Compute out [M, N] = a [M, K] . b [N, K]^T; see `matmul`."""
    backend = dispatch.backend_of(a.device)
    if (module := dispatch.static_kernel("linear", backend)) is not None:
        module.matmul(a, b, leaves, bias, out, accumulate)
        return
    p = Product.of(backend, a, b, leaves, bias, out, accumulate, spare)
    launch = _launches.get(p)
    if launch is None:
        launch = dispatch.prepare("linear", p, _launches)
    launch(a, b, bias, out)


@differentiable_once("linear")
class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, bias, tp, sequence_parallel, row_leaves, out_dtype):
        gather = sequence_parallel and not row_leaves
        full = tp.gather(x) if gather else x
        x2 = full.reshape(-1, full.shape[-1])
        if row_leaves and tp.size > 1:
            y = tp.sum_products(
                lambda rows, to, spare: matmul(x2[rows], weight, leaves=row_leaves, to=to, spare=spare),
                len(x2),
                len(weight),
                x.device,
                bias=bias,
                dtype=out_dtype,
                scatter=sequence_parallel,
            )
        else:
            y = matmul(x2, weight, leaves=row_leaves or 1, bias=bias, out_dtype=out_dtype)
        ctx.save_for_backward(x, weight)  # saves this rank's rows only; backward gathers again
        ctx.op = "row_parallel_linear" if row_leaves else "linear"
        ctx.args = (bias is not None, tp, sequence_parallel, bool(row_leaves))
        shape = [*full.shape[:-1], weight.shape[0]]
        if sequence_parallel and row_leaves:
            shape[0] //= tp.size
        return y.reshape(shape)

    @staticmethod
    def backward(ctx, dy):
        x, weight = ctx.saved_tensors
        has_bias, tp, sequence_parallel, row = ctx.args
        if sequence_parallel and row:
            dy = tp.gather(dy)
        dy = dy.reshape(-1, dy.shape[-1])
        dx = dw = db = None
        full = None
        if ctx.needs_input_grad[1]:
            full = tp.begin_gather(x) if sequence_parallel and not row else lambda: x
        if ctx.needs_input_grad[0]:
            if row or tp.size == 1:
                dx = matmul(dy, weight.t(), out_dtype=x.dtype)
            else:
                dx = tp.sum_products(
                    lambda rows, to, spare: matmul(dy[rows], weight.t(), to=to, spare=spare),
                    len(dy),
                    weight.shape[1],
                    dy.device,
                    dtype=x.dtype,
                    scatter=sequence_parallel,
                )
            dx = dx.reshape(x.shape)
        if full is not None:
            x2 = full().reshape(-1, x.shape[-1])
            dw = matmul(dy.t(), x2.t(), out_dtype=weight.dtype)
        if has_bias and ctx.needs_input_grad[2]:
            db = rounded(row_sum(dy), weight.dtype)
        return dx, dw, db, None, None, None, None


def row_sum(x: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
    """Return the sum of x [M, N] over rows, fp32 [N], a chain in row order; accumulate into `out` if given."""
    ones = torch.ones(1, x.shape[0], dtype=x.dtype, device=x.device)
    return matmul(ones, x.t(), out=None if out is None else out[None])[0]


def _gradients(x: torch.Tensor, weight: torch.Tensor) -> tuple[bool, bool]:
    """Return whether x and weight need gradients; the collectives of the backward pass depend on it."""
    return torch.is_grad_enabled() and x.requires_grad, torch.is_grad_enabled() and weight.requires_grad


def _check(x, weight, bias, tp, sequence_parallel, out_dtype, row):
    check_flag("sequence_parallel", sequence_parallel)
    check_weight(x, weight, bias, dtypes=WITH_FP16)
    require(
        out_dtype is None or (isinstance(out_dtype, torch.dtype) and out_dtype in (x.dtype, torch.float32)),
        f"out_dtype: must be None, x's {x.dtype} or torch.float32, got {out_dtype!r:.200}",
    )
    require(
        not sequence_parallel or x.ndim >= 2,
        f"x: must have at least 2 dimensions with sequence_parallel, got shape {tuple(x.shape)}",
    )
    if row:
        k = x.shape[-1] * tp.size
        leaves = k_leaves(k)
        require(
            leaves % tp.size == 0,
            f"tp: number of ranks must divide alignkit.contract.k_leaves({k}) = {leaves}, got {tp.size}",
        )
        require(
            not sequence_parallel or x.shape[0] % tp.size == 0,
            f"x: dim 0 must be a multiple of tp.size = {tp.size} with sequence_parallel, got {x.shape[0]}",
        )
    meta = {
        "x": (tuple(x.shape), str(x.dtype)),
        "sequence_parallel": sequence_parallel,
        "bias": bias is not None,
        "out_dtype": str(out_dtype),
        "requires_grad": _gradients(x, weight),
    }
    return meta | ({"weight": tuple(weight.shape)} if row else {"weight": weight.shape[1]})


@op
def linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    tp: TP | None = None,
    sequence_parallel: bool = False,
    out_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """Compute a column-parallel or replicated linear layer: ``y = x @ weight.T + bias``.

    Each output is one chain over ascending k, so its bits do not depend on the number of rows or ranks.

    Args:
        x: [..., K], fp32, bf16 or fp16, any strides. With `sequence_parallel`, this rank's slice [S / tp, ..., K].
        weight: [N, K], x's dtype, any strides; the output features of this rank.
        bias: [N] of x's dtype, or None; added in fp32 before the single rounding.
        tp: Ranks that hold the other output features. The forward pass does not communicate, except to gather x with
            `sequence_parallel`. The backward pass sums x's gradient over them: fp32, balanced tree of rank order.
        sequence_parallel: All-gather x along dim 0 first; reduce-scatter x's gradient.
        out_dtype: x's dtype (default), or torch.float32 for an unrounded result.

    Returns:
        [..., N] of `out_dtype`, contiguous; S rows in dim 0 with `sequence_parallel`. Differentiable once in x, weight
        and bias, with gradients of their dtypes. The gradients of weight and bias have the same bits at every size of
        `tp`; x's gradient depends on the size.

    Raises:
        InputError: shapes, dtypes or devices do not match, or arguments differ between the ranks; on all ranks of `tp`,
            before anything is computed.
        UnsupportedError: a torch mode or transform without real tensors is active; double backward.
        BackendError: no backend for the device, or another rank of `tp` died.
    """
    tp = check_tp(tp)
    tp.check_same("linear", lambda: _check(x, weight, bias, tp, sequence_parallel, out_dtype, False))
    return _Linear.apply(x, weight, bias, tp, sequence_parallel and tp.size > 1, 0, out_dtype or x.dtype)


@op
def row_parallel_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    tp: TP | None = None,
    sequence_parallel: bool = False,
    out_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """Compute a row-parallel linear layer, ``y = sum over ranks of x @ weight.T, + bias``, with the bits of one rank.

    The global k is cut into `contract.k_leaves(k)` chains, which the balanced tree adds; each rank owns a subtree. The
    ranks exchange fp32 subtree sums.

    Args:
        x: [..., K / tp], fp32, bf16 or fp16, any strides; this rank's slice of the input features.
        weight: [N, K / tp], x's dtype, any strides.
        bias: [N] of x's dtype, or None; the same on every rank. Added once, after the tree, in fp32.
        tp: Ranks that share k; their number must divide the number of leaves. The forward pass sums over them.
        sequence_parallel: Reduce-scatter: return this rank's slice of dim 0, which the number of ranks must divide.
            The backward pass all-gathers the incoming gradient.
        out_dtype: x's dtype (default), or torch.float32 for an unrounded result.

    Returns:
        [..., N] of `out_dtype`, contiguous; [S / tp, ..., N] with `sequence_parallel`. Differentiable once in x, weight
        and bias, with gradients of their dtypes and the same bits at every size of `tp`.

    Raises:
        InputError: shapes, dtypes or devices do not match, `tp` does not divide the leaves, or arguments differ between
            the ranks; on all ranks of `tp`, before anything is computed.
        UnsupportedError: a torch mode or transform without real tensors is active; double backward.
        BackendError: no backend for the device, or another rank of `tp` died.
    """
    tp = check_tp(tp)
    tp.check_same("row_parallel_linear", lambda: _check(x, weight, bias, tp, sequence_parallel, out_dtype, True))
    leaves = k_leaves(x.shape[-1] * tp.size) // tp.size
    return _Linear.apply(x, weight, bias, tp, sequence_parallel and tp.size > 1, leaves, out_dtype or x.dtype)
