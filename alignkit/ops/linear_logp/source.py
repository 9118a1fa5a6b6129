"""Where logits come from: products of hidden and the weight, or a tensor of them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from types import ModuleType

import torch

from ...runtime import dispatch
from ...runtime.operands import operand
from ..linear import matmul, product
from . import blocks, problem
from .blocks import PART_ROWS, WORKSPACE, cpu_rows, cuts, even, part_of


@dataclass(frozen=True)
class Transform:
    """From a product to a logit: plus bias (fp32 [V_local]), capped, scaled; None leaves a step out."""

    bias: torch.Tensor | None = None
    soft_cap: float | None = None
    logit_scale: float | None = None

    def of(self, columns: slice) -> Transform:
        return replace(self, bias=part_of(self.bias, columns))


class HeadLogits:
    """Where logits come from: hidden . weight^T, then `how`."""

    def __init__(
        self,
        hidden,
        weight,
        how: Transform,
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
            return cpu_rows(columns, self.workspace), None
        rows = max(min(rows, part), 1)
        return rows, even(self.workspace // (4 * rows))

    def slabs(self, rows: int, columns: int, summed: bool) -> tuple[int, int | None]:
        """Of how many rows and columns to take the gradient at a time, where chains go over columns and begin again at every
        HEAD_ROWS rows; `summed`: if so, sums over these take memory too."""
        most = self.family.head_rows
        if most is None:
            return cpu_rows(columns, self.workspace), None
        sums = 4 * self.weight.shape[1] if summed and rows > most else 0
        return most, even(self.workspace // max(2 * min(rows, most) + sums, 1))

    def places(
        self, rows: int, columns: int, width: int | None, dweight: torch.Tensor | None, summed: bool
    ) -> Iterator[tuple[slice, torch.Tensor, torch.Tensor | None]]:
        """The slabs of columns, each with memory for its gradient of so many rows and, if `summed`, for fp32 sums of the weight's
        gradient: as wide as fit into the rows of dweight that come after them and are written later, if it is given; or else
        `width`."""
        dtype, start, d = self.backend.gradient_type(self.weight.dtype), 0, self.weight.shape[1]
        lent = dweight is not None and dweight.dtype == dtype and width is not None
        of_row = d * dtype.itemsize  # bytes of dweight
        own: tuple[torch.Tensor, torch.Tensor | None] | None = None
        while start < columns:
            left = columns - start
            fit = left * of_row // (rows * dtype.itemsize + (4 * d if summed else 0) + of_row)
            wide = blocks.even(fit)
            if lent and width < wide <= fit:
                stop = start + wide
                later, of_gradient = dweight[stop:].view(-1), rows * wide
                sums = later[of_gradient:].view(torch.float32)[: wide * d].view(wide, d) if summed else None
                yield slice(start, stop), later[:of_gradient], sums
            else:
                stop = start + min(left, width or left)
                if own is None:
                    wide, options = stop - start, {"device": self.weight.device}
                    memory = torch.empty(rows * (wide + -wide % 8), dtype=dtype, **options)
                    own = memory, torch.empty(wide, d, dtype=torch.float32, **options) if summed else None
                memory, sums = own
                yield slice(start, stop), memory, None if sums is None else sums[: stop - start]
            start = stop

    def products(self, rows: slice, columns: slice) -> torch.Tensor:
        """fp32; the caller may write to them unless they are kept on a GPU."""
        if self.kept is None:
            return matmul(self.hidden[rows], self.weight[columns])
        z = self.kept[rows, columns]
        if not self.filled:
            product_into(z, self.hidden[rows], self.weight[columns])
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
        kernel = self._fused("head_statistics", problem.Head, hidden, weight, products)
        if kernel is None:
            return False
        kernel.head_statistics(hidden, weight, self.how.of(columns), *args, self.count, rows.start, products)
        return True

    def gradient(self, rows: slice, columns: slice, first: int, per_row: tuple, memory: torch.Tensor) -> torch.Tensor:
        """Of the loss by the products [rows, columns]; column 0 is the id `first`."""
        n, c = rows.stop - rows.start, columns.stop - columns.start
        width = c + -c % 8
        dz = memory[: n * width].view(n, width)[:, :c]
        temperature, target, *others = (part_of(v, rows) for v in per_row)
        hidden, weight = self.hidden[rows], self.weight[columns]
        kernel = None if self.filled else self._fused("head_gradient", problem.HeadGradient, hidden, weight, dz)
        if kernel is not None:
            kernel.head_gradient(
                hidden, weight, self.how.of(columns), temperature, target, first, *others, dz, self.count, rows.start
            )
            return dz
        height, step = self.blocks(n, c)
        for part in cuts(0, n, height):
            here = slice(rows.start + part.start, rows.start + part.stop)
            each = [part_of(v, here) for v in per_row]
            for cut in cuts(0, c, None if self.filled else step):
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
        kernel = self._fused("head_products", problem.HeadProducts, dz, hidden, weight, dhidden, dweight)
        if kernel is not None:
            kernel.head_products(dz, hidden, weight, dhidden, dweight, resume, add, self.count, rows.start)
            return
        if dhidden is not None:
            product_into(dhidden, dz, weight.t(), resume=resume)
        if dweight is not None:
            product_into(dweight, dz.t(), hidden.t(), add=add)

    def _fused(self, op: str, kind: type, *tensors: torch.Tensor | None) -> ModuleType | None:
        """The file of a kernel that does all of it at once; None where products go to memory first."""
        backend = dispatch.name(self.hidden.device)
        if dispatch.sole(op, backend) is not None:
            return None
        kernel = dispatch.choose(op, kind(backend, *map(operand, tensors)))
        return kernel.load() if kernel.rule else None


def head_logits_of(hidden, weight, bias, soft_cap, logit_scale, *args, **options) -> HeadLogits:
    bias = None if bias is None else bias.detach().float().contiguous()
    return HeadLogits(hidden, weight, Transform(bias, soft_cap, logit_scale), *args, **options)


class GivenLogits:
    """Where logits come from: a tensor [N, V_local] of them, of which row order[i] is the i-th (all, if None)."""

    how = Transform()

    def __init__(self, logits, order: torch.Tensor | None = None):
        self.given = logits if logits.stride(1) == 1 else logits.contiguous()
        self.order, self.family = order, dispatch.family(logits.device)

    def blocks(self, rows: int, columns: int) -> tuple[int, None]:
        most = self.family.head_rows
        return cpu_rows(columns, WORKSPACE[self.family]) if most is None else most, None

    def products(self, rows: slice, columns: slice) -> torch.Tensor:
        return self.given[rows if self.order is None else self.order[rows]][:, columns]

    def logits(self, rows: slice, columns: slice) -> torch.Tensor:
        return self.products(rows, columns).float()

    def statistics(self, *_) -> bool:
        return False


def product_into(out: torch.Tensor, a: torch.Tensor, b: torch.Tensor, add: bool = False, resume: bool = False) -> None:
    """out <- a . b^T, added to what it holds if `add`; if `resume`, its chains go on from there."""
    if resume:
        dispatch.select("linear_resume", a.device).resume(a, b, out)
    else:
        product(a, b, 1, None, out, add)
