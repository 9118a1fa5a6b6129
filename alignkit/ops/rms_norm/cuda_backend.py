"""CUDA RMSNorm (csrc/sm90/rms_norm/rms_norm.cu): bf16 backward, and forward of long rows without a residual.

triton_backend.py computes the problems that these kernels reject, to the same bits (docs/contract.md, "RMSNorm").
"""

from __future__ import annotations

import ctypes
import math

import torch

from ...runtime import cuda
from ...runtime.operands import dtype_name
from ...runtime.shared import KERNELS
from . import triton_backend
from .problem import Norm

MIN_BACKWARD = 32  # schedule: backward kernel: elements per row must exceed this, its limit; may be raised
MIN_FORWARD = 2048  # schedule: forward kernel: elements per row must exceed this; its limit is 1024
MAX_COLUMNS, MAX_ROWS = KERNELS["kNormMaxColumns"], KERNELS["kNormMaxRows"]
TRITON_FORWARD = 4096
"""schedule: a row length, a power of two, for which the forward pass in Triton already runs at memory bandwidth."""


def forward_rejects(p: Norm) -> str | None:
    """Return why the forward kernel does not take a problem, or None if it does."""
    if p.tensors[0][0][-1] == TRITON_FORWARD:
        return f"speed: the Triton kernel is as fast for h = {TRITON_FORWARD}"
    return _reject(p, MIN_FORWARD, ("x", "weight"))


def backward_rejects(p: Norm) -> str | None:
    """Return why the backward kernel does not take a problem, or None if it does."""
    return _reject(p, MIN_BACKWARD, ("x", "dy", "weight", "d_total"))


def _reject(p: Norm, above: int, names: tuple[str, ...]) -> str | None:
    """Return why a kernel for rows of more than `above` elements does not take a problem, or None if it does.

    `names` are the names of ``p.tensors``, of which the last may be absent.
    """
    shape = p.tensors[0][0]
    h = shape[-1]
    if not above < h <= MAX_COLUMNS or h % 8:
        return f"h: must be a multiple of 8 in [{above + 8}, {MAX_COLUMNS}], got {h}"
    if not 0 < math.prod(shape[:-1]) <= MAX_ROWS:
        return f"rows: must be in [1, {MAX_ROWS}], got {math.prod(shape[:-1])}"
    for name, (_, strides, dtype, aligned) in zip(names, p.tensors, strict=False):
        if dtype != torch.bfloat16:
            return f"{name}: dtype must be bf16, got {dtype_name(dtype)}"
        if not aligned:
            return f"{name}: address must be a multiple of 16 bytes"
        if any(s % 8 for s in strides[:-1]):
            return f"{name}: leading strides must be multiples of 8 elements (16 bytes), got {strides}"
    return None


def _rows(t: torch.Tensor) -> tuple[torch.Tensor, ctypes.Structure, int]:
    """Return t or a copy of it, which must stay alive until the launch, its rows, and the rows per token."""
    t, heads, token, head = triton_backend.by_head(t)
    return t, cuda.struct("AlignkitNormRows")(data=t, token=token, head=head), heads


def forward(
    x: torch.Tensor, weight: torch.Tensor, eps: float, residual: torch.Tensor | None, zero_centered: bool = False
):
    """Return x and y [..., H], and fp32 rstd [rows]; residual is None."""
    h = x.shape[-1]
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    rstd = torch.empty(x.numel() // h, dtype=torch.float32, device=x.device)
    _keep_alive, x_rows, heads = _rows(x)
    sizes = {"rows": len(rstd), "heads": heads, "h": h}
    options = {"zero_centered": zero_centered, "eps": eps}
    p = cuda.struct("AlignkitNorm")(x=x_rows, weight=weight, y=y, rstd=rstd, **sizes, **options)
    cuda.call("alignkit_rms_norm", x.device, ctypes.byref(p))
    return x, y, rstd


def backward(
    dy, x, weight, rstd, d_total=None, zero_centered: bool = False, dweight_dtype=torch.bfloat16, chains: int = 0
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return dx + d_total [..., H] and dweight [H] rounded to dweight_dtype, for contiguous dy and d_total.

    `chains` (schedule) is the number of dweight chains that a CTA sums in registers before it writes one partial sum:
    1, 2, 4 or 8; 0: automatic. -n: n chains first, then fewer, as on a device that holds one CTA.
    """
    h = x.shape[-1]
    dx = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    dweight = torch.empty(h, dtype=dweight_dtype, device=x.device)
    sums = -(-len(rstd) // triton_backend.DW_ROWS)
    workspace = torch.empty((sums + -(-sums // 128)) * h + -(-h // 128), dtype=torch.float32, device=x.device)
    _keep_alive, x_rows, heads = _rows(x)
    p = cuda.struct("AlignkitNormGrad")(
        x=x_rows,
        dy=dy,
        d_total=d_total,
        weight=weight,
        rstd=rstd,
        dx=dx,
        dweight=dweight,
        workspace=workspace,
        rows=len(rstd),
        heads=heads,
        h=h,
        zero_centered=zero_centered,
        rounded=dweight_dtype == torch.bfloat16,
        chains=chains,
    )
    cuda.call("alignkit_rms_norm_grad", x.device, ctypes.byref(p))
    return dx, dweight
