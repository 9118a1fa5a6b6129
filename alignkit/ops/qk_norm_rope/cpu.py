"""C++: the kernels of RMSNorm and of rope, one after the other."""

from __future__ import annotations

import torch

from ..rms_norm import cpu as norm
from ..rope import cpu as rotation


def forward(
    q: torch.Tensor,
    k: torch.Tensor,
    q_weight: torch.Tensor,
    k_weight: torch.Tensor,
    eps: float,
    positions: torch.Tensor,
    table: torch.Tensor,
    zero_centered: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    _, q, _ = norm.forward(q, q_weight, eps, None, zero_centered)
    _, k, _ = norm.forward(k, k_weight, eps, None, zero_centered)
    return rotation.apply_qk(q, k, positions, table)
