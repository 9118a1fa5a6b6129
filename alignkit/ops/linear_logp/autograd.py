"""Autograd functions of `linear_logp` and `logp_from_logits`; statistics.py computes their forward passes.

The order of sums is the contract's (docs/contract.md, "Log-softmax over the vocabulary", and for GPUs "On Hopper
GPUs"). Row blocks of the backward pass are contract on a GPU: the gradients of weight and bias have one chain per
`Family.head_rows` = 8192 rows. On a CPU their chains continue across row blocks, so the blocks are free.

Column blocks are free, and so are the blocks of the forward pass. `blocks.even` keeps column widths at multiples of
256, so that no block splits a chain's step of 16 ids.
"""

from __future__ import annotations

import torch

from ...runtime import dispatch
from ...runtime.families import on_host
from .._calls import differentiable_once
from .._common import check_no_overlap, round_into
from ..linear import row_sum
from .blocks import cuts, part_of
from .source import GivenLogits, head_logits_of
from .statistics import statistics_of


def _remaining(ignored: torch.Tensor) -> torch.Tensor:
    """Return the indices of the rows that are not ignored, ascending; on a GPU the ignored rows' indices follow.

    On a GPU only the device knows the number of rows (`_count`); a shorter result would need a synchronization.
    """
    if on_host(ignored.device):
        return (~ignored).nonzero()[:, 0]
    return torch.argsort(ignored, stable=True)


def _count(target: torch.Tensor) -> torch.Tensor | None:
    """Return the number of rows that are not ignored, on the device; None on a CPU, where all given rows count."""
    return None if on_host(target.device) else (target >= 0).sum(dtype=torch.int32)


def _gather(values: torch.Tensor | None, order: torch.Tensor | None) -> torch.Tensor | None:
    return values if values is None or order is None else values.index_select(0, order)


def _scatter(values: torch.Tensor | None, order: torch.Tensor | None, shape: torch.Size) -> torch.Tensor | None:
    """Scatter values of the rows `order` to a tensor of `shape`, zeros elsewhere."""
    if values is None:
        return None
    if order is not None:
        values = values.new_zeros(shape.numel()).index_copy_(0, order, values)
    return values.view(shape)


def _flat(grad: torch.Tensor | None) -> torch.Tensor | None:
    return None if grad is None else grad.reshape(-1)


@differentiable_once("linear_logp")
class LinearLogp(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx,
        hidden,
        weight,
        bias,
        target,
        temperature,
        ignore_index,
        soft_cap,
        logit_scale,
        shards,
        tp,
        entropy,
        keep,
        main_grad,
        workspace,
        shape,
    ):
        ignored = target == ignore_index
        order = _remaining(ignored)
        target, temperature = target.masked_fill(ignored, -1).index_select(0, order), _gather(temperature, order)
        kept = None
        if keep:
            columns = shards.columns(tp.rank)
            kept = torch.empty(len(target), columns + -columns % 4, dtype=torch.float32, device=hidden.device)[
                :, :columns
            ]
        count = _count(target)
        source = head_logits_of(
            _ordered(hidden, order, target), weight, bias, soft_cap, logit_scale, count, kept, workspace=workspace
        )
        logp, lse, ent = statistics_of(source, target, temperature, shards, tp, entropy)
        ctx.save_for_backward(hidden, weight, bias, order, target, temperature, lse, ent, kept, count)
        ctx.args = (soft_cap, logit_scale, shards, tp, workspace)
        ctx.main_grad = main_grad  # not a saved tensor: every backward pass modifies it in place
        return _scatter(logp, order, shape), _scatter(ent, order, shape)

    @staticmethod
    def backward(ctx, g_logp, g_ent):
        hidden, weight, bias, order, target, temperature, lse, ent, kept, count = ctx.saved_tensors
        soft_cap, logit_scale, shards, tp, workspace = ctx.args
        need_h, need_w, need_b = ctx.needs_input_grad[:3]
        main = ctx.main_grad
        if main is not None:
            check_no_overlap("main_grad", main, {"the gradient of logp": g_logp, "the gradient of entropy": g_ent})
        # The gathered rows share the memory of the result: hidden's gradient.
        gathered = torch.empty(hidden.shape, dtype=hidden.dtype, device=hidden.device)
        source = head_logits_of(
            _ordered(hidden, order, target, gathered),
            weight,
            bias,
            soft_cap,
            logit_scale,
            count,
            kept,
            kept is not None,
            workspace,
        )
        per_row = (
            temperature,
            target,
            lse,
            ent,
            _gather(_flat(g_logp), order),
            None if ent is None else _gather(_flat(g_ent), order),
        )
        height, width = source.slabs(len(order), max(shards.sizes), need_w and main is None)
        blocks = cuts(0, len(order), height)
        used, start = shards.columns(tp.rank) if blocks else 0, shards.starts[tp.rank]
        dh = torch.empty(source.hidden.shape, dtype=torch.float32, device=hidden.device) if need_h else None
        dw, db = (
            torch.empty(t.shape, dtype=t.dtype, device=t.device) if need else None
            for t, need in ((weight, need_w and main is None), (bias, need_b))
        )
        if need_h and not used:
            dh.zero_()
        highest = max((part.stop - part.start for part in blocks), default=0)
        summed = dw is not None and len(blocks) > 1
        for columns, memory, sums in source.places(highest, used, width, dw, summed):
            db_sum, dw_sum = None, sums
            if main is not None:
                dw_sum = main[columns]
            elif dw is not None and not summed:  # a single chain, rounded directly
                dw_sum = dw[columns]
            for rows in blocks:
                dz = source.gradient(rows, columns, start + columns.start, per_row, memory)
                source.products_of(
                    dz,
                    rows,
                    columns,
                    None if dh is None else dh[rows],
                    dw_sum,
                    columns.start > 0,
                    main is not None or rows.start > 0,
                )
                if need_b:
                    db_sum = row_sum(dz, out=db_sum)
            if summed:
                round_into(dw[columns], dw_sum)  # pyright: ignore[reportOptionalSubscript, reportArgumentType]
            if need_b:
                round_into(db[columns], db_sum)  # pyright: ignore[reportArgumentType] - `blocks` is nonempty
        for grad in (dw, db):
            if grad is not None:
                grad[used:].zero_()
        return _scattered(tp.tree_sum(dh), order, target, gathered) if need_h else None, dw, db, *[None] * 12


