"""C++: a row at a time, the parts of its experts in the order of the tree."""

from __future__ import annotations

import torch

from ...runtime import native


def combine(y, place, ids, weights, experts, out) -> None:
    native.combine(y, place, ids.to(torch.int64), weights, experts, out)


def weigh(g, a, w) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    dw = torch.empty(len(a), dtype=torch.float32, device=a.device)
    wg, wa = (torch.empty(a.shape, dtype=a.dtype, device=a.device) for _ in range(2))
    native.weigh(g, a, w, dw, wg, wa)
    return dw, wg, wa
