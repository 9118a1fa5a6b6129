"""Triton backend of the LM head: the functions of reference.py, on logits or products that are in memory.

- Forward: `apply_transform`, `statistics` of tiles, `merge_tiles`, `finish`; `all_logp` and `selected_logp` for the ops
  of forward.py.
- Backward: `gradient`, with `gather_rows` before it and `scatter_rows` after it.
- Checks of values on the device: `check_rows`.

cuda_backend.py computes statistics and gradients within the GEMM, without logits in memory; it has no counterparts of
the other functions. Sums within and over tiles are integers, so num_warps and block sizes other than TILE (VOCAB_TILE)
are free. Every other operation is the contract's (docs/contract.md, "Log-softmax over the vocabulary").
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.language.extra import libdevice

from ...contract import VOCAB_TILE
from ...runtime.launch import launch
from .._triton import exp as _exp
from .._triton import next_power_of_2, to_fixed_point

INF = tl.constexpr(float("inf"))
ROUND = tl.constexpr(1.5 * 2.0**52)
"""hardware: v + ROUND rounds a double v in [0, 2^51) to the nearest integer, ties to even.

The low mantissa bits of the sum hold the integer: the bits of the sum minus ROUND_BITS.
"""
ROUND_BITS = tl.constexpr(0x4338000000000000)
"""hardware: the bits of `ROUND`."""


@triton.jit
def _logit(x, bias, cap, scale, temperature):
    """Return the logit of a product x, and the capped value. A step whose argument is None is skipped."""
    if bias is not None:
        x = x + bias
    if cap is not None:
        x = libdevice.tanh(tl.div_rn(x, cap)) * cap
    capped = x
    if scale is not None:
        x = x * scale
    if temperature is not None:
        x = tl.div_rn(x, temperature)
    return x, capped


@triton.jit
def _maximum(a, b):
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def _lse(m, s):
    # contract: s is in units of 2^-39, of which 2^-23 are from `to_fixed_point` and 2^-16 from `_sums`.
    return m.to(tl.float64) + tl.log(s.to(tl.float64) * 2.0**-39)


@triton.jit(do_not_specialize=["n"])
def _check_rows(TARGET, TEMPERATURE, n, vocab, ignore, BLOCK: tl.constexpr):
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    if TARGET is not None:
        t = tl.load(TARGET + i, mask=i < n, other=0)
        tl.device_assert(
            (t == ignore) | ((t >= 0) & (t < vocab)), "target: ids must be in [0, vocab_size) or ignore_index"
        )
    if TEMPERATURE is not None:
        t = tl.load(TEMPERATURE + i, mask=i < n, other=1.0)
        tl.device_assert((t > 0) & (t < INF), "temperature: values must be positive and finite")


def check_rows(target: torch.Tensor | None, temperature: torch.Tensor | None, vocab: int, ignore_index: int) -> None:
    """Launch device-side assertions on target and temperature values, without synchronization."""
    n = (target if target is not None else temperature).numel()
    if n:
        launch(
            _check_rows,
            (triton.cdiv(n, 1024),),
            (target, temperature, n, vocab, ignore_index),
            {"debug": True},
            BLOCK=1024,
        )


@triton.jit
def _logp_gather_rows(X, ORDER, TARGET, OUT, cols, blocks, sx, BLOCK: tl.constexpr):
    r = (tl.program_id(0) // blocks).to(tl.int64)
    j = tl.program_id(0) % blocks * BLOCK + tl.arange(0, BLOCK)
    counts = tl.load(TARGET + r) >= 0
    x = tl.load(X + tl.load(ORDER + r) * sx + j, mask=counts & (j < cols), other=0.0)
    tl.store(OUT + r * cols + j, x, mask=j < cols)


@triton.jit
def _logp_scatter_rows(X, ORDER, TARGET, OUT, cols, blocks, BLOCK: tl.constexpr):
    r = (tl.program_id(0) // blocks).to(tl.int64)
    j = tl.program_id(0) % blocks * BLOCK + tl.arange(0, BLOCK)
    counts = tl.load(TARGET + r) >= 0
    x = tl.load(X + r * cols + j, mask=counts & (j < cols), other=0.0)
    tl.store(OUT + tl.load(ORDER + r) * cols + j, x.to(OUT.dtype.element_ty), mask=j < cols)


def gather_rows(x, order, target, out) -> None:
    """Gather out [n, D] = x[order], with zeros where the target is negative."""
    (n, cols), block = out.shape, 2048
    if out.numel():
        x, blocks = x if x.stride(1) == 1 else x.contiguous(), triton.cdiv(cols, block)
        launch(
            _logp_gather_rows,
            (n * blocks,),
            (x, order, target, out, cols, blocks, x.stride(0)),
            {"num_warps": 8},
            BLOCK=block,
        )


def scatter_rows(x, order, target, out) -> None:
    """Scatter fp32 x to the rows `order` (a permutation) of out, rounded; zeros where the target is negative."""
    (n, cols), block = out.shape, 2048
    if out.numel():
        blocks = triton.cdiv(cols, block)
        launch(_logp_scatter_rows, (n * blocks,), (x, order, target, out, cols, blocks), {"num_warps": 8}, BLOCK=block)


@triton.jit
def _logp_transform(Z, BIAS, cols, sz, cap, scale, BLOCK: tl.constexpr):
    j = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    z = Z + tl.program_id(1).to(tl.int64) * sz + j
    b = None if BIAS is None else tl.load(BIAS + j, mask=j < cols, other=0.0)
    x, _ = _logit(tl.load(z, mask=j < cols, other=0.0), b, cap, scale, None)
    tl.store(z, x, mask=j < cols)


def apply_transform(z: torch.Tensor, transform) -> None:
    """Convert products z to logits before temperature, in place."""
    cols = z.shape[1]
    if z.numel() and any(v is not None for v in (transform.bias, transform.soft_cap, transform.logit_scale)):
        for part in z.split(65535):  # maximum of a grid's second dimension
            launch(
                _logp_transform,
                (triton.cdiv(cols, 1024), len(part)),
                (part, transform.bias, cols, z.stride(0), transform.soft_cap, transform.logit_scale),
                {"num_warps": 4},
                BLOCK=1024,
            )


@triton.jit(do_not_specialize=["rows"])
def _logp_statistics(
    Z,
    BIAS,
    TEMPERATURE,
    TARGET,
    M,
    Q,
    U,
    ZT,
    rows,
    cols,
    first,
    tiles,
    sz,
    sm,
    cap,
    scale,
    TILE: tl.constexpr,
    R: tl.constexpr,
):
    t = tl.program_id(0) % tiles
    r = (tl.program_id(0) // tiles).to(tl.int64) * R + tl.arange(0, R)
    j = t * TILE + tl.arange(0, TILE)
    row_ok = r < rows
    ok = row_ok[:, None] & (j < cols)[None, :]
    x = tl.load(Z + r[:, None] * sz + j[None, :], mask=ok, other=0.0).to(tl.float32)
    b = None if BIAS is None else tl.load(BIAS + j, mask=j < cols, other=0.0)[None, :]
    temperature = None if TEMPERATURE is None else tl.load(TEMPERATURE + r, mask=row_ok, other=1.0)
    z, _ = _logit(x, b, cap, scale, None if TEMPERATURE is None else temperature[:, None])
    z = tl.where(ok, z, -INF)
    m = tl.reduce(z, 1, _maximum)
    finite = (m > -INF) & (m < INF)
    d = tl.where(finite[:, None], z - m[:, None], -INF)
    e = _exp(d)
    tile_index = r * sm + t
    tl.store(M + tile_index, m, mask=row_ok)
    tl.store(Q + tile_index, tl.sum(to_fixed_point(e), axis=1), mask=row_ok)
    if U is not None:
        tl.store(U + tile_index, tl.sum(to_fixed_point(tl.where(e > 0, e * -d, 0.0)), axis=1), mask=row_ok)
    if TARGET is not None:  # rows whose target is in this tile
        c = tl.load(TARGET + r, mask=row_ok, other=-1) - first
        here = (c >= t * TILE) & (c < t * TILE + TILE) & (c < cols)
        x = tl.load(Z + r * sz + c, mask=here, other=0.0).to(tl.float32)
        b = None if BIAS is None else tl.load(BIAS + c, mask=here, other=0.0)
        z, _ = _logit(x, b, cap, scale, temperature)
        tl.store(ZT + r, z, mask=here)


def statistics(z, transform, temperature, target, first: int, m, q, u, z_target) -> None:
    """Compute tile statistics of products z; see reference.py."""
    rows, cols = z.shape
    if not z.numel():
        return
    r, warps = (16, 4) if rows >= 16 else (1, 1)
    launch(
        _logp_statistics,
        (m.shape[1] * triton.cdiv(rows, r),),
        (
            z,
            transform.bias,
            temperature,
            target,
            m,
            q,
            u,
            z_target,
            rows,
            cols,
            first,
            m.shape[1],
            z.stride(0),
            m.stride(0),
            transform.soft_cap,
            transform.logit_scale,
        ),
        {"num_warps": warps},
        TILE=VOCAB_TILE,
        R=r,
    )


@triton.jit
def _top(M, tiles, BLOCK: tl.constexpr):
    """Return the maximum of a row from M [tiles]."""
    i = tl.arange(0, BLOCK)
    best = tl.full((BLOCK,), -INF, tl.float32)
    for t in range(0, tiles, BLOCK):
        best = _maximum(best, tl.load(M + t + i, mask=t + i < tiles, other=-INF))
    return tl.reduce(best, 0, _maximum)


@triton.jit
def _sums(M, Q, U, m, tiles, BLOCK: tl.constexpr):
    """Return the integers s and u of a row with maximum m from M, Q and U [tiles]; u is 0 without U."""
    # contract: 65536 = 2^16, the fixed-point scale of a tile's terms, as in "Log-softmax over the vocabulary".
    i = tl.arange(0, BLOCK)
    s, u = tl.zeros((BLOCK,), tl.int64), tl.zeros((BLOCK,), tl.int64)
    for t in range(0, tiles, BLOCK):
        tm = tl.load(M + t + i, mask=t + i < tiles, other=-INF)
        q = tl.load(Q + t + i, mask=t + i < tiles, other=0).to(tl.float64)
        d = tm - m
        live = d > -INF  # False if d is NaN: then m is NaN or infinite, and so is the result
        w = _exp(tl.where(live, d, -INF)).to(tl.float64)
        s += tl.where(live, (w * q * 65536.0 + ROUND).to(tl.int64, bitcast=True) - ROUND_BITS, 0)
        if U is not None:
            gap = m.to(tl.float64) - tm.to(tl.float64)
            v = w * (tl.load(U + t + i, mask=t + i < tiles, other=0).to(tl.float64) + q * gap)
            u += tl.where(live, (v * 65536.0 + ROUND).to(tl.int64, bitcast=True) - ROUND_BITS, 0)
    return tl.sum(s, axis=0), tl.sum(u, axis=0)


@triton.jit(do_not_specialize=["n"])
def _logp_merge_tiles(M, Q, U, TOP, ZT, SUMS, n, tiles, GIVEN: tl.constexpr, BLOCK: tl.constexpr):
    r = tl.program_id(0).to(tl.int64)
    row_start = r * tiles
    if GIVEN:
        m = tl.load(TOP + r)
    else:
        m = _top(M + row_start, tiles, BLOCK)
        tl.store(TOP + r, m)
    s, u = _sums(M + row_start, Q + row_start, None if U is None else U + row_start, m, tiles, BLOCK)
    tl.store(SUMS + r, s)
    tl.store(SUMS + n + r, u)
    if ZT is not None:
        tl.store(SUMS + 2 * n + r, tl.load(ZT + r).to(tl.int32, bitcast=True).to(tl.int64))


def merge_tiles(m, q, u, z_target, top: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
    """Merge the tile statistics of each row; see reference.py."""
    n, tiles = m.shape
    given = top is not None
    top = top if given else torch.empty(n, dtype=torch.float32, device=m.device)
    sums = torch.empty(3, n, dtype=torch.int64, device=m.device)
    if n:
        launch(
            _logp_merge_tiles, (n,), (m, q, u, top, z_target, sums, n, tiles), {"num_warps": 4}, GIVEN=given, BLOCK=1024
        )
    return top, sums


@triton.jit(do_not_specialize=["n"])
def _logp_finish(TOP, SUMS, TARGET, LOGP, LSE, ENT, n, BLOCK: tl.constexpr):
    r = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    ok = r < n
    m, s = tl.load(TOP + r, mask=ok, other=0.0), tl.load(SUMS + r, mask=ok, other=1)
    lse = _lse(m, s)
    counts = tl.load(TARGET + r, mask=ok, other=-1) >= 0
    z = tl.load(SUMS + 2 * n + r, mask=ok, other=0).to(tl.int32).to(tl.float32, bitcast=True)
    tl.store(LOGP + r, tl.where(counts, (z.to(tl.float64) - lse).to(tl.float32), 0.0), mask=ok)
    tl.store(LSE + r, lse.to(tl.float32), mask=ok)
    if ENT is not None:
        u = tl.load(SUMS + n + r, mask=ok, other=0).to(tl.float64)
        mean = u / s.to(tl.float64)
        tl.store(ENT + r, tl.where(counts, (lse - m.to(tl.float64) + mean).to(tl.float32), 0.0), mask=ok)


def finish(m, sums, target, entropy: bool):
    """Return logp, lse and entropy (or None), fp32 [n]; logp and entropy are 0 where the target is negative."""
    n = len(target)
    logp, lse, ent = (
        torch.empty(n, dtype=torch.float32, device=m.device) if wanted else None for wanted in (True, True, entropy)
    )
    if n:
        launch(_logp_finish, (triton.cdiv(n, 128),), (m, sums, target, logp, lse, ent, n), {"num_warps": 4}, BLOCK=128)
    return logp, lse, ent


@triton.jit
def _all_logp(Z, TEMPERATURE, TOP, SUMS, OUT, cols, width, sz, BLOCK: tl.constexpr):
    r = tl.program_id(1).to(tl.int64)
    j = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(Z + r * sz + j, mask=j < cols, other=-INF).to(tl.float32)
    z, _ = _logit(x, None, None, None, None if TEMPERATURE is None else tl.load(TEMPERATURE + r))
    logp = (z.to(tl.float64) - _lse(tl.load(TOP + r), tl.load(SUMS + r))).to(tl.float32)
    tl.store(OUT + r * width + j, tl.where(j < cols, logp, -INF), mask=j < width)


def all_logp(z, temperature, m, sums, out) -> None:
    """Compute out [n, width]: the logprob of every id of logits z [n, C]; -inf from C on."""
    (rows, width), cols = out.shape, z.shape[1]
    if rows:
        launch(
            _all_logp,
            (triton.cdiv(width, 2048), rows),
            (z, temperature, m, sums, out, cols, width, z.stride(0)),
            {"num_warps": 8},
            BLOCK=2048,
        )


@triton.jit
def _selected_logp(Z, TEMPERATURE, IDS, M, Q, OUT, k, cols, tiles, sz, BLOCK: tl.constexpr, PICKS: tl.constexpr):
    r = tl.program_id(0).to(tl.int64)
    m = _top(M + r * tiles, tiles, BLOCK)
    s, _u = _sums(M + r * tiles, Q + r * tiles, None, m, tiles, BLOCK)
    lse = _lse(m, s)
    temperature = None if TEMPERATURE is None else tl.load(TEMPERATURE + r)
    for first in range(0, k, PICKS):
        i = first + tl.arange(0, PICKS)
        c = tl.load(IDS + r * k + i, mask=i < k, other=-1).to(tl.int64)
        x = tl.load(Z + r * sz + c, mask=(c >= 0) & (c < cols), other=float("nan")).to(tl.float32)
        z, _ = _logit(x, None, None, None, temperature)
        tl.store(OUT + r * k + i, (z.to(tl.float64) - lse).to(tl.float32), mask=i < k)


def selected_logp(z, temperature, ids, m, q, out) -> None:
    """Compute out [n, k]: logprobs of ids [n, k] under logits z [n, C] with tile statistics m and q.

    An id outside [0, C) gives NaN.
    """
    if out.numel():
        n, k = out.shape
        launch(
            _selected_logp,
            (n,),
            (z, temperature, ids, m, q, out, k, z.shape[1], m.shape[1], z.stride(0)),
            {"num_warps": 8},
            BLOCK=min(next_power_of_2(m.shape[1]), 2048),
            PICKS=16,
        )


@triton.jit
def _logp_gradient(
    Z, BIAS, TEMPERATURE, TARGET, LSE, ENT, GL, GE, DZ, cols, first, sz, sd, cap, scale, BLOCK: tl.constexpr
):
    r = tl.program_id(1).to(tl.int64)
    j = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    ok = j < cols
    g, target = tl.load(GL + r), tl.load(TARGET + r)
    x = tl.load(Z + r * sz + j, mask=ok & (target >= 0), other=0.0).to(tl.float32)  # other rows may be uninitialized
    b = None if BIAS is None else tl.load(BIAS + j, mask=ok, other=0.0)
    temperature = None if TEMPERATURE is None else tl.load(TEMPERATURE + r)
    z, capped = _logit(x, b, cap, scale, temperature)
    lp = z - tl.load(LSE + r)
    p = _exp(lp)
    d = -(g * p)
    if ENT is not None:
        d = tl.where(p == 0, 0.0, d - tl.load(GE + r) * (p * (lp + tl.load(ENT + r))))
    d = tl.where(j == target - first, d + g, d)
    if temperature is not None:
        d = tl.div_rn(d, temperature)
    if scale is not None:
        d = d * scale
    if cap is not None:
        c = tl.div_rn(capped, cap)
        d = d * (1.0 - c * c)
    tl.store(DZ + r * sd + j, tl.where(target < 0, 0.0, d).to(DZ.dtype.element_ty), mask=ok)


def gradient(z, transform, first: int, out, temperature, target, lse, entropy, g_logp, g_entropy) -> None:
    """Compute out [n, C]: the gradient of the products z; column 0 is the id `first`. `out` may be z.

    Rows with a negative target get 0.
    """
    rows, cols = z.shape
    if z.numel():
        launch(
            _logp_gradient,
            (triton.cdiv(cols, 2048), rows),
            (
                z,
                transform.bias,
                temperature,
                target,
                lse,
                entropy,
                g_logp,
                g_entropy,
                out,
                cols,
                first,
                z.stride(0),
                out.stride(0),
                transform.soft_cap,
                transform.logit_scale,
            ),
            {"num_warps": 8},
            BLOCK=2048,
        )


def gradient_type(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which the logits' gradient enters the GEMMs: the model's, for the tensor core."""
    return dtype
