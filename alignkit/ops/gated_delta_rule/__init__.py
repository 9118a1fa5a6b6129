"""Backward pass of the gated delta rule's chunk states.

Contract: docs/contract.md, "Gated delta rule". flash-linear-attention computes the other parts of the backward pass
(fla.py); ../delta_rule has the forward pass.

Each sequence and head is computed chunk by chunk, last chunk first, starting from D = dht or 0. With the rows of a
chunk as matrices:

    dh = D
    dv2 = dv + exp(g_last - g) (k D)
    D = exp(g_last) exp(gk_last) D + scale (exp(g) q)^T do - w^T dv2

dh0 is the final D. g (one number per row) and gk (one per row and channel of k) are sums of log decays from the chunk's
first row on; the factor of an absent gate is 1. "last" is the chunk's last row.

Public: `chunk_gated_delta_rule_bwd_dhu` (docs/api/ops.md).
"""

from __future__ import annotations

import torch

from ...runtime import dispatch
from .._calls import forbid_double_backward, op
from .._common import (
    WITH_FP16,
    check_device,
    check_flag,
    check_int,
    check_like,
    check_number,
    check_same_device,
    check_starts,
    check_tensor,
    checks_values,
    require,
)
from .._sequences import INTS
from .problem import Delta

CHUNK = 64  # contract: rows per chunk
DIMS = (64, 128, 256)  # schedule: head dimensions K and V, a limit of the CUDA kernel, which does not check them


def _check_shape(name: str, t: torch.Tensor, shape: tuple[int, ...]) -> None:
    require(tuple(t.shape) == shape, f"{name}: expected shape {shape}, got {tuple(t.shape)}")


def _check_tensors(q, k, w, do, dv, g, gk, dht, sequences: int, state_v_first: bool) -> None:
    """Raise InputError for a tensor of invalid shape, dtype or device."""
    for name, t in (("q", q), ("k", k), ("w", w), ("do", do), ("dv", dv)):
        check_tensor(name, t, 4, WITH_FP16)
        check_like(name, t, "q", q)
    (batch, rows, key_heads, k_dim), (heads, v_dim) = q.shape, do.shape[2:]
    require(k_dim in DIMS, f"q: head dimension must be one of {', '.join(map(str, DIMS))}, got {k_dim}")
    require(v_dim in DIMS, f"do: head dimension must be one of {', '.join(map(str, DIMS))}, got {v_dim}")
    require(batch > 0 and rows > 0 and key_heads > 0, f"q: must not be empty, got shape {tuple(q.shape)}")
    require(heads > 0 and heads % key_heads == 0, f"q: number of heads must divide do's {heads}, got {key_heads}")
    _check_shape("k", k, tuple(q.shape))
    _check_shape("w", w, (batch, rows, heads, k_dim))
    _check_shape("do", do, (batch, rows, heads, v_dim))
    _check_shape("dv", dv, (batch, rows, heads, v_dim))
    state = (sequences, heads, *((v_dim, k_dim) if state_v_first else (k_dim, v_dim)))
    shapes = ("g", g, (batch, rows, heads)), ("gk", gk, (batch, rows, heads, k_dim)), ("dht", dht, state)
    for name, t, shape in shapes:
        if t is not None:
            check_tensor(name, t, len(shape), (torch.float32,))
            check_same_device(name, t, "q", q)
            _check_shape(name, t, shape)


