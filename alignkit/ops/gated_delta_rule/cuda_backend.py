"""CUDA backend of `chunk_gated_delta_rule_bwd_dhu` for bf16 and fp16 (csrc/sm90/delta/gated_delta_rule.cu).

The op is the backward pass of the gated delta rule's chunk states. triton_backend.py computes it to the same bits, for
fp32 too. The bits are the contract's (docs/contract.md, "Gated delta rule"); only `columns` of `bwd_dhu` is free
(schedule).
"""

from __future__ import annotations

import ctypes
import math

import torch

from ...runtime import cuda
from .problem import Delta


def _copied(t: torch.Tensor) -> torch.Tensor:
    """Return t if TMA can read it, or else a contiguous copy.

    TMA needs a last dimension of stride 1, and an address and other strides that are multiples of 16 bytes.
    """
    readable = t.stride(3) == 1 and all(s > 0 and s % 8 == 0 for s in t.stride()[:3]) and t.data_ptr() % 16 == 0
    return t if readable else t.clone(memory_format=torch.contiguous_format)


def rejects(p: Delta) -> str | None:
    """Return why the kernel does not take a problem, or None if it does."""
    return "dtype: must be bf16 or fp16, got fp32" if p.dtype == torch.float32 else None


def bwd_dhu(
    q,
    k,
    w,
    do,
    dv,
    g,
    gk,
    dht,
    scale: float,
    cu_seqlens,
    state_v_first: bool,
    base2: bool,
    dh,
    dh0,
    dv2,
    columns: int = 0,
) -> None:
    """Write dh, dh0 (unless None) and dv2.

    `columns` is the number of columns of V that a CTA computes; it affects speed alone (schedule). For K = 64 and 128
    it is 32, 64 or 128, at most V. For K = 256 a CTA always computes 64. 0: the kernel's launch function chooses.
    """
    taken = None if cu_seqlens is None else torch.empty(1, dtype=torch.int32, device=q.device)
    q, k, w, do, dv = inputs = [_copied(t) for t in (q, k, w, do, dv)]
    p = cuda.struct("AlignkitDelta")(
        q=q,
        k=k,
        w=w,
        d_o=do,
        dv=dv,
        strides=tuple(stride for t in inputs for stride in t.stride()[:3]),
        g=g,
        gk=gk,
        dht=dht,
        cu_seqlens=cu_seqlens,
        dh=dh,
        dh0=dh0,
        dv2=dv2,
        taken=taken,
        batch=q.shape[0],
        rows=q.shape[1],
        heads=do.shape[2],
        key_heads=q.shape[2],
        key_dim=q.shape[3],
        value_dim=do.shape[3],
        sequences=q.shape[0] if cu_seqlens is None else len(cu_seqlens) - 1,
        chunks=dh.shape[1],
        scale=scale,
        unit=1.0 if base2 else math.log2(math.e),
        wide=cu_seqlens is not None and cu_seqlens.dtype == torch.int64,
        half=q.dtype == torch.float16,
        v_first=state_v_first,
        columns=columns,
    )
    cuda.call("alignkit_delta_back", q.device, ctypes.byref(p))
