"""Megatron-core's TransformerEngine layer spec: the bits of the local one, and nothing of a module but its arithmetic changed.

The modules of `te_on_cpu` stand in for TransformerEngine's own, which need a GPU (`test_te_cuda.py`), below
Megatron-core's own wrappers of them.
"""

import sys
from functools import partial
from pathlib import Path

import pytest
import torch

from alignkit.testing import Ranks, assert_bitwise_equal
from tests.megatron import workers

MODELS = {
    "qwen2": ("qwen2", torch.bfloat16, False),
    "qwen3": ("qwen3", torch.bfloat16, False),
    "llama-tied": ("llama", torch.float32, True),
}


@pytest.fixture(scope="module")
def te():
    """Gives ``run(size, function, *args)`` on ranks for which TransformerEngine is installed."""
    sys.path.insert(0, str(Path(__file__).parent / "te_on_cpu"))
    try:
        started = {size: Ranks(size) for size in (1, 2)}
    finally:
        sys.path.pop(0)
    with started[1], started[2]:
        yield lambda size, function, *args: started[size].run(size, function, *args)


@pytest.mark.parametrize("name", MODELS)
def test_every_way_gives_the_bits_of_the_local_spec(name, checkpoint, rows, te, world):
    path, dtype = checkpoint(*MODELS[name]), MODELS[name][1]
    expected = workers.every_way(world, path, dtype, False, rows)
    for size, sequence_parallel in ((1, False), (2, False), (2, True)):
        for spec in (True, False):  # the local one has TransformerEngine's final norm where it is installed
            run = partial(workers.every_way, transformer_engine=spec)
            for rank, result in enumerate(te(size, run, path, dtype, sequence_parallel, rows)):
                assert result.keys() == expected.keys()
                for way, value in result.items():
                    how = f"{way}, TP {size}, SP {sequence_parallel}, its spec {spec}, rank {rank}"
                    assert_bitwise_equal(value, expected[way], how)


@pytest.mark.parametrize("name", MODELS)
def test_gradients_are_those_of_the_local_spec(name, checkpoint, rows, te, world, pair):
    path, dtype = checkpoint(*MODELS[name]), MODELS[name][1]
    for size, sequence_parallel in ((1, False), (2, False), (2, True)):
        given = path, dtype, sequence_parallel, rows
        expected = workers.step(world, *given) if size == 1 else pair.run(2, workers.step, *given)[0]
        for loss, grads in te(size, partial(workers.step, transformer_engine=True), *given):
            assert loss == expected[0] and grads.keys() == expected[1].keys()
            for weight, gradient in grads.items():
                assert_bitwise_equal(gradient, expected[1][weight], f"{weight}, TP {size}, SP {sequence_parallel}")
