"""Matrix products of the contract: a chain per output, or a k-tree for row-parallel layers.

docs/contract.md, "Linear".
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
    """[M, N] = a [M, K] . b [N, K]^T, any strides; each output a chain over ascending k, or `leaves` such chains
    joined by the balanced tree; plus bias [N] in fp32; rounded to `out_dtype`. With `out` (fp32, unit stride in the
    last dim, one leaf) the chains continue from what `out` holds on a CPU, and are added to it on a GPU. With `to`, the
    result takes the place of what `to` holds, in its type. spare: multiprocessors that are left to what runs beside it, by a
    way that can."""
    accumulate = out is not None
    if out is None:
        out = to if to is not None else torch.empty(a.shape[0], b.shape[0], dtype=out_dtype, device=a.device)
    if out.numel():
        product(a, b, leaves, bias, out, accumulate, spare)
    return out


_launches: dict[Product, Callable] = {}


def product(
    a: torch.Tensor,
    b: torch.Tensor,
    leaves: int,
    bias: torch.Tensor | None,
    out: torch.Tensor,
    accumulate: bool,
    spare: int = 0,
) -> None:
    """out [M, N] <- a [M, K] . b [N, K]^T, as `matmul` says."""
    backend = dispatch.name(a.device)
    if (module := dispatch.sole("linear", backend)) is not None:
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
        ctx.save_for_backward(x, weight)  # gathered again in backward: only this rank's rows are kept
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
    """fp32 [N]: sum of x [M, N] over rows, a chain in row order; continues from `out` if given."""
    ones = torch.ones(1, x.shape[0], dtype=x.dtype, device=x.device)
    return matmul(ones, x.t(), out=None if out is None else out[None])[0]


def _gradients(x: torch.Tensor, weight: torch.Tensor) -> tuple[bool, bool]:
    """Of which of them the backward pass will ask for the gradient: the ranks' sums and gathers there follow from it."""
    return torch.is_grad_enabled() and x.requires_grad, torch.is_grad_enabled() and weight.requires_grad


def _check(x, weight, bias, tp, sequence_parallel, out_dtype, row):
    check_flag("sequence_parallel", sequence_parallel)
    check_weight(x, weight, bias, dtypes=WITH_FP16)
    require(
        out_dtype is None or (isinstance(out_dtype, torch.dtype) and out_dtype in (x.dtype, torch.float32)),
        f"out_dtype: {out_dtype} is neither x's {x.dtype} nor torch.float32",
    )
    require(not sequence_parallel or x.ndim >= 2, "x: sequence_parallel needs a sequence dimension in front")
    if row:
        k = x.shape[-1] * tp.size
        leaves = k_leaves(k)
        require(
            leaves % tp.size == 0,
            f"tp: {tp.size} ranks cannot share the {leaves} leaves that the contract cuts k = {k} into",
        )
        require(
            not sequence_parallel or x.shape[0] % tp.size == 0,
            f"x: dim 0 ({x.shape[0]}) does not divide among {tp.size} sequence-parallel ranks",
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
    """Column-parallel or replicated linear layer: ``y = x @ weight.T + bias``.

    Args:
        x: [..., K], fp32, bf16 or fp16. With `sequence_parallel`, this rank's slice [S / tp, ..., K] of dim 0.
        weight: [N, K], x's type; the output features of this rank.
        bias: [N] or None; added in fp32 before the one rounding.
        tp: ranks that hold the other output features; in backward the gradient of x is summed over them in fp32.
        sequence_parallel: gather x along dim 0 first; the gradient of x is scattered likewise.
        out_dtype: x's type (default), or torch.float32 for an unrounded result.

    Returns:
        [..., N] of `out_dtype`. Differentiable in x, weight and bias.

    Raises:
        InputError: shapes, types or devices do not fit; on all ranks of `tp` together.
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
    """Row-parallel linear layer: ``y = sum over ranks of x @ weight.T, + bias`` with the bits of a single rank.

    The global k is cut into `contract.k_leaves(k)` chains that are added by a balanced tree; a rank owns a subtree.

    Args:
        x: [..., K / tp], fp32, bf16 or fp16; this rank's slice of the input features.
        weight: [N, K / tp], x's type.
        bias: [N] or None, the same on every rank; added once, after the tree, in fp32.
        tp: the ranks that share k; their number must divide the number of leaves.
        sequence_parallel: return this rank's slice of dim 0 instead of the whole.
        out_dtype: as for `linear`.

    Returns:
        [..., N]. Differentiable in x, weight and bias.

    Raises:
        InputError: shapes, types or devices do not fit; on all ranks of `tp` together.
    """
    tp = check_tp(tp)
    tp.check_same("row_parallel_linear", lambda: _check(x, weight, bias, tp, sequence_parallel, out_dtype, True))
    leaves = k_leaves(x.shape[-1] * tp.size) // tp.size
    return _Linear.apply(x, weight, bias, tp, sequence_parallel and tp.size > 1, leaves, out_dtype or x.dtype)
