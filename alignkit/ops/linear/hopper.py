"""Gluon: chains and k-trees of bf16 at many rows, by warps with roles of their own.

A block of threads takes one tile of 128 x 128 outputs after another. One warp copies operands to shared memory, through
the ends of leaves and tiles without a pause; two groups of four warps multiply 64 rows each and join the leaves' sums.
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

FEW = 256
"""Up to so many rows, tiles of 128 x 128 would leave most of the device's multiprocessors idle."""
ROWS = gl.constexpr(64)
"""Of a group of warps; a tile has two."""
COLS = gl.constexpr(128)
STEP = gl.constexpr(64)
"""Of k, 128 bytes."""
STAGES = gl.constexpr(5)
"""Steps of operands in shared memory, 32 KiB each. With the sums of four leaves, 64 KiB, they fill it."""
BAND = gl.constexpr(8)
"""Tiles are taken in bands of so many rows of tiles, so that weights stay in L2."""


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
def _copy(a_desc, b_desc, a_smem, b_smem, full, empty, M, N, steps):
    """The warp that copies. Outside of the operands there are zeros."""
    it = 0
    for tile in range(gl.program_id(0), _count(M, N), gl.num_programs(0)):
        m, n = _corner(tile, M, N)
        for s in range(steps):
            stage = it % STAGES
            mbarrier.wait(empty.index(stage), ((it // STAGES) & 1) ^ 1)
            mbarrier.expect(full.index(stage), (2 * ROWS + COLS) * STEP * 2)
            tma.async_copy_global_to_shared(b_desc, [n, s * STEP], full.index(stage), b_smem.index(stage))
            tma.async_copy_global_to_shared(a_desc, [m, s * STEP], full.index(stage), a_smem.index(2 * stage))
            tma.async_copy_global_to_shared(
                a_desc, [m + ROWS, s * STEP], full.index(stage), a_smem.index(2 * stage + 1)
            )
            it += 1


@gluon.jit
def _multiply(
    c_desc,
    BIAS,
    a_smem,
    b_smem,
    four,
    c_smem,
    full,
    empty,
    M,
    N,
    steps,
    WHICH: gl.constexpr,
    LEAVES: gl.constexpr,
    HAS_BIAS: gl.constexpr,
):
    """The group of warps that computes the rows of half WHICH of a tile. A stage is handed back when the next product has
    been started, at the end of a leaf when its own is done."""
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, COLS, 16])
    it = 0
    for tile in range(gl.program_id(0), _count(M, N), gl.num_programs(0)):
        m, n = _corner(tile, M, N)
        acc = gl.zeros((ROWS, COLS), gl.float32, layout)
        one = acc  # sums of 1, 2 and 4 leaves wait for their pair; that of 4 not in registers
        two = acc
        for leaf in gl.static_range(LEAVES):
            for s in range(steps):
                stage = it % STAGES
                mbarrier.wait(full.index(stage), (it // STAGES) & 1)
                acc = warpgroup_mma(
                    a_smem.index(2 * stage + WHICH),
                    b_smem.index(stage).permute((1, 0)),
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


@gluon.jit(do_not_specialize=["M", "steps"])
def _matmul(a_desc, b_desc, c_desc, BIAS, M, N, steps, LEAVES: gl.constexpr, HAS_BIAS: gl.constexpr):
    """`steps` is that of a leaf."""
    a_smem = gl.allocate_shared_memory(gl.bfloat16, [2 * STAGES, ROWS, STEP], a_desc.layout)
    b_smem = gl.allocate_shared_memory(gl.bfloat16, [STAGES, COLS, STEP], b_desc.layout)
    plain: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    four = gl.allocate_shared_memory(gl.float32, [2, ROWS, COLS], plain)
    c0 = four.index(0)._reinterpret(c_desc.dtype, [ROWS, COLS], c_desc.layout)
    c1 = four.index(1)._reinterpret(c_desc.dtype, [ROWS, COLS], c_desc.layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=2)
    gl.warp_specialize(
        [
            (
                _multiply,
                (c_desc, BIAS, a_smem, b_smem, four.index(0), c0, full, empty, M, N, steps, 0, LEAVES, HAS_BIAS),
            ),
            (
                _multiply,
                (c_desc, BIAS, a_smem, b_smem, four.index(1), c1, full, empty, M, N, steps, 1, LEAVES, HAS_BIAS),
            ),
            (_copy, (a_desc, b_desc, a_smem, b_smem, full, empty, M, N, steps * LEAVES)),
        ],
        [4, 1],
        [240, 24],
    )


class _Matrix(TensorDescriptor):
    """Without the checks of each new object; `refuses` has made them."""

    def __post_init__(self):
        pass


def _block(rows: gl.constexpr, columns: gl.constexpr, dtype: torch.dtype) -> tuple[list[int], gl.NVMMASharedLayout]:
    shape = [rows.value, columns.value]
    return shape, gl.NVMMASharedLayout.get_default_for(shape, gl.float32 if dtype == torch.float32 else gl.bfloat16)


def refuses(p: Product) -> str | None:
    return f"{p.m} rows, of more than {FEW}" if p.m <= FEW else unfit(p)


def unfit(p: Product) -> str | None:
    """Why it cannot compute it."""
    if p.accumulate:
        return "it adds to what out holds"
    if {p.a[2], p.b[2]} != {torch.bfloat16}:
        return "operands other than bf16"
    if not p.k or p.k % (p.leaves * STEP.value):
        return f"leaves of {p.k // p.leaves} k, no multiple of {STEP.value}"
    if not all(map(copied, (p.a, p.b, p.out))):
        return "strides or addresses that the copy engine does not take"
    return None


def prepare(p: Product) -> Callable:
    (m, k), n = p.a[0], p.n
    tiles = triton.cdiv(m, 2 * ROWS.value) * triton.cdiv(n, COLS.value)
    grid = min(tiles, p.multiprocessors)
    rest = (m, n, k // p.leaves // STEP.value, p.leaves, p.bias is not None)
    launch = prepared(p.device, _matmul, (grid, 1, 1), rest, num_warps=4)  # pyright: ignore[reportArgumentType]
    blocks = _block(ROWS, STEP, p.a[2]), _block(COLS, STEP, p.b[2]), _block(ROWS, COLS, p.out[2])
    return functools.partial(_run, launch, blocks)


def _run(
    launch: Callable, blocks: tuple, a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor | None, out: torch.Tensor
) -> None:
    bias = None if bias is None else bias.contiguous()
    launch(*(_Matrix(t, t.shape, t.stride(), *block) for t, block in zip((a, b, out), blocks, strict=True)), bias)
