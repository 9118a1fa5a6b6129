"""Gluon: chains and k-trees of bf16 at many rows, by warps with roles of their own.

A block of threads takes one tile of 128 x 128 outputs after another. One warp copies operands to shared memory, through
the ends of leaves and tiles without a pause; two groups of four warps multiply 64 rows each and join the leaves' sums. To
the copy engine k is two dimensions, leaves and what is in them: a leaf whose length is no multiple of 64 ends in zeros. Where
tiles are too few, or the last of them would leave most of the device idle, they are halved, or their leaves are dealt out to
several blocks, whose sums `_join_tiles` adds. The order of k, and so every bit, is that of triton.py.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
import triton
import triton.language as tl
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
from .._triton import tree_sum
from . import cost
from .cost import Shares
from .problem import Product

FEW, FEW_OF_TREES = 256, 64
"""Up to so many rows, tiles of 128 x 128 would leave most of the device's multiprocessors idle; with leaves that can be dealt
out, up to fewer."""
ROWS = gl.constexpr(64)
"""Of a group of warps; a tile has two."""
WIDE = gl.constexpr(128)
"""Columns of a tile; of a halved one half of them."""
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
_JOINED = 8
"""Rows of a tile that a block joins."""


@gluon.jit
def _corner(at, before, M, N, COLS: gl.constexpr):
    """Of the tile of COLS columns that is the `at`-th behind so many of WIDE."""
    rows, cols = gl.cdiv(M, 2 * ROWS), gl.cdiv(N, WIDE)
    tile = before + at // (WIDE // COLS)
    first = tile // (BAND * cols) * BAND
    band = gl.minimum(rows - first, BAND)
    n = tile % (BAND * cols) // band * WIDE + at % (WIDE // COLS) * COLS
    return (first + tile % (BAND * cols) % band) * (2 * ROWS), n


@gluon.jit
def _copy(a_desc, b_desc, a_smem, b_smem, bars, work, LEAVES: gl.constexpr, COLS: gl.constexpr):
    """The warp that copies. Outside of the operands, and behind the end of a leaf, there are zeros."""
    full, empty = bars
    M, N, steps, before, count, parts = work
    it = 0
    for task in range(gl.program_id(0), count * parts, gl.num_programs(0)):
        m, n = _corner(task % count, before, M, N, COLS)
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
    c_desc,
    BIAS,
    a_smem,
    b_smem,
    four,
    c_smem,
    bars,
    work,
    WHICH: gl.constexpr,
    LEAVES: gl.constexpr,
    HAS_BIAS: gl.constexpr,
    SUMS: gl.constexpr,
    COLS: gl.constexpr,
):
    """The group of warps that computes the rows of half WHICH of a tile. A stage is handed back when the next product has
    been started, at the end of a leaf when its own is done."""
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, COLS, 16])
    full, empty = bars
    M, N, steps, before, count, parts = work
    it = 0
    for task in range(gl.program_id(0), count * parts, gl.num_programs(0)):
        m, n = _corner(task % count, before, M, N, COLS)
        if SUMS:  # each task's are a tile of their own
            m, n = task * (2 * ROWS), 0
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


@gluon.jit(do_not_specialize=["M", "steps", "before", "count", "parts"])
def _matmul(
    a_desc,
    b_desc,
    c_desc,
    BIAS,
    M,
    N,
    steps,
    before,
    count,
    parts,
    LEAVES: gl.constexpr,
    HAS_BIAS: gl.constexpr,
    SUMS: gl.constexpr,
    COLS: gl.constexpr,
):
    """Of `count` tiles of COLS columns, behind so many wide ones; a task is a part of a tile. `steps` are those of a leaf, LEAVES
    those of a part. SUMS: of each task a tile of sums, instead of the product."""
    a_smem = gl.allocate_shared_memory(gl.bfloat16, [2 * STAGES, ROWS, 1, STEP], a_desc.layout)
    b_smem = gl.allocate_shared_memory(gl.bfloat16, [STAGES, COLS, 1, STEP], b_desc.layout)
    spread: gl.constexpr = gl.SwizzledSharedLayout(
        8, 1, 8, [1, 0]
    )  # the eight rows that a warp writes at once, over all banks
    four = gl.allocate_shared_memory(gl.float32, [2, ROWS, COLS], spread)
    c0 = four.index(0)._reinterpret(c_desc.dtype, [ROWS, COLS], c_desc.layout)
    c1 = four.index(1)._reinterpret(c_desc.dtype, [ROWS, COLS], c_desc.layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=2)
    bars, work = (full, empty), (M, N, steps, before, count, parts)
    gl.warp_specialize(
        [
            (_multiply, (c_desc, BIAS, a_smem, b_smem, four.index(0), c0, bars, work, 0, LEAVES, HAS_BIAS, SUMS, COLS)),
            (_multiply, (c_desc, BIAS, a_smem, b_smem, four.index(1), c1, bars, work, 1, LEAVES, HAS_BIAS, SUMS, COLS)),
            (_copy, (a_desc, b_desc, a_smem, b_smem, bars, work, LEAVES, COLS)),
        ],
        [4, 1],
        [240, 24],
    )


@triton.jit(do_not_specialize=["M", "before", "count"])
def _join_tiles(
    PARTS,
    C,
    BIAS,
    M,
    N,
    before,
    count,
    scm,
    LEVELS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    BAND: tl.constexpr,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
    SOME: tl.constexpr,
):
    """SOME rows of a tile of C [M, N]: the balanced tree over its parts' sums, plus bias, rounded. PARTS: the tiles of each part."""
    which, some = tl.program_id(0) // (ROWS // SOME), tl.program_id(0) % (ROWS // SOME) * SOME
    tile, rows, cols = before + which, tl.cdiv(M, ROWS), tl.cdiv(N, COLS)  # as in _corner
    first = tile // (BAND * cols) * BAND
    band = tl.minimum(rows - first, BAND)
    m, n = (first + tile % (BAND * cols) % band) * ROWS, tile % (BAND * cols) // band * COLS
    at = tl.arange(0, SOME * COLS)
    row, column = some + at // COLS, at % COLS
    part = tl.arange(0, 1 << LEVELS).to(tl.int64)
    from_ = PARTS + which.to(tl.int64) * (ROWS * COLS) + some * COLS
    parts = tl.load(from_ + at[:, None] + part[None, :] * (count.to(tl.int64) * (ROWS * COLS)))
    acc = tree_sum(parts, LEVELS)
    i, j = (m + row).to(tl.int64), n + column
    if HAS_BIAS:
        acc += tl.load(BIAS + j, mask=j < N, other=0.0).to(tl.float32)
    tl.store(C + i * scm + j, acc.to(C.dtype.element_ty), mask=(i < M) & (j < N))


