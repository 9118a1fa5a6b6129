"""MoE experts: gated MLPs, each applied to the tokens routed to it.

Contract: docs/contract.md, "Mixture of experts".
Public: `moe_experts` (docs/api/ops.md).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from ...contract import k_leaves
from ...contract.experts import ExpertTree
from ...dist import SINGLE, TP, check_same_across, check_same_values_across
from ...errors import InputError
from ...runtime import dispatch
from ...runtime.operands import Operand, operand
from .._calls import differentiable_once, op
from .._common import (
    check_device,
    check_flag,
    check_int,
    check_like,
    check_plain,
    check_same_device,
    check_tensor,
    check_tp,
    checks_values,
    require,
    rounded,
)
from .problem import Grouped, Ids, Matrices, Pairs, Rows


class Ranks(NamedTuple):
    """The parallel layout of the experts.

    `tp` shards the features of each expert; `ep` shards the experts, of which this rank holds those from `first` on.
    With `gather`, each rank has its own rows.
    """

    experts: int
    """Number of experts on all ranks."""
    first: int
    tp: TP
    ep: TP
    gather: bool

    def gather_rows(self, t: torch.Tensor) -> torch.Tensor:
        """Return the rows of all ranks, ordered by rank of `ep`, then of `tp`; t itself without `gather`."""
        return self.ep.gather(self.tp.gather(t)) if self.gather else t

    def sum_over_experts(self, parts: torch.Tensor) -> torch.Tensor:
        """Add the fp32 subtree sums of all ranks of `ep`; return this rank's rows."""
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
        dispatch.backend_of(a.device),
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
    """Return [pairs, N]: rows of a (gathered by `row` if given) times the experts' [N, K], summed over `tp`."""
    count, columns = len(pairs.row), b.shape[0]
    if tp.size == 1 or not count:
        out = torch.empty(count, columns, dtype=dtype, device=a.device)
        _products(a, row, b, pairs.offsets, leaves, out)
        return out

    def part(chunk: slice, to: torch.Tensor, _: int) -> None:
        offsets = pairs.offsets.clamp(chunk.start, chunk.stop) - chunk.start
        _products(a[chunk] if row is None else a, None if row is None else row[chunk], b, offsets, leaves, to)

    return tp.sum_products(part, count, columns, a.device, dtype=dtype)


def _gated(a: torch.Tensor, b: Matrices, pairs: Pairs, keep: bool) -> tuple[torch.Tensor | None, torch.Tensor]:
    """Return gate and up of each pair (None unless `keep`), and silu_mul of them."""
    h = torch.empty(len(pairs.row), b.shape[0], dtype=a.dtype, device=a.device) if keep else None
    return h, _choose("moe_gated", a, pairs.row, b.operand(), h, len(b)).gated(a, pairs.row, b, pairs.offsets, h)


def _gradients(a, a_row, b, b_row, pairs: Pairs, like: Matrices) -> torch.Tensor:
    """Return the gradients [experts, N, K] of matrices `like`."""
    out = torch.empty(len(like), *like.shape, dtype=a.dtype, device=a.device)
    _choose("moe_gradients", a, a_row, operand(b), out, len(like)).gradients(a, a_row, b, b_row, pairs.offsets, out)
    return out


def _pairs(ids: torch.Tensor, ranks: Ranks, experts: int) -> Pairs:
    p = Ids(dispatch.backend_of(ids.device), ids.numel(), experts)
    return dispatch.choose("moe_pairs", p).load().pairs(ids, ranks.first, experts)


def _combine(y, pairs: Pairs, ids, weights, ranks: Ranks, dtype: torch.dtype) -> torch.Tensor:
    """Sum the weighted pairs of each row by the tree over the experts of all ranks; return this rank's rows."""
    local_dtype = dtype if ranks.ep.size == 1 else torch.float32
    out = torch.empty(len(ids), y.shape[1], dtype=local_dtype, device=y.device)
    if out.numel():
        p = Rows(dispatch.backend_of(y.device), operand(y), operand(out), ids.shape[1])  # pyright: ignore[reportArgumentType]
        dispatch.choose("moe_combine", p).load().combine(y, pairs.place, ids, weights, ranks.experts, out)
    return rounded(ranks.sum_over_experts(out), dtype).contiguous()


