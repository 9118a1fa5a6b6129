"""qk_norm_rope by separate norm and rope kernels, for the backends `cpu` and `reference`.

triton_backend.py fuses both and gives the same bits.
"""

from __future__ import annotations


def compose(norm, rotation):
    """Return `forward` and `backward` of a backend, given its rms_norm and rope modules."""

    def forward(
        q, k, q_weight, k_weight, eps: float, positions, table, zero_centered: bool = False, keep: bool = False
    ):
        _, q, q_rstd = norm.forward(q, q_weight, eps, None, zero_centered)
        _, k, k_rstd = norm.forward(k, k_weight, eps, None, zero_centered)
        return *rotation.apply_qk(q, k, positions, table), q_rstd, k_rstd

    def backward(dyq, dyk, q, k, q_weight, k_weight, q_rstd, k_rstd, positions, table, zero_centered: bool = False):
        dq, dq_weight = norm.backward(
            rotation.apply(dyq, positions, table, True), q, q_weight, q_rstd, None, zero_centered
        )
        dk, dk_weight = norm.backward(
            rotation.apply(dyk, positions, table, True), k, k_weight, k_rstd, None, zero_centered
        )
        return dq, dk, dq_weight, dk_weight

    return forward, backward
