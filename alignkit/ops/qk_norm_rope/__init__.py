"""Norms of queries and keys and their rotation in one op, for rollout. docs/contract.md, "RoPE"."""

from __future__ import annotations

import torch

from ...errors import UnsupportedError
from ...runtime import dispatch
from .._calls import op
from .._common import check_flag, check_like, check_tensor, require, unit
from ..rms_norm import check as check_norm
from ..rope import check as check_rope


def forward(q, k, q_weight, k_weight, eps: float, positions, table, zero_centered: bool = False):
    """`qk_norm_rope` of what has been checked."""
    return dispatch.select("qk_norm_rope", q.device).forward(
        unit(q),
        unit(k),
        q_weight.contiguous(),
        k_weight.contiguous(),
        eps,
        positions.contiguous(),
        table.contiguous(),
        zero_centered,
    )


class _ForwardOnly(torch.autograd.Function):
    @staticmethod
    def forward(ctx, *arguments):
        return forward(*arguments)

    @staticmethod
    def backward(ctx, *_):
        raise UnsupportedError("qk_norm_rope: forward only; rms_norm and rope have gradients")


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
        [T, Hq, D] and [T, Hkv, D], q's type. Not differentiable: it raises an UnsupportedError to ask for gradients.

    Raises:
        InputError: shapes, types or devices do not fit, or a position is outside the table. A GPU is not waited for to
            find the latter, unless ``ALIGNKIT_STRICT=1``: what is rotated of such a token is NaN.
    """
    check(q, k, q_weight, k_weight, eps, positions, table, rotary_dim)
    zero_centered = check_flag("zero_centered", zero_centered)
    return _ForwardOnly.apply(q, k, q_weight, k_weight, float(eps), positions, table, zero_centered)