def _split(items: Sequence, stacked: tuple[bool, bool]) -> tuple[Sequence, Sequence]:
    """Split autograd's flat list into the items of gate_up and of down."""
    first = 1 if stacked[0] else len(items) - 1 if stacked[1] else len(items) // 2
    return items[:first], items[first:]


def _matrices(tensors: Sequence[torch.Tensor], stacked: tuple[bool, bool]) -> tuple[Matrices, Matrices]:
    gate_up, down = _split(tensors, stacked)
    return Matrices(gate_up[0] if stacked[0] else gate_up), Matrices(down[0] if stacked[1] else down)


def _listed(*matrices: Matrices) -> list[torch.Tensor]:
    return [t for m in matrices for t in ([m.given] if isinstance(m.given, torch.Tensor) else m.given)]


def _unstacked(like: Matrices, gradients: torch.Tensor | None) -> list[torch.Tensor | None]:
    """Return gradients [experts, N, K] (or None) in the form that `like` was given: stacked or a list."""
    if like.stacked or gradients is None:
        return [gradients] * (1 if like.stacked else len(like))
    return [*gradients.unbind()]


def _all_rows(t: torch.Tensor, ranks: Ranks) -> torch.Tensor:
    return ranks.gather_rows(t.reshape(-1, t.shape[-1])).contiguous()


def _trimmed(pairs: Pairs, ranks: Ranks, keep: bool) -> Pairs:
    """Drop the unused entries after the last pair if the count is worth a synchronization.

    With `ep`, the activations saved for backward would otherwise be up to `ep.size` times too large.
    """
    if checks_values(pairs.offsets.device) or (
        keep and ranks.ep.size > 1 and not torch.cuda.is_current_stream_capturing()
    ):
        return pairs.cut(int(pairs.offsets[-1]))
    return pairs


def forward(x, ids, weights, gate_up: Matrices, down: Matrices, ranks: Ranks, keep: bool):
    """Return the result, and gate and up of each pair for the backward pass (None unless `keep`)."""
    all_ids = _all_rows(ids, ranks)
    pairs = _trimmed(_pairs(all_ids, ranks, len(gate_up)), ranks, keep)
    h, a = _gated(_all_rows(x, ranks), gate_up, pairs, keep)
    leaves = k_leaves(a.shape[1] * ranks.tp.size) // ranks.tp.size
    y = _product(a, None, down, pairs, x.dtype, ranks.tp, leaves)
    return _combine(y, pairs, all_ids, _all_rows(weights, ranks), ranks, x.dtype).reshape(x.shape), h


