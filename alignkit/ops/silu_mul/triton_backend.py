"""Triton silu_mul: elementwise. moe_experts uses `silu_times` and `silu_gradients` too.

Each operation is the contract's (docs/contract.md, "SiLU times up"); block sizes are free.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ...runtime.launch import launch
from .._triton import exp


@triton.jit
def silu_times(g, u):
    """Return silu(g) * u in fp32."""
    return tl.div_rn(g, 1.0 + exp(-g)) * u


@triton.jit
def silu_gradients(g, u, d):
    """Return the gradients of g and u for the gradient d of `silu_times`."""
    s = tl.div_rn(g * 0.0 + 1.0, 1.0 + exp(-g))
    return d * u * (s * tl.fma(g, 1.0 - s, g * 0.0 + 1.0)), d * (g * s)


@triton.jit
def _silu_mul(G, U, Y, n, sg, su, BLOCK: tl.constexpr):
    r = tl.program_id(0).to(tl.int64)
    j = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    g = tl.load(G + r * sg + j, mask=j < n, other=0.0).to(tl.float32)
    u = tl.load(U + r * su + j, mask=j < n, other=0.0).to(tl.float32)
    tl.store(Y + r * n + j, silu_times(g, u).to(Y.dtype.element_ty), mask=j < n)


@triton.jit
def _silu_mul_grad(G, U, DY, DG, DU, n, sg, su, sdg, sdu, BLOCK: tl.constexpr):
    r = tl.program_id(0).to(tl.int64)
    j = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    g = tl.load(G + r * sg + j, mask=j < n, other=0.0).to(tl.float32)
    u = tl.load(U + r * su + j, mask=j < n, other=0.0).to(tl.float32)
    d = tl.load(DY + r * n + j, mask=j < n, other=0.0).to(tl.float32)
    dg, du = silu_gradients(g, u, d)
    tl.store(DU + r * sdu + j, du.to(DU.dtype.element_ty), mask=j < n)
    tl.store(DG + r * sdg + j, dg.to(DG.dtype.element_ty), mask=j < n)


def forward(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    y = torch.empty(gate.shape, dtype=gate.dtype, device=gate.device)
    if y.numel():
        rows, n = gate.shape
        launch(
            _silu_mul,
            (rows, triton.cdiv(n, 1024)),
            (gate, up, y, n, gate.stride(0), up.stride(0)),
            {"num_warps": 4},
            BLOCK=1024,
        )
    return y


def backward(gate, up, dy, dgate, dup) -> None:
    if dy.numel():
        rows, n = gate.shape
        launch(
            _silu_mul_grad,
            (rows, triton.cdiv(n, 1024)),
            (gate, up, dy, dgate, dup, n, *(t.stride(0) for t in (gate, up, dgate, dup))),
            {"num_warps": 4},
            BLOCK=1024,
        )
