"""Decode batches of an engine's startup cover every variant of the attention kernels, so no request compiles one.

Launches are recorded, not run; no GPU is needed.
"""

from unittest import mock

import pytest
import torch

pytest.importorskip("triton")
from alignkit.ops.attention import triton_backend
from alignkit.ops.attention.sharing import variant_batches

from .helpers import hopper_without_gpu  # noqa: F401 - used by pytest

PAGE = 16


def compiled(seqs: int, extra_rows: int, heads: int, kv_heads: int, dim: int, width: int, dtype: torch.dtype) -> set:
    """Return the options and constants with which the kernels are compiled for a batch."""
    found = set()

    def launch_repeatable(kernel, grid, args, options, changing, **constants):
        found.add((kernel.__name__, *sorted(options.items()), *sorted(constants.items())))

    q = torch.empty(seqs + extra_rows, heads, dim, dtype=dtype, device="meta")
    k = torch.empty(PAGE, kv_heads, dim, dtype=dtype, device="meta")
    table = torch.empty(seqs, width, dtype=torch.int32, device="meta")
    integers = (
        torch.empty(seqs + 1, dtype=torch.int32, device="meta"),
        torch.empty(seqs, dtype=torch.int32, device="meta"),
    )
    with mock.patch.object(triton_backend, "launch_repeatable", launch_repeatable):
        triton_backend.decode(q, k, k, table, *integers, PAGE, 0.1, q, decode_all=not extra_rows)
    return found


@pytest.mark.parametrize("longest", [512, 1024, 2048, 4096, 40960, 131072])
@pytest.mark.parametrize("heads, kv_heads, dim", [(32, 8, 128), (28, 4, 128), (8, 1, 128), (16, 16, 64), (16, 2, 256)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_startup_batches_cover_every_compiled_kernel(heads, kv_heads, dim, longest, dtype):
    max_seqs, width = 600, longest // PAGE
    batches = variant_batches(heads, kv_heads, dim, longest, max_seqs)
    assert batches[0] == 1 and batches == sorted(batches) and len(batches) <= 8
    problem = heads, kv_heads, dim, width, dtype
    for extra_rows in (0, 1, 100):
        known = set().union(*(compiled(seqs, min(extra_rows, 1), *problem) for seqs in batches))
        for seqs in (*range(1, 300), *range(300, max_seqs + 1, 7)):
            assert compiled(seqs, extra_rows, *problem) <= known, f"{seqs} sequences, {extra_rows} extra rows"
