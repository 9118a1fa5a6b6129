"""Gluon: chains and k-trees of bf16 at many rows, by warps with roles of their own.

A block of threads takes one tile of 128 x 128 outputs after another. One warp copies operands to shared memory, through
the ends of leaves and tiles without a pause; eight multiply, and add the leaves' sums while the tensor cores are busy with the
next leaf's first step. What a kernel does not need is not in it: one with much code begins later (docs/linear.md).

To the copy engine k is two dimensions, leaves and what is in them: a leaf whose length is no multiple of 64 ends in zeros, and
begins with some where it lies so that its other steps would straddle lines of 128 bytes. Rows outside of an operand take the
engine longer than those inside, so the last tiles end where the matrix does: they lie on others' rows and columns, and write the
same bytes there.

Tiles that do not fill a last round would leave most of the device idle. So each of them may be cut: an owner computes its
first leaves, helpers, which are the blocks that have no such tile, the rest, as subtrees of the leaves' tree, whose sums the
owner takes in their place. Helpers do this first of all, and are the blocks that begin first, so that whom an owner waits
for is on its way. The order of k, and so every bit, is that of triton.py.
"""

from __future__ import annotations

import functools
import secrets
from collections.abc import Callable

import torch
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
from . import cost
from .cost import Cut
from .cublaslt import rounded
from .problem import Product

FEW = 256
"""Up to so many rows, tiles of 128 x 128 may leave most of the device's multiprocessors idle: smaller ones take chains."""
ROWS, COLS = gl.constexpr(cost.MANY_ROWS), gl.constexpr(cost.MANY_OUTPUTS)
"""Of a tile."""
STEP = gl.constexpr(64)
"""Of k, 128 bytes."""
SLICE = 16
"""Of k, that the tensor core takes at once: a leaf is a multiple of it."""
BAND = gl.constexpr(8)
"""Tiles are taken in bands of so many rows of tiles, so that weights stay in L2."""
OPERAND = gl.constexpr(gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2))
"""How a box of an operand lies in shared memory, as a matrix."""
RESULT = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [8, 1], [16, COLS.value, 16]))
"""How the warps hold a tile's sums."""


@gluon.jit
def _corner(tile, M, N):
    """The first row and column of a tile. The last ones end where the matrix does, if it is as large as a tile."""
    rows, cols = gl.cdiv(M, ROWS), gl.cdiv(N, COLS)
    first = tile // (BAND * cols) * BAND
    band = gl.minimum(rows - first, BAND)
    row, col = first + tile % (BAND * cols) % band, tile % (BAND * cols) // band
    return gl.maximum(gl.minimum(row * ROWS, M - ROWS), 0), gl.maximum(gl.minimum(col * COLS, N - COLS), 0)


@gluon.jit
def _pieces_of(block, cut, pieces, helpers):
    """A block's are every `helpers`-th up to this, from `block` on: of an owner none."""
    return cut * pieces if block < helpers else 0


