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
        mbarrier = {"wait": lambda *_: None, "expect": lambda *_: None, "arrive": self.arrive}
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
                self.multiplied_steps, self.handed_back = 0, Counter()
                held = Held()
                bias = None
                c = types.SimpleNamespace(dtype=None)
                self.names["_multiply"](
                    self.group, Held(), held, c, bias, "sums", 7, shared, self.sizes, self.leaves, False, hopper.BEHIND
                )
                assert self.multiplied_steps == len(self.steps) / 3 > 0
                freed.append(self.handed_back)
            uses = Counter(i % STAGES for i in range(len(self.steps) // 3))
            assert freed == [uses, uses] and self.began == 1

    def arrive(self, barrier, pred=True):
        if barrier == "go":
            self.began += bool(pred)
        elif pred:
            name, stage = barrier
            assert name == "empty"
            self.handed_back[stage] += 1

    def copied(self, matrix, at, barrier, to):
        self.steps.append((matrix, *at, *to.at))

    def multiplied(self, a, b, acc, use_acc, is_async):
        at = self.multiplied_steps
        (_, n, leaf, k, _, stage), *of_a = self.steps[3 * at : 3 * at + 3]
        _, m, *same, _, place = of_a[self.group]
        assert same == [leaf, k] and stage == at % STAGES == b.at[1] and place == 2 * stage + self.group == a.at[1]
        self.multiplied_steps += 1
        return Sum((*(acc if use_acc else ()), (m, n, leaf, k)))


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
    for cut in cost.cuts(tiles, leaves, blocks):
        grid = cut.helpers + cut.tiles
        assert 0 < grid <= blocks
        device = Device(
            m, n, steps, leaves, grid, (tiles - cut.tiles, cut.tiles, cut.kept, len(cut.pieces), cut.helpers)
        )
        device.run()
        corners = [(i, j) for i in range(0, triton.cdiv(m, 2 * ROWS) * 2 * ROWS, ROWS) for j in range(0, n, COLS)]
        assert sorted(device.out) == corners
        for i, j in corners:
            chains = [Sum((i, j, leaf, k * STEP) for k in range(steps)) for leaf in range(leaves)]
            assert device.out[i, j] == tree(chains), f"{cut}: {i}, {j}"
        flags = {at: there for at, there in device.memory.items() if at[0] == "flag"}
        slots = 2 * cut.tiles * len(cut.pieces)
        assert sorted(at[1] for at in flags) == list(range(slots)) and {at[2] for at in flags} <= {slots}
        assert set(flags.values()) <= {0}  # for the next launch


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
    tiles=st.integers(1, 600), leaves=st.sampled_from([1, 2, 4, 8]), k=st.integers(1, 256), blocks=st.integers(1, 132)
)
def test_the_least_is_chosen(tiles, leaves, k, blocks):
    k *= 16 * leaves
    us = {cut: cost.MANY.of(tiles, k, leaves, blocks, cut) for cut in cost.cuts(tiles, leaves, blocks)}
    chosen = cost.cut(tiles, k, leaves, blocks)
    assert us[chosen] == min(us.values()) > 0
    if tiles % blocks == 0 or leaves == 1:
        assert list(us) == [chosen] and not chosen.tiles


def test_pieces():
    """Subtrees, none larger than what an owner keeps."""
    pieces = {n: {cut.kept: cut.pieces for cut in cost.cuts(1, n, 132) if cut.tiles} for n in (1, 2, 4, 8)}
    assert pieces[8] == {2: (2, 2, 2), 3: (1, 2, 2), 4: (4,), 5: (1, 2), 6: (2,), 7: (1,)}
    assert pieces[4] == {2: (2,), 3: (1,)} and pieces[2] == {1: (1,)} and not pieces[1]
