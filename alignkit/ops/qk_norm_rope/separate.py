"""The norms and the rotation one after the other, for the backends of the CPU, which have a kernel for each."""

from __future__ import annotations


def one_after_the_other(norm, rotation):
    """The backend's `forward` from its files of rms_norm and of rope."""

    def forward(q, k, q_weight, k_weight, eps: float, positions, table, zero_centered: bool = False):
        _, q, _ = norm.forward(q, q_weight, eps, None, zero_centered)
        _, k, _ = norm.forward(k, k_weight, eps, None, zero_centered)
        return rotation.apply_qk(q, k, positions, table)

    return forward
