"""Pipeline, context and data parallelism of real Megatron-core on two or four Hopper GPUs over NCCL.

Part of `make gpu-test`. It repeats test_pipeline.py, test_context.py and test_data_parallel.py; layouts.py holds the
functions that run on the ranks.
"""

from functools import partial

import pytest
import torch

from alignkit.runtime.machine import most_ranks
from tests.megatron import layouts, test_context, test_data_parallel, test_pipeline
from tests.megatron.gpus import GPUs
from tests.megatron.test_cuda import BIG
from tests.megatron.test_pipeline import OVERLAPPED

COUNT = most_ranks()

pytestmark = pytest.mark.skipif(COUNT < 2, reason="needs two GPUs")
four = pytest.mark.skipif(COUNT < 4, reason="needs four GPUs")


@pytest.fixture(scope="module")
def two():
    with GPUs(2) as ranks:
        yield ranks


def run(ranks, function, *given, **options):
    return ranks.run(ranks.world, partial(function, None, *given, **options))


def alone(ranks, *given, **options):
    """Return logprobs and gradients of one rank; all ranks have the same rows, so the mean gradient is that of each."""
    outputs, grads = run(ranks, layouts.pipeline, *given, how={}, fields={}, **options)[0]
    return [logp for _, logp in outputs], grads


@pytest.mark.parametrize(
    "how, fields",
    [
        (dict(pp=2), dict(deallocate_pipeline_outputs=True)),
        (dict(pp=2), dict(num_layers_in_first_pipeline_stage=1)),
        (dict(pp=2, vpp=2), OVERLAPPED),
    ],
    ids=["even", "uneven", "interleaved"],
)
@pytest.mark.parametrize("packed", [False, True], ids=["padded", "packed"])
def test_pipeline_gives_the_bits_of_one_rank(how, fields, packed, checkpoint, two, long_rows):
    given = checkpoint("qwen3", torch.bfloat16, vocab=2000, **BIG), torch.bfloat16, long_rows
    results = run(two, layouts.pipeline, *given, how=how, fields=fields, packed=packed)
    test_pipeline.check(results, alone(two, *given, packed=packed))


@four
@pytest.mark.parametrize("how", [dict(tp=2, pp=2), dict(pp=4)], ids=["tp2-pp2", "pp4"])
def test_pipeline_on_four_gpus_changes_no_bit(how, checkpoint, long_rows):
    given = checkpoint("qwen3", torch.bfloat16, vocab=2000, **BIG), torch.bfloat16, long_rows
    fields = dict(sequence_parallel="tp" in how)
    with GPUs(4) as ranks:
        whole = run(ranks, layouts.pipeline, *given, how={**how, "pp": 1}, fields=fields)[0]
        results = run(ranks, layouts.pipeline, *given, how=how, fields=fields)
        test_pipeline.check(results, (alone(ranks, *given)[0], whole[1]))


@pytest.mark.parametrize("packed", [False, True], ids=["padded", "packed"])
def test_context_parallelism_gives_the_bits_of_one_rank(packed, checkpoint, two, long_rows):
    path = checkpoint("qwen3", torch.bfloat16, vocab=2000, **BIG)
    given = path, torch.bfloat16, long_rows
    options = dict(fields={}, packed=packed)
    whole = run(two, layouts.context, *given, how={}, **options)[0]
    results = run(two, layouts.context, *given, how=dict(cp=2), **options)
    test_context.check(results, whole, 2, flow=True)
    test_context.check_against_float64(results[0][2], path, long_rows, torch.bfloat16)
    for first, again in zip(results, run(two, layouts.context, *given, how=dict(cp=2), **options), strict=True):
        assert all(torch.equal(gradient, first[2][name]) for name, gradient in again[2].items())


@four
@pytest.mark.parametrize("how", [dict(cp=4), dict(tp=2, cp=2)], ids=["cp4", "tp2-cp2"])
def test_context_parallelism_on_four_gpus_gives_the_logprob_bits_of_one_rank(how, checkpoint, long_rows):
    """At CP 4, two ranks share each KV head."""
    path = checkpoint("qwen3", torch.bfloat16, vocab=2000, **(BIG | dict(kv_heads=2)))
    given = path, torch.bfloat16, long_rows
    with GPUs(4) as ranks:
        whole = run(ranks, layouts.context, *given, how={}, fields={}, packed=True)[0]
        fields = dict(sequence_parallel="tp" in how)
        results = run(ranks, layouts.context, *given, how=how, fields=fields, packed=True)
        test_context.check(results, whole, how["cp"])
        test_context.check_against_float64(results[0][2], path, long_rows, torch.bfloat16)


def test_optimizer_steps_are_equal_and_reproducible(checkpoint, two, long_rows):
    given = checkpoint("qwen3", torch.bfloat16, vocab=2000, **BIG), torch.bfloat16, long_rows, {}
    plain = run(two, layouts.data_parallel, *given, distributed=False)
    for overlap in (False, True):
        test_data_parallel.same(run(two, layouts.data_parallel, *given, overlap=overlap), plain)
    clipped = run(two, layouts.data_parallel, *given, overlap=True, clip=1.0)
    test_data_parallel.same(run(two, layouts.data_parallel, *given, overlap=True, clip=1.0), clipped)
