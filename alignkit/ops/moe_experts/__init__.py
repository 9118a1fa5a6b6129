"""The MLPs of experts, each for the rows that chose it. docs/contract.md, "Mixture of experts"."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from ...contract import k_leaves
from ...contract.experts import ExpertTree
from ...dist import SINGLE, TP, check_same_across, check_same_values_across
from ...runtime import dispatch
from ...runtime.operands import Operand, operand
from .._calls import differentiable_once, op
from .._common import (
    check_device,
    check_flag,
    check_int,
    check_like,
    check_plain,
    check_tensor,
    check_tp,
    looks,
    require,
    rounded,
)
from .problem import Grouped, Ids, Matrices, Pairs, Rows


class Ranks(NamedTuple):
    """Who holds what: of n experts `tp` the features, `ep` the experts, this rank those from `first` on; with `gather`, each
    its own rows."""

    experts: int
    first: int
    tp: TP
    ep: TP
    gather: bool

    def rows(self, t: torch.Tensor) -> torch.Tensor:
        """Of all ranks: those of `ep` in their order, in each those of `tp`."""
        return self.ep.gather(self.tp.gather(t)) if self.gather else t

    def sum_over_experts(self, parts: torch.Tensor) -> torch.Tensor:
        """Sums of the subtrees of all ranks, fp32, of this rank's rows."""
        if self.gather:
            return self.tp.shard(self.ep.tree_sum_scatter(parts))
        return self.ep.tree_sum(parts)


def _choose(
    op: str,
    a: torch.Tensor,
    row: torch.Tensor | None,
    b: Operand | None,
    out: torch.Tensor | None,
    experts: int,
    leaves: int = 1,
):
    p = Grouped(
        dispatch.name(a.device),
        a.get_device(),
        operand(a),  # pyright: ignore[reportArgumentType]
        b,
        operand(out),
        experts,
        leaves,
        len(a if row is None else row),
        row is not None,
    )
    return dispatch.choose(op, p).load()


def _products(a, row, b: Matrices, offsets: torch.Tensor, leaves: int, out: torch.Tensor) -> None:
    if out.numel():
        _choose("moe_products", a, row, b.operand(), out, len(b), leaves).products(a, row, b, offsets, leaves, out)


def _product(
    a: torch.Tensor, row: torch.Tensor | None, b: Matrices, pairs: Pairs, dtype: torch.dtype, tp: TP, leaves: int = 1
) -> torch.Tensor:
    """[pairs, N] of a, whose rows are in the order of pairs or by `row`, and matrices [N, K], whose K the ranks of `tp` share."""
    count, columns = len(pairs.row), b.shape[0]
    if tp.size == 1 or not count:
        out = torch.empty(count, columns, dtype=dtype, device=a.device)
        _products(a, row, b, pairs.offsets, leaves, out)
        return out

    def part(some: slice, to: torch.Tensor, _: int) -> None:
        offsets = pairs.offsets.clamp(some.start, some.stop) - some.start
        _products(a[some] if row is None else a, None if row is None else row[some], b, offsets, leaves, to)

    return tp.sum_products(part, count, columns, a.device, dtype=dtype)


def _gated(a: torch.Tensor, b: Matrices, pairs: Pairs, keep: bool) -> tuple[torch.Tensor | None, torch.Tensor]:
    """Gate and up of each pair, if they are kept, and silu_mul of these."""
    h = torch.empty(len(pairs.row), b.shape[0], dtype=a.dtype, device=a.device) if keep else None
    return h, _choose("moe_gated", a, pairs.row, b.operand(), h, len(b)).gated(a, pairs.row, b, pairs.offsets, h)


def _gradients(a, a_row, b, b_row, pairs: Pairs, like: Matrices) -> torch.Tensor:
    """[experts, N, K], of matrices `like` those."""
    out = torch.empty(len(like), *like.shape, dtype=a.dtype, device=a.device)
    _choose("moe_gradients", a, a_row, operand(b), out, len(like)).gradients(a, a_row, b, b_row, pairs.offsets, out)
    return out


def _pairs(ids: torch.Tensor, ranks: Ranks, experts: int) -> Pairs:
    p = Ids(dispatch.name(ids.device), ids.numel(), experts)
    return dispatch.choose("moe_pairs", p).load().pairs(ids, ranks.first, experts)