def _ordered(
    hidden: torch.Tensor, order: torch.Tensor, target: torch.Tensor, to: torch.Tensor | None = None
) -> torch.Tensor:
    """Return the rows in `order`, in the memory of `to` if given; ignored rows become zeros."""
    to = torch.empty(hidden.shape, dtype=hidden.dtype, device=hidden.device) if to is None else to
    to = to[: len(order)]
    dispatch.select("linear_logp", hidden.device).gather_rows(hidden, order, target, to)
    return to


def _scattered(sums: torch.Tensor, order: torch.Tensor, target: torch.Tensor, to: torch.Tensor) -> torch.Tensor:
    """Scatter the fp32 rows `order` to `to` [N, D], rounded, zeros elsewhere; return `to`."""
    dispatch.select("linear_logp", to.device).scatter_rows(sums, order, target, to)
    return to


@differentiable_once("logp_from_logits")
class LogitsLogp(torch.autograd.Function):
    @staticmethod
    def forward(ctx, logits, target, temperature, ignore_index, shards, tp, entropy, shape):
        # On a GPU rows are not reordered: this op sums nothing over rows.
        ignored = target == ignore_index
        order = _remaining(ignored) if on_host(target.device) else None
        target, temperature = _gather(target.masked_fill(ignored, -1), order), _gather(temperature, order)
        logp, lse, ent = statistics_of(GivenLogits(logits, order), target, temperature, shards, tp, entropy)
        ctx.save_for_backward(logits, order, target, temperature, lse, ent)
        ctx.args = (shards, tp)
        return _scatter(logp, order, shape), _scatter(ent, order, shape)

    @staticmethod
    def backward(ctx, g_logp, g_ent):
        logits, order, target, temperature, lse, ent = ctx.saved_tensors
        shards, tp = ctx.args
        source, columns = GivenLogits(logits, order), slice(0, shards.columns(tp.rank))
        per_row = (
            temperature,
            target,
            lse,
            ent,
            _gather(_flat(g_logp), order).contiguous(),
            None if ent is None else _gather(_flat(g_ent), order).contiguous(),
        )
        grad = (torch.empty if order is None else torch.zeros)(logits.shape, dtype=logits.dtype, device=logits.device)
        grad[:, columns.stop :].zero_()
        backend = dispatch.select("linear_logp", logits.device)
        for rows in cuts(0, len(target), source.blocks(len(target), max(shards.sizes))[0]):
            z = source.products(rows, columns)
            out = grad[rows, columns] if order is None else torch.empty_like(z)
            backend.gradient(z, source.transform, shards.starts[tp.rank], out, *(part_of(v, rows) for v in per_row))
            if order is not None:
                grad[order[rows], columns] = out
        return grad, *[None] * 7
