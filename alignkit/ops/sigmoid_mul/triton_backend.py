"""sigmoid_mul on GPUs: reference.py's torch code, with the exp and the sum of the sm90 family.

The bits are the contract's (docs/contract.md, "Mixture of experts").
"""

from __future__ import annotations

import torch

from .._triton import exp_of, sum_of_products
from .reference import product, product_back


def forward(gate: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    return product(gate, x, exp_of)


def backward(gate, x, dy) -> tuple[torch.Tensor, torch.Tensor]:
    return product_back(gate, x, dy, exp_of, sum_of_products)
