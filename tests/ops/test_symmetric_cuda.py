"""The rank-sum kernel (csrc/sm90/rank_sum) with up to 8 ranks on one GPU: each rank is a stream with its own memory.

test_tp_cuda.py runs it over several GPUs.
"""

import ctypes
import random
from itertools import pairwise
from unittest import mock

import pytest
import torch

from alignkit.dist import symmetric
from alignkit.errors import BackendError
from alignkit.runtime import cuda
from alignkit.testing import assert_bitwise_equal

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

CAPACITY = 1 << 18
MOST = 16 * 512 * 4
"""Values for 16 CTAs of 512 threads: 8 ranks of this size are resident at once on an H100 or H200, as they must be."""
FORMS = (symmetric._WHOLE, symmetric._SLICE, symmetric._SHARED)


class Ranks:
    """`size` ranks on the current GPU."""

    def __init__(self, size):
        self.size, self.device = size, torch.device("cuda", torch.cuda.current_device())
        words = symmetric.HEAD // 4 + 2 * symmetric.ONE_BARRIER + CAPACITY + CAPACITY // size
        self.memory = [torch.zeros(words, device=self.device) for _ in range(size)]
        self.addresses = (ctypes.c_void_p * size)(*(m.data_ptr() for m in self.memory))
        self.order = [(ctypes.c_uint64 * 3)() for _ in range(size)]
        self.streams = [torch.cuda.Stream() for _ in range(size)]

    def sum(self, parts, form, bias, dtype, offset=0, blocks=symmetric.BLOCKS):
        """Sum parts [size, rows, columns], each at offset `offset` in the workspace; return each rank's result."""
        rows, columns = parts.shape[1:]
        height = rows // self.size if form == symmetric._SLICE else rows
        found = [torch.full((height, columns), 7.0, dtype=dtype, device=self.device) for _ in range(self.size)]
        torch.cuda.synchronize()
        for rank, (stream, y) in enumerate(zip(self.streams, found, strict=True)):
            with torch.cuda.stream(stream):
                self.add(rank, parts[rank], form, bias, y, offset, blocks)
        torch.cuda.synchronize()
        return found

    def add(self, rank, part, form, bias, y, offset=0, blocks=symmetric.BLOCKS):
        """Launch a rank's sum on the current stream; return the offset of its part in the workspace."""
        begin = ctypes.c_int64()
        order = self.order[rank]
        cuda.call("alignkit_tree_sum_begin", self.device, form, part.numel(), order, ctypes.byref(begin))
        begin.value += offset
        self.memory[rank][symmetric.HEAD // 4 + begin.value :][: part.numel()].copy_(part.flatten())
        cuda.call(
            "alignkit_tree_sum",
            self.device,
            self.addresses,
            self.size,
            rank,
            form,
            part.numel(),
            ctypes.c_int64(CAPACITY),
            begin,
            bias,
            int(bias is not None and bias.dtype == torch.bfloat16),
            part.shape[1],
            y,
            int(y.dtype == torch.bfloat16),
            order,
            ctypes.c_uint64(20 * 10**9),
            blocks,
        )
        return begin.value


def tree(parts):
    while len(parts) > 1:
        parts = parts[::2] + parts[1::2]
    return parts[0]


@pytest.mark.parametrize("size", symmetric.SIZES)
def test_random_sums_of_ranks_on_one_gpu(size):
    """Random forms, shapes, biases and dtypes follow each other in the same memory."""
    rng, ranks = random.Random(size), Ranks(size)
    torch.manual_seed(size)
    for turn in range(60):
        form = rng.choice(FORMS)
        columns = rng.choice((1, 7, 8, 96, 1000, 1024))
        most = (MOST * (1 if form == symmetric._WHOLE else size)) // columns
        rows = rng.randint(1, min(most, CAPACITY // columns))
        if form == symmetric._SLICE:  # a slice is a multiple of 16 bytes
            rows = max(rows // (4 * size), 1) * 4 * size
            if rows * columns > CAPACITY:
                continue
        dtype = rng.choice((torch.float32, torch.bfloat16))
        bias = rng.choice((None, torch.float32, torch.bfloat16))
        bias = None if bias is None else torch.randn(columns, device="cuda").to(bias)
        parts = torch.randn(size, rows, columns, device="cuda") * 2.0 ** torch.randint(
            -20, 20, (size, 1, columns), device="cuda"
        )
        want = tree(parts)
        want = (want if bias is None else want + bias.float()).to(dtype)
        offset = rng.choice((0, rng.randint(0, (CAPACITY - rows * columns) // 4) * 4))
        for rank, got in enumerate(ranks.sum(parts, form, bias, dtype, offset, rng.choice((1, 3, 64)))):
            own = want.chunk(size)[rank] if form == symmetric._SLICE else want
            assert_bitwise_equal(got, own, f"turn {turn}, form {form}, {rows} x {columns}, rank {rank} of {size}")


@pytest.mark.parametrize("size", symmetric.SIZES)
def test_graphs_and_eager_sums_of_ranks_on_one_gpu(size):
    """Small sums in a graph alternate between two places, except the first; graphs and eager sums are interleaved."""
    rng, ranks = random.Random(size), Ranks(size)
    torch.manual_seed(size)
    graphs = []
    for _ in range(2):
        shapes = [(rng.randint(1, 32), rng.choice((1, 96, 512))) for _ in range(rng.choice((1, 6, 7)))]
        forms = [rng.choice((*[symmetric._WHOLE] * 4, symmetric._SHARED)) for _ in shapes]
        parts = [torch.empty(size, *shape, device="cuda") for shape in shapes]
        found = [[torch.empty(shape, device="cuda") for _ in range(size)] for shape in shapes]
        waits = [[rng.choice((0, 0, 20000)) for _ in shapes] for _ in range(size)]
        captured = []
        for rank, stream in enumerate(ranks.streams):
            captured.append(torch.cuda.CUDAGraph())
            with torch.cuda.graph(captured[-1], stream=stream):
                begins = []
                for i, form in enumerate(forms):
                    torch.cuda._sleep(waits[rank][i])
                    begins.append(ranks.add(rank, parts[i][rank], form, None, found[i][rank]))
        small = [begin for i, begin in enumerate(begins) if i and forms[i] == symmetric._WHOLE]
        assert begins[0] == 2 * symmetric.ONE_BARRIER
        assert all({a, b} == {0, symmetric.ONE_BARRIER} for a, b in pairwise(small))
        graphs.append((captured, parts, found))
    for turn in range(40):
        captured, parts, found = rng.choice(graphs)
        for part in parts:
            part.normal_()
        torch.cuda.synchronize()
        for graph, stream in zip(captured, ranks.streams, strict=True):
            with torch.cuda.stream(stream):
                graph.replay()
        torch.cuda.synchronize()
        for i, part in enumerate(parts):
            for rank in range(size):
                assert_bitwise_equal(found[i][rank], tree(part), f"turn {turn}, call {i}, rank {rank} of {size}")
        if rng.random() < 0.5:
            alone = torch.randn(size, 5, 64, device="cuda")
            for got in ranks.sum(alone, symmetric._WHOLE, None, torch.float32):
                assert_bitwise_equal(got, tree(alone), f"after turn {turn}")


def test_sum_at_an_invalid_offset_is_rejected():
    ranks = Ranks(2)
    lost = mock.patch.object(
        ctypes, "byref", return_value=ctypes.pointer(ctypes.c_int64())
    )  # loses the returned offset
    with lost, pytest.raises(BackendError, match="invalid argument"):
        ranks.add(0, torch.ones(1, 8, device="cuda"), symmetric._WHOLE, None, torch.empty(1, 8, device="cuda"))
    for offset in (-4, 2, CAPACITY - 4):
        with pytest.raises(BackendError, match="invalid argument"):
            ranks.sum(torch.ones(2, 1, 8, device="cuda"), symmetric._WHOLE, None, torch.float32, offset)
