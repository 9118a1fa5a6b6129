"""Gluon: chains and k-trees of bf16 at many rows, by warps with roles of their own.

A block of threads takes one tile of 128 x 128 outputs after another. One warp copies operands to shared memory, through
the ends of leaves and tiles without a pause; two groups of four warps multiply 64 rows each and join the leaves' sums. The
second group is a little behind the first, so that one has the tensor core while the other adds. To the copy engine k is two
dimensions, leaves and what is in them: a leaf whose length is no multiple of 64 ends in zeros. Where tiles are too few, or
the last of them would leave most of the device idle, their leaves are dealt out to several blocks, whose sums `_join` adds.
The order of k, and so every bit, is that of triton.py.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from ...runtime.launch import prepared
from ...runtime.operands import copied
from .problem import Product
from .triton import prepared_join

FEW = 256
"""Up to so many rows, tiles of 128 x 128 would leave most of the device's multiprocessors idle."""
ROWS = gl.constexpr(64)
"""Of a group of warps; a tile has two."""
COLS = gl.constexpr(128)
STEP = gl.constexpr(64)
"""Of k, 128 bytes."""
SLICE = 16
"""Of k, that the tensor core takes at once: a leaf is a multiple of it."""
STAGES = gl.constexpr(5)
"""Steps of operands in shared memory, 32 KiB each. With the sums of four leaves, 64 KiB, they fill it."""
BAND = gl.constexpr(8)
"""Tiles are taken in bands of so many rows of tiles, so that weights stay in L2."""
OPERAND = gl.constexpr(gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2))
"""How a box of an operand lies in shared memory, as a matrix."""
BEHIND = 2
"""Steps by which the second group of warps begins later."""


@gluon.jit
def _count(M, N):
    return gl.cdiv(M, 2 * ROWS) * gl.cdiv(N, COLS)


@gluon.jit
def _corner(tile, M, N):
    rows, cols = gl.cdiv(M, 2 * ROWS), gl.cdiv(N, COLS)
    first = tile // (BAND * cols) * BAND
    band = gl.minimum(rows - first, BAND)
    return (first + tile % (BAND * cols) % band) * (2 * ROWS), tile % (BAND * cols) // band * COLS


