"""Sums over two or more GPUs in symmetric memory: the bits of the tree, for repeated eager calls and graphs.

test_tp_faults_cuda.py tests invalid sums, test_symmetric_cuda.py the kernel on one GPU.
"""

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
    """Return this rank's group after splitting the GPUs into groups of `size`."""
    groups = [dist.new_group(list(range(first, first + size))) for first in range(0, WORLD, size)]
    return groups[dist.get_rank() // size]


def require_workspace(tp):
    """Return the group's workspace, which must exist."""
    found = symmetric.workspace(tp.group, torch.device("cuda", torch.cuda.current_device()))
    assert found is not None
    return found


def values(*shape):
    """Return values of which some lose digits in a sum, some are subnormal, and some are infinite."""
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
    """Return the sum computed by torch from all ranks' values."""
    y = tree(tp.all_gather(x))
    y = (y if bias is None else y + bias.float()).to(dtype)
    return y.chunk(tp.size)[tp.rank] if scatter else y


def delay_a_rank(tp, rng):
    """Delay a random rank, or none."""
    rank, cycles = rng.randrange(tp.size + 1), rng.randrange(2_000_000)
    if rank == tp.rank:
        torch.cuda._sleep(cycles)


class RandomSum:
    """A sum of random size and kind, the same on all ranks."""

    def __init__(self, tp, rng):
        self.scatter = rng.random() < 0.4
        self.rows = rng.choice([1, 2, 3, 7, 16, 40, 129, 700]) * (tp.size if self.scatter else 1)
        self.columns = rng.choice([1, 3, 8, 96, 129, 500, 2048])
        if self.scatter:
            self.columns += -self.columns % 4
        self.dtype = rng.choice([torch.float32, torch.bfloat16])
        bias = rng.choice([None, torch.float32, torch.bfloat16])
        generator = torch.Generator("cuda").manual_seed(rng.randrange(1000))
        self.bias = None if bias is None else torch.randn(self.columns, device="cuda", generator=generator).to(bias)
        self.shared = rng.choice([None, False, True])
        self.x = values(self.rows, self.columns)
        self.before = lambda: None

    def sum(self, workspace):
        assert workspace.supports(self.rows, self.columns, self.scatter)

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
    rng, workspace = random.Random(seed), require_workspace(tp)
    sums, got = [], []
    for _ in range(60):  # all are launched before the first check
        sums.append(RandomSum(tp, rng))
        delay_a_rank(tp, rng)
        got.append(sums[-1].sum(workspace))
    for i, (one, y) in enumerate(zip(sums, got, strict=True)):
        one.check(tp, y, f"call {i}")


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("size", SIZES)
def test_random_eager_sums(gpus, size, seed):
    run(gpus, size, many_sums, seed)


def graph_of_sums(tp):
    torch.manual_seed(tp.rank)
    rng, workspace = random.Random(11), require_workspace(tp)
    sums = [RandomSum(tp, rng) for _ in range(5)]
    for one in sums:
        one.sum(workspace)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = [one.sum(workspace) for one in sums]
    for replay in range(50):
        for one in sums:
            one.x.copy_(values(*one.x.shape))
        delay_a_rank(tp, rng)
        graph.replay()
        eager = RandomSum(tp, rng)
        y = eager.sum(workspace)
        for i, (one, g) in enumerate(zip(sums, got, strict=True)):
            one.check(tp, g, f"replay {replay}, call {i}")
        eager.check(tp, y, f"after replay {replay}")


@pytest.mark.parametrize("size", SIZES)
def test_graph_of_random_sums(gpus, size):
    run(gpus, size, graph_of_sums)


def decoding_steps(tp):
    """Replay graphs of many small sums, as in decode steps, with new values and delays on different ranks."""
    torch.manual_seed(tp.rank)
    rng, workspace = random.Random(13), require_workspace(tp)
    graphs = []
    for rows in (1, 8, 64):
        inputs = torch.zeros(30, rows, 1024, device="cuda")
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            got = []
            for x in inputs:
                delayed_rank, cycles = rng.randrange(tp.size), rng.choice([0, 0, 3000, 20000])
                if delayed_rank == tp.rank:
                    torch.cuda._sleep(cycles)
                product = functools.partial(lambda x, part, out, _: torch.mul(x[part], 2.0, out=out), x)
                got.append(workspace.sum(product, rows, 1024, None, torch.float32, False))
        graphs.append((graph, inputs, got))
    for replay in range(60):
        chosen = [rng.choice(graphs) for _ in range(3)]
        for _, inputs, _ in graphs:
            inputs.normal_()
        for graph, _, _ in chosen:  # without waiting between them
            graph.replay()
        for _, inputs, got in chosen:
            want = tree([2.0 * x for x in tp.all_gather(inputs)])
            assert_bitwise_equal(torch.stack(got), want, f"replay {replay}, {inputs.shape[1]} rows")


@pytest.mark.parametrize("size", SIZES)
def test_graphs_of_decode_steps(gpus, size):
    run(gpus, size, decoding_steps)


def sums_on_streams(tp):
    torch.manual_seed(tp.rank)
    rng, workspace, other = random.Random(12), require_workspace(tp), torch.cuda.Stream()
    sums = [RandomSum(tp, rng) for _ in range(40)]
    torch.cuda.synchronize()
    got = []
    for one in sums:
        with torch.cuda.stream(rng.choice([other, torch.cuda.current_stream()])):
            delay_a_rank(tp, rng)
            got.append(one.sum(workspace))
    torch.cuda.synchronize()
    for i, (one, y) in enumerate(zip(sums, got, strict=True)):
        one.check(tp, y, f"call {i}")


@pytest.mark.parametrize("size", SIZES)
def test_sums_on_two_streams(gpus, size):
    run(gpus, size, sums_on_streams)


def large_sums(tp):
    """Sum more values than a workspace holds, with rows that the pieces do not divide."""
    torch.manual_seed(tp.rank)
    x = values(5008, 4100)
    assert require_workspace(tp) and x.numel() > symmetric.PIECE
    assert_bitwise_equal(tp.tree_sum(x), expected(tp, x, None, torch.float32, False), "tree_sum")
    assert_bitwise_equal(tp.tree_sum_scatter(x), expected(tp, x, None, torch.float32, True), "tree_sum_scatter")


@pytest.mark.parametrize("size", SIZES)
def test_sums_larger_than_the_workspace(gpus, size):
    run(gpus, size, large_sums)


def small_pieces(tp, seed):
    """Overlap each small piece with the next piece's product, with delayed ranks, eager and in a graph."""
    torch.manual_seed(100 * seed + tp.rank)
    rng, workspace = random.Random(seed), require_workspace(tp)
    graph, captured = torch.cuda.CUDAGraph(), None
    with mock.patch.object(symmetric, "PIECE", 1 << 17):
        sums = [RandomSum(tp, rng) for _ in range(40)]
        for one in sums[::2]:
            one.before = functools.partial(delay_a_rank, tp, rng)
        got = [one.sum(workspace) for one in sums]
        torch.cuda.synchronize()
        with torch.cuda.graph(graph):
            captured = [one.sum(workspace) for one in sums[:9]]
    for i, (one, y) in enumerate(zip(sums, got, strict=True)):
        one.check(tp, y, f"call {i}")
    for replay in range(10):
        for one in sums[:9]:
            one.x.copy_(values(*one.x.shape))
        graph.replay()
        for i, (one, y) in enumerate(zip(sums, captured, strict=False)):
            one.check(tp, y, f"replay {replay}, call {i}")


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("size", SIZES)
def test_sums_in_small_pieces(gpus, size, seed):
    run(gpus, size, small_pieces, seed)


def long_layers(tp, columns, rows):
    """Run products of several pieces, which leave SMs to the concurrent sums."""
    rng = random.Random(rows)
    torch.manual_seed(5)  # the same on all ranks
    x, w = torch.randn(rows, 2048, device="cuda").bfloat16(), torch.randn(columns, 2048, device="cuda").bfloat16()
    assert rows * columns > 2 * symmetric.PIECE
    want = ops.row_parallel_linear(x, w, tp=TP())
    ours = x.chunk(tp.size, 1)[tp.rank].contiguous(), w.chunk(tp.size, 1)[tp.rank].contiguous()
    for turn in range(8):
        delay_a_rank(tp, rng)
        assert_bitwise_equal(ops.row_parallel_linear(*ours, tp=tp), want, f"turn {turn}")
    whole = rows - rows % tp.size
    part = ours[0][:whole]
    got = ops.row_parallel_linear(part, ours[1], tp=tp, sequence_parallel=True)
    assert_bitwise_equal(got, want[:whole].chunk(tp.size)[tp.rank], "a slice")


@pytest.mark.parametrize("columns, rows", [(4096, 5000), (3584, 16384), (8192, 9001)])
@pytest.mark.parametrize("size", SIZES)
def test_row_parallel_layers_of_several_pieces(gpus, size, columns, rows):
    run(gpus, size, long_layers, columns, rows)


def layers(tp, dtype, sequence_parallel, rows):
    torch.manual_seed(3)  # the same on all ranks
    x, b = torch.randn(rows, 2, 256, device="cuda").to(dtype), torch.randn(384, device="cuda").to(dtype)
    w1, w2 = (torch.randn(*shape, device="cuda").to(dtype) / 16 for shape in ((512, 256), (384, 512)))
    g = torch.randn(rows, 2, 384, device="cuda").to(dtype)

    def step(tp):
        shard = tp.shard if sequence_parallel and tp.size > 1 else lambda t: t
        ours = [
            t.clone().requires_grad_() for t in (shard(x), w1.chunk(tp.size)[tp.rank], w2.chunk(tp.size, 1)[tp.rank], b)
        ]
        y = ops.linear(ours[0], ours[1], tp=tp, sequence_parallel=sequence_parallel)
        z = ops.row_parallel_linear(y, *ours[2:], tp=tp, sequence_parallel=sequence_parallel)
        z.backward(shard(g))
        return z.detach(), ours[0].grad

    assert require_workspace(tp)
    z, dx = step(tp)
    alone = step(TP())[0]
    assert_bitwise_equal(z, tp.shard(alone) if sequence_parallel else alone, "output against one rank")
    with mock.patch.object(symmetric, "workspace", return_value=None):
        assert_bitwise_equal(dx, step(tp)[1], "gradient against NCCL")


@pytest.mark.parametrize("rows", [8, 600])
@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("size", SIZES)
def test_layers_have_the_bits_of_one_rank(gpus, size, dtype, sequence_parallel, rows):
    run(gpus, size, layers, dtype, sequence_parallel, rows)


def first_in_a_capture(group):
    tp, x = TP(group), values(30, 40)
    want = expected(tp, x, None, torch.float32, False)  # initializes NCCL, but no workspace
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = tp.tree_sum(x)
    assert group not in symmetric._workspaces
    graph.replay()
    assert_bitwise_equal(got, want, "gathered in a graph")
    assert_bitwise_equal(tp.tree_sum(x), want, "summed after it")
    assert symmetric._workspaces[group] is not None


def turned_off_on_one_rank(group):
    tp, x = TP(group), values(30, 40)
    with mock.patch.dict(os.environ, {"ALIGNKIT_SYMMETRIC": "0"} if tp.rank else {}):
        assert_bitwise_equal(tp.tree_sum(x), expected(tp, x, None, torch.float32, False))
    assert symmetric._workspaces[group] is None


def failed_on_one_rank(group):
    tp, x, allocate = TP(group), values(30, 40), symmetric.allocate

    def fails(*args):
        if tp.rank:
            raise RuntimeError("no memory is left")
        return allocate(*args)

    with mock.patch.object(symmetric, "allocate", fails), pytest.warns(UserWarning, match="no memory is left"):
        assert_bitwise_equal(tp.tree_sum(x), expected(tp, x, None, torch.float32, False))
    assert symmetric._workspaces[group] is None


def patience_of_the_group(group):
    found = require_workspace(TP(group))
    assert found._timeout_ns == 180 * 10**9


def in_a_new_group(function):
    function(dist.new_group(list(range(WORLD)), timeout=datetime.timedelta(minutes=3)))
    torch.cuda.synchronize()


@pytest.mark.parametrize(
    "function", [first_in_a_capture, turned_off_on_one_rank, failed_on_one_rank, patience_of_the_group]
)
def test_first_use_in_a_new_group(gpus, function):
    gpus.run(WORLD, functools.partial(in_a_new_group, function))
