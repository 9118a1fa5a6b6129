"""The kernel of sums over ranks, with as many ranks as it knows, on one GPU: each rank is a stream with memory of its own."""

import ctypes
import random

import pytest
import torch

from alignkit.dist import symmetric
from alignkit.runtime import cuda
from alignkit.testing import assert_bitwise_equal

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

CAPACITY = 1 << 18
MOST = 16 * 512 * 4
"""Values in 16 blocks of 512 threads: so many of each of 8 ranks are on an H100 or H200 at once, as they wait for each other."""
FORMS = (symmetric._WHOLE, symmetric._SLICE, symmetric._SHARED)


class Ranks:
    """`size` of them on the current GPU."""

    def __init__(self, size):
        self.size, self.device = size, torch.device("cuda", torch.cuda.current_device())
        words = symmetric.HEAD // 4 + CAPACITY + CAPACITY // size
        self.memory = [torch.zeros(words, device=self.device) for _ in range(size)]
        self.addresses = (ctypes.c_void_p * size)(*(m.data_ptr() for m in self.memory))
        self.order = [(ctypes.c_uint64 * 2)() for _ in range(size)]
        self.streams = [torch.cuda.Stream() for _ in range(size)]

    def sum(self, parts, form, bias, dtype):
        """Of each rank what it has in the end, of parts [size, rows, columns]."""
        rows, columns = parts.shape[1:]
        height = rows // self.size if form == symmetric._SLICE else rows
        found = [torch.full((height, columns), 7.0, dtype=dtype, device=self.device) for _ in range(self.size)]
        for memory, part in zip(self.memory, parts, strict=True):
            memory[symmetric.HEAD // 4 :][: part.numel()].copy_(part.flatten())
        torch.cuda.synchronize()
        for rank, (stream, y) in enumerate(zip(self.streams, found, strict=True)):
            with torch.cuda.stream(stream):
                cuda.call(
                    "alignkit_tree_sum",
                    self.device,
                    self.addresses,
                    self.size,
                    rank,
                    form,
                    rows * columns,
                    ctypes.c_int64(CAPACITY),
                    bias,
                    int(bias is not None and bias.dtype == torch.bfloat16),
                    columns,
                    y,
                    int(dtype == torch.bfloat16),
                    self.order[rank],
                    ctypes.c_uint64(20 * 10**9),
                )
        torch.cuda.synchronize()
        return found


def tree(parts):
    while len(parts) > 1:
        parts = parts[::2] + parts[1::2]
    return parts[0]


@pytest.mark.parametrize("size", symmetric.SIZES)
def test_ranks_of_one_gpu(size):
    """Forms, shapes, biases and types as they come, one after another in the same memory."""
    draw, ranks = random.Random(size), Ranks(size)
    torch.manual_seed(size)
    for turn in range(60):
        form = draw.choice(FORMS)
        columns = draw.choice((1, 7, 8, 96, 1000, 1024))
        most = (MOST * (1 if form == symmetric._WHOLE else size)) // columns
        rows = draw.randint(1, min(most, CAPACITY // columns))
        if form == symmetric._SLICE:  # a slice is a multiple of 16 bytes
            rows = max(rows // (4 * size), 1) * 4 * size
            if rows * columns > CAPACITY:
                continue
        dtype = draw.choice((torch.float32, torch.bfloat16))
        bias = draw.choice((None, torch.float32, torch.bfloat16))
        bias = None if bias is None else torch.randn(columns, device="cuda").to(bias)
        parts = torch.randn(size, rows, columns, device="cuda") * 2.0 ** torch.randint(
            -20, 20, (size, 1, columns), device="cuda"
        )
        want = tree(parts)
        want = (want if bias is None else want + bias.float()).to(dtype)
        for rank, got in enumerate(ranks.sum(parts, form, bias, dtype)):
            mine = want.chunk(size)[rank] if form == symmetric._SLICE else want
            assert_bitwise_equal(got, mine, f"turn {turn}, form {form}, {rows} x {columns}, rank {rank} of {size}")
