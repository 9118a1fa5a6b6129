"""Symbolic execution of the Gluon kernel alignkit/ops/linear/hopper.py on a CPU: k-trees of many rows.

A cut tile is one whose leaves several CTAs compute (stream-K); `cost.cuts` lists the ways to cut. The test runs the
kernel's warp roles on names instead of numbers, and checks that every cut keeps the order of summation. `Device` takes
the place of the Gluon functions that the roles call; a role that calls another function needs that function in
`Device`.
"""

import importlib
import types
from collections import Counter

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings

pytest.importorskip("triton")
import triton

from alignkit.ops.linear import cost
from alignkit.ops.linear.problem import Product
from alignkit.runtime import families

hopper = importlib.import_module("alignkit.ops.linear.hopper")
ROWS, COLS, STEP = (getattr(hopper, name).value for name in ("ROWS", "COLS", "STEP"))
STAGES = 5
"""Pipeline depth of the emulated device; the roles take it from the shape of the barriers."""


class Sum(tuple):
    """A symbolic sum, which records the order of its terms."""

    def __add__(self, other):
        return Sum((self, other))

    def to(self, _):
        return self


class Device:
    """A device that runs CTAs one after another: first the producer warp, then the consumer warps."""

    def __init__(self, sizes, rounds, leaves, kept, grid):
        self.sizes, self.rounds, self.leaves, self.kept, self.grid = sizes, rounds, leaves, kept, grid
        self.memory, self.out = {}, {}
        gluon = {
            "minimum": min,
            "maximum": max,
            "cdiv": triton.cdiv,
            "static_range": range,
            "num_programs": lambda _: grid,
        }
        gluon |= {"program_id": lambda _: self.block, "zeros": lambda *_: None, "store": self.memory.__setitem__}
        gluon |= {"load": lambda address, **_: self.memory[address]}
        gluon |= {"float32": None, "bfloat16": None}
        gluon |= {"atomic_xchg": lambda address, v, **_: self.memory.__setitem__(address, v)}
        gluon |= {"atomic_add": lambda address, v, **_: self.memory[address] + v}  # no CTA waits for a later one
        mbarrier = {"wait": self.wait, "expect": self.expect, "arrive": self.arrive}
        tma = {"store_wait": lambda _: None}
        namespaces = {"gl": gluon, "mbarrier": mbarrier, "tma": tma}
        self.names = {
            name: v.fn if isinstance(v, triton.JITFunction) else getattr(v, "value", v)
            for name, v in vars(hopper).items()
        }
        self.names |= {name: types.SimpleNamespace(**members) for name, members in namespaces.items()}
        self.names |= {"warpgroup_mma": self.mma, "warpgroup_mma_wait": self.mma_wait}
        self.names |= {"fence_async_shared": lambda: None, "_barrier": lambda: None, "_tma_load": self.async_copy}
        self.names |= {"_tma_store": lambda _, corner, source: self.write(tuple(corner), source.value)}
        self.names |= {"_reinterpret": lambda memory, *_: memory}
        self.names |= {
            "_sums_of": lambda _, slot: ("sums", slot),
            "_flag_of": lambda _, slot, slots: ("flag", slot, slots),
        }
        for name, v in self.names.items():
            if isinstance(v, types.FunctionType) and isinstance(vars(hopper).get(name), triton.JITFunction):
                self.names[name] = types.FunctionType(v.__code__, self.names)

    def run(self):
        for block in range(self.grid):
            self.block = block
            self.steps, self.seen, self.running, self.released = [], 0, [], Counter()
            shared = Operand("a"), Operand("b"), Barriers("full"), Barriers("empty")
            self.names["_producer"](("a", "b"), shared, self.sizes, self.rounds, self.leaves, self.kept)
            shared_out, c = FakeShared(), types.SimpleNamespace(dtype=None)
            self.names["_consumer"](
                shared_out,
                shared_out,
                c,
                None,
                "sums",
                7,
                shared,
                self.sizes,
                self.rounds,
                self.leaves,
                self.kept,
                False,
            )
            assert self.seen == len(self.steps) > 0 and not self.running
            assert self.released == Counter(i % STAGES for i in range(len(self.steps)))

    def write(self, corner, value):
        assert corner not in self.out
        self.out[corner] = value

    def arrive(self, barrier):
        name, stage = barrier
        assert name == "empty" and stage == sum(self.released.values()) % STAGES
        self.released[stage] += 1
        assert sum(self.released.values()) <= self.seen - len(self.running)  # the MMA of this stage is done

    def wait(self, barrier, phase):
        if barrier[0] == "full":
            assert (self.seen % STAGES, self.seen // STAGES & 1) == (barrier[1], phase)
            self.seen += 1
        else:
            i = len(self.steps)
            assert (i % STAGES, i // STAGES & 1 ^ 1) == (barrier[1], phase)

    def expect(self, barrier, size):
        self.steps.append({"bytes": size})

    def async_copy(self, matrix, corner, barrier, target):
        step = self.steps[-1]
        name, stage = target.path
        step["bytes"] -= (ROWS if name == "a" else COLS) * STEP * 2
        step[name, stage] = corner
        assert matrix == name and barrier == ("full", (len(self.steps) - 1) % STAGES)

    def mma(self, a, b, acc, use_acc, is_async):
        step, stage = self.steps[self.seen - 1], (self.seen - 1) % STAGES
        assert (a.path, b.path) == (("a", stage), ("b", stage)) and step["bytes"] == 0
        (m, *of_a), (n, *of_b) = step[a.path], step[b.path]
        assert of_a == of_b
        self.running.append(self.seen)
        return Sum((*(acc if use_acc else ()), (m, n, *of_a)))

    def mma_wait(self, outstanding, deps):
        self.running = self.running[len(self.running) - outstanding :] if outstanding else []
        return deps if len(deps) > 1 else deps[0]


class Operand:
    def __init__(self, *path):
        self.path = path

    def index(self, i):
        return Operand(*self.path, i)

    def permute(self, _):
        return self


class Barriers:
    shape = (STAGES, 1)

    def __init__(self, name):
        self.name = name

    def index(self, i):
        return self.name, i


class FakeShared:
    value = None

    def store(self, value):
        self.value = value

    def load(self, _):
        return self.value


def tree(sums):
    return sums[0] if len(sums) == 1 else Sum((tree(sums[: len(sums) // 2]), tree(sums[len(sums) // 2 :])))


def corners(size, tile):
    """Return the tiles' first rows or columns; the last tile ends with the matrix."""
    return sorted({max(min(i, size - tile), 0) for i in range(0, size, tile)})


def assert_whole(m, n, steps, length, leaves, blocks):
    """Check for every cut that an output is the tree of all its leaves, and a leaf the chain of all its steps."""
    tiles = triton.cdiv(m, ROWS) * triton.cdiv(n, COLS)
    assert tiles == cost.tiles_of(m, n)
    for cut in cost.cuts(m, n, leaves, blocks):
        grid = cut.helpers + cut.tiles
        assert 0 < grid <= blocks
        device = Device((m, n, steps, length), (tiles - cut.tiles, cut.tiles, cut.helpers), leaves, cut.kept, grid)
        device.run()
        assert sorted(device.out) == [(i, j) for i in corners(m, ROWS) for j in corners(n, COLS)]
        for (i, j), got in device.out.items():
            chains = [
                Sum((i, j, leaf, k * STEP - leaf * length % STEP) for k in range(steps)) for leaf in range(leaves)
            ]
            assert got == tree(chains), f"{cut}: {i}, {j}"
        flags = {address: value for address, value in device.memory.items() if address[0] == "flag"}
        slots = cut.tiles * cut.pieces
        assert set(flags) == {("flag", slot, slots) for slot in range(slots)}
        assert set(flags.values()) <= {0}  # reset for the next launch


@settings(max_examples=60, deadline=None)
@given(
    m=st.integers(1, 1200),
    n=st.integers(1, 700),
    steps=st.integers(1, 4),
    length=st.integers(0, 256),
    leaves=st.sampled_from([1, 2, 4, 8]),
    blocks=st.integers(1, 40),
)
def test_output_is_the_tree_of_its_leaves(m, n, steps, length, leaves, blocks):
    assert_whole(m, n, steps, length, leaves, blocks)


@pytest.mark.parametrize("tiles, blocks", [(1, 132), (24, 132), (100, 132), (288, 132), (131, 132), (140, 108)])
def test_output_is_the_tree_of_its_leaves_on_a_whole_device(tiles, blocks):
    assert_whole(ROWS * tiles, COLS, 1, 64, 8, blocks)


@given(slices=st.integers(1, 300), leaves=st.sampled_from([1, 2, 4, 8]), pad=st.sampled_from([0, 8, 64]))
def test_steps_cover_each_leaf(slices, leaves, pad):
    """Steps start at 128-byte lines if this adds at most 1/8 more steps."""
    length = 16 * slices
    a = torch.empty(300, leaves * length + pad, dtype=torch.bfloat16)[:, : leaves * length]
    out = torch.empty(300, 300, dtype=torch.bfloat16)
    p = Product.of(families.TRITON, a, a, leaves, None, out, False)
    steps, by = hopper._steps(p)
    plain = triton.cdiv(length, STEP)
    assert by in (0, length) and plain <= steps <= plain * 9 / 8
    for leaf in range(leaves):
        begin = leaf * length - leaf * by % STEP
        assert begin + steps * STEP >= (leaf + 1) * length
        if by and a.stride(0) % STEP == 0:
            assert begin % STEP == 0
    if length % STEP == 0 or leaves == 1:
        assert steps == plain


@given(
    m=st.integers(1, 9000),
    n=st.integers(1, 9000),
    leaves=st.sampled_from([1, 2, 4, 8]),
    k=st.integers(1, 256),
    blocks=st.integers(1, 132),
)
def test_cheapest_cut_is_chosen(m, n, leaves, k, blocks):
    k *= 16 * leaves
    us = {cut: cost.MANY.of(m, n, k, leaves, blocks, cut) for cut in cost.cuts(m, n, leaves, blocks)}
    chosen = cost.cut(m, n, k, leaves, blocks)
    assert us[chosen] == min(us.values()) > 0
    if cost.tiles_of(m, n) % blocks == 0 or leaves == 1:
        assert list(us) == [chosen] and not chosen.tiles


def test_pieces_of_a_cut_tile():
    """Pieces are subtrees of one size, at most as large as the owner's part."""
    pieces = {
        n: {cut.kept: (cost.piece(cut.kept),) * cut.pieces for cut in cost.cuts(1, 1, n, 132) if cut.tiles}
        for n in (1, 2, 4, 8)
    }
    assert pieces[8] == {2: (2, 2, 2), 4: (4,), 6: (2,)}
    assert pieces[4] == {2: (2,), 3: (1,)} and pieces[2] == {1: (1,)} and not pieces[1]
