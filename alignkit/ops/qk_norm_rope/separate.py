"""The norms and the rotation one after the other, for the backends of the CPU, which have a kernel for each."""

from __future__ import annotations


def one_after_the_other(norm, rotation):
    """The backend's `forward` and `backward` from its files of rms_norm and of rope."""

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
