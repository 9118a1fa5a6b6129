"""Sources of logits: GEMMs of hidden states and the LM head's weight, or a given tensor.

A source also chooses the blocks of rows and columns to compute at a time. The row blocks of `HeadLogits.slabs` are
contract on a GPU (`Family.head_rows`). All other blocks are free. `blocks.even` keeps their widths at multiples of 256:
a block must split neither a vocabulary tile (128 ids) nor a chain's step (16 ids).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from types import ModuleType

import torch

from ...runtime import dispatch
from ...runtime.operands import operand
from ..linear import matmul, matmul_into
from . import blocks, problem
from .blocks import PART_ROWS, WORKSPACE, cpu_rows, cuts, even, part_of


@dataclass(frozen=True)
class Transform:
    """The map from products to logits: add bias (fp32 [V_local]), cap, scale; None skips a step."""

    bias: torch.Tensor | None = None
    soft_cap: float | None = None
    logit_scale: float | None = None

    def of(self, columns: slice) -> Transform:
        """Return the transform of some columns."""
        return replace(self, bias=part_of(self.bias, columns))


class HeadLogits:
    """Logits computed as hidden . weight^T, then `transform`."""

    def __init__(
        self,
        hidden,
        weight,
        transform: Transform,
        count: torch.Tensor | None = None,
        kept: torch.Tensor | None = None,
        filled: bool = False,
        workspace: int | None = None,
    ):
        """Describe the logits.

        Args:
            hidden: [N, D].
            weight: [V_local, D].
            transform: Map from products to logits.
            count: int32 device scalar, number of leading rows to compute; None for all.
            kept: fp32 [N, V_local], storage for the products, or None.
            filled: True if `kept` already holds the products.
            workspace: Limit in bytes of the logits alive at a time.
        """
        self.hidden, self.weight, self.transform, self.count, self.kept, self.filled = (
            hidden,
            weight,
            transform,
            count,
            kept,
            filled,
        )
        self.family = dispatch.family(hidden.device)
        self.backend = dispatch.select("linear_logp", hidden.device)
        self.workspace = WORKSPACE[self.family] if workspace is None else workspace

    def blocks(self, rows: int, columns: int) -> tuple[int, int | None]:
        """Return the block shape (rows, columns) for statistics; equal on all ranks if `columns` is."""
        part = PART_ROWS[self.family]
        if part is None:
            return cpu_rows(columns, self.workspace), None
        rows = max(min(rows, part), 1)
        return rows, even(self.workspace // (4 * rows))

    def slabs(self, rows: int, columns: int, summed: bool) -> tuple[int, int | None]:
        """Return the block shape (rows, columns) for gradients.

        Chains over columns continue across blocks; chains over rows restart every `Family.head_rows` rows. With
        `summed`, fp32 sums over the latter need memory too.
        """
        chain_rows = self.family.head_rows
        if chain_rows is None:
            return cpu_rows(columns, self.workspace), None
        sums = 4 * self.weight.shape[1] if summed and rows > chain_rows else 0
        return chain_rows, even(self.workspace // max(2 * min(rows, chain_rows) + sums, 1))

    def places(
        self, rows: int, columns: int, width: int | None, dweight: torch.Tensor | None, summed: bool
    ) -> Iterator[tuple[slice, torch.Tensor, torch.Tensor | None]]:
        """Yield the slabs of columns, each with memory for its gradient and (with `summed`) fp32 weight-gradient sums.

        The memory is borrowed from later rows of `dweight`, which are written later, if the slab can be wider than
        `width` that way. Otherwise it is a buffer for `width` columns.
        """
        dtype, start, d = self.backend.gradient_type(self.weight.dtype), 0, self.weight.shape[1]
        lent = dweight is not None and dweight.dtype == dtype and width is not None
        row_bytes = d * dtype.itemsize  # per row of dweight
        own: tuple[torch.Tensor, torch.Tensor | None] | None = None
        while start < columns:
            left = columns - start
            fit = left * row_bytes // (rows * dtype.itemsize + (4 * d if summed else 0) + row_bytes)
            wide = blocks.even(fit)
            if lent and width < wide <= fit:
                stop = start + wide
                later, size = dweight[stop:].view(-1), rows * wide
                sums = later[size:].view(torch.float32)[: wide * d].view(wide, d) if summed else None
                yield slice(start, stop), later[:size], sums
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
        """Return fp32 products; the caller may modify them unless they are kept on a GPU."""
        if self.kept is None:
            return matmul(self.hidden[rows], self.weight[columns])
        z = self.kept[rows, columns]
        if not self.filled:
            gemm_into(z, self.hidden[rows], self.weight[columns])
        return z if self.family.on_gpu else z.clone()

    def logits(self, rows: slice, columns: slice) -> torch.Tensor:
        """Return fp32 logits before temperature."""
        z = self.products(rows, columns)
        z = z if self.kept is None else z.clone()
        self.backend.apply_transform(z, self.transform.of(columns))
        return z

    def statistics(self, rows: slice, columns: slice, *args) -> bool:
        """Compute tile statistics by the fused kernel; return False, without computing, if it is not used."""
        hidden, weight = self.hidden[rows], self.weight[columns]
        products = None if self.kept is None else self.kept[rows, columns]
        kernel = self._fused("head_statistics", problem.Head, hidden, weight, products)
        if kernel is None:
            return False
        kernel.head_statistics(hidden, weight, self.transform.of(columns), *args, self.count, rows.start, products)
        return True

    def gradient(self, rows: slice, columns: slice, first: int, per_row: tuple, memory: torch.Tensor) -> torch.Tensor:
        """Return the gradient of the products [rows, columns], in `memory`; column 0 is the id `first`."""
        n, c = rows.stop - rows.start, columns.stop - columns.start
        width = c + -c % 8
        dz = memory[: n * width].view(n, width)[:, :c]
        temperature, target, *others = (part_of(v, rows) for v in per_row)
        hidden, weight = self.hidden[rows], self.weight[columns]
        kernel = None if self.filled else self._fused("head_gradient", problem.HeadGradient, hidden, weight, dz)
        if kernel is not None:
            kernel.head_gradient(
                hidden,
                weight,
                self.transform.of(columns),
                temperature,
                target,
                first,
                *others,
                dz,
                self.count,
                rows.start,
            )
            return dz
        height, step = self.blocks(n, c)
        for part in cuts(0, n, height):
            here = slice(rows.start + part.start, rows.start + part.stop)
            each = [part_of(v, here) for v in per_row]
            for cut in cuts(0, c, None if self.filled else step):
                ids = slice(columns.start + cut.start, columns.start + cut.stop)
                self.backend.gradient(
                    self.products(here, ids), self.transform.of(ids), first + cut.start, dz[part, cut], *each
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
        """Compute the gradients from dz of these rows and columns; either may be None.

        With `resume`, the chains of dhidden [rows, D] continue from its values. With `add`, the chains of dweight
        [columns, D] are added to its values.
        """
        hidden, weight = self.hidden[rows], self.weight[columns]
        kernel = self._fused("head_products", problem.HeadProducts, dz, hidden, weight, dhidden, dweight)
        if kernel is not None:
            kernel.head_products(dz, hidden, weight, dhidden, dweight, resume, add, self.count, rows.start)
            return
        if dhidden is not None:
            gemm_into(dhidden, dz, weight.t(), resume=resume)
        if dweight is not None:
            gemm_into(dweight, dz.t(), hidden.t(), add=add)

    def _fused(self, op: str, kind: type, *tensors: torch.Tensor | None) -> ModuleType | None:
        """Return the module of the fused kernel, or None if the products go through memory."""
        backend = dispatch.backend_of(self.hidden.device)
        if dispatch.static_kernel(op, backend) is not None:
            return None
        kernel = dispatch.choose(op, kind(backend, *map(operand, tensors)))
        return kernel.load() if kernel.rule else None


def head_logits_of(hidden, weight, bias, soft_cap, logit_scale, *args, **options) -> HeadLogits:
    """Return `HeadLogits` with a transform of these parameters."""
    bias = None if bias is None else bias.detach().float().contiguous()
    return HeadLogits(hidden, weight, Transform(bias, soft_cap, logit_scale), *args, **options)


class GivenLogits:
    """Logits given as a tensor [N, V_local]; the i-th row is row order[i] of it (None: row i)."""

    transform = Transform()

    def __init__(self, logits, order: torch.Tensor | None = None):
        self.given = logits if logits.stride(1) == 1 else logits.contiguous()
        self.order, self.family = order, dispatch.family(logits.device)

    def blocks(self, rows: int, columns: int) -> tuple[int, None]:
        rows_per_block = self.family.head_rows
        return cpu_rows(columns, WORKSPACE[self.family]) if rows_per_block is None else rows_per_block, None

    def products(self, rows: slice, columns: slice) -> torch.Tensor:
        return self.given[rows if self.order is None else self.order[rows]][:, columns]

    def logits(self, rows: slice, columns: slice) -> torch.Tensor:
        return self.products(rows, columns).float()

    def statistics(self, *_) -> bool:
        return False


def gemm_into(out: torch.Tensor, a: torch.Tensor, b: torch.Tensor, add: bool = False, resume: bool = False) -> None:
    """Compute out = a . b^T; with `add`, added to its values; with `resume`, the chains continue from them."""
    if resume:
        dispatch.select("linear_resume", a.device).resume(a, b, out)
    else:
        matmul_into(a, b, 1, None, out, add)
