"""Gluon backend: persistent, warp-specialized bf16 GEMMs with many rows, chains and k-trees.

Each CTA walks tiles of 128 x 128 outputs. A producer warp loads operands by TMA, without a pause at ends of leaves and
tiles. Two consumer warpgroups issue wgmma, and add the sums of leaves while the next leaf's first step runs. Each
kernel is specialized to one leaf count and split, because a larger kernel starts later (docs/notes/linear.md).

TMA sees k as two dimensions: leaves, and k within a leaf. A leaf whose length is not a multiple of 64 ends in
out-of-bounds zeros. It also begins with zeros if its steps would otherwise straddle 128-byte lines. TMA is slower for
out-of-bounds rows, so the last tiles are shifted to end at the matrix border. They overlap other tiles and write the
same bytes there.

Tiles of the last, partial wave may be split (stream-K). The owner of a tile computes its first leaves. Helpers, the
CTAs without such a tile, compute the other leaves as pieces: subtrees whose sums the owner reads from memory. Helpers
have the lowest CTA indices and start with their pieces, so an owner never waits for a CTA that has not started. The
order of k, and so every bit, is that of triton_backend.py. Tiles, pipeline and splits change no bits. RESULT and
OPERAND fix ROWS and STEP, and `_own` supports the splits of `cost.KEPT` alone.
"""

from __future__ import annotations

import functools
import secrets
from collections.abc import Callable

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language._core import builtin
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from ...runtime.launch import prepared
from ...runtime.operands import dtype_name, tma_rejects
from . import cost
from .cost import Cut
from .cublaslt import round_up_rows
from .problem import Product

SMALL_M = 256
"""schedule: rows up to which 128 x 128 tiles may leave most SMs idle; chains use smaller tiles then."""
ROWS, COLS = gl.constexpr(cost.MANY_ROWS), gl.constexpr(cost.MANY_OUTPUTS)
"""schedule: tile shape, which cost.py models. RESULT fixes ROWS to 128: two warpgroups of 64 rows."""
STEP = gl.constexpr(cost.STEP)
MMA_K = 16
"""hardware: k extent of one MMA instruction; leaf lengths are multiples of it."""
GROUP_SIZE_M = gl.constexpr(8)
"""schedule: tile rows per rasterization band, so that weights stay in L2."""
OPERAND = gl.constexpr(gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2))
"""schedule: shared-memory layout of an operand box, as a matrix."""
RESULT = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [8, 1], [16, COLS.value, 16]))
"""schedule: register layout of the accumulators, two warpgroups of m64n128k16."""


# Names that Triton 3.6 to 3.9 spell differently.
_barrier = gl.thread_barrier if hasattr(gl, "thread_barrier") else gl.barrier  # renamed in 3.7
_tma_load = tma.async_load if hasattr(tma, "async_load") else tma.async_copy_global_to_shared  # renamed in 3.8
_tma_store = tma.async_store if hasattr(tma, "async_store") else tma.async_copy_shared_to_global  # renamed in 3.8


@builtin
def _reinterpret(memory, dtype, shape, layout, _semantic=None):
    """Return the descriptor of the same shared memory with another dtype, shape and layout."""
    method = memory._reinterpret if hasattr(memory, "_reinterpret") else memory.reinterpret  # renamed in 3.9
    return method(dtype, shape, layout, _semantic=_semantic)


@gluon.jit
def _corner(tile, M, N):
    """Return the first row and column of a tile; the last tiles are shifted to end at the matrix border."""
    rows, cols = gl.cdiv(M, ROWS), gl.cdiv(N, COLS)
    first = tile // (GROUP_SIZE_M * cols) * GROUP_SIZE_M
    group_size_m = gl.minimum(rows - first, GROUP_SIZE_M)
    row, col = first + tile % (GROUP_SIZE_M * cols) % group_size_m, tile % (GROUP_SIZE_M * cols) // group_size_m
    return gl.maximum(gl.minimum(row * ROWS, M - ROWS), 0), gl.maximum(gl.minimum(col * COLS, N - COLS), 0)


