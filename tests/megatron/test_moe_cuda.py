"""Gradients of MoE models of real Megatron-core on one or two Hopper GPUs; part of `make gpu-test`.

They agree with float64, repeat exactly, and agree across layouts. Helpers are in moe.py and test_moe.py.
"""

import dataclasses
import itertools
from functools import partial

import pytest
import torch

from alignkit.convert import Checkpoint, read_architecture
from alignkit.runtime.machine import most_ranks
from alignkit.testing import assert_bitwise_equal
from tests.megatron import moe, reference
from tests.megatron.gpus import GPUs, _on_cpu
from tests.megatron.test_gradients import bound
from tests.megatron.test_moe import LAYOUTS, TRAINED, relative_error

COUNT = most_ranks()
SIZES = dict(vocab=2000, hidden=512, layers=2, heads=8, kv_heads=4, intermediate=256, experts=16, top_k=4)
FAMILIES = {"qwen3_moe": SIZES, "qwen2_moe": SIZES | dict(layers=3, dense_layers=(1,), dense_intermediate=768)}

pytestmark = pytest.mark.skipif(not COUNT, reason="needs a GPU")


@pytest.fixture(scope="module")
def one():
    with GPUs(1) as ranks:
        yield ranks


@pytest.fixture(scope="module")
def two():
    with GPUs(2) as ranks:
        yield ranks


def step(ranks, *given):
    """Return `moe.step` of each rank."""
    return ranks.run(ranks.world, partial(_step, given))


def _step(given):
    return _on_cpu(moe.step(None, *given))


class Float64Gradients:
    """Float64 gradients with the experts of `chosen`: the reference's routing could differ where scores nearly tie."""

    def __init__(self, path, dtype, rows, chosen):
        arch = read_architecture(path)
        width = max(arch.top_k * arch.intermediate + arch.shared_intermediate, arch.dense_intermediate)
        self.limit = bound(dataclasses.replace(arch, intermediate=width), dtype)
        self.weights = reference.weights64(Checkpoint(path))
        starts = torch.tensor([0, *(len(row) - 1 for row in rows)]).cumsum(0).tolist()
        parts = [chosen[:, a:b] for a, b in itertools.pairwise(starts)]
        logp = [reference.logprobs(arch, self.weights, row, mine) for row, mine in zip(rows, parts, strict=True)]
        (-torch.cat(logp).mean()).backward()

    def check(self, grads, called):
        assert grads.keys() == self.weights.keys()
        for name, w in self.weights.items():
            error = relative_error(grads[name], w.grad)
            assert error < self.limit, f"{called}: {name} is off by {error:.2e}, more than {self.limit:.2e}"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "fp32"])
@pytest.mark.parametrize("arch", FAMILIES)
def test_one_step_agrees_with_float64_and_is_reproducible(arch, dtype, checkpoint, one, long_rows):
    given = checkpoint(arch, dtype, **FAMILIES[arch]), dtype, long_rows
    ((grads, chosen),) = step(one, *given, {})
    Float64Gradients(*given, chosen).check(grads, "one rank")
    ((again, _),) = step(one, *given, {})
    for name, gradient in grads.items():
        assert_bitwise_equal(again[name], gradient, name)


@pytest.mark.skipif(COUNT < 2, reason="needs two GPUs")
@pytest.mark.parametrize("arch", FAMILIES)
def test_two_ranks_agree_with_float64_and_one_rank(arch, checkpoint, one, two, long_rows):
    """Expert gradients with expert parallelism are bit-equal to those of one rank with the whole batch."""
    given = checkpoint(arch, torch.bfloat16, **FAMILIES[arch]), torch.bfloat16
    rows = [*long_rows[::2], *long_rows[1::2]]
    ((expected, chosen),) = step(one, *given, rows, {}, False, True, True)
    wanted = Float64Gradients(*given, rows, chosen)
    of_experts = [name for name in expected if ".experts." in name]
    for grads, _ in step(two, *given, long_rows, dict(ep=2), False, True, True):
        for name in of_experts:
            assert_bitwise_equal(grads[name], expected[name], name)
    for called in TRAINED:
        for grads, _ in step(two, *given, long_rows, *LAYOUTS[called]):
            wanted.check(grads, called)
