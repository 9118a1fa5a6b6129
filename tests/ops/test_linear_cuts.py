"""K-trees of many rows, whose last round's tiles may be cut (alignkit/ops/linear/hopper.py): what its warps do, with names in the
place of numbers."""

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


class Sum(tuple):
    """One added to another, in that order."""

    def __add__(self, other):
        return Sum((self, other))

    def to(self, _):
        return self


class Device:
    """One block after another, of each first the warp that copies, then those that multiply."""

    def __init__(self, sizes, rounds, leaves, kept, grid):
        self.sizes, self.rounds, self.leaves, self.kept, self.grid = sizes, rounds, leaves, kept, grid
        self.memory, self.out = {}, {}
        there = {
            "minimum": min,
            "maximum": max,
            "cdiv": triton.cdiv,
            "static_range": range,
            "num_programs": lambda _: grid,
        }
        there |= {"program_id": lambda _: self.block, "zeros": lambda *_: None, "store": self.memory.__setitem__}
        there |= {"load": lambda at, **_: self.memory[at], "thread_barrier": lambda: None}
        there |= {"float32": None, "bfloat16": None}
        there |= {"atomic_xchg": lambda at, v, **_: self.memory.__setitem__(at, v)}
        there |= {"atomic_add": lambda at, v, **_: self.memory[at] + v}  # nobody waits for a block that has not begun
        mbarrier = {"wait": self.wait, "expect": self.expect, "arrive": self.arrive}
        tma = {"async_copy_global_to_shared": self.copied, "store_wait": lambda _: None}
        tma["async_copy_shared_to_global"] = lambda c, corner, of: self.write(tuple(corner), of.held)
        of_gluon = {"gl": there, "mbarrier": mbarrier, "tma": tma}
        self.names = {
            name: v.fn if isinstance(v, triton.JITFunction) else getattr(v, "value", v)
            for name, v in vars(hopper).items()
        }
        self.names |= {name: types.SimpleNamespace(**those) for name, those in of_gluon.items()}
        self.names |= {"warpgroup_mma": self.multiplied, "warpgroup_mma_wait": self.waited}
        self.names |= {"fence_async_shared": lambda: None}
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
            self.steps, self.seen, self.running, self.handed_back = [], 0, [], Counter()
            shared = Operand("a"), Operand("b"), Barriers("full"), Barriers("empty")
            self.names["_copy"](("a", "b"), shared, self.sizes, self.rounds, self.leaves, self.kept)
            held, c = Held(), types.SimpleNamespace(dtype=None)
            self.names["_multiply"](
                held, held, c, None, "sums", 7, shared, self.sizes, self.rounds, self.leaves, self.kept, False
            )
            assert self.seen == len(self.steps) > 0 and not self.running
            assert self.handed_back == Counter(i % STAGES for i in range(len(self.steps)))

    def write(self, corner, value):
        assert corner not in self.out
        self.out[corner] = value

    def arrive(self, barrier):
        name, stage = barrier
        assert name == "empty" and stage == sum(self.handed_back.values()) % STAGES
        self.handed_back[stage] += 1
        assert sum(self.handed_back.values()) <= self.seen - len(self.running)  # its product is done

    def wait(self, barrier, phase):
        if barrier[0] == "full":
            assert (self.seen % STAGES, self.seen // STAGES & 1) == (barrier[1], phase)
            self.seen += 1
        else:
            i = len(self.steps)
            assert (i % STAGES, i // STAGES & 1 ^ 1) == (barrier[1], phase)

    def expect(self, barrier, size):
        self.steps.append({"bytes": size})

    def copied(self, matrix, at, barrier, to):
        step = self.steps[-1]
        name, place = to.at
        step["bytes"] -= (ROWS if name == "a" else COLS) * STEP * 2
        step[name, place] = at
        assert matrix == name and barrier == ("full", (len(self.steps) - 1) % STAGES)

    def multiplied(self, a, b, acc, use_acc, is_async):
        step, stage = self.steps[self.seen - 1], (self.seen - 1) % STAGES
        assert (a.at, b.at) == (("a", stage), ("b", stage)) and step["bytes"] == 0
        (m, *of_a), (n, *of_b) = step[a.at], step[b.at]
        assert of_a == of_b
        self.running.append(self.seen)
        return Sum((*(acc if use_acc else ()), (m, n, *of_a)))

    def waited(self, outstanding, deps):
        self.running = self.running[len(self.running) - outstanding :] if outstanding else []
        return deps if len(deps) > 1 else deps[0]


class Operand:
    def __init__(self, *at):
        self.at = at

    def index(self, i):
        return Operand(*self.at, i)

    def _reinterpret(self, *_):
        return self

    def permute(self, _):
        return self


class Barriers:
    shape = (STAGES, 1)

    def __init__(self, name):
        self.name = name

    def index(self, i):
        return self.name, i


class Held:
    held = None

    def store(self, value):
        self.held = value

    def load(self, _):
        return self.held


def tree(sums):
    return sums[0] if len(sums) == 1 else Sum((tree(sums[: len(sums) // 2]), tree(sums[len(sums) // 2 :])))


def corners(size, of):
    """Where tiles begin: one behind the other, the last where the matrix ends."""
    return sorted({max(min(i, size - of), 0) for i in range(0, size, of)})


def assert_whole(m, n, steps, length, leaves, blocks):
    """Whatever is cut, each output is the tree of all of its leaves, and each of these all of its steps, in order."""
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
        flags = {at: there for at, there in device.memory.items() if at[0] == "flag"}
        slots = cut.tiles * cut.pieces
        assert set(flags) == {("flag", slot, slots) for slot in range(slots)}
        assert set(flags.values()) <= {0}  # for the next launch


@settings(max_examples=60, deadline=None)
@given(
    m=st.integers(1, 1200),
    n=st.integers(1, 700),
    steps=st.integers(1, 4),
    length=st.integers(0, 256),
    leaves=st.sampled_from([1, 2, 4, 8]),
    blocks=st.integers(1, 40),
)
def test_each_output_is_the_tree_of_its_leaves(m, n, steps, length, leaves, blocks):
    assert_whole(m, n, steps, length, leaves, blocks)


@pytest.mark.parametrize("tiles, blocks", [(1, 132), (24, 132), (100, 132), (288, 132), (131, 132), (140, 108)])
def test_on_the_blocks_of_a_device(tiles, blocks):
    assert_whole(ROWS * tiles, COLS, 1, 64, 8, blocks)


@given(slices=st.integers(1, 300), leaves=st.sampled_from([1, 2, 4, 8]), pad=st.sampled_from([0, 8, 64]))
def test_steps_hold_each_leaf(slices, leaves, pad):
    """And begin on lines of 128 bytes where that takes few more of them."""
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
def test_the_least_is_chosen(m, n, leaves, k, blocks):
    k *= 16 * leaves
    us = {cut: cost.MANY.of(m, n, k, leaves, blocks, cut) for cut in cost.cuts(m, n, leaves, blocks)}
    chosen = cost.cut(m, n, k, leaves, blocks)
    assert us[chosen] == min(us.values()) > 0
    if cost.tiles_of(m, n) % blocks == 0 or leaves == 1:
        assert list(us) == [chosen] and not chosen.tiles


def test_pieces():
    """Subtrees of one size, none larger than what an owner keeps."""
    pieces = {
        n: {cut.kept: (cost.piece(cut.kept),) * cut.pieces for cut in cost.cuts(1, 1, n, 132) if cut.tiles}
        for n in (1, 2, 4, 8)
    }
    assert pieces[8] == {2: (2, 2, 2), 4: (4,), 6: (2,)}
    assert pieces[4] == {2: (2,), 3: (1,)} and pieces[2] == {1: (1,)} and not pieces[1]
