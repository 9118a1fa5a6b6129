"""sigmoid_mul on GPUs: reference.py's torch code for one gate per row, Triton kernels for one per element.

The exp and the sum are those of the sm90 family (docs/contract.md, "Mixture of experts" and "Gated DeltaNet"). Block
sizes are free.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ...runtime.launch import launch
from .._triton import exp_of, sigmoid, sum_of_products
from .reference import product, product_back


def forward(gate: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    return product(gate, x, exp_of)


def backward(gate, x, dy) -> tuple[torch.Tensor, torch.Tensor]:
    return product_back(gate, x, dy, exp_of, sum_of_products)


@triton.jit
def _sigmoid_mul(G, X, Y, n, sg, sx, BLOCK: tl.constexpr):
    r = tl.program_id(0).to(tl.int64)
    j = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    g = tl.load(G + r * sg + j, mask=j < n, other=0.0).to(tl.float32)
    x = tl.load(X + r * sx + j, mask=j < n, other=0.0).to(tl.float32)
    tl.store(Y + r * n + j, (sigmoid(g) * x).to(Y.dtype.element_ty), mask=j < n)


@triton.jit
def _sigmoid_mul_grad(G, X, DY, DG, DX, n, sg, sx, BLOCK: tl.constexpr):
    r = tl.program_id(0).to(tl.int64)
    j = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    g = tl.load(G + r * sg + j, mask=j < n, other=0.0).to(tl.float32)
    x = tl.load(X + r * sx + j, mask=j < n, other=0.0).to(tl.float32)
    d = tl.load(DY + r * n + j, mask=j < n, other=0.0).to(tl.float32)
    s = sigmoid(g)
    tl.store(DG + r * n + j, (d * x * s * (1.0 - s)).to(DG.dtype.element_ty), mask=j < n)
    tl.store(DX + r * n + j, (s * d).to(DX.dtype.element_ty), mask=j < n)


def _launch(kernel, gate: torch.Tensor, x: torch.Tensor, *others: torch.Tensor) -> None:
    if x.numel():
        rows, n = x.shape
        strides = gate.stride(0), x.stride(0)
        launch(kernel, (rows, triton.cdiv(n, 1024)), (gate, x, *others, n, *strides), {"num_warps": 4}, BLOCK=1024)


def forward_each(gate: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    _launch(_sigmoid_mul, gate, x, y)
    return y


def backward_each(gate, x, dy) -> tuple[torch.Tensor, torch.Tensor]:
    dgate, dx = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for _ in range(2))
    _launch(_sigmoid_mul_grad, gate, x, dy, dgate, dx)
    return dgate, dx