def _combine(y, pairs: Pairs, ids, weights, ranks: Ranks, dtype: torch.dtype) -> torch.Tensor:
    """The tree over experts of all ranks, of this rank's rows."""
    here = dtype if ranks.ep.size == 1 else torch.float32
    out = torch.empty(len(ids), y.shape[1], dtype=here, device=y.device)
    if out.numel():
        p = Rows(dispatch.name(y.device), operand(y), operand(out), ids.shape[1])  # pyright: ignore[reportArgumentType]
        dispatch.choose("moe_combine", p).load().combine(y, pairs.place, ids, weights, ranks.experts, out)
    return rounded(ranks.sum_over_experts(out), dtype).contiguous()


def _cut(items: Sequence, stacked: tuple[bool, bool]) -> tuple[Sequence, Sequence]:
    """Those of gate_up and those of down, of what autograd has as one list."""
    first = 1 if stacked[0] else len(items) - 1 if stacked[1] else len(items) // 2
    return items[:first], items[first:]


def _matrices(tensors: Sequence[torch.Tensor], stacked: tuple[bool, bool]) -> tuple[Matrices, Matrices]:
    gate_up, down = _cut(tensors, stacked)
    return Matrices(gate_up[0] if stacked[0] else gate_up), Matrices(down[0] if stacked[1] else down)


def _listed(*matrices: Matrices) -> list[torch.Tensor]:
    return [t for m in matrices for t in ([m.given] if isinstance(m.given, torch.Tensor) else m.given)]


def _as(like: Matrices, gradients: torch.Tensor | None) -> list[torch.Tensor | None]:
    """[experts, N, K], or None, as what `like` was given."""
    if like.stacked or gradients is None:
        return [gradients] * (1 if like.stacked else len(like))
    return [*gradients.unbind()]


def _all_rows(t: torch.Tensor, ranks: Ranks) -> torch.Tensor:
    return ranks.rows(t.reshape(-1, t.shape[-1])).contiguous()


def _counted(pairs: Pairs, ranks: Ranks, keep: bool) -> Pairs:
    """Without what lies behind the last, where that is worth waiting for a GPU: what is kept for backward would be as many
    times too large as there are ranks of `ep`."""
    if looks(pairs.offsets.device) or (keep and ranks.ep.size > 1 and not torch.cuda.is_current_stream_capturing()):
        return pairs.cut(int(pairs.offsets[-1]))
    return pairs


def forward(x, ids, weights, gate_up: Matrices, down: Matrices, ranks: Ranks, keep: bool):
    """The result; and if they are kept, gate and up of each pair, which backward needs."""
    all_ids = _all_rows(ids, ranks)
    pairs = _counted(_pairs(all_ids, ranks, len(gate_up)), ranks, keep)
    h, a = _gated(_all_rows(x, ranks), gate_up, pairs, keep)
    leaves = k_leaves(a.shape[1] * ranks.tp.size) // ranks.tp.size
    y = _product(a, None, down, pairs, x.dtype, ranks.tp, leaves)
    return _combine(y, pairs, all_ids, _all_rows(weights, ranks), ranks, x.dtype).reshape(x.shape), h


