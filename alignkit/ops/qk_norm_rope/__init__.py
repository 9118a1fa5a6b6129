"""RMSNorm of query and key heads followed by RoPE, fused.

Contract: docs/contract.md, "RMSNorm" and "RoPE".
Public: `qk_norm_rope` (docs/api/ops.md). ops/library.py calls `check` and `forward`.
"""

from __future__ import annotations

import torch

from ...runtime import dispatch
from .._calls import differentiable_once, op
from .._common import check_flag, check_like, check_tensor, require, rounded, unit
from ..rms_norm import check as check_norm
from ..rope import check as check_rope


def _forward(q, k, q_weight, k_weight, eps: float, positions, table, zero_centered: bool, keep: bool):
    """Return the new q and k, and fp32 rstd [T * H] of each; rstd may be None unless `keep`."""
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
    """Compute `qk_norm_rope` from checked arguments, without gradients."""
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
        # A result without an incoming gradient is replaced by an empty tensor.
        inputs = [
            (x[:, :0], x[:, :0], r[:0]) if d is None else (unit(d), unit(x), r)
            for d, x, r in zip(dy, (q, k), rstd, strict=True)
        ]
        (dyq, q, q_rstd), (dyk, k, k_rstd) = inputs
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
        grads = dq, dk, *(rounded(d, q_weight.dtype) for d in dw)  # dq, dk, dq_weight, dk_weight; even ones belong to q
        return *(None if dy[i % 2] is None else d for i, d in enumerate(grads)), None, None, None, None


def check(q, k, q_weight, k_weight, eps: float, positions, table, rotary_dim: int | None = None) -> None:
    """Raise InputError for invalid arguments of `qk_norm_rope`."""
    check_rope(q, positions, table, "q", rotary_dim)
    check_tensor("k", k, 3)
    check_like("k", k, "q", q)
    require(k.shape[0] == q.shape[0], f"k: number of tokens must equal q's {q.shape[0]}, got {k.shape[0]}")
    require(k.shape[2] == q.shape[2], f"k: head_dim must equal q's {q.shape[2]}, got {k.shape[2]}")
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
    """Compute ``rope(rms_norm(x, weight, eps), positions, table)`` for queries and keys, with the same bits.

    A GPU computes it in one launch.

    Args:
        q: [T, Hq, D], fp32 or bf16, D even. A GPU reads q and k in place if D has unit stride, for example as views of
            a fused QKV projection; other layouts are copied.
        k: [T, Hkv, D], q's dtype and device.
        q_weight: [D], q's dtype; the weight of the norm over each query head.
        k_weight: [D], q's dtype; the weight of the norm over each key head.
        eps: added to the mean of squares; positive.
        positions: int64 [T] on q's device, in [0, max_position).
        table: fp32 [max_position, D] from `rope_table`, or [max_position, rotary_dim]. It must not require a gradient.
        rotary_dim: number of leading head dimensions to rotate, even; None: all.
        zero_centered: the weights are stored minus one; 1 is added in fp32.

    Returns:
        The pair of [T, Hq, D] and [T, Hkv, D], q's dtype. Differentiable once in q, k and the weights; the gradients
        have the bits of `rope`'s and `rms_norm`'s gradients.

    Raises:
        InputError: a shape, dtype or device is invalid, or a position is outside the table. On a GPU positions are
            checked only under ``ALIGNKIT_STRICT=1``, because reading them synchronizes; unchecked, the rotated
            dimensions of such a token are NaN.
        UnsupportedError: a gradient is differentiated again.
    """
    check(q, k, q_weight, k_weight, eps, positions, table, rotary_dim)
    zero_centered = check_flag("zero_centered", zero_centered)
    return _QKNormRope.apply(q, k, q_weight, k_weight, float(eps), positions, table, zero_centered)
