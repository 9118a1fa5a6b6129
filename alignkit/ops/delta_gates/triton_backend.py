"""Triton delta_gates: elementwise; gradients of the parameters by chains of rows, summed by the tree.

Each operation is the contract's (docs/contract.md, "Gated DeltaNet"); block sizes are free.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import libdevice

from ...runtime.launch import launch
from .._triton import exp, next_power_of_2, sigmoid
from ..rms_norm.triton_backend import DW_ROWS, sum_partials
from .reference import LINEAR

_LINEAR = tl.constexpr(LINEAR)


@triton.jit
def log_decay(a, a_log, dt_bias):
    """Return g = -exp(a_log) * softplus(a + dt_bias) in fp32."""
    x = a + dt_bias
    soft = libdevice.log1p(exp(tl.where(x > _LINEAR, _LINEAR, x)).to(tl.float64)).to(tl.float32)
    return exp(a_log) * -1.0 * tl.where(x > _LINEAR, x, soft)


@triton.jit(do_not_specialize=["n"])
def _delta_gates(A, B, A_LOG, DT_BIAS, G, BETA, n, h, sa, sb, BLOCK: tl.constexpr):
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    r, j = i // h, i % h
    a = tl.load(A + r * sa + j, mask=i < n, other=0.0).to(tl.float32)
    b = tl.load(B + r * sb + j, mask=i < n, other=0.0).to(tl.float32)
    g = log_decay(a, tl.load(A_LOG + j, mask=i < n, other=0.0), tl.load(DT_BIAS + j, mask=i < n, other=0.0))
    tl.store(G + i, g, mask=i < n)
    tl.store(BETA + i, sigmoid(b), mask=i < n)


@triton.jit(do_not_specialize=["rows"])
def _delta_gates_grad(
    DG, DBETA, A, A_LOG, DT_BIAS, G, BETA, DA, DB, PART, rows, h, sa, BLOCK: tl.constexpr, ROWS: tl.constexpr
):
    chain, j = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    factor = exp(tl.load(A_LOG + j, mask=j < h, other=0.0)) * -1.0
    bias = tl.load(DT_BIAS + j, mask=j < h, other=0.0)
    d_log, d_bias = tl.zeros((BLOCK,), tl.float32), tl.zeros((BLOCK,), tl.float32)
    for i in range(ROWS):
        r = chain * ROWS + i
        ok = (j < h) & (r < rows)
        dg = tl.load(DG + r * h + j, mask=ok, other=0.0)
        beta = tl.load(BETA + r * h + j, mask=ok, other=0.0)
        x = tl.load(A + r * sa + j, mask=ok, other=0.0).to(tl.float32) + bias
        dx = dg * factor * tl.where(x > _LINEAR, 1.0, sigmoid(x))
        db = tl.load(DBETA + r * h + j, mask=ok, other=0.0) * beta * (1.0 - beta)
        tl.store(DA + r * h + j, dx.to(DA.dtype.element_ty), mask=ok)
        tl.store(DB + r * h + j, db.to(DB.dtype.element_ty), mask=ok)
        d_log = tl.fma(dg, tl.load(G + r * h + j, mask=ok, other=0.0), d_log)
        d_bias += tl.where(ok, dx, 0.0)
    # + 0.0: no partial sum is -0, so zero-padding the tree changes no bit.
    tl.store(PART + chain * 2 * h + j, d_log + 0.0, mask=j < h)
    tl.store(PART + chain * 2 * h + h + j, d_bias + 0.0, mask=j < h)


def forward(a, b, a_log, dt_bias) -> tuple[torch.Tensor, torch.Tensor]:
    """Return fp32 g and beta [rows, H], for a and b [rows, H] and fp32 a_log and dt_bias [H]."""
    g, beta = (torch.empty(a.shape, dtype=torch.float32, device=a.device) for _ in range(2))
    if n := a.numel():
        operands = a, b, a_log, dt_bias, g, beta, n, a.shape[1], a.stride(0), b.stride(0)
        launch(_delta_gates, (triton.cdiv(n, 256),), operands, {"num_warps": 4}, BLOCK=256)
    return g, beta


def backward(dg, dbeta, a, a_log, dt_bias, g, beta):
    """Return da and db [rows, H], and the fp32 gradients [H] of a_log and dt_bias, for contiguous dg and dbeta."""
    rows, h = a.shape
    da, db = (torch.empty(a.shape, dtype=a.dtype, device=a.device) for _ in range(2))
    if not a.numel():
        return da, db, *(torch.zeros(h, dtype=torch.float32, device=a.device) for _ in range(2))
    chains = triton.cdiv(rows, DW_ROWS)
    parts = torch.empty(chains, 2 * h, dtype=torch.float32, device=a.device)
    launch(
        _delta_gates_grad,
        (chains,),
        (dg, dbeta, a, a_log, dt_bias, g, beta, da, db, parts, rows, h, a.stride(0)),
        {"num_warps": 1},
        BLOCK=next_power_of_2(h),
        ROWS=DW_ROWS,
    )
    return da, db, *sum_partials(parts).view(2, h)
