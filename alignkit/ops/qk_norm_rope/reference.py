"""The references of RMSNorm and of rope, one after the other."""

from __future__ import annotations

import torch

from ..rms_norm import reference as norm
from ..rope import reference as rotation


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
    normed = (norm.forward(x, w, eps, None, zero_centered)[1] for x, w in ((q, q_weight), (k, k_weight)))
    return rotation.apply_qk(*normed, positions, table)
