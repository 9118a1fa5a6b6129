"""The sum over experts in torch, shared by the reference implementations of the MoE ops.

The order of summation is the contract's (docs/contract.md, "Mixture of experts").
"""

from __future__ import annotations

import torch

from ..contract.experts import ExpertTree


def tree_over_experts(parts: torch.Tensor) -> torch.Tensor:
    """Sum [..., n] over its n experts by the contract's tree, absent leaves being 0; a zero result is +0."""
    tree = ExpertTree.of(parts.shape[-1])
    parts = parts.unflatten(-1, (tree.groups, tree.run))
    parts = torch.nn.functional.pad(parts, (0, tree.width - tree.run)).flatten(-2)
    while parts.shape[-1] > 1:
        parts = parts[..., ::2] + parts[..., 1::2]
    return parts[..., 0] + 0.0