@differentiable_once("moe_experts")
class _Experts(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, ids, weights, ranks, stacked, *tensors):
        out, h = forward(x, ids, weights, *_matrices(tensors, stacked), ranks, any(ctx.needs_input_grad))
        ctx.save_for_backward(x, ids, weights, h, *tensors)  # this rank's rows only; backward gathers again
        ctx.args = ranks, stacked
        return out

    @staticmethod
    def backward(ctx, dout):
        x, ids, weights, h, *tensors = ctx.saved_tensors
        ranks, stacked = ctx.args
        gate_up, down = _matrices(tensors, stacked)
        need_x, _, need_weights, _, _, *need_tensors = ctx.needs_input_grad
        need_gate_up, need_down = (any(part) for part in _split(need_tensors, stacked))
        all_ids = _all_rows(ids, ranks)
        h = h.contiguous()  # a saved-tensor hook may have changed the strides
        pairs = _pairs(all_ids, ranks, len(gate_up)).cut(len(h))
        dout = _all_rows(dout, ranks)
        g = _product(dout, pairs.row, down.t(), pairs, torch.float32, SINGLE)
        w = _all_rows(weights, ranks).view(-1)[pairs.choice]
        dw, d, weighed = dispatch.select("moe_weigh", h.device).weigh(g, h, w)
        dx = d_weights = d_gate_up = d_down = None
        if need_weights:
            whole = torch.zeros(all_ids.shape, dtype=torch.float32, device=dw.device)
            whole.view(-1)[pairs.choice] = ranks.tp.tree_sum(dw)
            whole.masked_fill_(pairs.place < 0, 0.0)
            d_weights = ranks.sum_over_experts(whole).reshape(weights.shape)
        if need_x:
            dx_pairs = _product(d, None, gate_up.t(), pairs, x.dtype, ranks.tp)
            dx = _combine(dx_pairs, pairs, all_ids, None, ranks, x.dtype).reshape(x.shape)
        if need_gate_up:
            d_gate_up = _gradients(d, None, _all_rows(x, ranks), pairs.row, pairs, gate_up)
        if need_down:
            d_down = _gradients(dout, pairs.row, weighed, None, pairs, down)
        grads = [*_unstacked(gate_up, d_gate_up), *_unstacked(down, d_down)]
        return (
            dx,
            None,
            d_weights,
            None,
            None,
            *(t if needed else None for t, needed in zip(grads, need_tensors, strict=True)),
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
    """Compute the weighted sum of each token's experts, with the bits of a single rank.

    The result is the sum over a token's experts e of ``weight * down_e(silu(gate_e(x)) * up_e(x))``, by the tree over
    expert ids.

    On a GPU the host does not need the number of rows per expert, so CUDA graphs may be replayed with other ids.
    Two cases synchronize: `ep` with a backward pass, and a sequence of tensors that differ in strides or alignment.
    The addresses of a sequence's tensors are copied to the GPU at their first use.

    Args:
        x: [..., H], fp32 or bf16.
        ids: [..., k], int64 or int32: the experts of each token, in any order, without duplicates; -1 for none. A token
            without experts gets 0.
        weights: [..., k], fp32.
        gate_up: [E, 2F, H], or a sequence of E tensors [2F, H], of x's dtype, any strides: the gate rows, then the up
            rows, of this rank's E experts. F is this rank's part of an expert's features.
        down: [E, H, F], or a sequence of E tensors [H, F], of x's dtype, any strides.
        num_experts: Number of experts on all ranks of `ep`: E times their number (the default).
        first_expert: Id of this rank's first expert: E times the rank in `ep`.
        tp: Ranks that shard the features of each expert; their number must divide the k-tree leaves of F * tp. The
            forward pass sums over them (k-tree), the backward pass sums the gradients of x and weights.
        ep: Ranks that hold the other experts; their number must divide the largest power of two in the number of
            experts. Forward and backward passes sum over them (tree over experts, fp32).
        gather: False if all ranks have the same rows and need all results. True if each rank of `tp` and `ep` has its
            own rows, the same number on each; the batch is then ordered by rank of `ep`, then of `tp`, then by row.

    Returns:
        A tensor like x, this rank's rows. Differentiable once in x, weights, gate_up and down, with gradients of their
        dtypes. The gradients of gate_up and down have the same bits at every size of `tp` and `ep`; those of x and
        weights at every size of `ep`.

    Raises:
        InputError: shapes, dtypes, devices or numbers do not match, an id is out of range or duplicated, or arguments
            differ between the ranks; on all ranks, before anything is computed. On a GPU without ``ALIGNKIT_STRICT=1``,
            an id out of range counts as -1, and the result of a token with duplicate ids is undefined.
        UnsupportedError: a torch mode or transform without real tensors is active, double backward, or a first use of
            a sequence or a synchronizing case during CUDA graph capture.
        BackendError: no backend for the device, or another rank died.
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
    """Check gate_up or down; return its experts, rows and columns."""
    if isinstance(given, torch.Tensor):
        check_tensor(name, given, 3)
        check_like(name, given, "x", x)
        shape = tuple(given.shape)
    else:
        require(
            isinstance(given, (list, tuple)),
            f"{name}: expected a tensor, or a list or tuple of tensors, got {type(given).__name__}",
        )
        require(len(given) > 0, f"{name}: must hold at least one expert, got an empty sequence")
        for e, w in enumerate(given):
            require(isinstance(w, torch.Tensor), f"{name}: expected a tensor at index {e}, got {type(w).__name__}")
        for e, w in enumerate(given):
            check_tensor(f"{name}[{e}]", w, 2)
            check_like(f"{name}[{e}]", w, "x", x)
            require(
                w.shape == given[0].shape,
                f"{name}[{e}]: shape must equal {name}[0]'s {tuple(given[0].shape)}, got {tuple(w.shape)}",
            )
        shape = (len(given), *given[0].shape)
    require(min(shape) > 0, f"{name}: must not be empty, got shape {shape}")
    experts, rows, columns = shape
    return experts, rows, columns


def _check_choice(ids, weights, x: torch.Tensor, experts: int) -> None:
    check_plain("ids", ids)
    require(ids.dtype in (torch.int64, torch.int32), f"ids: dtype must be torch.int64 or torch.int32, got {ids.dtype}")
    check_same_device("ids", ids, "x", x)
    require(
        ids.ndim == x.ndim and ids.shape[:-1] == x.shape[:-1] and ids.shape[-1] > 0,
        f"ids: shape must be [{', '.join(map(str, x.shape[:-1]))}, top_k] to match x, got {list(ids.shape)}",
    )
    check_tensor("weights", weights, dtypes=(torch.float32,))
    check_same_device("weights", weights, "x", x)
    require(
        weights.shape == ids.shape, f"weights: shape must equal ids' {tuple(ids.shape)}, got {tuple(weights.shape)}"
    )
    if checks_values(x.device) and ids.numel():
        if len(outside := ((ids < -1) | (ids >= experts)).nonzero()):
            at = tuple(outside[0].tolist())
            raise InputError(
                f"ids: must be expert ids in [0, {experts}), or -1 for no expert, got {int(ids[at])} at {at}"
            )
        in_order = ids.sort(dim=-1).values
        duplicate = (in_order[..., 1:] == in_order[..., :-1]) & (in_order[..., 1:] >= 0)
        if len(equal := duplicate.nonzero()):
            *token, i = equal[0].tolist()
            raise InputError(
                f"ids: the expert ids of a token must be distinct, got {int(in_order[(*token, i)])} twice "
                f"at {tuple(token)}"
            )


def _check(x, ids, weights, gate_up, down, num_experts, first_expert, tp, ep, gather) -> dict:
    check_flag("gather", gather)
    check_tensor("x", x)
    check_device("x", x)
    own, doubled, h = _check_matrices("gate_up", gate_up, x)
    require(h == x.shape[-1], f"gate_up: must have x's {x.shape[-1]} columns, got {h}")
    require(doubled % 2 == 0, f"gate_up: must have an even number of rows (gate, then up), got {doubled}")
    shape = _check_matrices("down", down, x)
    f = doubled // 2
    require(shape == (own, h, f), f"down: must have shape {(own, h, f)} to match gate_up, got {shape}")
    experts, first = own * ep.size, own * ep.rank
    if num_experts is not None:
        found = check_int("num_experts", num_experts, 1)
        require(
            found == experts,
            f"num_experts: must be {experts} ({own} on each of the {ep.size} ranks of ep), got {found}",
        )
    require(
        check_int("first_expert", first_expert, 0) == first,
        f"first_expert: must be {first} (rank {ep.rank} of ep, {own} experts per rank), got {first_expert}",
    )
    leaves, subtrees = k_leaves(f * tp.size), ExpertTree.of(experts).groups
    require(
        leaves % tp.size == 0,
        f"tp: number of ranks must divide alignkit.contract.k_leaves({f * tp.size}) = {leaves}, got {tp.size}",
    )
    require(
        subtrees % ep.size == 0,
        f"ep: number of ranks must be a power of two that divides the {experts} experts, got {ep.size}",
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
