"""Tensor parallelism with eight gloo ranks, the largest number that can share the contract's k-tree: one rank's bits.

test_tp.py tests up to four ranks and holds the helpers.
"""

import pytest
import torch

from alignkit.testing import Ranks, assert_bitwise_equal
from tests.forks import METHOD

from .helpers import CPU
from .test_tp import HEADS, run_head, run_linears

pytestmark = pytest.mark.skipif(not CPU, reason="the ranks are gloo processes on the CPU")

SHARDS = [1, 130, 3, 250, 128, 57, 400, 31]
"""Shards of test_tp.py's 1000 rows: borders inside tiles, a shard within one tile, and a shard of a single row."""


@pytest.fixture(scope="module")
def eight():
    with Ranks(8, method=METHOD) as ranks:
        ranks.run(8, str)
        yield ranks


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_linear_logp_bits_of_eight_ranks_equal_those_of_one(eight, dtype):
    kwargs = {"temperature": 0.7, "soft_cap": 8.0}
    (want, entropy), _, grads = eight.run(1, run_head, HEADS[1], dtype, kwargs)[0]
    results = eight.run(8, run_head, SHARDS, dtype, kwargs)
    for rank, (out, from_logits, got) in enumerate(results):
        assert_bitwise_equal(out[0], want, f"logp on rank {rank}")
        assert_bitwise_equal(out[1], entropy, f"entropy on rank {rank}")
        assert_bitwise_equal(from_logits, want, f"logp_from_logits on rank {rank}")
        assert_bitwise_equal(got[0], results[0][2][0], f"dhidden on rank {rank}")
    for name, i in (("dweight", 1), ("dbias", 2)):
        assert_bitwise_equal(torch.cat([r[2][i] for r in results]), grads[i], name)


@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_linear_bits_of_eight_ranks_equal_those_of_one(eight, dtype, sequence_parallel):
    """Each rank has one leaf of eight."""
    rows = 16
    want, grads, _ = eight.run(1, run_linears, dtype, False, rows)[0]
    results = eight.run(8, run_linears, dtype, sequence_parallel, rows)
    whole = torch.cat([r[0] for r in results]) if sequence_parallel else results[0][0]
    assert_bitwise_equal(whole, want, "output")
    for name, i, dim in (("first weight", 1, 0), ("second weight", 2, 1)):
        assert_bitwise_equal(torch.cat([r[1][i] for r in results], dim), grads[i], f"gradient of the {name}")
    assert_bitwise_equal(results[0][1][3], grads[3], "gradient of the bias")