@gluon.jit
def _piece_end(block, cut, pieces, helpers):
    """Return the end of a CTA's range of pieces (start `block`, stride `helpers`); 0, so empty, for an owner."""
    return cut * pieces if block < helpers else 0


@gluon.jit
def _load_leaves(tile, first, last, it, descs, shared, sizes):
    """Load the operands of leaves [first, last) of a tile; `it` counts pipeline steps."""
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
            _tma_load(b_desc, [n, leaf, k], full.index(stage), b_smem.index(stage))
            _tma_load(a_desc, [m, leaf, k], full.index(stage), a_smem.index(stage))
            k += STEP
            it += 1
    return it


@gluon.jit
def _producer(descs, shared, sizes, rounds, LEAVES: gl.constexpr, KEPT: gl.constexpr):
    """Run the producer warp. TMA fills zeros outside of a leaf."""
    whole, cut, helpers = rounds
    SIZE: gl.constexpr = KEPT & -KEPT
    it = 0
    block = gl.program_id(0)
    if KEPT < LEAVES:
        for piece in range(block, _piece_end(block, cut, (LEAVES - KEPT) // SIZE, helpers), helpers):
            first = KEPT + piece // cut * SIZE
            it = _load_leaves(whole + piece % cut, first, first + SIZE, it, descs, shared, sizes)
    for tile in range(block, whole, gl.num_programs(0)):
        it = _load_leaves(tile, 0, LEAVES, it, descs, shared, sizes)
    if KEPT < LEAVES and block >= helpers:
        _load_leaves(whole + block - helpers, 0, KEPT, it, descs, shared, sizes)


@gluon.jit
def _step(acc, it, ADDS: gl.constexpr, shared):
    """Issue the wgmma of a step, accumulating into `acc` if ADDS."""
    a_smem, b_smem, full, _ = shared
    stages: gl.constexpr = full.shape[0]
    stage = it % stages
    mbarrier.wait(full.index(stage), (it // stages) & 1)
    return warpgroup_mma(
        _reinterpret(a_smem.index(stage), gl.bfloat16, [ROWS, STEP], OPERAND),
        _reinterpret(b_smem.index(stage), gl.bfloat16, [COLS, STEP], OPERAND).permute((1, 0)),
        acc,
        use_acc=ADDS,
        is_async=True,
    )


@gluon.jit
def _release_previous(it, shared):
    """Release the pipeline stage of the previous step, whose wgmma is complete."""
    _, _, _, empty = shared
    stages: gl.constexpr = empty.shape[0]
    mbarrier.arrive(empty.index((it + stages - 1) % stages))


@gluon.jit
def _begin(it, shared):
    """Issue the first step of a leaf; no wgmma is in flight before it."""
    acc = _step(gl.zeros((ROWS, COLS), gl.float32, RESULT), it, False, shared)
    return warpgroup_mma_wait(1, deps=(acc,)), it + 1


@gluon.jit
def _begin_next(before, it, shared):
    """Issue the first step of a leaf while the previous leaf's last step runs; return that leaf's final sums too."""
    acc = _step(gl.zeros((ROWS, COLS), gl.float32, RESULT), it, False, shared)
    acc, before = warpgroup_mma_wait(1, deps=(acc, before))
    _release_previous(it, shared)
    return acc, before, it + 1


@gluon.jit
def _accumulate(acc, it, steps, shared):
    """Issue the other steps of a leaf; the last one is still in flight on return."""
    for _ in range(1, steps):
        acc = _step(acc, it, True, shared)
        acc = warpgroup_mma_wait(1, deps=(acc,))
        _release_previous(it, shared)
        it += 1
    return acc, it


@gluon.jit
def _end(acc, it, shared):
    """Wait for the leaf's last step and return its final sums."""
    acc = warpgroup_mma_wait(0, deps=(acc,))
    _release_previous(it, shared)
    return acc


@gluon.jit
def _fence(sums):
    """Force the addition here; the compiler would otherwise delay it and hold both operands in registers."""
    return warpgroup_mma_wait(0, deps=(sums,))


@gluon.jit
def _one(it, steps, shared):
    """Return the sums of the next leaf."""
    acc, it = _begin(it, shared)
    acc, it = _accumulate(acc, it, steps, shared)
    return _end(acc, it, shared), it


@gluon.jit
def _two(it, steps, shared):
    """Return the tree sum of the next two leaves."""
    one, it = _begin(it, shared)
    one, it = _accumulate(one, it, steps, shared)
    acc, one, it = _begin_next(one, it, shared)
    acc, it = _accumulate(acc, it, steps, shared)
    return _fence(one + _end(acc, it, shared)), it


@gluon.jit
def _four(it, steps, shared):
    """Return the tree sum of the next four leaves."""
    one, it = _begin(it, shared)
    one, it = _accumulate(one, it, steps, shared)
    acc, one, it = _begin_next(one, it, shared)
    acc, it = _accumulate(acc, it, steps, shared)
    third, acc, it = _begin_next(acc, it, shared)
    third, two = warpgroup_mma_wait(1, deps=(third, one + acc))  # like `_fence`, while the third leaf's first step runs
    third, it = _accumulate(third, it, steps, shared)
    acc, third, it = _begin_next(third, it, shared)
    acc, it = _accumulate(acc, it, steps, shared)
    return _fence(two + (third + _end(acc, it, shared))), it


@gluon.jit
def _subtree(COUNT: gl.constexpr, it, steps, shared):
    """Return the tree sum of the next 1, 2 or 4 leaves."""
    if COUNT == 1:
        acc, it = _one(it, steps, shared)
    elif COUNT == 2:
        acc, it = _two(it, steps, shared)
    else:
        acc, it = _four(it, steps, shared)
    return acc, it


@gluon.jit
def _stash(sums, held):
    """Store sums that are needed later to shared memory."""
    tma.store_wait(0)  # the previous tile's outputs use the same buffer
    held.store(sums)


@gluon.jit
def _whole(it, steps, held, shared, LEAVES: gl.constexpr):
    """Return the tree sum of all leaves of a tile."""
    if LEAVES < 8:
        acc, it = _subtree(LEAVES, it, steps, shared)
    else:
        acc = gl.zeros((ROWS, COLS), gl.float32, RESULT)
        for half in range(2):  # a loop rather than unrolled, to halve the code size
            acc, it = _four(it, steps, shared)
            if half == 0:
                _stash(acc, held)
            else:
                acc = held.load(RESULT) + acc
    return acc, it


@gluon.jit
def _finish(acc, m, n, c_smem, c_desc, BIAS, N, HAS_BIAS: gl.constexpr):
    """Add the bias, round, and store a tile by TMA."""
    if HAS_BIAS:
        j = n + gl.arange(0, COLS, gl.SliceLayout(0, RESULT))
        acc += gl.load(BIAS + j, mask=j < N, other=0.0).to(gl.float32)[None, :]
    tma.store_wait(0)
    c_smem.store(acc.to(c_desc.dtype))
    fence_async_shared()
    _tma_store(c_desc, [m, n], c_smem)


@gluon.jit
def _sums_of(SUMS, slot):
    """Return the addresses of a piece's sums, permuted so that each warp's accesses are coalesced."""
    i = gl.arange(0, ROWS, gl.SliceLayout(1, RESULT))
    j = gl.arange(0, COLS, gl.SliceLayout(0, RESULT))
    i, j = i % 8 * 8 + i // 8 % 2 * 512 + i // 16 * 64, j % 8 + j // 8 * 1024
    return SUMS + slot.to(gl.int64) * (ROWS * COLS) + gl.max_contiguous(i[:, None] + j[None, :], [1, 2])


@gluon.jit
def _flag_of(SUMS, slot, slots):
    """Return the address of a piece's ready flag; the flags follow all sums."""
    return (SUMS + slots.to(gl.int64) * (ROWS * COLS)).to(gl.pointer_type(gl.int64), bitcast=True) + slot


@gluon.jit
def _publish(acc, SUMS, READY, slot, slots):
    """Store a piece's sums and set its flag, for the owner."""
    gl.store(_sums_of(SUMS, slot), acc)
    _barrier()
    gl.atomic_xchg(_flag_of(SUMS, slot, slots), READY, sem="release", scope="gpu")


@gluon.jit
def _wait(SUMS, READY, slot, slots):
    """Wait until a piece's sums are ready, and reset its flag."""
    flag = _flag_of(SUMS, slot, slots)
    while gl.atomic_add(flag, 0, sem="acquire", scope="gpu") != READY:
        pass
    gl.store(flag, 0)


@gluon.jit
def _load_piece(SUMS, slot):
    """Load a piece's sums, after `_wait`."""
    return gl.load(_sums_of(SUMS, slot), cache_modifier=".cg")


@gluon.jit
def _own(it, steps, held, SUMS, READY, slot, slots, shared, LEAVES: gl.constexpr, KEPT: gl.constexpr):
    """Return the sums of a split tile: this CTA computes the first KEPT leaves, pieces from `slot` on the rest."""
    if 2 * KEPT < LEAVES:  # KEPT = 2, LEAVES = 8
        acc, it = _two(it, steps, shared)
        for piece in gl.static_range(3):
            _wait(SUMS, READY, slot + piece, slots)
        acc = _fence(acc + _load_piece(SUMS, slot))
        acc += _load_piece(SUMS, slot + 1) + _load_piece(SUMS, slot + 2)
    elif 2 * KEPT == LEAVES:
        acc, it = _subtree(KEPT, it, steps, shared)
        _wait(SUMS, READY, slot, slots)
        acc += _load_piece(SUMS, slot)
    elif LEAVES == 4:  # KEPT = 3
        two, it = _two(it, steps, shared)
        acc, it = _one(it, steps, shared)
        _wait(SUMS, READY, slot, slots)
        acc = two + (acc + _load_piece(SUMS, slot))
    else:  # KEPT = 6, LEAVES = 8
        acc, it = _four(it, steps, shared)
        _stash(acc, held)
        acc, it = _two(it, steps, shared)
        _wait(SUMS, READY, slot, slots)
        acc = _fence(acc + _load_piece(SUMS, slot))
        acc = held.load(RESULT) + acc
    return acc


@gluon.jit
def _consumer(
    held,
    c_smem,
    c_desc,
    BIAS,
    SUMS,
    READY,
    shared,
    sizes,
    rounds,
    LEAVES: gl.constexpr,
    KEPT: gl.constexpr,
    HAS_BIAS: gl.constexpr,
):
    """Run the consumer warpgroups."""
    M, N, steps, _ = sizes
    whole, cut, helpers = rounds
    SIZE: gl.constexpr = KEPT & -KEPT
    PIECES: gl.constexpr = (LEAVES - KEPT) // SIZE
    it = 0
    block = gl.program_id(0)
    if KEPT < LEAVES:
        for piece in range(block, _piece_end(block, cut, PIECES, helpers), helpers):
            acc, it = _subtree(SIZE, it, steps, shared)
            _publish(acc, SUMS, READY, piece % cut * PIECES + piece // cut, cut * PIECES)
    for tile in range(block, whole, gl.num_programs(0)):
        m, n = _corner(tile, M, N)
        acc, it = _whole(it, steps, held, shared, LEAVES)
        _finish(acc, m, n, c_smem, c_desc, BIAS, N, HAS_BIAS)
    if KEPT < LEAVES and block >= helpers:
        own = block - helpers
        m, n = _corner(whole + own, M, N)
        acc = _own(it, steps, held, SUMS, READY, own * PIECES, cut * PIECES, shared, LEAVES, KEPT)
        _finish(acc, m, n, c_smem, c_desc, BIAS, N, HAS_BIAS)
    tma.store_wait(0)


@gluon.jit(do_not_specialize=["READY", "M", "steps", "length", "whole", "cut", "helpers"])
def _matmul(
    a_desc,
    b_desc,
    c_desc,
    BIAS,
    SUMS,
    READY,
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
    """Compute C = A . B^T (+ BIAS).

    A leaf takes `steps` pipeline steps; `length` is its k extent, or 0 if no leaf begins with zeros. The first `whole`
    tiles are not split. For each of the `cut` others, an owner computes the first KEPT leaves, and the first `helpers`
    CTAs compute the rest in pieces. SUMS holds the sums of each piece, then their flags, which equal READY once the
    sums are stored.
    """
    # Shared memory: pipeline stages of 32 KiB, and one buffer for a tile's outputs or stashed sums.
    LARGE: gl.constexpr = LEAVES == 8 or c_desc.dtype == gl.float32
    STAGES: gl.constexpr = 5 if LARGE else 6
    a_smem = gl.allocate_shared_memory(gl.bfloat16, [STAGES, ROWS, 1, STEP], a_desc.layout)
    b_smem = gl.allocate_shared_memory(gl.bfloat16, [STAGES, COLS, 1, STEP], b_desc.layout)
    # Swizzled: the eight rows that a warp writes at once are in different banks.
    swizzled: gl.constexpr = gl.SwizzledSharedLayout(8, 1, 8, [1, 0])
    held = gl.allocate_shared_memory(gl.float32, [ROWS if LARGE else ROWS // 2, COLS], swizzled)
    TILES: gl.constexpr = 2 if LARGE and c_desc.dtype != gl.float32 else 1  # outputs that fit into the buffer
    c_smem = _reinterpret(held, c_desc.dtype, [TILES, ROWS, COLS], c_desc.layout).index(0)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=1)
    shared, sizes, rounds = (a_smem, b_smem, full, empty), (M, N, steps, length), (whole, cut, helpers)
    gl.warp_specialize(
        [
            (_consumer, (held, c_smem, c_desc, BIAS, SUMS, READY, shared, sizes, rounds, LEAVES, KEPT, HAS_BIAS)),
            (_producer, ((a_desc, b_desc), shared, sizes, rounds, LEAVES, KEPT)),
        ],
        [1],
        [24],
    )


class _Matrix(TensorDescriptor):
    """A TensorDescriptor without the checks in its constructor; `rejects` has made them."""

    def __post_init__(self):
        pass


def _block(dtype: torch.dtype, *shape: int) -> tuple[list[int], gl.NVMMASharedLayout]:
    return [*shape], gl.NVMMASharedLayout.get_default_for(shape, gl.float32 if dtype == torch.float32 else gl.bfloat16)


def rejects(p: Product) -> str | None:
    """Return why this kernel is not used for a GEMM, or None."""
    if (why := p.needs_hopper()) is not None:
        return why
    least = SMALL_M if p.leaves == 1 else ROWS.value
    if p.m <= least:
        return f"rows: must be at least {least + 1}, got {p.m}"
    if (why := unsupported(p)) is not None or p.m > SMALL_M:
        return why
    problem = round_up_rows(p.m), p.n, p.k, p.leaves
    faster = cost.best_of_tiles(*problem)[0] < cost.many(*problem)
    return f"speed: linear/cost.py predicts that triton_backend.py is faster for rows = {p.m}" if faster else None


def unsupported(p: Product) -> str | None:
    """Return why this kernel cannot compute a GEMM, or None."""
    if p.accumulate:
        return "accumulate: must be no, got yes"
    for name, t in (("x", p.a), ("weight", p.b)):
        if t[2] != torch.bfloat16:
            return f"{name}: dtype must be bf16, got {dtype_name(t[2])}"
    if p.leaves not in (1, 2, 4, 8):
        return f"leaves: must be 1, 2, 4 or 8, got {p.leaves}"
    if not p.k or p.k % (p.leaves * MMA_K):
        return f"k: must be a positive multiple of {MMA_K} * leaves = {MMA_K * p.leaves}, got {p.k}"
    return tma_rejects("x", p.a) or tma_rejects("weight", p.b) or tma_rejects("out", p.out)


def ways(p: Product) -> list[Cut]:
    """Return the possible splits of the last wave's tiles."""
    return cost.cuts(p.m, p.n, p.leaves, p.sm_count - p.spare)


def cut_of(p: Product) -> Cut:
    """Return the fastest split by cost.py."""
    return cost.cut(p.m, p.n, p.k, p.leaves, p.sm_count - p.spare)


def prepare(p: Product) -> Callable:
    return prepare_cut(p, cut_of(p))


def _steps(p: Product) -> tuple[int, int]:
    """Return the pipeline steps per leaf, and the leaf's k extent if leaves begin with zeros for 128-byte alignment."""
    length, step = p.k // p.leaves, STEP.value
    plain, aligned = (
        max(cost.ceil_div(leaf * by % step + length, step) for leaf in range(p.leaves)) for by in (0, length)
    )
    lined = all(row % step == 0 for _, (row, _), *_ in (p.a, p.b))
    return (aligned, length) if lined and 8 * aligned <= 9 * plain else (plain, 0)


def prepare_cut(p: Product, cut: Cut) -> Callable:
    """Return a launcher with this split; no bit depends on it."""
    has_bias, slots = p.bias is not None, cut.tiles * cut.pieces
    ready = secrets.randbits(62) | 1 << 62  # random, so that uninitialized flags do not match
    whole = cost.tiles_of(p.m, p.n) - cut.tiles
    rest = ready, p.m, p.n, *_steps(p), whole, cut.tiles, cut.helpers, p.leaves, cut.kept, has_bias
    grid = cut.helpers + cut.tiles, 1, 1
    launch = prepared(p.device, _matmul, grid, rest, num_warps=8)  # pyright: ignore[reportArgumentType]
    blocks = (
        _block(p.a[2], ROWS.value, 1, STEP.value),
        _block(p.b[2], COLS.value, 1, STEP.value),
        _block(p.out[2], ROWS.value, COLS.value),
    )
    sums = slots * (ROWS.value * COLS.value + 2)  # in fp32 values; a 64-bit flag takes two
    device = torch.device("cuda", p.device)  # pyright: ignore[reportArgumentType]
    allocate = functools.partial(torch.empty, sums, dtype=torch.float32, device=device)
    empty = None if sums else allocate()
    return functools.partial(_run, launch, blocks, p.leaves, allocate, empty)


def _leaves(t: torch.Tensor, leaves: int, block: tuple) -> _Matrix:
    """Return the TMA descriptor of a matrix [rows, k] as [rows, leaves, k / leaves]."""
    (rows, k), (row, column) = t.shape, t.stride()
    return _Matrix(t, (rows, leaves, k // leaves), (row, k // leaves, column), *block)


def _run(
    launch: Callable,
    blocks: tuple,
    leaves: int,
    allocate: Callable[[], torch.Tensor],
    empty: torch.Tensor | None,
    a: torch.Tensor,
    b: torch.Tensor,
    bias: torch.Tensor | None,
    out: torch.Tensor,
) -> None:
    bias = None if bias is None else bias.contiguous()
    a_block, b_block, out_block = blocks
    launch(
        _leaves(a, leaves, a_block),
        _leaves(b, leaves, b_block),
        _Matrix(out, out.shape, out.stride(), *out_block),
        bias,
        allocate() if empty is None else empty,
    )