@gluon.jit
def _copy_leaves(tile, first, last, it, descs, shared, sizes):
    """Operands of these leaves of a tile; `it` steps have been copied before."""
    a_desc, b_desc = descs
    a_smem, b_smem, full, empty = shared
    M, N, steps, length = sizes
    stages: gl.constexpr = full.shape[0]
    m, n = _corner(tile, M, N)
    for leaf in range(first, last):
        k = -(leaf * length % STEP)
        for _ in range(steps):
            stage = it % stages
            mbarrier.wait(empty.index(stage), ((it // stages) & 1) ^ 1)
            mbarrier.expect(full.index(stage), (ROWS + COLS) * STEP * 2)
            tma.async_copy_global_to_shared(b_desc, [n, leaf, k], full.index(stage), b_smem.index(stage))
            tma.async_copy_global_to_shared(a_desc, [m, leaf, k], full.index(stage), a_smem.index(stage))
            k += STEP
            it += 1
    return it


@gluon.jit
def _copy(descs, shared, sizes, rounds, LEAVES: gl.constexpr, KEPT: gl.constexpr):
    """The warp that copies. Outside of a leaf there are zeros."""
    whole, cut, helpers = rounds
    SIZE: gl.constexpr = KEPT & -KEPT
    it = 0
    block = gl.program_id(0)
    if KEPT < LEAVES:
        for piece in range(block, _pieces_of(block, cut, (LEAVES - KEPT) // SIZE, helpers), helpers):
            first = KEPT + piece // cut * SIZE
            it = _copy_leaves(whole + piece % cut, first, first + SIZE, it, descs, shared, sizes)
    for tile in range(block, whole, gl.num_programs(0)):
        it = _copy_leaves(tile, 0, LEAVES, it, descs, shared, sizes)
    if KEPT < LEAVES and block >= helpers:
        _copy_leaves(whole + block - helpers, 0, KEPT, it, descs, shared, sizes)


@gluon.jit
def _step(acc, it, ADDS: gl.constexpr, shared):
    """Starts the product of a step; it is added to `acc` if ADDS."""
    a_smem, b_smem, full, _ = shared
    stages: gl.constexpr = full.shape[0]
    stage = it % stages
    mbarrier.wait(full.index(stage), (it // stages) & 1)
    return warpgroup_mma(
        a_smem.index(stage)._reinterpret(gl.bfloat16, [ROWS, STEP], OPERAND),
        b_smem.index(stage)._reinterpret(gl.bfloat16, [COLS, STEP], OPERAND).permute((1, 0)),
        acc,
        use_acc=ADDS,
        is_async=True,
    )


@gluon.jit
def _hand_back(it, shared):
    """The place of the step before this one, whose product is done."""
    _, _, _, empty = shared
    stages: gl.constexpr = empty.shape[0]
    mbarrier.arrive(empty.index((it + stages - 1) % stages))


@gluon.jit
def _begin(it, shared):
    """The first step of a leaf, with none before it."""
    acc = _step(gl.zeros((ROWS, COLS), gl.float32, RESULT), it, False, shared)
    return warpgroup_mma_wait(1, deps=(acc,)), it + 1


@gluon.jit
def _begin_next(before, it, shared):
    """Likewise behind a leaf whose last step still runs. That leaf's sums are whole now."""
    acc = _step(gl.zeros((ROWS, COLS), gl.float32, RESULT), it, False, shared)
    acc, before = warpgroup_mma_wait(1, deps=(acc, before))
    _hand_back(it, shared)
    return acc, before, it + 1


@gluon.jit
def _go_on(acc, it, steps, shared):
    """The other steps of a leaf, of which the last still runs."""
    for _ in range(1, steps):
        acc = _step(acc, it, True, shared)
        acc = warpgroup_mma_wait(1, deps=(acc,))
        _hand_back(it, shared)
        it += 1
    return acc, it


@gluon.jit
def _end(acc, it, shared):
    """The leaf's sums, whole."""
    acc = warpgroup_mma_wait(0, deps=(acc,))
    _hand_back(it, shared)
    return acc


@gluon.jit
def _now(sums):
    """These sums, added here: else the compiler may wait until they are needed, and keep what it adds in more registers."""
    return warpgroup_mma_wait(0, deps=(sums,))


@gluon.jit
def _one(it, steps, shared):
    """The sums of the next leaf."""
    acc, it = _begin(it, shared)
    acc, it = _go_on(acc, it, steps, shared)
    return _end(acc, it, shared), it


@gluon.jit
def _two(it, steps, shared):
    """The sums of the next two leaves."""
    one, it = _begin(it, shared)
    one, it = _go_on(one, it, steps, shared)
    acc, one, it = _begin_next(one, it, shared)
    acc, it = _go_on(acc, it, steps, shared)
    return _now(one + _end(acc, it, shared)), it


@gluon.jit
def _four(it, steps, shared):
    """The sums of the next four leaves."""
    one, it = _begin(it, shared)
    one, it = _go_on(one, it, steps, shared)
    acc, one, it = _begin_next(one, it, shared)
    acc, it = _go_on(acc, it, steps, shared)
    third, acc, it = _begin_next(acc, it, shared)
    third, two = warpgroup_mma_wait(1, deps=(third, one + acc))  # as `_now`, while the third leaf's first step runs
    third, it = _go_on(third, it, steps, shared)
    acc, third, it = _begin_next(third, it, shared)
    acc, it = _go_on(acc, it, steps, shared)
    return _now(two + (third + _end(acc, it, shared))), it


@gluon.jit
def _subtree(COUNT: gl.constexpr, it, steps, shared):
    """The sums of the next 1, 2 or 4 leaves."""
    if COUNT == 1:
        acc, it = _one(it, steps, shared)
    elif COUNT == 2:
        acc, it = _two(it, steps, shared)
    else:
        acc, it = _four(it, steps, shared)
    return acc, it


@gluon.jit
def _keep(sums, held):
    """Sums that are needed later, in shared memory."""
    tma.store_wait(0)  # the last tile's outputs, which lie in the same place
    held.store(sums)


@gluon.jit
def _whole(it, steps, held, shared, LEAVES: gl.constexpr):
    """The sums of all leaves of a tile."""
    if LEAVES < 8:
        acc, it = _subtree(LEAVES, it, steps, shared)
    else:
        acc = gl.zeros((ROWS, COLS), gl.float32, RESULT)
        for half in range(2):  # a loop, so that the instructions are there once
            acc, it = _four(it, steps, shared)
            if half == 0:
                _keep(acc, held)
            else:
                acc = held.load(RESULT) + acc
    return acc, it


@gluon.jit
def _finish(acc, m, n, c_smem, c_desc, BIAS, N, HAS_BIAS: gl.constexpr):
    """Outputs of a tile, rounded, to memory."""
    if HAS_BIAS:
        j = n + gl.arange(0, COLS, gl.SliceLayout(0, RESULT))
        acc += gl.load(BIAS + j, mask=j < N, other=0.0).to(gl.float32)[None, :]
    tma.store_wait(0)
    c_smem.store(acc.to(c_desc.dtype))
    fence_async_shared()
    tma.async_copy_shared_to_global(c_desc, [m, n], c_smem)


@gluon.jit
def _sums_of(SUMS, slot):
    """Where a piece's sums lie: those that the threads of a warp hold in the same registers beside each other."""
    i = gl.arange(0, ROWS, gl.SliceLayout(1, RESULT))
    j = gl.arange(0, COLS, gl.SliceLayout(0, RESULT))
    i, j = i % 8 * 8 + i // 8 % 2 * 512 + i // 16 * 64, j % 8 + j // 8 * 1024
    return SUMS + slot.to(gl.int64) * (ROWS * COLS) + gl.max_contiguous(i[:, None] + j[None, :], [1, 2])


@gluon.jit
def _flag_of(SUMS, slot, slots):
    """Whether they lie there: behind all sums, a number."""
    return (SUMS + slots.to(gl.int64) * (ROWS * COLS)).to(gl.pointer_type(gl.int64), bitcast=True) + slot


@gluon.jit
def _give(acc, SUMS, THERE, slot, slots):
    """A piece's sums to its owner."""
    gl.store(_sums_of(SUMS, slot), acc)
    gl.thread_barrier()
    gl.atomic_xchg(_flag_of(SUMS, slot, slots), THERE, sem="release", scope="gpu")


@gluon.jit
def _wait(SUMS, THERE, slot, slots):
    """Until a piece's sums are there."""
    flag = _flag_of(SUMS, slot, slots)
    while gl.atomic_add(flag, 0, sem="acquire", scope="gpu") != THERE:
        pass
    gl.store(flag, 0)


@gluon.jit
def _take(SUMS, slot):
    """A piece's sums, which are there."""
    return gl.load(_sums_of(SUMS, slot), cache_modifier=".cg")


@gluon.jit
def _own(it, steps, held, SUMS, THERE, slot, slots, shared, LEAVES: gl.constexpr, KEPT: gl.constexpr):
    """The sums of a tile whose first KEPT leaves this block computes. The others' are pieces, the first at `slot`."""
    if 2 * KEPT < LEAVES:  # 2 of 8
        acc, it = _two(it, steps, shared)
        for piece in gl.static_range(3):
            _wait(SUMS, THERE, slot + piece, slots)
        acc = _now(acc + _take(SUMS, slot))
        acc += _take(SUMS, slot + 1) + _take(SUMS, slot + 2)
    elif 2 * KEPT == LEAVES:
        acc, it = _subtree(KEPT, it, steps, shared)
        _wait(SUMS, THERE, slot, slots)
        acc += _take(SUMS, slot)
    elif LEAVES == 4:  # 3
        two, it = _two(it, steps, shared)
        acc, it = _one(it, steps, shared)
        _wait(SUMS, THERE, slot, slots)
        acc = two + (acc + _take(SUMS, slot))
    else:  # 6 of 8
        acc, it = _four(it, steps, shared)
        _keep(acc, held)
        acc, it = _two(it, steps, shared)
        _wait(SUMS, THERE, slot, slots)
        acc = _now(acc + _take(SUMS, slot))
        acc = held.load(RESULT) + acc
    return acc


@gluon.jit
def _multiply(
    held,
    c_smem,
    c_desc,
    BIAS,
    SUMS,
    THERE,
    shared,
    sizes,
    rounds,
    LEAVES: gl.constexpr,
    KEPT: gl.constexpr,
    HAS_BIAS: gl.constexpr,
):
    """The warps that multiply."""
    M, N, steps, _ = sizes
    whole, cut, helpers = rounds
    SIZE: gl.constexpr = KEPT & -KEPT
    PIECES: gl.constexpr = (LEAVES - KEPT) // SIZE
    it = 0
    block = gl.program_id(0)
    if KEPT < LEAVES:
        for piece in range(block, _pieces_of(block, cut, PIECES, helpers), helpers):
            acc, it = _subtree(SIZE, it, steps, shared)
            _give(acc, SUMS, THERE, piece % cut * PIECES + piece // cut, cut * PIECES)
    for tile in range(block, whole, gl.num_programs(0)):
        m, n = _corner(tile, M, N)
        acc, it = _whole(it, steps, held, shared, LEAVES)
        _finish(acc, m, n, c_smem, c_desc, BIAS, N, HAS_BIAS)
    if KEPT < LEAVES and block >= helpers:
        own = block - helpers
        m, n = _corner(whole + own, M, N)
        acc = _own(it, steps, held, SUMS, THERE, own * PIECES, cut * PIECES, shared, LEAVES, KEPT)
        _finish(acc, m, n, c_smem, c_desc, BIAS, N, HAS_BIAS)
    tma.store_wait(0)


@gluon.jit(do_not_specialize=["THERE", "M", "steps", "length", "whole", "cut", "helpers"])
def _matmul(
    a_desc,
    b_desc,
    c_desc,
    BIAS,
    SUMS,
    THERE,
    M,
    N,
    steps,
    length,
    whole,
    cut,
    helpers,
    LEAVES: gl.constexpr,
    KEPT: gl.constexpr,
    HAS_BIAS: gl.constexpr,
):
    """`steps` are those of a leaf, and `length` its k, or 0 where it begins without zeros. Of the tiles the first `whole` are not
    cut; of each of the `cut` others an owner keeps the first KEPT leaves, and the first `helpers` blocks compute the rest, in
    pieces of as many leaves as the tree has there. SUMS: of each piece, and behind them flags, which are THERE when their sums
    are."""
    # In shared memory are steps of operands, 32 KiB each, and outputs of a tile, or sums that wait for others.
    LARGE: gl.constexpr = LEAVES == 8 or c_desc.dtype == gl.float32
    STAGES: gl.constexpr = 5 if LARGE else 6
    a_smem = gl.allocate_shared_memory(gl.bfloat16, [STAGES, ROWS, 1, STEP], a_desc.layout)
    b_smem = gl.allocate_shared_memory(gl.bfloat16, [STAGES, COLS, 1, STEP], b_desc.layout)
    # The eight rows that a warp writes at once lie in different banks.
    spread: gl.constexpr = gl.SwizzledSharedLayout(8, 1, 8, [1, 0])
    held = gl.allocate_shared_memory(gl.float32, [ROWS if LARGE else ROWS // 2, COLS], spread)
    c_smem = held._reinterpret(c_desc.dtype, [ROWS, COLS], c_desc.layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=1)
    shared, sizes, rounds = (a_smem, b_smem, full, empty), (M, N, steps, length), (whole, cut, helpers)
    gl.warp_specialize(
        [
            (_multiply, (held, c_smem, c_desc, BIAS, SUMS, THERE, shared, sizes, rounds, LEAVES, KEPT, HAS_BIAS)),
            (_copy, ((a_desc, b_desc), shared, sizes, rounds, LEAVES, KEPT)),
        ],
        [1],
        [24],
    )


class _Matrix(TensorDescriptor):
    """Without the checks of each new object; `refuses` has made them."""

    def __post_init__(self):
        pass


def _block(dtype: torch.dtype, *shape: int) -> tuple[list[int], gl.NVMMASharedLayout]:
    return [*shape], gl.NVMMASharedLayout.get_default_for(shape, gl.float32 if dtype == torch.float32 else gl.bfloat16)


def refuses(p: Product) -> str | None:
    least = FEW if p.leaves == 1 else ROWS.value
    if p.m <= least:
        return f"{p.m} rows, of more than {least}"
    if (why := unfit(p)) is not None or p.m > FEW:
        return why
    problem = rounded(p.m), p.n, p.k, p.leaves
    return "tiles are faster" if cost.best_of_tiles(*problem)[0] < cost.many(*problem) else None


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


def ways(p: Product) -> list[Cut]:
    """How it can cut the tiles of the last round."""
    return cost.cuts(p.m, p.n, p.leaves, p.multiprocessors - p.spare)


def cut_of(p: Product) -> Cut:
    """The fastest of them."""
    return cost.cut(p.m, p.n, p.k, p.leaves, p.multiprocessors - p.spare)


def prepare(p: Product) -> Callable:
    return prepare_cut(p, cut_of(p))


def _steps(p: Product) -> tuple[int, int]:
    """Of a leaf; and its k, if each is to begin with as many zeros as set its other steps on lines of 128 bytes."""
    length, step = p.k // p.leaves, STEP.value
    plain, aligned = (max(cost.up(leaf * by % step + length, step) for leaf in range(p.leaves)) for by in (0, length))
    lined = all(row % step == 0 for _, (row, _), *_ in (p.a, p.b))
    return (aligned, length) if lined and 8 * aligned <= 9 * plain else (plain, 0)


def prepare_cut(p: Product, cut: Cut) -> Callable:
    """As `prepare`. No bit depends on how tiles are cut."""
    has_bias, slots = p.bias is not None, cut.tiles * cut.pieces
    there = secrets.randbits(62) | 1 << 62  # whatever memory held before is another number
    whole = cost.tiles_of(p.m, p.n) - cut.tiles
    rest = there, p.m, p.n, *_steps(p), whole, cut.tiles, cut.helpers, p.leaves, cut.kept, has_bias
    grid = cut.helpers + cut.tiles, 1, 1
    launch = prepared(p.device, _matmul, grid, rest, num_warps=8)  # pyright: ignore[reportArgumentType]
    blocks = (
        _block(p.a[2], ROWS.value, 1, STEP.value),
        _block(p.b[2], COLS.value, 1, STEP.value),
        _block(p.out[2], ROWS.value, COLS.value),
    )
    sums = slots * (ROWS.value * COLS.value + 2)  # a flag is two of them
    device = torch.device("cuda", p.device)  # pyright: ignore[reportArgumentType]
    memory = functools.partial(torch.empty, sums, dtype=torch.float32, device=device)
    nothing = None if sums else memory()
    return functools.partial(_run, launch, blocks, p.leaves, memory, nothing)


def _leaves(t: torch.Tensor, leaves: int, block: tuple) -> _Matrix:
    """A matrix [rows, k] as the copy engine sees it."""
    (rows, k), (row, column) = t.shape, t.stride()
    return _Matrix(t, (rows, leaves, k // leaves), (row, k // leaves, column), *block)


def _run(
    launch: Callable,
    blocks: tuple,
    leaves: int,
    memory: Callable[[], torch.Tensor],
    nothing: torch.Tensor | None,
    a: torch.Tensor,
    b: torch.Tensor,
    bias: torch.Tensor | None,
    out: torch.Tensor,
) -> None:
    bias = None if bias is None else bias.contiguous()
    of_a, of_b, of_out = blocks
    launch(
        _leaves(a, leaves, of_a),
        _leaves(b, leaves, of_b),
        _Matrix(out, out.shape, out.stride(), *of_out),
        bias,
        memory() if nothing is None else nothing,
    )