class _Matrix(TensorDescriptor):
    """Without the checks of each new object; `refuses` has made them."""

    def __post_init__(self):
        pass


def _block(dtype: torch.dtype, *shape: int) -> tuple[list[int], gl.NVMMASharedLayout]:
    return [*shape], gl.NVMMASharedLayout.get_default_for(shape, gl.float32 if dtype == torch.float32 else gl.bfloat16)


def refuses(p: Product) -> str | None:
    few = FEW if p.leaves == 1 else FEW_OF_TREES
    if p.m <= few:
        return f"{p.m} rows, of more than {few}"
    if (why := unfit(p)) is not None or p.leaves == 1:
        return why
    problem = p.m, p.n, p.k, p.leaves, p.multiprocessors
    small = cost.best_of_tiles(*problem)
    faster = small is not None and small[0] < cost.best_of_many(*problem)[0]
    return f"{p.leaves} leaves of {p.m} rows: smaller tiles are faster" if faster else None


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


def dealt(p: Product) -> Shares:
    """How its tiles are dealt out."""
    return cost.best_of_many(p.m, p.n, p.k, p.leaves, p.multiprocessors)[1]


def prepare(p: Product) -> Callable:
    return prepare_shares(p, dealt(p))


def prepare_shares(p: Product, shares: Shares) -> Callable:
    """As `prepare`. No bit depends on how tiles are dealt out."""
    (m, k), n, leaves, has_bias = p.a[0], p.n, p.leaves, p.bias is not None
    height, width = 2 * ROWS.value, WIDE.value
    whole, rest = shares.whole, triton.cdiv(m, height) * triton.cdiv(n, width) - shares.whole

    def product(before: int, count: int, parts: int, cols: int, sums: bool) -> tuple[Callable, tuple, int]:
        steps, grid = triton.cdiv(k // leaves, STEP.value), (min(count * parts, p.multiprocessors), 1, 1)
        rest = m, n, steps, before, count, parts, leaves // parts, has_bias and not sums, sums, cols
        launch = prepared(p.device, _matmul, grid, rest, num_warps=4)  # pyright: ignore[reportArgumentType]
        operands = _block(p.a[2], ROWS.value, 1, STEP.value), _block(p.b[2], cols, 1, STEP.value)
        return launch, (*operands, _block(torch.float32 if sums else p.out[2], ROWS.value, cols)), leaves

    runs: list[Callable] = []
    if whole:
        runs.append(functools.partial(_run, *product(0, whole, 1, width, False)))
    if rest and shares.parts == 1:
        runs.append(functools.partial(_run, *product(whole, 2 * rest, 1, width // 2, False)))
    elif rest:
        of_join = (
            m,
            n,
            whole,
            rest,
            p.out[1][0],
            shares.parts.bit_length() - 1,
            has_bias,
            BAND.value,
            height,
            width,
            _JOINED,
        )
        grid = rest * (height // _JOINED), 1, 1
        join = prepared(p.device, _join_tiles, grid, of_join)  # pyright: ignore[reportArgumentType]
        shape = shares.parts * rest * height, width
        runs.append(functools.partial(_run_parts, *product(whole, rest, shares.parts, width, True), join, shape))
    return runs[0] if len(runs) == 1 else functools.partial(_run_all, runs)


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


def _run_all(
    runs: list[Callable], a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor | None, out: torch.Tensor
) -> None:
    for run in runs:
        run(a, b, bias, out)