@gluon.jit
def _copy(a_desc, b_desc, shared, sizes, LEAVES: gl.constexpr):
    """The warp that copies. Outside of the operands, and behind the end of a leaf, there are zeros."""
    a_smem, b_smem, full, empty, _ = shared
    M, N, steps, parts = sizes
    it = 0
    count = _count(M, N)
    for task in range(gl.program_id(0), count * parts, gl.num_programs(0)):
        m, n = _corner(task % count, M, N)
        first = task // count * LEAVES
        for i in range(steps * LEAVES):
            stage = it % STAGES
            leaf, k = first + i // steps, i % steps * STEP
            mbarrier.wait(empty.index(stage), ((it // STAGES) & 1) ^ 1)
            mbarrier.expect(full.index(stage), (2 * ROWS + COLS) * STEP * 2)
            tma.async_copy_global_to_shared(b_desc, [n, leaf, k], full.index(stage), b_smem.index(stage))
            tma.async_copy_global_to_shared(a_desc, [m, leaf, k], full.index(stage), a_smem.index(2 * stage))
            tma.async_copy_global_to_shared(a_desc, [m + ROWS, leaf, k], full.index(stage), a_smem.index(2 * stage + 1))
            it += 1


@gluon.jit
def _multiply(
    WHICH: gl.constexpr,
    four,
    c_smem,
    c_desc,
    BIAS,
    shared,
    sizes,
    LEAVES: gl.constexpr,
    HAS_BIAS: gl.constexpr,
    BEHIND: gl.constexpr,
):
    """The group of warps that computes the rows of half WHICH of a tile. A stage is handed back when the next product has
    been started, at the end of a leaf when its own is done."""
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, COLS, 16])
    a_smem, b_smem, full, empty, go = shared
    M, N, steps, parts = sizes
    it = 0
    count = _count(M, N)
    last = gl.minimum(steps * LEAVES, BEHIND) - 1  # before the other group begins
    if BEHIND > 0 and WHICH == 1:
        mbarrier.wait(go, 0)
    for task in range(gl.program_id(0), count * parts, gl.num_programs(0)):
        m, n = _corner(task % count, M, N)
        # The sums of each part lie below those of the part before.
        m += task // count * (gl.cdiv(M, 2 * ROWS) * 2 * ROWS)
        acc = gl.zeros((ROWS, COLS), gl.float32, layout)
        one = acc  # sums of 1, 2 and 4 leaves wait for their pair; that of 4 not in registers
        two = acc
        for leaf in gl.static_range(LEAVES):
            for s in range(steps):
                stage = it % STAGES
                mbarrier.wait(full.index(stage), (it // STAGES) & 1)
                acc = warpgroup_mma(
                    a_smem.index(2 * stage + WHICH)._reinterpret(gl.bfloat16, [ROWS, STEP], OPERAND),
                    b_smem.index(stage)._reinterpret(gl.bfloat16, [COLS, STEP], OPERAND).permute((1, 0)),
                    acc,
                    use_acc=s > 0,
                    is_async=True,
                )
                if BEHIND > 0 and WHICH == 0:
                    mbarrier.arrive(go, pred=it == last)
                acc = warpgroup_mma_wait(1, deps=(acc,))
                mbarrier.arrive(empty.index((it + STAGES - 1) % STAGES), pred=s > 0)
                it += 1
            acc = warpgroup_mma_wait(0, deps=(acc,))
            mbarrier.arrive(empty.index((it + STAGES - 1) % STAGES))
            if leaf % 2 == 0:
                one = acc
            else:
                acc = one + acc
                if leaf % 4 == 1:
                    two = acc
                else:
                    acc = two + acc
                    if leaf == 3 and LEAVES == 8:
                        tma.store_wait(0)  # the last tile's outputs, which lie in the same place
                        four.store(acc)
                    if leaf == 7:
                        acc = four.load(layout) + acc
        if HAS_BIAS:
            j = n + gl.arange(0, COLS, gl.SliceLayout(0, layout))
            acc += gl.load(BIAS + j, mask=j < N, other=0.0).to(gl.float32)[None, :]
        tma.store_wait(0)
        c_smem.store(acc.to(c_desc.dtype))
        fence_async_shared()
        tma.async_copy_shared_to_global(c_desc, [m + WHICH * ROWS, n], c_smem)
    tma.store_wait(0)


@gluon.jit(do_not_specialize=["M", "steps", "parts"])
def _matmul(
    a_desc, b_desc, c_desc, BIAS, M, N, steps, parts, LEAVES: gl.constexpr, HAS_BIAS: gl.constexpr, BEHIND: gl.constexpr
):
    """`steps` are those of a leaf, LEAVES those of a part; a task is a part of a tile."""
    a_smem = gl.allocate_shared_memory(gl.bfloat16, [2 * STAGES, ROWS, 1, STEP], a_desc.layout)
    b_smem = gl.allocate_shared_memory(gl.bfloat16, [STAGES, COLS, 1, STEP], b_desc.layout)
    plain: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    four = gl.allocate_shared_memory(gl.float32, [2, ROWS, COLS], plain)
    c0 = four.index(0)._reinterpret(c_desc.dtype, [ROWS, COLS], c_desc.layout)
    c1 = four.index(1)._reinterpret(c_desc.dtype, [ROWS, COLS], c_desc.layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    go = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(go, count=1)
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=2)
    shared, sizes = (a_smem, b_smem, full, empty, go), (M, N, steps, parts)
    gl.warp_specialize(
        [
            (_multiply, (0, four.index(0), c0, c_desc, BIAS, shared, sizes, LEAVES, HAS_BIAS, BEHIND)),
            (_multiply, (1, four.index(1), c1, c_desc, BIAS, shared, sizes, LEAVES, HAS_BIAS, BEHIND)),
            (_copy, (a_desc, b_desc, shared, sizes, LEAVES)),
        ],
        [4, 1],
        [240, 24],
    )


class _Matrix(TensorDescriptor):
    """Without the checks of each new object; `refuses` has made them."""

    def __post_init__(self):
        pass


def _block(dtype: torch.dtype, *shape: int) -> tuple[list[int], gl.NVMMASharedLayout]:
    return [*shape], gl.NVMMASharedLayout.get_default_for(shape, gl.float32 if dtype == torch.float32 else gl.bfloat16)


def refuses(p: Product) -> str | None:
    return f"{p.m} rows, of more than {FEW}" if p.m <= FEW else unfit(p)


def unfit(p: Product) -> str | None:
    """Why it cannot compute it."""
    if p.accumulate:
        return "it adds to what out holds"
    if {p.a[2], p.b[2]} != {torch.bfloat16}:
        return "operands other than bf16"
    if p.leaves not in (1, 2, 4, 8):
        return f"{p.leaves} leaves: it computes chains and trees of 2, 4 or 8"
    if not p.k or p.k % (p.leaves * SLICE):
        return f"leaves of {p.k // p.leaves} k, no multiple of {SLICE}"
    if not all(map(copied, (p.a, p.b, p.out))):
        return "strides or addresses that the copy engine does not take"
    return None


def ways(p: Product) -> list[int]:
    """Into how many parts it can deal out the leaves."""
    return [parts for parts in (1, 2, 4, 8) if parts <= p.leaves and (parts == 1 or p.n % 4 == 0)]


def prepare(p: Product) -> Callable:
    return prepare_parts(p, 1)


def prepare_parts(p: Product, parts: int, behind: int = BEHIND) -> Callable:
    """As `prepare`, with the leaves dealt out. No bit depends on it."""
    (m, k), n, leaves, has_bias = p.a[0], p.n, p.leaves, p.bias is not None
    tiles = triton.cdiv(m, 2 * ROWS.value) * triton.cdiv(n, COLS.value)
    grid, leaf = min(tiles * parts, p.multiprocessors - p.spare), k // leaves
    rest = (m, n, triton.cdiv(leaf, STEP.value), parts, leaves // parts, has_bias and parts == 1, behind)
    launch = prepared(p.device, _matmul, (grid, 1, 1), rest, num_warps=4)  # pyright: ignore[reportArgumentType]
    blocks = (
        _block(p.a[2], ROWS.value, 1, STEP.value),
        _block(p.b[2], COLS.value, 1, STEP.value),
        _block(p.out[2] if parts == 1 else torch.float32, ROWS.value, COLS.value),
    )
    if parts == 1:
        return functools.partial(_run, launch, blocks, leaves)
    padded = triton.cdiv(m, 2 * ROWS.value) * 2 * ROWS.value
    join = prepared_join(p.device, m, n, padded * n, p.out[1][0], parts, has_bias)  # pyright: ignore[reportArgumentType]
    return functools.partial(_run_parts, launch, blocks, leaves, join, (parts * padded, n))


def _leaves(t: torch.Tensor, leaves: int, block: tuple) -> _Matrix:
    """A matrix [rows, k] as the copy engine sees it."""
    (rows, k), (row, column) = t.shape, t.stride()
    return _Matrix(t, (rows, leaves, k // leaves), (row, k // leaves, column), *block)


def _run(
    launch: Callable,
    blocks: tuple,
    leaves: int,
    a: torch.Tensor,
    b: torch.Tensor,
    bias: torch.Tensor | None,
    out: torch.Tensor,
) -> None:
    bias = None if bias is None else bias.contiguous()
    of_a, of_b, of_out = blocks
    launch(_leaves(a, leaves, of_a), _leaves(b, leaves, of_b), _Matrix(out, out.shape, out.stride(), *of_out), bias)


def _run_parts(
    launch: Callable,
    blocks: tuple,
    leaves: int,
    join: Callable,
    shape: tuple[int, int],
    a: torch.Tensor,
    b: torch.Tensor,
    bias: torch.Tensor | None,
    out: torch.Tensor,
) -> None:
    sums = torch.empty(shape, dtype=torch.float32, device=out.device)
    _run(launch, blocks, leaves, a, b, None, sums)
    join(sums, out, None if bias is None else bias.contiguous())
