"""K-trees of many rows whose last round's tiles are cut (alignkit/ops/linear/hopper.py): what its groups of warps do, with
names in the place of numbers."""

import importlib
import types
from collections import Counter

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

pytest.importorskip("triton")
import triton

from alignkit.ops.linear import cost

hopper = importlib.import_module("alignkit.ops.linear.hopper")
ROWS, COLS, STEP, STAGES = (getattr(hopper, name).value for name in ("ROWS", "COLS", "STEP", "STAGES"))


class Sum(tuple):
    """One added to another, in that order."""

    def __add__(self, other):
        return Sum((self, other))

    def to(self, _):
        return self


class Device:
    """One block after another, of each first the warp that copies, then the two groups that multiply."""

    def __init__(self, m, n, steps, leaves, grid, arguments):
        self.sizes, self.leaves, self.grid = (m, n, steps, *arguments), leaves, grid
        self.memory, self.out = {}, {}
        there = {"minimum": min, "cdiv": triton.cdiv, "static_range": range, "num_programs": lambda _: grid}
        there |= {"program_id": lambda _: self.block, "zeros": lambda *_: None, "store": self.memory.__setitem__}
        there |= {
            "load": lambda at, **_: self.memory[at],
            "thread_barrier": lambda: None,
            "float32": None,
            "bfloat16": None,
        }
        there |= {"atomic_xchg": lambda at, v, **_: self.memory.__setitem__(at, v)}
        there |= {"atomic_add": lambda at, v, **_: self.memory[at] + v}  # nobody waits for a block that has not begun
        mbarrier = {"wait": self.wait, "expect": self.expect, "arrive": self.arrive}
        tma = {"async_copy_global_to_shared": self.copied, "store_wait": lambda _: None}
        tma["async_copy_shared_to_global"] = lambda c, corner, of: self.out.__setitem__(tuple(corner), of.held)
        of_gluon = {"gl": there, "mbarrier": mbarrier, "tma": tma}
        self.names = {
            name: self.function(v) if isinstance(v, triton.JITFunction) else getattr(v, "value", v)
            for name, v in vars(hopper).items()
        }
        self.names |= {name: types.SimpleNamespace(**those) for name, those in of_gluon.items()}
        self.names |= {"warpgroup_mma": self.multiplied, "warpgroup_mma_wait": lambda _, deps: deps[0]}
        self.names |= {"fence_async_shared": lambda: None}
        self.names |= {
            "_sums_of": lambda _, slot: ("sums", slot),
            "_flag_of": lambda _, slot, slots: ("flag", slot, slots),
        }
        for name, v in self.names.items():
            if isinstance(v, types.FunctionType) and isinstance(vars(hopper).get(name), triton.JITFunction):
                self.names[name] = types.FunctionType(v.__code__, self.names)

    def function(self, kernel):
        return kernel.fn

    def run(self):
        for block in range(self.grid):
            self.block, self.steps, self.began = block, [], 0
            shared = [
                types.SimpleNamespace(index=lambda i, name=name: (name, i)) for name in ("a", "b", "full", "empty")
            ]
            shared = (Operand("a"), Operand("b"), *shared[2:], "go")
            self.names["_copy"](("a", "b"), shared, self.sizes, self.leaves)
            freed = []
            for self.group in (0, 1):
                self.seen, self.handed_back = 0, Counter()
                held = Held()
                bias = None
                c = types.SimpleNamespace(dtype=None)
                self.names["_multiply"](
                    self.group, Held(), held, c, bias, "sums", 7, shared, self.sizes, self.leaves, False, hopper.BEHIND
                )
                assert self.seen == len(self.steps) > 0
                freed.append(self.handed_back)
            uses = Counter(i % STAGES for i in range(len(self.steps)))
            assert freed == [uses, uses] and self.began == 1

    def arrive(self, barrier, pred=True):
        if barrier == "go":
            self.began += bool(pred)
        elif pred:
            name, stage = barrier
            assert name == "empty"
            self.handed_back[stage] += 1

    def wait(self, barrier, phase):
        if barrier[0] == "full":
            assert (self.seen % STAGES, self.seen // STAGES & 1) == (barrier[1], phase)
            self.seen += 1

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
        assert (a.at, b.at) == (("a", 2 * stage + self.group), ("b", stage)) and step["bytes"] == 0
        (m, *of_a), (n, *of_b) = step[a.at], step[b.at]
        assert of_a == of_b
        return Sum((*(acc if use_acc else ()), (m, n, *of_a)))


class Operand:
    def __init__(self, *at):
        self.at = at

    def index(self, i):
        return Operand(*self.at, i)

    def _reinterpret(self, *_):
        return self

    def permute(self, _):
        return self


class Held:
    held = None

    def store(self, value):
        self.held = value

    def load(self, _):
        return self.held


def tree(sums):
    return sums[0] if len(sums) == 1 else Sum((tree(sums[: len(sums) // 2]), tree(sums[len(sums) // 2 :])))


def assert_whole(m, n, steps, leaves, blocks):
    """Whatever is cut, each output is the tree of all of its leaves, and each of these all of its steps, in order."""
    tiles = triton.cdiv(m, 2 * ROWS) * triton.cdiv(n, COLS)
    for cut in cost.cuts(m, n, leaves, blocks):
        grid = cut.helpers + cut.tiles
        assert 0 < grid <= blocks
        device = Device(
            m, n, steps, leaves, grid, (tiles - cut.tiles, cut.tiles, cut.kept, len(cut.pieces), cut.helpers)
        )
        device.run()
        corners = [(i, j) for i in range(0, m, ROWS) for j in range(0, n, COLS)]
        assert sorted(device.out) == corners
        for i, j in corners:
            chains = [Sum((i, j, leaf, k * STEP) for k in range(steps)) for leaf in range(leaves)]
            assert device.out[i, j] == tree(chains), f"{cut}: {i}, {j}"
        flags = {at: there for at, there in device.memory.items() if at[0] == "flag"}
        slots = 2 * cut.tiles * len(cut.pieces)
        assert {at[1] for at in flags} <= set(range(slots)) and {at[2] for at in flags} <= {slots}
        assert set(flags.values()) <= {0}  # for the next launch
        halves = sum(0 < (m - i) <= ROWS for i in range(0, m, 2 * ROWS)) * triton.cdiv(n, COLS)
        assert len(flags) == slots - min(halves, cut.tiles) * len(cut.pieces)


@settings(max_examples=60, deadline=None)
@given(
    m=st.integers(1, 1200),
    n=st.integers(1, 700),
    steps=st.integers(1, 4),
    leaves=st.sampled_from([1, 2, 4, 8]),
    blocks=st.integers(1, 40),
)
def test_each_output_is_the_tree_of_its_leaves(m, n, steps, leaves, blocks):
    assert_whole(m, n, steps, leaves, blocks)


@pytest.mark.parametrize("tiles, blocks", [(1, 132), (24, 132), (100, 132), (288, 132), (131, 132), (140, 108)])
def test_on_the_blocks_of_a_device(tiles, blocks):
    assert_whole(2 * ROWS * tiles, COLS, 1, 8, blocks)


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
    if triton.cdiv(m, 2 * ROWS) * triton.cdiv(n, COLS) % blocks == 0 or leaves == 1:
        assert list(us) == [chosen] and not chosen.tiles


def test_half_a_tile_takes_less():
    """Of a last round that has no others."""
    of = {
        m: cost.MANY.of(m, 132 * COLS, 4096, 8, 132, cost.cuts(m, 132 * COLS, 8, 132)[0]) for m in (128, 192, 193, 256)
    }
    assert of[128] < of[192] < of[193] == of[256]


def test_pieces():
    """Subtrees, none larger than what an owner keeps."""
    pieces = {n: {cut.kept: cut.pieces for cut in cost.cuts(1, 1, n, 132) if cut.tiles} for n in (1, 2, 4, 8)}
    assert pieces[8] == {2: (2, 2, 2), 3: (1, 2, 2), 4: (4,), 5: (1, 2), 6: (2,), 7: (1,)}
    assert pieces[4] == {2: (2,), 3: (1,)} and pieces[2] == {1: (1,)} and not pieces[1]
