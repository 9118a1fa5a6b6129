"""The sum over experts in torch, which the references of the ops of mixture of experts share."""

from __future__ import annotations

import torch

from ..contract.experts import ExpertTree


def tree_over_experts(parts: torch.Tensor) -> torch.Tensor:
    """Sum over the last dim [..., n experts] by the contract's tree, absent leaves 0; a zero comes out positive."""
    tree = ExpertTree.of(parts.shape[-1])
    parts = parts.unflatten(-1, (tree.groups, tree.run))
    parts = torch.nn.functional.pad(parts, (0, tree.width - tree.run)).flatten(-2)
    while parts.shape[-1] > 1:
        parts = parts[..., ::2] + parts[..., 1::2]
    return parts[..., 0] + 0.0
