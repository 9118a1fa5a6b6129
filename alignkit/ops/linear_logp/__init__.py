"""Log-probabilities of target tokens, from hidden states or from logits, with one set of bits.

docs/contract.md, "Log-softmax over the vocabulary". The vocabulary is cut into tiles at fixed global ids; a tile's
statistics are integers, so neither the order of a sum nor the rank that computes it can change a bit. Ranks exchange
statistics, and logits only of a tile that a shard's border cuts. The [N, V] logits are taken a block of rows and columns at a
time, and not stored unless `keep_logits` asks for it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from types import ModuleType

import torch

from ...contract import VOCAB_TILE
from ...dist import SINGLE, TP
from ...errors import InputError
from ...runtime import dispatch
from ...runtime.families import CPU, SM90, on_host
from ...runtime.operands import operand
from .._calls import differentiable_once, op
from .._common import (
    check_apart,
    check_device,
    check_flag,
    check_int,
    check_number,
    check_plain,
    check_tensor,
    check_tp,
    check_weight,
    looks,
    require,
    round_into,
    rows_shape,
)
from ..linear import matmul, product, row_sum
from .problem import Head, HeadGradient, HeadProducts
from .vocab import Shards

WORKSPACE = {CPU: 1 << 23, SM90: SM90.multiprocessors << 20}
"""Bytes of logits alive at a time, and of their gradients, if the caller does not say, by device family; not in the
contract."""
PART_ROWS = {CPU: None, SM90: 4096}
"""Rows of logits computed at a time, so that they are still in the cache when they are read; not in the contract."""
EVEN = SM90.multiprocessors // 2 * VOCAB_TILE
"""So many ids, or a multiple, are shared evenly by the multiprocessors of a GPU; 256 at least."""


def _cuts(start: int, stop: int, step: int | None, border: int = 0) -> list[slice]:
    """[start, stop) cut wherever the distance to `border` is a multiple of `step`; whole if that is None."""
    inner = () if step is None else range(start + step - (start - border) % step, stop, step)
    return [slice(a, b) for a, b in zip((start, *inner), (*inner, stop), strict=True) if a < b]


def _cpu_rows(columns: int, workspace: int) -> int:
    """Rows of logits on the CPU that stay below the limit: a multiple of 16."""
    return max(1, workspace // (64 * columns)) * 16


def _even(columns: int) -> int:
    """At most so many where possible, such that a GPU is well used."""
    return columns // EVEN * EVEN or max(columns // 256, 1) * 256


def _part(values: torch.Tensor | None, rows: slice) -> torch.Tensor | None:
    return None if values is None else values[rows]


@dataclass(frozen=True)
class _Transform:
    """From a product to a logit: plus bias (fp32 [V_local]), capped, scaled; None leaves a step out."""

    bias: torch.Tensor | None = None
    soft_cap: float | None = None
    logit_scale: float | None = None

    def of(self, columns: slice) -> _Transform:
        return replace(self, bias=_part(self.bias, columns))


class _Head:
    """Where logits come from: hidden . weight^T, then `how`."""

    def __init__(
        self,
        hidden,
        weight,
        how: _Transform,
        count: torch.Tensor | None = None,
        kept: torch.Tensor | None = None,
        filled: bool = False,
        workspace: int | None = None,
    ):
        """count: so many rows count, the first (int32, on the device); None: all. kept: fp32 [N, V_local], where the
        products stay; `filled`, if they are there."""
        self.hidden, self.weight, self.how, self.count, self.kept, self.filled = (
            hidden,
            weight,
            how,
            count,
            kept,
            filled,
        )
        self.family = dispatch.family(hidden.device)
        self.backend = dispatch.select("linear_logp", hidden.device)
        self.workspace = WORKSPACE[self.family] if workspace is None else workspace

    def blocks(self, rows: int, columns: int) -> tuple[int, int | None]:
        """How many rows and columns of logits to take at a time where the order is free; the same on every rank if
        `columns` is."""
        part = PART_ROWS[self.family]
        if part is None:
            return _cpu_rows(columns, self.workspace), None
        rows = max(min(rows, part), 1)
        return rows, _even(self.workspace // (4 * rows))

    def slabs(self, rows: int, columns: int, summed: bool) -> tuple[int, int | None]:
        """Of how many rows and columns to take the gradient at a time, where chains go over columns and begin again at every
        HEAD_ROWS rows; `summed`: if so, sums over these take memory too."""
        most = self.family.head_rows
        if most is None:
            return _cpu_rows(columns, self.workspace), None
        sums = 4 * self.weight.shape[1] if summed and rows > most else 0
        return most, _even(self.workspace // max(2 * min(rows, most) + sums, 1))

    def places(self, rows: int, columns: int, width: int | None, dweight: torch.Tensor | None):
        """The slabs of columns, each with memory for its gradient of so many rows: as wide as fit into the rows of dweight
        that come after them and are written later, if it is given; or else `width`."""
        dtype, start, own = self.backend.gradient_type(self.weight.dtype), 0, None
        lent, d = dweight is not None and dweight.dtype == dtype and width is not None, self.weight.shape[1]
        while start < columns:
            left = columns - start
            wide = left * d // (rows + d) // EVEN * EVEN
            if lent and wide > width:
                stop = start + wide
                yield slice(start, stop), dweight[stop:].view(-1)
            else:
                stop = start + min(left, width or left)
                if own is None:
                    own = torch.empty(
                        rows * (stop - start + -(stop - start) % 8), dtype=dtype, device=self.weight.device
                    )
                yield slice(start, stop), own
            start = stop

    def products(self, rows: slice, columns: slice) -> torch.Tensor:
        """fp32; the caller may write to them unless they are kept on a GPU."""
        if self.kept is None:
            return matmul(self.hidden[rows], self.weight[columns])
        z = self.kept[rows, columns]
        if not self.filled:
            _product(z, self.hidden[rows], self.weight[columns])
        return z if self.family.on_gpu else z.clone()

    def logits(self, rows: slice, columns: slice) -> torch.Tensor:
        """fp32, before temperature."""
        z = self.products(rows, columns)
        z = z if self.kept is None else z.clone()
        self.backend.transform(z, self.how.of(columns))
        return z

    def statistics(self, rows: slice, columns: slice, *args) -> bool:
        """Those of the products, if that takes no products in memory; see the backend."""
        hidden, weight = self.hidden[rows], self.weight[columns]
        products = None if self.kept is None else self.kept[rows, columns]
        kernel = self._fused("head_statistics", Head, hidden, weight, products)
        if kernel is None:
            return False
        kernel.head_statistics(hidden, weight, self.how.of(columns), *args, self.count, rows.start, products)
        return True

    def gradient(self, rows: slice, columns: slice, first: int, per_row: tuple, memory: torch.Tensor) -> torch.Tensor:
        """Of the loss by the products [rows, columns]; column 0 is the id `first`."""
        n, c = rows.stop - rows.start, columns.stop - columns.start
        width = c + -c % 8
        dz = memory[: n * width].view(n, width)[:, :c]
        temperature, target, *others = (_part(v, rows) for v in per_row)
        hidden, weight = self.hidden[rows], self.weight[columns]
        kernel = None if self.filled else self._fused("head_gradient", HeadGradient, hidden, weight, dz)
        if kernel is not None:
            kernel.head_gradient(
                hidden, weight, self.how.of(columns), temperature, target, first, *others, dz, self.count, rows.start
            )
            return dz
        height, step = self.blocks(n, c)
        for part in _cuts(0, n, height):
            here = slice(rows.start + part.start, rows.start + part.stop)
            each = [_part(v, here) for v in per_row]
            for cut in _cuts(0, c, None if self.filled else step):
                ids = slice(columns.start + cut.start, columns.start + cut.stop)
                self.backend.gradient(
                    self.products(here, ids), self.how.of(ids), first + cut.start, dz[part, cut], *each
                )
        return dz

    def products_of(
        self,
        dz: torch.Tensor,
        rows: slice,
        columns: slice,
        dhidden: torch.Tensor | None,
        dweight: torch.Tensor | None,
        resume: bool,
        add: bool,
    ) -> None:
        """What the gradient dz of these rows and columns gives: for dhidden [rows, D], whose chains go on from what it holds if
        `resume`; for dweight [columns, D], where the chains are added to what it holds if `add`. Either may be None."""
        hidden, weight = self.hidden[rows], self.weight[columns]
        kernel = self._fused("head_products", HeadProducts, dz, hidden, weight, dhidden, dweight)
        if kernel is not None:
            kernel.head_products(dz, hidden, weight, dhidden, dweight, resume, add, self.count, rows.start)
            return
        if dhidden is not None:
            _product(dhidden, dz, weight.t(), resume=resume)
        if dweight is not None:
            _product(dweight, dz.t(), hidden.t(), add=add)

    def _fused(self, op: str, kind: type, *tensors: torch.Tensor | None) -> ModuleType | None:
        """The file of a kernel that does all of it at once; None where products go to memory first."""
        backend = dispatch.name(self.hidden.device)
        if dispatch.sole(op, backend) is not None:
            return None
        kernel = dispatch.choose(op, kind(backend, *map(operand, tensors)))
        return kernel.load() if kernel.rule else None


def _head(hidden, weight, bias, soft_cap, logit_scale, *args, **options) -> _Head:
    bias = None if bias is None else bias.detach().float().contiguous()
    return _Head(hidden, weight, _Transform(bias, soft_cap, logit_scale), *args, **options)


class _Given:
    """Where logits come from: a tensor [N, V_local] of them, of which row order[i] is the i-th (all, if None)."""

    how = _Transform()

    def __init__(self, logits, order: torch.Tensor | None = None):
        self.given = logits if logits.stride(1) == 1 else logits.contiguous()
        self.order, self.family = order, dispatch.family(logits.device)

    def blocks(self, rows: int, columns: int) -> tuple[int, None]:
        most = self.family.head_rows
        return _cpu_rows(columns, WORKSPACE[CPU]) if most is None or not self.family.on_gpu else most, None

    def products(self, rows: slice, columns: slice) -> torch.Tensor:
        return self.given[rows if self.order is None else self.order[rows]][:, columns]

    def logits(self, rows: slice, columns: slice) -> torch.Tensor:
        return self.products(rows, columns).float()

    def statistics(self, *_) -> bool:
        return False


def _row_sums(source, device, n: int, target, temperature, shards: Shards, tp: TP, entropy: bool):
    """For each block of the n rows: the block, and its maxima and sums over all ranks (see the backends' `join`)."""
    backend = dispatch.select("linear_logp", device)
    start, lead = shards.starts[tp.rank], shards.lead(tp.rank)
    columns, tail = shards.columns(tp.rank), shards.tail(tp.rank)
    tiles = -(-(columns - lead) // VOCAB_TILE)
    height, width = source.blocks(n, max(shards.sizes))
    for rows in _cuts(0, n, height):
        size = rows.stop - rows.start
        m, q, u = (
            torch.empty(size, tiles if kept else 0, dtype=dtype, device=device)
            for dtype, kept in ((torch.float32, True), (torch.int32, True), (torch.int32, entropy))
        )
        z_target = None if target is None else torch.zeros(size, dtype=torch.float32, device=device)

        def into(first: int, last: int, rows=rows, out=(m, q, u if entropy else None)):
            """What else the statistics of the columns from `first` to `last` take, and where they go."""
            of = slice((first - lead) // VOCAB_TILE, -((lead - last) // VOCAB_TILE))
            return (
                _part(temperature, rows),
                _part(target, rows),
                start + first,
                *(None if t is None else t[:, of] for t in out),
            )

        if lead < tail and not source.statistics(rows, slice(lead, tail), *into(lead, tail), z_target):
            for part in _cuts(lead, tail, width, border=-start):
                backend.statistics(
                    source.products(rows, part), source.how.of(part), *into(part.start, part.stop), z_target
                )
        cut = shards.cut_tile(lambda part, rows=rows: source.logits(rows, part), tp)
        if tail < columns:
            backend.statistics(cut, _Transform(), *into(tail, columns), z_target)
        if tp.size == 1:
            yield rows, *backend.join(m, q, u if entropy else None, z_target, None)
        else:
            own = m.amax(dim=1) if tiles else m.new_full((size,), -math.inf)
            top = torch.stack(tp.all_gather(own)).amax(dim=0)
            _, sums = backend.join(m, q, u if entropy else None, z_target, top)
            yield rows, top, torch.stack(tp.all_gather(sums)).sum(dim=0)


def _statistics(source, target, temperature, shards: Shards, tp: TP, entropy: bool):
    """logp, lse, entropy (or None), fp32 [N], of this source on every rank."""
    backend = dispatch.select("linear_logp", target.device)
    parts = [
        backend.finish(m, sums, target[rows], entropy)
        for rows, m, sums in _row_sums(source, target.device, len(target), target, temperature, shards, tp, entropy)
    ]
    if len(parts) == 1:
        return parts[0]
    empty = torch.empty(0, dtype=torch.float32, device=target.device)
    logp, lse, ent = zip(*parts, strict=True) if parts else ((empty,),) * 3
    return torch.cat(logp), torch.cat(lse), torch.cat(ent) if entropy else None


def _remaining(ignored: torch.Tensor) -> torch.Tensor:
    """The rows that count, in order. Counting them would wait for a GPU: there the ignored rows follow at the end."""
    if on_host(ignored.device):
        return (~ignored).nonzero()[:, 0]
    return torch.argsort(ignored, stable=True)


def _count(target: torch.Tensor) -> torch.Tensor | None:
    """How many rows count, on a GPU; they come first there."""
    return None if on_host(target.device) else (target >= 0).sum(dtype=torch.int32)


def _taken(values: torch.Tensor | None, order: torch.Tensor | None) -> torch.Tensor | None:
    return values if values is None or order is None else values.index_select(0, order)


def _put_back(values: torch.Tensor | None, order: torch.Tensor | None, shape: torch.Size) -> torch.Tensor | None:
    """Values of the rows `order` to their places among those of `shape`; zeros elsewhere."""
    if values is None:
        return None
    if order is not None:
        values = values.new_zeros(shape.numel()).index_copy_(0, order, values)
    return values.view(shape)


def _flat(grad: torch.Tensor | None) -> torch.Tensor | None:
    return None if grad is None else grad.reshape(-1)


def _product(out: torch.Tensor, a: torch.Tensor, b: torch.Tensor, add: bool = False, resume: bool = False) -> None:
    """out <- a . b^T, added to what it holds if `add`; if `resume`, its chains go on from there."""
    if resume:
        dispatch.select("linear_resume", a.device).resume(a, b, out)
    else:
        product(a, b, 1, None, out, add)


@differentiable_once("linear_logp")
class _LinearLogp(torch.autograd.Function):
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
        target, temperature = _taken(target.masked_fill(ignored, -1), order), _taken(temperature, order)
        kept = None
        if keep:
            columns = shards.columns(tp.rank)
            kept = torch.empty(len(target), columns + -columns % 4, dtype=torch.float32, device=hidden.device)[
                :, :columns
            ]
        count = _count(target)
        source = _head(
            _ordered(hidden, order, target), weight, bias, soft_cap, logit_scale, count, kept, workspace=workspace
        )
        logp, lse, ent = _statistics(source, target, temperature, shards, tp, entropy)
        ctx.save_for_backward(hidden, weight, bias, order, target, temperature, lse, ent, kept, count)
        ctx.args = (soft_cap, logit_scale, shards, tp, workspace)
        ctx.main_grad = main_grad  # written to in every backward pass, so nothing that autograd may watch
        return _put_back(logp, order, shape), _put_back(ent, order, shape)

    @staticmethod
    def backward(ctx, g_logp, g_ent):
        hidden, weight, bias, order, target, temperature, lse, ent, kept, count = ctx.saved_tensors
        soft_cap, logit_scale, shards, tp, workspace = ctx.args
        need_h, need_w, need_b = ctx.needs_input_grad[:3]
        main = ctx.main_grad
        if main is not None:
            check_apart("main_grad", main, {"the gradient of logp": g_logp, "the gradient of entropy": g_ent})
        # The rows in order lie where the gradient will.
        given = torch.empty(hidden.shape, dtype=hidden.dtype, device=hidden.device)
        source = _head(
            _ordered(hidden, order, target, given),
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
            _taken(_flat(g_logp), order),
            None if ent is None else _taken(_flat(g_ent), order),
        )
        height, width = source.slabs(len(order), max(shards.sizes), need_w and main is None)
        blocks = _cuts(0, len(order), height)
        used, start = shards.columns(tp.rank) if blocks else 0, shards.starts[tp.rank]
        dh = torch.empty(source.hidden.shape, dtype=torch.float32, device=hidden.device) if need_h else None
        dw, db = (
            torch.empty(t.shape, dtype=t.dtype, device=t.device) if need else None
            for t, need in ((weight, need_w and main is None), (bias, need_b))
        )
        if need_h and not used:
            dh.zero_()
        highest = max((part.stop - part.start for part in blocks), default=0)
        for columns, memory in source.places(highest, used, width, dw if len(blocks) == 1 else None):
            dw_sum = db_sum = None
            if main is not None:
                dw_sum = main[columns]
            elif need_w:  # rounded at once if it is one chain
                dw_sum = dw[columns] if len(blocks) == 1 else torch.empty_like(dw[columns], dtype=torch.float32)
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
            if dw is not None and len(blocks) > 1:
                round_into(dw[columns], dw_sum)  # pyright: ignore[reportArgumentType]
            if need_b:
                round_into(db[columns], db_sum)  # pyright: ignore[reportArgumentType] - `blocks` has some
        for grad in (dw, db):
            if grad is not None:
                grad[used:].zero_()
        return _returned(tp.tree_sum(dh), order, target, given) if need_h else None, dw, db, *[None] * 12


def _ordered(
    hidden: torch.Tensor, order: torch.Tensor, target: torch.Tensor, to: torch.Tensor | None = None
) -> torch.Tensor:
    """The rows in `order`, in the memory of `to` if given. An ignored one may hold anything: it is taken for zeros."""
    to = torch.empty(hidden.shape, dtype=hidden.dtype, device=hidden.device) if to is None else to
    to = to[: len(order)]
    dispatch.select("linear_logp", hidden.device).take(hidden, order, target, to)
    return to


def _returned(sums: torch.Tensor, order: torch.Tensor, target: torch.Tensor, to: torch.Tensor) -> torch.Tensor:
    """`to` [N, D] <- the fp32 rows `order`, rounded; zeros elsewhere."""
    dispatch.select("linear_logp", to.device).put(sums, order, target, to)
    return to


@differentiable_once("logp_from_logits")
class _LogitsLogp(torch.autograd.Function):
    @staticmethod
    def forward(ctx, logits, target, temperature, ignore_index, shards, tp, entropy, shape):
        # On a GPU every row is taken where it is: nothing is summed over rows here.
        ignored = target == ignore_index
        order = _remaining(ignored) if on_host(target.device) else None
        target, temperature = _taken(target.masked_fill(ignored, -1), order), _taken(temperature, order)
        logp, lse, ent = _statistics(_Given(logits, order), target, temperature, shards, tp, entropy)
        ctx.save_for_backward(logits, order, target, temperature, lse, ent)
        ctx.args = (shards, tp)
        return _put_back(logp, order, shape), _put_back(ent, order, shape)

    @staticmethod
    def backward(ctx, g_logp, g_ent):
        logits, order, target, temperature, lse, ent = ctx.saved_tensors
        shards, tp = ctx.args
        source, columns = _Given(logits, order), slice(0, shards.columns(tp.rank))
        per_row = (
            temperature,
            target,
            lse,
            ent,
            _taken(_flat(g_logp), order).contiguous(),
            None if ent is None else _taken(_flat(g_ent), order).contiguous(),
        )
        grad = (torch.empty if order is None else torch.zeros)(logits.shape, dtype=logits.dtype, device=logits.device)
        grad[:, columns.stop :].zero_()
        backend = dispatch.select("linear_logp", logits.device)
        for rows in _cuts(0, len(target), source.blocks(len(target), max(shards.sizes))[0]):
            z = source.products(rows, columns)
            out = grad[rows, columns] if order is None else torch.empty_like(z)
            backend.gradient(z, source.how, shards.starts[tp.rank], out, *(_part(v, rows) for v in per_row))
            if order is not None:
                grad[order[rows], columns] = out
        return grad, *[None] * 7


def _check_transform(soft_cap, logit_scale) -> None:
    if soft_cap is not None:
        check_number("soft_cap", soft_cap)
    check_number("logit_scale", logit_scale, positive=False)


def _is_number(temperature) -> bool:
    """Whether it can be read without waiting for a GPU."""
    return not isinstance(temperature, torch.Tensor) or (temperature.ndim == 0 and on_host(temperature.device))


def _check_temperature(temperature, shape: torch.Size, device) -> None:
    if not isinstance(temperature, torch.Tensor):
        check_number("temperature", temperature)
        return
    check_plain("temperature", temperature)
    require(
        not temperature.is_complex() and temperature.dtype != torch.bool,
        f"temperature: dtype {temperature.dtype} is not one of numbers",
    )
    if _is_number(temperature):
        check_number("temperature", temperature.item())
        return
    if temperature.ndim:
        check_tensor("temperature", temperature, dtypes=(torch.float32,))
        require(
            temperature.shape == shape,
            f"temperature: shape {tuple(temperature.shape)} differs from the rows' {tuple(shape)}",
        )
    require(temperature.device == device, f"temperature: device {temperature.device} differs from {device}")
    bad = temperature[~(temperature > 0) | temperature.isinf()].tolist() if looks(device) else []
    require(not bad, f"temperature: {bad[:1]} is not positive and finite")


def _per_row(temperature) -> torch.Tensor | None:
    """The temperature, if it is a tensor whose values may lie on a GPU."""
    return None if _is_number(temperature) else temperature


def _described(temperature):
    """What ranks compare of it before its values."""
    return float(temperature) if _is_number(temperature) else ("per row", tuple(temperature.shape))


def _check_rows(target, temperature, shape, device, ignore_index: int) -> tuple[int, tuple[int, ...]]:
    """Check what is given per row; the largest target, and where, or (-1, ()) if values are not looked at."""
    _check_temperature(temperature, shape, device)
    check_plain("target", target)
    require(target.dtype == torch.int64, f"target: dtype {target.dtype} is not torch.int64")
    require(target.shape == shape, f"target: shape {tuple(target.shape)} differs from the rows' {tuple(shape)}")
    require(target.device == device, f"target: device {target.device} differs from {device}")
    if not looks(device) or not target.numel():
        return -1, ()
    kept = target.masked_fill(target == ignore_index, 0)
    ends = [(int(v), tuple((kept == v).nonzero()[0].tolist())) for v in (kept.min(), kept.max())]
    (least, where), largest = ends
    require(least >= 0, f"target: id {least} at {where} is negative and not ignore_index ({ignore_index})")
    return largest


def _rows(target, temperature, shape, device, ignore_index: int, vocab: int):
    """What is given per row, flat: target int64 [N], and temperature fp32 [N] or None for 1. Where their values were
    not looked at, the device is to check them."""
    t = _temperatures(temperature, shape, device)
    target = None if target is None else target.reshape(-1).contiguous()
    if not looks(device) and (target is not None or t is not None):
        dispatch.select("linear_logp", device).check_rows(target, t, vocab, ignore_index)
    return target, t


def _temperatures(temperature, shape, device) -> torch.Tensor | None:
    """fp32 [N], or None for 1."""
    if not _is_number(temperature):
        return temperature.detach().float().expand(shape).reshape(-1).contiguous()
    return (
        None
        if temperature == 1.0
        else torch.full((shape.numel(),), float(temperature), dtype=torch.float32, device=device)
    )


@op
def linear_logp(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    target: torch.Tensor,
    *,
    bias: torch.Tensor | None = None,
    temperature: float | torch.Tensor = 1.0,
    soft_cap: float | None = None,
    logit_scale: float = 1.0,
    ignore_index: int = -100,
    vocab_size: int | None = None,
    vocab_start: int = 0,
    tp: TP | None = None,
    return_entropy: bool = False,
    keep_logits: bool = False,
    main_grad: torch.Tensor | None = None,
    workspace: int | None = None,
):
    """``log_softmax(logits / temperature)[target]`` with ``logits = logit_scale * cap(hidden @ weight.T + bias)``,
    ``cap(x) = soft_cap * tanh(x / soft_cap)``; the logits are fp32, not rounded, and not stored unless `keep_logits`.

    Args:
        hidden: [..., D], fp32 or bf16; finite (on a GPU this is not looked at: a NaN spreads as the formula says). The
            same on every rank of `tp`.
        weight: [V_local, D], hidden's type; this rank's rows of the vocabulary.
        target: int64 [...], global ids in [0, vocab_size), or `ignore_index`. On a GPU another id, like a temperature
            that is not positive and finite, stops the device with a message (see `ALIGNKIT_STRICT`).
        bias: [V_local] or None, weight's type.
        temperature: positive, a number or fp32 [...]; divides the logits.
        soft_cap: positive and finite, or None for no cap.
        logit_scale: factor of the logits.
        ignore_index: rows with this target give logp 0 and entropy 0 and have no gradient.
        vocab_size: the true global size; padded rows at or beyond it never count. Default: all rows.
        vocab_start: global id of this rank's first row. Shards follow each other in rank order; they may differ in
            size, but may not overlap, leave a hole, or be empty.
        tp: the ranks that hold the other rows.
        return_entropy: also return the entropy of the distribution, in nats.
        keep_logits: store the products hidden @ weight.T, 4 bytes each, for a backward pass that does not compute them
            again. The same bits; without it no more than some bytes per row and 128 ids are stored.
        main_grad: fp32 [V_local, D], contiguous, memory that is no other argument's, or None. The gradient of weight is added to it, unrounded, in each backward
            pass, and weight.grad stays as it is.
        workspace: limit, in bytes, of the logits alive at a time, and of their gradients, at least a few rows or ids; None:
            8 MiB on a CPU, 132 MiB on a GPU. A small one takes more time; it changes no bit. Beyond it the backward pass
            holds hidden's gradient in fp32.

    Returns:
        logp, fp32 [...], in nats; or (logp, entropy). Differentiable in hidden (summed over ranks), weight and bias
        (this rank's rows).

    Raises:
        InputError: an argument is outside the above; on all ranks of `tp` together, before anything is computed.
    """
    tp = check_tp(tp)
    rows = rows_shape(hidden)

    def checks():
        _check_transform(soft_cap, logit_scale)
        check_int("ignore_index", ignore_index)
        check_flag("return_entropy", return_entropy)
        check_flag("keep_logits", keep_logits)
        if workspace is not None:
            check_int("workspace", workspace, 1)
        check_weight(hidden, weight, bias, "hidden")
        if main_grad is not None:
            check_tensor("main_grad", main_grad, 2, (torch.float32,))
            require(
                main_grad.shape == weight.shape and main_grad.device == weight.device and main_grad.is_contiguous(),
                f"main_grad: {tuple(main_grad.shape)} on {main_grad.device}, strides {main_grad.stride()}, does not fit "
                f"weight: {tuple(weight.shape)} on {weight.device}",
            )
            read = {"hidden": hidden, "weight": weight, "bias": bias}
            check_plain("target", target)
            if isinstance(temperature, torch.Tensor):
                check_plain("temperature", temperature)
            check_apart(
                "main_grad",
                main_grad,
                read
                | {"target": target, "temperature": temperature}
                | {f"{name}.grad": t.grad for name, t in read.items() if t is not None and t.is_leaf},
            )
        require(not looks(hidden.device) or bool(hidden.isfinite().all()), "hidden: has NaN or infinite values")
        largest = _check_rows(target, temperature, rows, hidden.device, ignore_index)
        return (
            Shards.describe(vocab_start, weight.shape[0], vocab_size),
            {
                "hidden": (tuple(hidden.shape), str(hidden.dtype)),
                "bias": bias is not None,
                "temperature": _described(temperature),
                "soft_cap": None if soft_cap is None else float(soft_cap),
                "logit_scale": float(logit_scale),
                "ignore_index": int(ignore_index),
                "return_entropy": bool(return_entropy),
                "workspace": None if workspace is None else int(workspace),
                "requires_grad": torch.is_grad_enabled() and hidden.requires_grad,
            },
            largest,
        )

    shards, ignore_index = Shards.agree(tp, "linear_logp", checks), int(ignore_index)
    tp.check_same_values("linear_logp", target=target, temperature=_per_row(temperature))
    flat, t = _rows(target, temperature, rows, hidden.device, ignore_index, shards.vocab_size)
    logp, entropy = _LinearLogp.apply(
        hidden.reshape(-1, hidden.shape[-1]),
        weight,
        bias,
        flat,
        t,
        ignore_index,
        None if soft_cap is None else float(soft_cap),
        None if logit_scale == 1.0 else float(logit_scale),
        shards,
        tp,
        bool(return_entropy),
        bool(keep_logits) and torch.is_grad_enabled(),
        main_grad,
        None if workspace is None else int(workspace),
        rows,
    )
    return (logp, entropy) if return_entropy else logp


@op
def logp_from_logits(
    logits: torch.Tensor,
    target: torch.Tensor,
    *,
    temperature: float | torch.Tensor = 1.0,
    ignore_index: int = -100,
    vocab_size: int | None = None,
    vocab_start: int = 0,
    tp: TP | None = None,
    return_entropy: bool = False,
):
    """`linear_logp` from logits that exist already: given `head_logits`, the same bits.

    Args:
        logits: [..., V_local], fp32 or bf16; -inf masks an id, NaN or +inf make their row NaN.
        target, temperature, ignore_index, vocab_size, vocab_start, tp, return_entropy: as for `linear_logp`.

    Returns:
        logp, fp32 [...], in nats; or (logp, entropy). Differentiable in logits.

    Raises:
        InputError: an argument is outside the above; on all ranks of `tp` together, before anything is computed.
    """
    tp = check_tp(tp)
    rows = rows_shape(logits)

    def checks():
        check_int("ignore_index", ignore_index)
        check_flag("return_entropy", return_entropy)
        check_tensor("logits", logits)
        check_device("logits", logits)
        largest = _check_rows(target, temperature, rows, logits.device, ignore_index)
        return (
            Shards.describe(vocab_start, logits.shape[-1], vocab_size),
            {
                "logits": (tuple(rows), str(logits.dtype)),
                "temperature": _described(temperature),
                "ignore_index": int(ignore_index),
                "return_entropy": bool(return_entropy),
            },
            largest,
        )

    shards, ignore_index = Shards.agree(tp, "logp_from_logits", checks), int(ignore_index)
    tp.check_same_values("logp_from_logits", target=target, temperature=_per_row(temperature))
    flat, t = _rows(target, temperature, rows, logits.device, ignore_index, shards.vocab_size)
    logp, entropy = _LogitsLogp.apply(
        logits.reshape(-1, logits.shape[-1]), flat, t, ignore_index, shards, tp, bool(return_entropy), rows
    )
    return (logp, entropy) if return_entropy else logp


@op
def head_logits(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    soft_cap: float | None = None,
    logit_scale: float = 1.0,
) -> torch.Tensor:
    """The logits of `linear_logp` before temperature: what rollout samples from. Not differentiable.

    Args:
        hidden: [..., D], fp32 or bf16.
        weight: [V_local, D], hidden's type.
        bias: [V_local] or None.
        soft_cap, logit_scale: as for `linear_logp`.

    Returns:
        fp32 [..., V_local].

    Raises:
        InputError: shapes, types or devices do not fit.
    """
    _check_transform(soft_cap, logit_scale)
    check_weight(hidden, weight, bias, "hidden")
    if bias is None and soft_cap is None and logit_scale == 1.0:
        z = matmul(hidden.reshape(-1, hidden.shape[-1]), weight)
        return z if hidden.ndim == 2 else z.view(*hidden.shape[:-1], len(weight))
    flat = hidden.detach().reshape(-1, hidden.shape[-1])
    head = _head(
        flat,
        weight.detach(),
        bias,
        None if soft_cap is None else float(soft_cap),
        None if logit_scale == 1.0 else float(logit_scale),
    )
    return head.logits(slice(0, len(flat)), slice(0, len(weight))).reshape(*hidden.shape[:-1], len(weight))


@op
def log_softmax(
    logits: torch.Tensor, *, temperature: float | torch.Tensor = 1.0, vocab_size: int | None = None
) -> torch.Tensor:
    """Log-probabilities of every id, each with the bits that `linear_logp` gives it. Not differentiable.

    Args:
        logits: [..., V], fp32 or bf16, the whole vocabulary; -inf masks an id.
        temperature: positive, a number or fp32 [...].
        vocab_size: true size; columns at or beyond it get -inf. Default: V.

    Returns:
        fp32 [..., V].

    Raises:
        InputError: an argument is outside the above.
    """
    flat, t, shards = _whole(logits, temperature, vocab_size)
    out = torch.empty(flat.shape, dtype=torch.float32, device=flat.device)
    source, backend = _Given(flat), dispatch.select("linear_logp", flat.device)
    for rows, m, sums in _row_sums(source, flat.device, len(flat), None, t, shards, SINGLE, False):
        backend.spread(source.products(rows, slice(0, shards.vocab_size)), _part(t, rows), m, sums, out[rows])
    return out.reshape(logits.shape)


@op
def token_logp(
    logits: torch.Tensor, token_ids: torch.Tensor, *, temperature: float | torch.Tensor = 1.0
) -> torch.Tensor:
    """Log-probabilities of a few ids of each row: `log_softmax` gathered at `token_ids`, which is not computed whole.
    Not differentiable.

    Args:
        logits: [..., V], fp32 or bf16, the whole vocabulary; -inf masks an id.
        token_ids: int64 or int32 [..., K], in [0, V). On a GPU an id outside gives NaN.
        temperature: positive, a number or fp32 [...].

    Returns:
        fp32 [..., K].

    Raises:
        InputError: an argument is outside the above.
    """
    check_tensor("logits", logits)
    check_device("logits", logits)
    check_tensor("token_ids", token_ids, logits.ndim, (torch.int64, torch.int32))
    rows, (vocab, k), device = logits.shape[:-1], (logits.shape[-1], token_ids.shape[-1]), logits.device
    require(vocab > 0, "logits: the vocabulary is empty")
    if token_ids.shape[:-1] != rows or token_ids.device != device:
        raise InputError(
            f"token_ids: shape {tuple(token_ids.shape)} on {token_ids.device} does not fit logits of "
            f"shape {tuple(logits.shape)} on {device}"
        )
    _check_temperature(temperature, rows, device)
    backend, t = dispatch.select("linear_logp", device), _temperatures(temperature, rows, device)
    if looks(device):
        bad = token_ids[(token_ids < 0) | (token_ids >= vocab)][:1].tolist()
        require(not bad, f"token_ids: {bad} is not in [0, {vocab})")
    elif t is not None:
        backend.check_rows(None, t, vocab, -1)
    source, ids = _Given(logits.detach().reshape(-1, vocab)), token_ids.reshape(rows.numel(), k).contiguous()
    out = torch.empty(ids.shape, dtype=torch.float32, device=device)
    tiles = -(-vocab // VOCAB_TILE)
    for part in _cuts(0, len(ids), source.blocks(len(ids), vocab)[0]):
        z, of_part, n = source.given[part], _part(t, part), part.stop - part.start
        m, q = (torch.empty(n, tiles, dtype=dtype, device=device) for dtype in (torch.float32, torch.int32))
        backend.statistics(z, source.how, of_part, None, 0, m, q, None, None)
        backend.pick(z, of_part, ids[part], m, q, out[part])
    return out if logits.ndim == 2 else out.reshape(token_ids.shape)


def _whole(logits, temperature, vocab_size: int | None):
    """Checked logits of the whole vocabulary as [N, V], their temperature, and the vocabulary."""
    check_tensor("logits", logits)
    check_device("logits", logits)
    rows = logits.shape[:-1]
    _check_temperature(temperature, rows, logits.device)
    shards = Shards.agree(
        SINGLE, "log_softmax", lambda: (Shards.describe(0, logits.shape[-1], vocab_size), {}, (-1, ()))
    )
    _, t = _rows(None, temperature, rows, logits.device, -1, shards.vocab_size)
    return logits.detach().reshape(-1, logits.shape[-1]), t, shards