def _check_sequences(cu_seqlens, num_chunks: int | None, q: torch.Tensor) -> tuple[torch.Tensor, int]:
    """Check cu_seqlens, and return it contiguous with the number of chunks."""
    check_tensor("cu_seqlens", cu_seqlens, 1, INTS)
    check_same_device("cu_seqlens", cu_seqlens, "q", q)
    require(len(cu_seqlens) > 1, f"cu_seqlens: must have at least 2 entries, got {len(cu_seqlens)}")
    require(q.shape[0] == 1, f"q: batch must be 1 with cu_seqlens, got {q.shape[0]}")
    if num_chunks is None or checks_values(q.device):
        check_starts("cu_seqlens", cu_seqlens)
        last = int(cu_seqlens[-1])
        require(last == q.shape[1], f"cu_seqlens: last entry must equal q's {q.shape[1]} rows, got {last}")
        counted = int(((cu_seqlens.diff() + CHUNK - 1) // CHUNK).sum())
        require(
            num_chunks in (None, counted),
            f"num_chunks: must be {counted}, the number of chunks in cu_seqlens, got {num_chunks}",
        )
        num_chunks = counted
    require(num_chunks > 0, "cu_seqlens: at least one sequence must have rows, got empty sequences only")
    return cu_seqlens.contiguous(), num_chunks


@op
def chunk_gated_delta_rule_bwd_dhu(
    q: torch.Tensor,
    k: torch.Tensor,
    w: torch.Tensor,
    do: torch.Tensor,
    dv: torch.Tensor,
    g: torch.Tensor | None = None,
    gk: torch.Tensor | None = None,
    *,
    dht: torch.Tensor | None = None,
    scale: float | None = None,
    cu_seqlens: torch.Tensor | None = None,
    num_chunks: int | None = None,
    state_v_first: bool = False,
    base2: bool = False,
    need_dh0: bool = False,
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor]:
    """Compute the gradient of the state at the end of each chunk of 64 rows, and the gradient of the new values.

    A sequence's results depend on the sequence alone, not on the packing, the number of heads or the device. Dense and
    packed layouts give the same bits. Differentiating the results raises an UnsupportedError.

    Args:
        q: [B, T, H, K], bf16, fp16 or fp32; K is 64, 128 or 256.
        k: q's shape, dtype and device.
        w: [B, T, HV, K], q's dtype. H divides HV; head h of w uses head h // (HV / H) of q and k.
        do: [B, T, HV, V], q's dtype; V is 64, 128 or 256.
        dv: do's shape and dtype.
        g: None, or fp32 [B, T, HV]: log decays, summed from the chunk's first row on.
        gk: None, or fp32 [B, T, HV, K]: the same per channel of the state; only each chunk's last row is read.
        dht: None, or fp32 [N, HV, K, V]: the gradient of the final states of the N sequences (N = B if dense).
        scale: factor of q; None: ``K ** -0.5``.
        cu_seqlens: None for B dense sequences, or int32 or int64 [N + 1] for N sequences packed in B = 1. Sequence i
            has the rows from ``cu_seqlens[i]`` to ``cu_seqlens[i + 1]``. cu_seqlens begins with 0, does not decrease
            and ends at T. An empty sequence has no chunk, and its dh0 is dht or 0. On a GPU the values are unchecked if
            num_chunks is given; invalid values give meaningless results, but no access beyond row T.
        num_chunks: total number of chunks of the packed sequences. None: counted, which synchronizes with the GPU. With
            a wrong number, chunks beyond it are dropped, and the results of missing chunks are uninitialized.
        state_v_first: dht, dh and dh0 are [..., V, K] instead of [..., K, V].
        base2: gates are logarithms to base 2 instead of e.
        need_dh0: also return the gradient of the initial states.

    Returns:
        dh: [B, NT, HV, K, V], q's dtype, for NT chunks per sequence; packed sequences: NT = num_chunks, in order.
        dh0: fp32 [N, HV, K, V], or None.
        dv2: [B, T, HV, V], q's dtype.

    Raises:
        InputError: a shape, dtype, device or checked value is invalid.
    """
    for name, flag in (("state_v_first", state_v_first), ("base2", base2), ("need_dh0", need_dh0)):
        check_flag(name, flag)
    scale = None if scale is None else check_number("scale", scale, positive=False)
    num_chunks = None if num_chunks is None else check_int("num_chunks", num_chunks, 1)
    check_tensor("q", q, 4, WITH_FP16)
    check_device("q", q)
    if cu_seqlens is None:
        require(num_chunks is None, f"num_chunks: must be None without cu_seqlens, got {num_chunks}")
        chunks = -(-q.shape[1] // CHUNK)
    else:
        cu_seqlens, chunks = _check_sequences(cu_seqlens, num_chunks, q)
    sequences = q.shape[0] if cu_seqlens is None else len(cu_seqlens) - 1
    _check_tensors(q, k, w, do, dv, g, gk, dht, sequences, state_v_first)
    scale = q.shape[3] ** -0.5 if scale is None else scale
    inputs = q, k, w, do, dv, g, gk, dht
    heads, state = do.shape[2], (q.shape[3], do.shape[3])
    state = state[::-1] if state_v_first else state
    dh = q.new_empty(q.shape[0], chunks, heads, *state)
    dh0 = q.new_empty(sequences, heads, *state, dtype=torch.float32) if need_dh0 else None
    dv2 = torch.empty(dv.shape, dtype=dv.dtype, device=dv.device)
    g, gk, dht = (t if t is None else t.contiguous() for t in (g, gk, dht))
    kernel = dispatch.choose("gated_delta_rule", Delta(dispatch.backend_of(q.device), q.dtype)).load()
    kernel.bwd_dhu(q, k, w, do, dv, g, gk, dht, scale, cu_seqlens, state_v_first, base2, dh, dh0, dv2)
    return forbid_double_backward("chunk_gated_delta_rule_bwd_dhu", (dh, dh0, dv2), inputs)
