"""Sums over GPUs in memory that all of them read: the bytes of the tree, however often, from eager calls and graphs."""

import datetime
import functools
import os
import random
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from alignkit import ops
from alignkit.dist import TP, symmetric
from alignkit.testing import assert_bitwise_equal
from tests.megatron.gpus import GPUs

WORLD = max((n for n in symmetric.SIZES if n <= torch.cuda.device_count()), default=0)
SIZES = [pytest.param(n, marks=pytest.mark.skipif(n > WORLD, reason=f"needs {n} GPUs")) for n in symmetric.SIZES]

pytestmark = pytest.mark.skipif(not WORLD, reason="needs two GPUs")


@pytest.fixture(scope="module")
def gpus():
    with GPUs(WORLD) as ranks:
        yield ranks


def run(gpus, size, function, *args):
    gpus.run(WORLD, functools.partial(_call, size, function, args))


def _call(size, function, args):
    function(TP(_group(size)), *args)
    torch.cuda.synchronize()


@functools.cache
def _group(size):
    """This rank's, of groups that share out the GPUs."""
    groups = [dist.new_group(list(range(first, first + size))) for first in range(0, WORLD, size)]
    return groups[dist.get_rank() // size]


def shared(tp):
    """The group's workspace; here there must be one."""
    found = symmetric.workspace(tp.group, torch.device("cuda", torch.cuda.current_device()))
    assert found is not None
    return found


def values(*shape):
    """Some with digits that a sum must round away, some subnormal, some infinite or NaN."""
    x = torch.randn(*shape, device="cuda")
    kind = torch.randint(1000, shape, device="cuda")
    x = torch.where(kind % 3 == 0, x * 2.0**20, x)
    x = torch.where(kind == 1, 1e-41, x)
    return torch.where(kind == 2, float("inf"), torch.where(kind == 4, -float("inf"), x))


def tree(parts):
    if len(parts) == 1:
        return parts[0]
    half = len(parts) // 2
    return tree(parts[:half]) + tree(parts[half:])


def expected(tp, x, bias, dtype, scatter):
    """By torch, from everything that the ranks hold."""
    y = tree(tp.all_gather(x))
    y = (y if bias is None else y + bias.float()).to(dtype)
    return y.chunk(tp.size)[tp.rank] if scatter else y


def late(tp, draw):
    """One of the ranks is some way behind, or none."""
    rank, cycles = draw.randrange(tp.size + 1), draw.randrange(2_000_000)
    if rank == tp.rank:
        torch.cuda._sleep(cycles)


class Drawn:
    """A sum of random size and kind, the same on all ranks."""

    def __init__(self, tp, draw):
        self.scatter = draw.random() < 0.4
        self.rows = draw.choice([1, 2, 3, 7, 16, 40, 129, 700]) * (tp.size if self.scatter else 1)
        self.columns = draw.choice([1, 3, 8, 96, 129, 500, 2048])
        if self.scatter:
            self.columns += -self.columns % 4
        self.dtype = draw.choice([torch.float32, torch.bfloat16])
        bias = draw.choice([None, torch.float32, torch.bfloat16])
        generator = torch.Generator("cuda").manual_seed(draw.randrange(1000))
        self.bias = None if bias is None else torch.randn(self.columns, device="cuda", generator=generator).to(bias)
        self.shared = draw.choice([None, False, True])
        self.x = values(self.rows, self.columns)
        self.before = lambda: None

    def sum(self, workspace):
        assert workspace.takes(self.rows, self.columns, self.scatter)

        def product(rows, out, _):
            self.before()
            out.copy_(self.x[rows])

        return workspace.sum(product, self.rows, self.columns, self.bias, self.dtype, self.scatter, self.shared)

    def check(self, tp, got, what):
        assert_bitwise_equal(
            got,
            expected(tp, self.x, self.bias, self.dtype, self.scatter),
            f"{what}: {self.rows} x {self.columns}, {self.dtype}, {self.scatter}, {self.shared}",
        )


def many_sums(tp, seed):
    torch.manual_seed(100 * seed + tp.rank)
    draw, workspace = random.Random(seed), shared(tp)
    sums, got = [], []
    for _ in range(60):  # all are on their way before one is looked at
        sums.append(Drawn(tp, draw))
        late(tp, draw)
        got.append(sums[-1].sum(workspace))
    for i, (drawn, y) in enumerate(zip(sums, got, strict=True)):
        drawn.check(tp, y, f"call {i}")


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("size", SIZES)
def test_sums(gpus, size, seed):
    run(gpus, size, many_sums, seed)


def graph_of_sums(tp):
    torch.manual_seed(tp.rank)
    draw, workspace = random.Random(11), shared(tp)
    sums = [Drawn(tp, draw) for _ in range(5)]
    for drawn in sums:
        drawn.sum(workspace)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = [drawn.sum(workspace) for drawn in sums]
    for replay in range(50):
        for drawn in sums:
            drawn.x.copy_(values(*drawn.x.shape))
        late(tp, draw)
        graph.replay()
        eager = Drawn(tp, draw)
        y = eager.sum(workspace)
        for i, (drawn, g) in enumerate(zip(sums, got, strict=True)):
            drawn.check(tp, g, f"replay {replay}, call {i}")
        eager.check(tp, y, f"after replay {replay}")


@pytest.mark.parametrize("size", SIZES)
def test_graph(gpus, size):
    run(gpus, size, graph_of_sums)


def decoding_steps(tp):
    """Graphs of many small sums, as a decoding step has them: of values that change, by ranks that are late by turns."""
    torch.manual_seed(tp.rank)
    draw, workspace = random.Random(13), shared(tp)
    graphs = []
    for rows in (1, 8, 64):
        inputs = torch.zeros(30, rows, 1024, device="cuda")
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            got = []
            for x in inputs:
                behind, cycles = draw.randrange(tp.size), draw.choice([0, 0, 3000, 20000])
                if behind == tp.rank:
                    torch.cuda._sleep(cycles)
                product = functools.partial(lambda x, part, out, _: torch.mul(x[part], 2.0, out=out), x)
                got.append(workspace.sum(product, rows, 1024, None, torch.float32, False))
        graphs.append((graph, inputs, got))
    for replay in range(60):
        chosen = [draw.choice(graphs) for _ in range(3)]
        for _, inputs, _ in graphs:
            inputs.normal_()
        for graph, _, _ in chosen:  # without waiting between them
            graph.replay()
        for _, inputs, got in chosen:
            want = tree([2.0 * x for x in tp.all_gather(inputs)])
            assert_bitwise_equal(torch.stack(got), want, f"replay {replay}, {inputs.shape[1]} rows")


@pytest.mark.parametrize("size", SIZES)
def test_decoding_steps(gpus, size):
    run(gpus, size, decoding_steps)


def sums_on_streams(tp):
    torch.manual_seed(tp.rank)
    draw, workspace, other = random.Random(12), shared(tp), torch.cuda.Stream()
    sums = [Drawn(tp, draw) for _ in range(40)]
    torch.cuda.synchronize()
    got = []
    for drawn in sums:
        with torch.cuda.stream(draw.choice([other, torch.cuda.current_stream()])):
            late(tp, draw)
            got.append(drawn.sum(workspace))
    torch.cuda.synchronize()
    for i, (drawn, y) in enumerate(zip(sums, got, strict=True)):
        drawn.check(tp, y, f"call {i}")


@pytest.mark.parametrize("size", SIZES)
def test_streams(gpus, size):
    run(gpus, size, sums_on_streams)


def large_sums(tp):
    """More than a workspace holds, and a number of rows that pieces do not divide."""
    torch.manual_seed(tp.rank)
    x = values(5008, 4100)
    assert shared(tp) and x.numel() > symmetric.PIECE
    assert_bitwise_equal(tp.tree_sum(x), expected(tp, x, None, torch.float32, False), "tree_sum")
    assert_bitwise_equal(tp.tree_sum_scatter(x), expected(tp, x, None, torch.float32, True), "tree_sum_scatter")


@pytest.mark.parametrize("size", SIZES)
def test_pieces(gpus, size):
    run(gpus, size, large_sums)


def small_pieces(tp, seed):
    """Each beside the next piece's product, by ranks that are late by turns; of sums that are not waited for, and of a graph."""
    torch.manual_seed(100 * seed + tp.rank)
    draw, workspace = random.Random(seed), shared(tp)
    graph, captured = torch.cuda.CUDAGraph(), None
    with mock.patch.object(symmetric, "PIECE", 1 << 17):
        sums = [Drawn(tp, draw) for _ in range(40)]
        for drawn in sums[::2]:
            drawn.before = functools.partial(late, tp, draw)
        got = [drawn.sum(workspace) for drawn in sums]
        torch.cuda.synchronize()
        with torch.cuda.graph(graph):
            captured = [drawn.sum(workspace) for drawn in sums[:9]]
    for i, (drawn, y) in enumerate(zip(sums, got, strict=True)):
        drawn.check(tp, y, f"call {i}")
    for replay in range(10):
        for drawn in sums[:9]:
            drawn.x.copy_(values(*drawn.x.shape))
        graph.replay()
        for i, (drawn, y) in enumerate(zip(sums, captured, strict=False)):
            drawn.check(tp, y, f"replay {replay}, call {i}")


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("size", SIZES)
def test_small_pieces(gpus, size, seed):
    run(gpus, size, small_pieces, seed)


def long_layers(tp, columns, rows):
    """Products of several pieces, which leave multiprocessors to the sums beside them."""
    draw = random.Random(rows)
    torch.manual_seed(5)  # the same on all ranks
    x, w = torch.randn(rows, 2048, device="cuda").bfloat16(), torch.randn(columns, 2048, device="cuda").bfloat16()
    assert rows * columns > 2 * symmetric.PIECE
    want = ops.row_parallel_linear(x, w, tp=TP())
    ours = x.chunk(tp.size, 1)[tp.rank].contiguous(), w.chunk(tp.size, 1)[tp.rank].contiguous()
    for turn in range(8):
        late(tp, draw)
        assert_bitwise_equal(ops.row_parallel_linear(*ours, tp=tp), want, f"turn {turn}")
    whole = rows - rows % tp.size
    given = ours[0][:whole]
    got = ops.row_parallel_linear(given, ours[1], tp=tp, sequence_parallel=True)
    assert_bitwise_equal(got, want[:whole].chunk(tp.size)[tp.rank], "a slice")


@pytest.mark.parametrize("columns, rows", [(4096, 5000), (3584, 16384), (8192, 9001)])
@pytest.mark.parametrize("size", SIZES)
def test_long_layers(gpus, size, columns, rows):
    run(gpus, size, long_layers, columns, rows)


def layers(tp, dtype, sequence_parallel, rows):
    torch.manual_seed(3)  # the same on all ranks
    x, b = torch.randn(rows, 2, 256, device="cuda").to(dtype), torch.randn(384, device="cuda").to(dtype)
    w1, w2 = (torch.randn(*shape, device="cuda").to(dtype) / 16 for shape in ((512, 256), (384, 512)))
    g = torch.randn(rows, 2, 384, device="cuda").to(dtype)

    def step(tp):
        cut = tp.shard if sequence_parallel and tp.size > 1 else lambda t: t
        ours = [
            t.clone().requires_grad_() for t in (cut(x), w1.chunk(tp.size)[tp.rank], w2.chunk(tp.size, 1)[tp.rank], b)
        ]
        y = ops.linear(ours[0], ours[1], tp=tp, sequence_parallel=sequence_parallel)
        z = ops.row_parallel_linear(y, *ours[2:], tp=tp, sequence_parallel=sequence_parallel)
        z.backward(cut(g))
        return z.detach(), ours[0].grad

    assert shared(tp)
    z, dx = step(tp)
    alone = step(TP())[0]
    assert_bitwise_equal(z, tp.shard(alone) if sequence_parallel else alone, "output, beside one rank's")
    with mock.patch.object(symmetric, "workspace", return_value=None):
        assert_bitwise_equal(dx, step(tp)[1], "gradient, beside that gathered by NCCL")


@pytest.mark.parametrize("rows", [8, 600])
@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("size", SIZES)
def test_layers(gpus, size, dtype, sequence_parallel, rows):
    run(gpus, size, layers, dtype, sequence_parallel, rows)


def first_in_a_capture(group):
    tp, x = TP(group), values(30, 40)
    want = expected(tp, x, None, torch.float32, False)  # NCCL has met, the workspace was not asked for
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = tp.tree_sum(x)
    assert group not in symmetric._made
    graph.replay()
    assert_bitwise_equal(got, want, "gathered in a graph")
    assert_bitwise_equal(tp.tree_sum(x), want, "summed after it")
    assert symmetric._made[group] is not None


def turned_off_on_one_rank(group):
    tp, x = TP(group), values(30, 40)
    with mock.patch.dict(os.environ, {"ALIGNKIT_SYMMETRIC": "0"} if tp.rank else {}):
        assert_bitwise_equal(tp.tree_sum(x), expected(tp, x, None, torch.float32, False))
    assert symmetric._made[group] is None


def failed_on_one_rank(group):
    tp, x, allocate = TP(group), values(30, 40), symmetric.allocate

    def fails(*args):
        if tp.rank:
            raise RuntimeError("no memory is left")
        return allocate(*args)

    with mock.patch.object(symmetric, "allocate", fails), pytest.warns(UserWarning, match="no memory is left"):
        assert_bitwise_equal(tp.tree_sum(x), expected(tp, x, None, torch.float32, False))
    assert symmetric._made[group] is None


def patience_of_the_group(group):
    found = shared(TP(group))
    assert found._patience.value == 180 * 10**9


def in_a_new_group(function):
    function(dist.new_group(list(range(WORLD)), timeout=datetime.timedelta(minutes=3)))
    torch.cuda.synchronize()


@pytest.mark.parametrize(
    "function", [first_in_a_capture, turned_off_on_one_rank, failed_on_one_rank, patience_of_the_group]
)
def test_the_first_use(gpus, function):
    gpus.run(WORLD, functools.partial(in_a_new_group, function))
