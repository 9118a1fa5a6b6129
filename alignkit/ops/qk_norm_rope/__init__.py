"""Norms of queries and keys and their rotation in one op. docs/contract.md, "RoPE"."""

from __future__ import annotations

import torch

from ...runtime import dispatch
from .._calls import differentiable_once, op
from .._common import check_flag, check_like, check_tensor, require, rounded, unit
from ..rms_norm import check as check_norm
from ..rope import check as check_rope


def _forward(q, k, q_weight, k_weight, eps: float, positions, table, zero_centered: bool, keep: bool):
    """Queries and keys, and of each fp32 rstd, [T * H], which need not be there unless it is to `keep` them."""
    return dispatch.select("qk_norm_rope", q.device).forward(
        unit(q),
        unit(k),
        q_weight.contiguous(),
        k_weight.contiguous(),
        eps,
        positions.contiguous(),
        table.contiguous(),
        zero_centered,
        keep,
    )


def forward(q, k, q_weight, k_weight, eps: float, positions, table, zero_centered: bool = False):
    """`qk_norm_rope` of what has been checked, without gradients."""
    return _forward(q, k, q_weight, k_weight, eps, positions, table, zero_centered, False)[:2]


@differentiable_once("qk_norm_rope")
class _QKNormRope(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, q_weight, k_weight, eps, positions, table, zero_centered):
        keep = any(ctx.needs_input_grad)
        yq, yk, *rstd = _forward(q, k, q_weight, k_weight, eps, positions, table, zero_centered, keep)
        if keep:
            ctx.save_for_backward(q, k, q_weight, k_weight, positions, table, *rstd)
        ctx.zero_centered = zero_centered
        ctx.set_materialize_grads(False)
        return yq, yk

    @staticmethod
    def backward(ctx, *dy):
        q, k, q_weight, k_weight, positions, table, *rstd = ctx.saved_tensors
        # Queries or keys that no gradient comes in of are as none of them.
        given = [
            (x[:, :0], x[:, :0], r[:0]) if d is None else (unit(d), unit(x), r)
            for d, x, r in zip(dy, (q, k), rstd, strict=True)
        ]
        (dyq, q, q_rstd), (dyk, k, k_rstd) = given
        dq, dk, *dw = dispatch.select("qk_norm_rope", q.device).backward(
            dyq,
            dyk,
            q,
            k,
            q_weight.contiguous(),
            k_weight.contiguous(),
            q_rstd,
            k_rstd,
            positions.contiguous(),
            table.contiguous(),
            ctx.zero_centered,
        )
        found = dq, dk, *(rounded(d, q_weight.dtype) for d in dw)
        return *(None if dy[i % 2] is None else d for i, d in enumerate(found)), None, None, None, None


def check(q, k, q_weight, k_weight, eps: float, positions, table, rotary_dim: int | None = None) -> None:
    """Raise InputError unless `qk_norm_rope` takes these arguments."""
    check_rope(q, positions, table, "q", rotary_dim)
    check_tensor("k", k, 3)
    check_like("k", k, "q", q)
    require(k.shape[0] == q.shape[0], f"k: {k.shape[0]} tokens differ from q's {q.shape[0]}")
    require(k.shape[2] == q.shape[2], f"k: head_dim {k.shape[2]} differs from q's {q.shape[2]}")
    check_norm(q, q_weight, eps, name="q", weight_name="q_weight")
    check_norm(k, k_weight, eps, name="k", weight_name="k_weight")


@op
def qk_norm_rope(
    q: torch.Tensor,
    k: torch.Tensor,
    q_weight: torch.Tensor,
    k_weight: torch.Tensor,
    eps: float,
    positions: torch.Tensor,
    table: torch.Tensor,
    *,
    rotary_dim: int | None = None,
    zero_centered: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """``rope(rms_norm(x, weight, eps), positions, table)`` of queries and keys, to the bit; on a GPU in one launch.

    Args:
        q: [T, Hq, D], fp32 or bf16. On a GPU, queries and keys within a joint tensor are not copied.
        k: [T, Hkv, D], q's type.
        q_weight, k_weight: [D], q's type; of the norms over each head.
        eps: added to the mean of squares; positive.
        positions: int64 [T], in [0, max_position).
        table: fp32 [max_position, D] of `rope_table`, or [max_position, rotary_dim].
        rotary_dim: how many of a head's dimensions, from the first on, are rotated. None: all.
        zero_centered: the weights are the scales minus one; 1 is added in fp32.

    Returns:
        [T, Hq, D] and [T, Hkv, D], q's type. Differentiable in q, k and the weights: the bits are those of `rope`'s and
        `rms_norm`'s gradients.

    Raises:
        InputError: shapes, types or devices do not fit, or a position is outside the table. A GPU is not waited for to
            find the latter, unless ``ALIGNKIT_STRICT=1``: what is rotated of such a token is NaN.
    """
    check(q, k, q_weight, k_weight, eps, positions, table, rotary_dim)
    zero_centered = check_flag("zero_centered", zero_centered)
    return _QKNormRope.apply(q, k, q_weight, k_weight, float(eps), positions, table, zero_centered)
