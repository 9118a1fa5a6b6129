"""The gated delta rule, backward: how the gradient of the state goes back over chunks.
docs/contract.md, "Gated delta rule".

Of a sequence and a head, with rows of a chunk as matrices, last chunk first, from D = dht or 0:

    dh = D
    dv2 = dv + exp(g_last - g) (k D)
    D = exp(g_last) exp(gk_last) D + scale (exp(g) q)^T do - w^T dv2

and dh0 is what D is at last. g (a number a row) and gk (a number a row and channel of k) are sums of log decays from
the chunk's first row on; where one is absent, so is its factor. "last" is the chunk's last row.
"""

from __future__ import annotations

import torch

from ...runtime import dispatch
from .._calls import final, op
from .._common import (
    WITH_FP16,
    check_device,
    check_flag,
    check_int,
    check_like,
    check_number,
    check_tensor,
    looks,
    require,
)
from .problem import Delta

CHUNK = 64
"""Rows of a chunk."""
DIMS = (64, 128, 256)
"""Head dimensions, K and V."""
INTS = (torch.int32, torch.int64)


def _check_shape(name: str, t: torch.Tensor, shape: tuple[int, ...]) -> None:
    require(tuple(t.shape) == shape, f"{name}: expected shape {shape}, got {tuple(t.shape)}")


def _check_tensors(q, k, w, do, dv, g, gk, dht, sequences: int, state_v_first: bool) -> None:
    for name, t in (("q", q), ("k", k), ("w", w), ("do", do), ("dv", dv)):
        check_tensor(name, t, 4, WITH_FP16)
        check_like(name, t, "q", q)
    (batch, rows, key_heads, k_dim), (heads, v_dim) = q.shape, do.shape[2:]
    require(k_dim in DIMS, f"q: head dimension {k_dim} is none of {', '.join(map(str, DIMS))}")
    require(v_dim in DIMS, f"do: head dimension {v_dim} is none of {', '.join(map(str, DIMS))}")
    require(batch > 0 and rows > 0 and key_heads > 0, f"q: empty, shape {tuple(q.shape)}")
    require(heads > 0 and heads % key_heads == 0, f"q: {key_heads} heads do not divide do's {heads}")
    _check_shape("k", k, tuple(q.shape))
    _check_shape("w", w, (batch, rows, heads, k_dim))
    _check_shape("do", do, (batch, rows, heads, v_dim))
    _check_shape("dv", dv, (batch, rows, heads, v_dim))
    state = (sequences, heads, *((v_dim, k_dim) if state_v_first else (k_dim, v_dim)))
    shapes = ("g", g, (batch, rows, heads)), ("gk", gk, (batch, rows, heads, k_dim)), ("dht", dht, state)
    for name, t, shape in shapes:
        if t is not None:
            check_tensor(name, t, len(shape), (torch.float32,))
            require(t.device == q.device, f"{name}: device {t.device} differs from q's {q.device}")
            _check_shape(name, t, shape)


def _check_sequences(cu_seqlens, num_chunks: int | None, q: torch.Tensor) -> tuple[torch.Tensor, int]:
    """cu_seqlens, dense, and the number of chunks."""
    check_tensor("cu_seqlens", cu_seqlens, 1, INTS)
    require(cu_seqlens.device == q.device, f"cu_seqlens: device {cu_seqlens.device} differs from q's {q.device}")
    require(len(cu_seqlens) > 1, "cu_seqlens: no sequence")
    require(q.shape[0] == 1, f"q: packed sequences lie in a batch of 1, got {q.shape[0]}")
    if num_chunks is None or looks(q.device):
        require(int(cu_seqlens[0]) == 0, "cu_seqlens: must begin with 0")
        require(bool((cu_seqlens[1:] >= cu_seqlens[:-1]).all()), "cu_seqlens: must not decrease")
        last = int(cu_seqlens[-1])
        require(last == q.shape[1], f"cu_seqlens: ends at {last}, q has {q.shape[1]} rows")
        counted = int(((cu_seqlens.diff() + CHUNK - 1) // CHUNK).sum())
        require(num_chunks in (None, counted), f"num_chunks: {num_chunks}, cu_seqlens has {counted} chunks")
        num_chunks = counted
    require(num_chunks > 0, "cu_seqlens: all sequences are empty")
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
    """The gradient of the state at the end of each chunk of 64 rows, and that of the new values through it.

    A sequence's results depend on the sequence alone: not on what it is packed with or where, the number of heads, or
    the device's size. Dense and packed give the same bits. It has no gradient of its own: to differentiate its results
    is refused.

    Args:
        q, k: [B, T, H, K], bf16, fp16 or fp32; K is 64, 128 or 256.
        w: [B, T, HV, K], q's type; H divides HV, and head h of w goes with head h // (HV / H) of q and k.
        do, dv: [B, T, HV, V], q's type; V is 64, 128 or 256.
        g: None, or fp32 [B, T, HV]: log decay, summed from the first row of the chunk on.
        gk: None, or fp32 [B, T, HV, K]: likewise, for each channel of the state; the last row of each chunk is read.
        dht: None, or fp32 [N, HV, K, V]: the gradient of the final states.
        scale: factor of q; None: ``K ** -0.5``.
        cu_seqlens: None, or int32 or int64 [N + 1]: N sequences packed in B = 1; sequence i is rows ``cu_seqlens[i]``
            to ``cu_seqlens[i + 1]``. It begins with 0, does not decrease and ends at T. An empty sequence has no chunk,
            and dht, or zeros, for its dh0. On a GPU, if num_chunks is given, its values are not checked: of wrong ones
            the results are meaningless, but rows beyond T are not touched.
        num_chunks: how many chunks these sequences have together. None: counted, which waits for a GPU. Of a wrong
            number, chunks beyond it are left out, and those that do not exist are not written.
        state_v_first: states (dht, dh, dh0) are [.., V, K] instead of [.., K, V].
        base2: gates are logarithms to base 2 instead of e.
        need_dh0: return the gradient of the initial states.

    Returns:
        dh [B, NT, HV, K, V], q's type: NT chunks, of packed sequences one sequence after the other; dh0 fp32
        [N, HV, K, V], or None; dv2 [B, T, HV, V], q's type.

    Raises:
        InputError: shapes, types, devices or, where they are looked at, values do not fit.
    """
    for name, flag in (("state_v_first", state_v_first), ("base2", base2), ("need_dh0", need_dh0)):
        check_flag(name, flag)
    scale = None if scale is None else check_number("scale", scale, positive=False)
    num_chunks = None if num_chunks is None else check_int("num_chunks", num_chunks, 1)
    check_tensor("q", q, 4, WITH_FP16)
    check_device("q", q)
    if cu_seqlens is None:
        require(num_chunks is None, "num_chunks: only packed sequences have it")
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
    kernel = dispatch.choose("gated_delta_rule", Delta(dispatch.name(q.device), q.dtype)).load()
    kernel.bwd_dhu(q, k, w, do, dv, g, gk, dht, scale, cu_seqlens, state_v_first, base2, dh, dh0, dv2)
    return final("chunk_gated_delta_rule_bwd_dhu", (dh, dh0, dv2), inputs)
