"""Gluon: chains and k-trees of bf16 at many rows, by warps with roles of their own.

A block of threads takes one tile of 128 x 128 outputs after another. One warp copies operands to shared memory, through
the ends of leaves and tiles without a pause; two groups of four warps multiply 64 rows each and join the leaves' sums. The
second group is a little behind the first, so that one has the tensor core while the other adds. To the copy engine k is two
dimensions, leaves and what is in them: a leaf whose length is no multiple of 64 ends in zeros.

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
from . import cost
from .cost import Cut
from .problem import Product

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
RESULT = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, COLS.value, 16]))
"""How a group of warps holds its sums."""
BEHIND = 2
"""Steps by which the second group of warps begins later."""


@gluon.jit
def _corner(tile, M, N):
    """The first row and column of a tile. Those of the last rows, if these are one group's, are the last tiles."""
    rows, cols = (M + ROWS - 1) // (2 * ROWS), gl.cdiv(N, COLS)
    if tile < rows * cols:
        first = tile // (BAND * cols) * BAND
        band = gl.minimum(rows - first, BAND)
        row, col = first + tile % (BAND * cols) % band, tile % (BAND * cols) // band
    else:
        row, col = rows, tile - rows * cols
    return row * (2 * ROWS), col * COLS


@gluon.jit
def _half(tile, M, N):
    """Whether a tile has rows for one group only."""
    m, _ = _corner(tile, M, N)
    return m + ROWS >= M


@gluon.jit
def _size(first, kept):
    """Leaves of the subtree that begins at leaf `first` and is given away, where an owner keeps so many: as many as the tree
    has there, but no more than those kept."""
    size = first & -first
    while size > kept:
        size = size // 2
    return size


@gluon.jit
def _given(piece, kept):
    """The first leaf and the size of a tile's piece, of those given away, in order."""
    first = kept
    for _ in range(piece):
        first += _size(first, kept)
    return first, _size(first, kept)


