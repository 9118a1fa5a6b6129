"""Weights after steps of Megatron's optimizers on two data-parallel gloo ranks, plain and distributed.

The distributed optimizer and overlapped reduction must give the weights of the plain optimizer, bit for bit. Two ranks,
because the sum of more gradients depends on their order. test_ddp.py has the gradients of one step on one data-parallel
rank; layouts.py holds the function that runs on the ranks.
"""

from functools import partial

import pytest
import torch

from alignkit.testing import assert_bitwise_equal
from tests.megatron import layouts


def same(results, expected):
    """Compare the ranks' results of `layouts.data_parallel`: losses (with `clip`, and norms) and weights."""
    for (losses, weights), (wanted, its_weights) in zip(results, expected, strict=True):
        assert losses == wanted
        for name, weight in weights.items():
            assert_bitwise_equal(weight, its_weights[name], name)


def test_distributed_optimizer_gives_the_weights_of_the_plain_one(checkpoint, rows, two):
    """Compare three reductions of the same gradients; the ranks have different rows."""
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
    steps, _ = first[0]
    _, gradient_norm = steps[0]
    assert gradient_norm > 1.0  # the gradients were clipped
    same(two.run(2, run, *given), first)