@differentiable_once("moe_experts")
class _Experts(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, ids, weights, ranks, stacked, *tensors):
        out, h = forward(x, ids, weights, *_matrices(tensors, stacked), ranks, any(ctx.needs_input_grad))
        ctx.save_for_backward(x, ids, weights, h, *tensors)  # of rows that were gathered, this rank's
        ctx.args = ranks, stacked
        return out

    @staticmethod
    def backward(ctx, dout):
        x, ids, weights, h, *tensors = ctx.saved_tensors
        ranks, stacked = ctx.args
        gate_up, down = _matrices(tensors, stacked)
        of_x, _, of_weights, _, _, *of_tensors = ctx.needs_input_grad
        of_gate_up, of_down = (any(part) for part in _cut(of_tensors, stacked))
        all_ids = _all_rows(ids, ranks)
        h = h.contiguous()  # a hook on saved tensors may have laid it out anew
        pairs = _pairs(all_ids, ranks, len(gate_up)).cut(len(h))
        dout = _all_rows(dout, ranks)
        g = _product(dout, pairs.row, down.t(), pairs, torch.float32, SINGLE)
        w = _all_rows(weights, ranks).view(-1)[pairs.choice]
        dw, d, weighed = dispatch.select("moe_weigh", h.device).weigh(g, h, w)
        dx = d_weights = d_gate_up = d_down = None
        if of_weights:
            whole = torch.zeros(all_ids.shape, dtype=torch.float32, device=dw.device)
            whole.view(-1)[pairs.choice] = ranks.tp.tree_sum(dw)
            whole.masked_fill_(pairs.place < 0, 0.0)
            d_weights = ranks.sum_over_experts(whole).reshape(weights.shape)
        if of_x:
            of_pairs = _product(d, None, gate_up.t(), pairs, x.dtype, ranks.tp)
            dx = _combine(of_pairs, pairs, all_ids, None, ranks, x.dtype).reshape(x.shape)
        if of_gate_up:
            d_gate_up = _gradients(d, None, _all_rows(x, ranks), pairs.row, pairs, gate_up)
        if of_down:
            d_down = _gradients(dout, pairs.row, weighed, None, pairs, down)
        found = [*_as(gate_up, d_gate_up), *_as(down, d_down)]
        return (
            dx,
            None,
            d_weights,
            None,
            None,
            *(t if wanted else None for t, wanted in zip(found, of_tensors, strict=True)),
        )


@op
def moe_experts(
    x: torch.Tensor,
    ids: torch.Tensor,
    weights: torch.Tensor,
    gate_up: torch.Tensor | Sequence[torch.Tensor],
    down: torch.Tensor | Sequence[torch.Tensor],
    *,
    num_experts: int | None = None,
    first_expert: int = 0,
    tp: TP | None = None,
    ep: TP | None = None,
    gather: bool = False,
) -> torch.Tensor:
    """The sum over a row's experts of weight times ``down_e(silu(gate_e(x)) * up_e(x))``, with the bits of a single rank.

    Args:
        x: [..., H], fp32 or bf16.
        ids: [..., k], int64 or int32: the experts of each row, each at most once, in any order; -1: none. The result of a
            row without experts is 0. On a GPU values are not looked at; there, an id that is none counts as -1, and
            what a row gets that names an expert twice is not said.
        weights: [..., k] fp32.
        gate_up: [E, 2F, H], or a sequence of E tensors [2F, H], of x's type, any strides: of this rank's E experts, the
            gate's rows, then those of up. F is this rank's part of an expert's features.
        down: [E, H, F], or a sequence of E tensors [H, F].
        num_experts: of all ranks of `ep`; E times their number, which it is by default.
        first_expert: id of this rank's first expert: E times its rank of `ep`.
        tp: ranks that share the features of each expert; their number must divide the number of leaves.
        ep: ranks that hold the other experts; their number must divide the largest power of two in the number of experts.
        gather: False: all ranks have all rows, the same ones, and get all. True: each rank of `tp` and `ep` has rows of its own, as many as
            each other, and gets theirs. The batch is then that of all ranks, by rank of `ep`, then of `tp`, then by row.

    Returns:
        As x. Differentiable in x, weights, gate_up and down.

    Raises:
        InputError: shapes, types, devices or numbers do not fit; on all ranks together, before anything is computed.

    On a GPU the host does not wait to know how many rows each expert has, and a CUDA graph may be replayed with other ids. It
    waits with `ep`, where there will be a backward pass; and where gate_up or down is a sequence of tensors that differ in
    strides or alignment. The addresses of a sequence's tensors are copied to the GPU when they are first given, which cannot
    be while a graph is captured.
    """
    tp, ep = check_tp(tp), check_tp(ep, "ep")
    args = (x, ids, weights, gate_up, down, num_experts, first_expert, tp, ep, gather)
    check_same_across((tp, ep), "moe_experts", lambda: _check(*args))
    if not gather:
        check_same_values_across((tp, ep), "moe_experts", ids=ids.detach())
    matrices = Matrices(gate_up), Matrices(down)
    ranks = Ranks(len(gate_up) * ep.size, int(first_expert), tp, ep, bool(gather))
    return _Experts.apply(x, ids, weights, ranks, tuple(m.stacked for m in matrices), *_listed(*matrices))