@gluon.jit
def _copy_leaves(tile, first, last, it, descs, shared, M, N, steps):
    """Operands of these leaves of a tile; `it` steps have been copied before."""
    a_desc, b_desc = descs
    a_smem, b_smem, full, empty, _ = shared
    m, n = _corner(tile, M, N)
    for i in range((last - first) * steps):
        stage = it % STAGES
        leaf, k = first + i // steps, i % steps * STEP
        mbarrier.wait(empty.index(stage), ((it // STAGES) & 1) ^ 1)
        if m + ROWS < M:
            mbarrier.expect(full.index(stage), (2 * ROWS + COLS) * STEP * 2)
            tma.async_copy_global_to_shared(a_desc, [m + ROWS, leaf, k], full.index(stage), a_smem.index(2 * stage + 1))
        else:
            mbarrier.expect(full.index(stage), (ROWS + COLS) * STEP * 2)
        tma.async_copy_global_to_shared(b_desc, [n, leaf, k], full.index(stage), b_smem.index(stage))
        tma.async_copy_global_to_shared(a_desc, [m, leaf, k], full.index(stage), a_smem.index(2 * stage))
        it += 1
    return it


@gluon.jit
def _pieces_of(block, cut, pieces, helpers):
    """A block's are every `helpers`-th up to this, from `block` on: of an owner none."""
    return cut * pieces if block < helpers else 0


@gluon.jit
def _copy(descs, shared, sizes, LEAVES: gl.constexpr):
    """The warp that copies. Outside of the operands, and behind the end of a leaf, there are zeros."""
    M, N, steps, whole, cut, kept, pieces, helpers = sizes
    it = 0
    block = gl.program_id(0)
    for q in range(block, _pieces_of(block, cut, pieces, helpers), helpers):
        first, size = _given(pieces - 1 - q // cut, kept)
        it = _copy_leaves(whole + q % cut, first, first + size, it, descs, shared, M, N, steps)
    for tile in range(block, whole, gl.num_programs(0)):
        it = _copy_leaves(tile, 0, LEAVES, it, descs, shared, M, N, steps)
    if block >= helpers:
        _copy_leaves(whole + block - helpers, 0, kept, it, descs, shared, M, N, steps)


@gluon.jit
def _pass(count, it, shared):
    """So many steps of a tile that has no rows for this group."""
    _, _, full, empty, _ = shared
    for _ in range(count):
        mbarrier.wait(full.index(it % STAGES), (it // STAGES) & 1)
        mbarrier.arrive(empty.index(it % STAGES))
        it += 1
    return it


@gluon.jit
def _chain(acc, it, steps, WHICH: gl.constexpr, shared, BEHIND: gl.constexpr):
    """The next leaf's sums. A stage is handed back when the next product has been started, at the end when its own is done."""
    a_smem, b_smem, full, empty, go = shared
    last = gl.minimum(steps, BEHIND) - 1  # before the other group begins
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
    return acc, it


@gluon.jit
def _join(acc, two, four, done, LEAVES: gl.constexpr):
    """The sums of the last 2 or, if these are so many, 4 of the `done` first leaves of a tree, with those that have waited for them.
    Sums of 2 and 4 leaves wait for their pair; those of 4 not in registers."""
    if LEAVES > 2:
        if done % 4 == 2:
            two = acc
        elif done % 4 == 0:
            acc = two + acc
    return _join_four(acc, four, done, LEAVES), two


@gluon.jit
def _join_four(acc, four, done, LEAVES: gl.constexpr):
    """Likewise of 4."""
    if LEAVES > 4:
        if done == 4:
            tma.store_wait(0)  # the last tile's outputs, which lie in the same place
            four.store(acc)
        elif done == 8:
            acc = four.load(RESULT) + acc
    return acc


@gluon.jit
def _pair(acc, it, steps, WHICH: gl.constexpr, shared, BEHIND: gl.constexpr):
    """The sums of the next two leaves."""
    one, it = _chain(acc, it, steps, WHICH, shared, BEHIND)
    acc, it = _chain(one, it, steps, WHICH, shared, BEHIND)
    return one + acc, it


@gluon.jit
def _finish(acc, tile, WHICH: gl.constexpr, c_smem, c_desc, BIAS, M, N, HAS_BIAS: gl.constexpr):
    m, n = _corner(tile, M, N)
    if HAS_BIAS:
        j = n + gl.arange(0, COLS, gl.SliceLayout(0, RESULT))
        acc += gl.load(BIAS + j, mask=j < N, other=0.0).to(gl.float32)[None, :]
    tma.store_wait(0)
    c_smem.store(acc.to(c_desc.dtype))
    fence_async_shared()
    tma.async_copy_shared_to_global(c_desc, [m + WHICH * ROWS, n], c_smem)


@gluon.jit
def _sums_of(SUMS, slot):
    """Where a group of warps' sums of a piece lie."""
    i = gl.arange(0, ROWS, gl.SliceLayout(1, RESULT))
    j = gl.arange(0, COLS, gl.SliceLayout(0, RESULT))
    return SUMS + slot.to(gl.int64) * (ROWS * COLS) + (i[:, None] * COLS + j[None, :])


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
def _take(SUMS, THERE, slot, slots):
    """A piece's sums, when they are there."""
    flag = _flag_of(SUMS, slot, slots)
    while gl.atomic_add(flag, 0, sem="acquire", scope="gpu") != THERE:
        pass
    gl.store(flag, 0)
    return gl.load(_sums_of(SUMS, slot), cache_modifier=".cg")


@gluon.jit
def _pairs(count, it, four, steps, WHICH: gl.constexpr, shared, LEAVES: gl.constexpr, BEHIND: gl.constexpr):
    """The sums of the first `count` pairs of leaves of a tree: of the last of them, with those that have waited for them, and
    of two leaves that wait for others."""
    acc = gl.zeros((ROWS, COLS), gl.float32, RESULT)
    two = acc
    for pair in range(count):
        acc, it = _pair(acc, it, steps, WHICH, shared, BEHIND)
        acc, two = _join(acc, two, four, 2 * pair + 2, LEAVES)
    return acc, two, it


@gluon.jit
def _own(WHICH: gl.constexpr, it, four, SUMS, THERE, shared, sizes, LEAVES: gl.constexpr, BEHIND: gl.constexpr):
    """The sums of the tile that this block owns."""
    _, _, steps, _, cut, kept, pieces, helpers = sizes
    slot, slots = (gl.program_id(0) - helpers) * pieces * 2 + WHICH, 2 * cut * pieces
    acc, two, it = _pairs(kept // 2, it, four, steps, WHICH, shared, LEAVES, BEHIND)
    done = kept
    if kept % 2 == 1:
        one, it = _chain(acc, it, steps, WHICH, shared, BEHIND)
        acc = one + _take(SUMS, THERE, slot, slots)
        acc, two = _join(acc, two, four, kept + 1, LEAVES)
        done += 1
        slot += 2
    while done < LEAVES:  # subtrees of two and four leaves
        size = _size(done, kept)
        done += size
        acc = _take(SUMS, THERE, slot, slots)
        if size == 2:
            acc, two = _join(acc, two, four, done, LEAVES)
        else:
            acc = _join_four(acc, four, done, LEAVES)
        slot += 2
    return acc


@gluon.jit
def _multiply(
    WHICH: gl.constexpr,
    four,
    c_smem,
    c_desc,
    BIAS,
    SUMS,
    THERE,
    shared,
    sizes,
    LEAVES: gl.constexpr,
    HAS_BIAS: gl.constexpr,
    BEHIND: gl.constexpr,
):
    """The group of warps that computes the rows of half WHICH of a tile."""
    M, N, steps, whole, cut, kept, pieces, helpers = sizes
    it = 0
    block = gl.program_id(0)
    if BEHIND > 0 and WHICH == 1:
        mbarrier.wait(shared[4], 0)
    if LEAVES > 1:
        for q in range(block, _pieces_of(block, cut, pieces, helpers), helpers):
            piece = pieces - 1 - q // cut
            _, size = _given(piece, kept)
            if WHICH == 1 and _half(whole + q % cut, M, N):
                it = _pass(size * steps, it, shared)
            else:
                acc, two, it = _pairs(size // 2, it, four, steps, WHICH, shared, 4 if LEAVES > 4 else LEAVES, BEHIND)
                if size == 1:
                    acc, it = _chain(acc, it, steps, WHICH, shared, BEHIND)
                _give(acc, SUMS, THERE, (q % cut * pieces + piece) * 2 + WHICH, 2 * cut * pieces)
    for tile in range(block, whole, gl.num_programs(0)):
        if WHICH == 1 and _half(tile, M, N):
            it = _pass(LEAVES * steps, it, shared)
        else:
            acc = gl.zeros((ROWS, COLS), gl.float32, RESULT)
            two = acc
            if LEAVES == 1:
                acc, it = _chain(acc, it, steps, WHICH, shared, BEHIND)
            for pair in gl.static_range(LEAVES // 2):
                acc, it = _pair(acc, it, steps, WHICH, shared, BEHIND)
                acc, two = _join(acc, two, four, 2 * pair + 2, LEAVES)
            _finish(acc, tile, WHICH, c_smem, c_desc, BIAS, M, N, HAS_BIAS)
    if LEAVES > 1 and block >= helpers:
        tile = whole + block - helpers
        if WHICH == 1 and _half(tile, M, N):
            _pass(kept * steps, it, shared)
        else:
            acc = _own(WHICH, it, four, SUMS, THERE, shared, sizes, LEAVES, BEHIND)
            _finish(acc, tile, WHICH, c_smem, c_desc, BIAS, M, N, HAS_BIAS)
    tma.store_wait(0)


@gluon.jit(do_not_specialize=["THERE", "M", "steps", "whole", "cut", "kept", "pieces", "helpers"])
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
    whole,
    cut,
    kept,
    pieces,
    helpers,
    LEAVES: gl.constexpr,
    HAS_BIAS: gl.constexpr,
    BEHIND: gl.constexpr,
):
    """`steps` are those of a leaf. Of the tiles the first `whole` are not cut; of each of the `cut` others an owner keeps the
    first `kept` leaves, and the first `helpers` blocks compute the rest, in so many `pieces`. SUMS: of each piece, and behind
    them flags, which are THERE when their sums are."""
    a_smem = gl.allocate_shared_memory(gl.bfloat16, [2 * STAGES, ROWS, 1, STEP], a_desc.layout)
    b_smem = gl.allocate_shared_memory(gl.bfloat16, [STAGES, COLS, 1, STEP], b_desc.layout)
    # The eight rows that a warp writes at once lie in different banks.
    spread: gl.constexpr = gl.SwizzledSharedLayout(8, 1, 8, [1, 0])
    four = gl.allocate_shared_memory(gl.float32, [2, ROWS, COLS], spread)
    c0 = four.index(0)._reinterpret(c_desc.dtype, [ROWS, COLS], c_desc.layout)
    c1 = four.index(1)._reinterpret(c_desc.dtype, [ROWS, COLS], c_desc.layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    go = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(go, count=1)
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=2)
    shared, sizes = (a_smem, b_smem, full, empty, go), (M, N, steps, whole, cut, kept, pieces, helpers)
    gl.warp_specialize(
        [
            (_multiply, (0, four.index(0), c0, c_desc, BIAS, SUMS, THERE, shared, sizes, LEAVES, HAS_BIAS, BEHIND)),
            (_multiply, (1, four.index(1), c1, c_desc, BIAS, SUMS, THERE, shared, sizes, LEAVES, HAS_BIAS, BEHIND)),
            (_copy, ((a_desc, b_desc), shared, sizes, LEAVES)),
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


def _tiles(p: Product) -> int:
    return triton.cdiv(p.m, 2 * ROWS.value) * triton.cdiv(p.n, COLS.value)


def ways(p: Product) -> list[Cut]:
    """How it can cut the tiles of the last round."""
    return cost.cuts(p.m, p.n, p.leaves, p.multiprocessors - p.spare)


def cut_of(p: Product) -> Cut:
    """The fastest of them."""
    return cost.cut(p.m, p.n, p.k, p.leaves, p.multiprocessors - p.spare)


def prepare(p: Product) -> Callable:
    return prepare_cut(p, cut_of(p))


def prepare_cut(p: Product, cut: Cut, behind: int = BEHIND) -> Callable:
    """As `prepare`. No bit depends on how tiles are cut."""
    has_bias, pieces = p.bias is not None, len(cut.pieces)
    there = secrets.randbits(62) | 1 << 62  # whatever memory held before is another number
    steps = triton.cdiv(p.k // p.leaves, STEP.value)
    rest = (
        there,
        p.m,
        p.n,
        steps,
        _tiles(p) - cut.tiles,
        cut.tiles,
        cut.kept,
        pieces,
        cut.helpers,
        p.leaves,
        has_bias,
        behind,
    )
    grid = cut.helpers + cut.tiles, 1, 1
    launch = prepared(p.device, _matmul, grid, rest, num_warps=4)  # pyright: ignore[reportArgumentType]
    blocks = (
        _block(p.a[2], ROWS.value, 1, STEP.value),
        _block(p.b[2], COLS.value, 1, STEP.value),
        _block(p.out[2], ROWS.value, COLS.value),
    )
    sums = 2 * cut.tiles * pieces * (ROWS.value * COLS.value + 2)  # a flag is two of them
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
