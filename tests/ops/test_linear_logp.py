"""linear_logp in blocks of rows and vocabulary slabs, as GPUs use them, on the CPU.

On the CPU a chain of dweight continues over blocks and slabs, so the size of either changes no bit. On sm90 the block
of 8192 rows is part of the contract.
"""

import pytest
import torch

from alignkit.ops.linear_logp import blocks
from alignkit.runtime.families import CPU
from alignkit.testing import assert_bitwise_equal

from .helpers import CPU as ON_CPU
from .test_tp import HEADS, run_head

pytestmark = pytest.mark.skipif(not ON_CPU, reason="on a GPU, the contract fixes the blocks of rows")


def run_in_blocks(tp, sizes, dtype, rows, slab):
    """Run `run_head` in blocks of `rows` rows, 32 at a time, and in slabs of 256 or at least 32 ids.

    With the small slabs, their gradient and the fp32 sums over blocks are stored in the weight gradient's memory.
    """
    cuts = ((blocks.PART_ROWS, 32), (blocks.WORKSPACE, 1 << 16 if slab == 256 else 1))
    before, even, chain = [table[CPU] for table, _ in cuts], blocks.EVEN, CPU.head_rows
    try:
        blocks.EVEN = even if slab == 256 else 32
        for table, value in cuts:
            table[CPU] = value
        CPU.head_rows = rows
        return run_head(tp, sizes, dtype, {"temperature": 0.7, "soft_cap": 8.0})
    finally:
        blocks.EVEN, CPU.head_rows = even, chain
        for (table, _), value in zip(cuts, before, strict=True):
            table[CPU] = value


@pytest.mark.parametrize("rows,slab", [(48, 256), (48, 32), (1 << 20, 32)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("size", HEADS)
def test_blocks_and_slabs_change_no_bit(ranks, size, dtype, rows, slab):
    for rank, (want, got) in enumerate(
        zip(
            ranks.run(size, run_head, HEADS[size], dtype, {"temperature": 0.7, "soft_cap": 8.0}),
            ranks.run(size, run_in_blocks, HEADS[size], dtype, rows, slab),
            strict=True,
        )
    ):
        for name, a, b in zip(
            ("logp", "entropy", "given", "dhidden", "dweight", "dbias"),
            (*got[0], got[1], *got[2]),
            (*want[0], want[1], *want[2]),
            strict=True,
        ):
            assert_bitwise_equal(a, b, f"{name} on rank {rank}")