def _check_matrices(name: str, given, x: torch.Tensor) -> tuple[int, int, int]:
    """Experts, rows and columns of gate_up or down."""
    if isinstance(given, torch.Tensor):
        check_tensor(name, given, 3)
        check_like(name, given, "x", x)
        shape = tuple(given.shape)
    else:
        listed = given if isinstance(given, (list, tuple)) else [given]
        odd = next((type(w).__name__ for w in listed if not isinstance(w, torch.Tensor)), None)
        require(
            odd is None, f"{name}: expected a tensor or a sequence of them, got {'one of ' * (listed is given)}{odd}"
        )
        require(len(given) > 0, f"{name}: no experts")
        for e, w in enumerate(given):
            check_tensor(f"{name}[{e}]", w, 2)
            check_like(f"{name}[{e}]", w, "x", x)
            require(
                w.shape == given[0].shape,
                f"{name}[{e}]: shape {tuple(w.shape)} differs from the first one's {tuple(given[0].shape)}",
            )
        shape = (len(given), *given[0].shape)
    require(min(shape) > 0, f"{name}: empty, shape {shape}")
    experts, rows, columns = shape
    return experts, rows, columns


def _check_choice(ids, weights, x: torch.Tensor, experts: int) -> None:
    check_plain("ids", ids)
    require(ids.dtype in (torch.int64, torch.int32), f"ids: dtype {ids.dtype} is neither torch.int64 nor torch.int32")
    require(ids.device == x.device, f"ids: device {ids.device} differs from x's {x.device}")
    require(
        ids.ndim == x.ndim and ids.shape[:-1] == x.shape[:-1] and ids.shape[-1] > 0,
        f"ids: shape {tuple(ids.shape)} does not fit x of shape {tuple(x.shape)}",
    )
    check_tensor("weights", weights, dtypes=(torch.float32,))
    require(weights.device == x.device, f"weights: device {weights.device} differs from x's {x.device}")
    require(weights.shape == ids.shape, f"weights: shape {tuple(weights.shape)} differs from ids' {tuple(ids.shape)}")
    if looks(x.device) and ids.numel():
        least, most = int(ids.min()), int(ids.max())
        require(-1 <= least and most < experts, f"ids: {least} to {most} leave the {experts} experts")
        in_order = ids.sort(dim=-1).values
        twice = (in_order[..., 1:] == in_order[..., :-1]) & (in_order[..., 1:] >= 0)
        require(not bool(twice.any()), "ids: a row names an expert twice")


def _check(x, ids, weights, gate_up, down, num_experts, first_expert, tp, ep, gather) -> dict:
    check_flag("gather", gather)
    check_tensor("x", x)
    check_device("x", x)
    own, doubled, h = _check_matrices("gate_up", gate_up, x)
    require(h == x.shape[-1], f"gate_up: {h} columns do not fit x of shape {tuple(x.shape)}")
    require(doubled % 2 == 0, f"gate_up: {doubled} rows are not gate's and as many of up")
    shape = _check_matrices("down", down, x)
    f = doubled // 2
    require(shape == (own, h, f), f"down: {shape} does not fit gate_up: expected {(own, h, f)}")
    experts, first = own * ep.size, own * ep.rank
    if num_experts is not None:
        found = check_int("num_experts", num_experts, 1)
        require(found == experts, f"num_experts: {found} is not {own} on each of {ep.size} ranks")
    require(
        check_int("first_expert", first_expert, 0) == first,
        f"first_expert: {first_expert} is not {first}, of rank {ep.rank} of those that have {own} experts each",
    )
    leaves, subtrees = k_leaves(f * tp.size), ExpertTree.of(experts).groups
    require(
        leaves % tp.size == 0,
        f"tp: {tp.size} ranks cannot share the {leaves} leaves that the contract cuts {f * tp.size} features into",
    )
    require(
        subtrees % ep.size == 0,
        f"ep: {ep.size} ranks cannot share the {subtrees} subtrees that the contract cuts {experts} experts into",
    )
    _check_choice(ids, weights, x, experts)
    return {
        "x": (tuple(x.shape), str(x.dtype)),
        "ids": tuple(ids.shape),
        "gate_up": (own, doubled),
        "gather": bool(gather),
        "requires_grad": tuple(
            torch.is_grad_enabled() and any(t.requires_grad for t in given)
            for given in ((x,), (weights,), *(_listed(Matrices(m)) for m in (gate_up, down)))
        ),
    }
