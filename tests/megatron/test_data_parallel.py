"""Data parallelism under Megatron's DDP and optimizers, over two gloo ranks: reproducible weights.

The distributed optimizer and overlapped reduction must give the weights of the plain optimizer, bit for bit.
"""

from functools import partial

import pytest
import torch

from alignkit.testing import assert_bitwise_equal
from tests.megatron import layouts


def same(results, expected):
    for (losses, weights), (wanted, its_weights) in zip(results, expected, strict=True):
        assert losses == wanted
        for name, weight in weights.items():
            assert_bitwise_equal(weight, its_weights[name], name)


def test_distributed_optimizer_gives_the_weights_of_the_plain_one(checkpoint, rows, two):
    """The sum of two ranks' gradients does not depend on the order."""
    given = checkpoint("qwen3", torch.bfloat16), torch.bfloat16, rows, {}
    plain = two.run(2, partial(layouts.data_parallel, distributed=False), *given)
    (first, weights), (second, others) = plain
    assert first[0] != second[0]  # the ranks have different rows
    same([(first, weights)], [(first, others)])
    for overlap in (False, True):
        same(two.run(2, partial(layouts.data_parallel, overlap=overlap), *given), plain)


@pytest.mark.parametrize("distributed", [False, True], ids=["plain", "distributed"])
def test_steps_are_reproducible(distributed, checkpoint, rows, two):
    """Gradients are clipped by their norm, which Megatron sums over the ranks."""
    given = checkpoint("qwen3", torch.bfloat16), torch.bfloat16, rows, {}
    run = partial(layouts.data_parallel, distributed=distributed, overlap=True, clip=1.0)
    first = two.run(2, run, *given)
    assert first[0][0][0][1] > 1.0  # the gradients were clipped
    same(two.run(2, run, *given), first)
