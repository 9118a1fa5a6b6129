"""For which batches kernels of few queries are compiled anew: an engine runs one of each kind when it starts. None is launched here."""

from unittest import mock

import pytest
import torch

pytest.importorskip("triton")
from alignkit.ops.attention import triton
from alignkit.ops.attention.sharing import batches

PAGE = 16


def compiled(seqs: int, more: int, heads: int, kv_heads: int, dim: int, width: int, dtype: torch.dtype) -> set:
    """What the kernels are compiled for: their options and constants."""
    found = set()

    def repeated(kernel, grid, args, options, changing, **constants):
        found.add((kernel.__name__, *sorted(options.items()), *sorted(constants.items())))

    q = torch.empty(seqs + more, heads, dim, dtype=dtype, device="meta")
    k = torch.empty(PAGE, kv_heads, dim, dtype=dtype, device="meta")
    table = torch.empty(seqs, width, dtype=torch.int32, device="meta")
    integers = (
        torch.empty(seqs + 1, dtype=torch.int32, device="meta"),
        torch.empty(seqs, dtype=torch.int32, device="meta"),
    )
    with mock.patch.object(triton, "repeated", repeated):
        triton.few(q, k, k, table, *integers, PAGE, 0.1, q, all_of_them=not more)
    return found


@pytest.mark.parametrize("longest", [512, 1024, 2048, 4096, 40960, 131072])
@pytest.mark.parametrize("heads, kv_heads, dim", [(32, 8, 128), (28, 4, 128), (8, 1, 128), (16, 16, 64), (16, 2, 256)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_batches_are_of_every_kind(heads, kv_heads, dim, longest, dtype):
    most, width = 600, longest // PAGE
    some = batches(heads, kv_heads, dim, longest, most)
    assert some[0] == 1 and some == sorted(some) and len(some) <= 8
    problem = heads, kv_heads, dim, width, dtype
    for more in (0, 1, 100):
        known = set().union(*(compiled(seqs, min(more, 1), *problem) for seqs in some))
        for seqs in (*range(1, 300), *range(300, most + 1, 7)):
            assert compiled(seqs, more, *problem) <= known, f"{seqs} sequences, {more} more rows"
