"""Pipeline parallelism over gloo ranks under Megatron's real schedules: logprobs and gradients of one process.

layouts.py holds the functions that run on the ranks; test_hybrid.py and test_parallel_cuda.py import helpers.
"""

from functools import partial

import pytest
import torch

from alignkit.convert import read_architecture
from alignkit.errors import InputError, UnsupportedError
from alignkit.testing import Failed, assert_bitwise_equal
from tests.megatron import layouts, workers
from tests.megatron.test_gradients import bound

FOUR = dict(layers=4)


def alone(world, path, dtype, rows, micro_batches=2):
    """Return the logprobs of each micro-batch, and the gradients of the same step, on one process."""
    with torch.no_grad():
        logp = [
            workers.all_calls(world, path, dtype, False, rows[i::micro_batches])["one"] for i in range(micro_batches)
        ]
    return logp, workers.step(world, path, dtype, False, rows, micro_batches=micro_batches)[1]


def check(results, expected, *, exact=lambda name: True, limit=0.0):
    """Check results of `layouts.pipeline` against `expected`, the result of `alone`.

    Logprobs must be bit-equal and on the last stage only. The gradients of a weight must be bit-equal on all ranks that
    hold it. They must equal the expected ones bit for bit if ``exact(name)``, else within a relative error of `limit`.
    """
    logp, grads = expected
    assert any(outputs for outputs, _ in results) and not results[0][0]
    last = [outputs for outputs, _ in results if outputs]
    for part, wanted in enumerate(logp):
        assert torch.cat([outputs[part][0] for outputs in last]).unique().tolist() == list(range(len(wanted)))
        for outputs in last:
            numbers, actual = outputs[part]
            assert_bitwise_equal(actual, wanted[numbers], f"micro-batch {part}")
    assert set().union(*(held for _, held in results)) == set(grads)
    for name, wanted in grads.items():
        held = [own[name] for _, own in results if name in own]
        for actual in held:
            assert_bitwise_equal(actual, held[0], f"{name} on another rank")
        if exact(name):
            assert_bitwise_equal(held[0], wanted, name)
        else:
            error = ((held[0] - wanted).norm() / wanted.norm()).item()
            assert error < limit, f"{name} is off by {error:.2e}, more than {limit:.2e}"


OVERLAPPED = dict(batch_p2p_comm=False, overlap_p2p_comm=True)
"""Fields that Megatron's interleaved schedule requires with two stages."""


@pytest.mark.parametrize(
    "how, fields",
    [
        (dict(pp=2), {}),
        (dict(pp=2), dict(deallocate_pipeline_outputs=True, num_layers_in_first_pipeline_stage=1)),
        (dict(pp=2), dict(num_layers_in_last_pipeline_stage=1)),
        (dict(pp=2), dict(account_for_embedding_in_pipeline_split=True, account_for_loss_in_pipeline_split=True)),
        (dict(pp=2, vpp=2), OVERLAPPED),
        (dict(pp=2), dict(pipeline_model_parallel_layout="Et|tttL")),
        (dict(pp=2, vpp=2), dict(pipeline_model_parallel_layout="E|tt|tt|L") | OVERLAPPED),
        (dict(pp=2, vpp=2), dict(pipeline_model_parallel_layout="E||tttt|L") | OVERLAPPED),
    ],
    ids=[
        "even",
        "first",
        "last",
        "accounted for",
        "interleaved",
        "layout",
        "embedding and head alone",
        "an empty stage",
    ],
)
def test_pipeline_gives_the_bits_of_one_process(how, fields, checkpoint, rows, world, two):
    """Gradients do not depend on the stage boundaries."""
    given = checkpoint("qwen3", torch.bfloat16, **FOUR), torch.bfloat16, rows
    check(two.run(2, partial(layouts.pipeline, how=how, fields=fields), *given), alone(world, *given))


def test_four_stages_in_fp32_with_the_loss_call(checkpoint, rows, world, four):
    given = checkpoint("qwen2", torch.float32, **FOUR), torch.float32, rows
    run = partial(layouts.pipeline, how=dict(pp=4), fields={}, by="loss call")
    check(four.run(4, run, *given), alone(world, *given))


def test_tied_embeddings_agree_within_the_bound(checkpoint, rows, world, two):
    """The gradients of the first and last stage are added in fp32; in one process, in the model type."""
    path = checkpoint("llama", torch.bfloat16, tied=True)
    given = path, torch.bfloat16, rows
    results = two.run(2, partial(layouts.pipeline, how=dict(pp=2), fields={}), *given)
    assert all("model.embed_tokens.weight" in held for _, held in results)
    limit = bound(read_architecture(path), torch.bfloat16)
    check(results, alone(world, *given), exact=lambda name: "embed" not in name, limit=limit)


@pytest.mark.parametrize("packed", [False, True], ids=["padded", "packed"])
def test_pipeline_with_tensor_and_sequence_parallelism_changes_no_bit(packed, checkpoint, rows, world, two, four):
    """Logprobs have the bits of one process, gradients those of tensor parallelism without a pipeline."""
    given = checkpoint("qwen3", torch.bfloat16, **FOUR), torch.bfloat16, rows
    run = partial(layouts.pipeline, fields=dict(sequence_parallel=True), packed=packed)
    logp, _ = alone(world, *given)
    _, grads = two.run(2, partial(run, how=dict(tp=2)), *given)[0]
    results = four.run(4, partial(run, how=dict(tp=2, pp=2)), *given)
    assert [outputs is None for outputs, _ in results] == [True, True, False, False]
    check(results, (logp, grads))


def test_pipeline_with_context_parallelism_gives_the_logprobs_of_one_process(checkpoint, rows, world, four):
    """Two stages of two context-parallel ranks each."""
    path = checkpoint("qwen3", torch.bfloat16)
    given = path, torch.bfloat16, rows
    results = four.run(4, partial(layouts.pipeline, how=dict(cp=2, pp=2), fields={}, packed=True), *given)
    assert [outputs is None for outputs, _ in results] == [True, True, False, False]
    limit = bound(read_architecture(path), torch.bfloat16)
    check(results, alone(world, *given), exact=lambda name: False, limit=limit)


@pytest.mark.parametrize(
    "change, kind, named",
    [
        (layouts.set_softmax_scale, UnsupportedError, "softmax_scale"),
        (
            layouts.change_rotary_base,
            InputError,
            "rotary_base: must be equal on all ranks of the pipeline-parallel group",
        ),
        (layouts.change_layer_number, InputError, "must have layers 1 to 4 in order, got [1, 2, 1, 4]"),
    ],
    ids=["a field", "a setting", "a layer"],
)
@pytest.mark.parametrize("how", [dict(pp=2), dict(tp=2, pp=2)], ids=["pp2", "tp2-pp2"])
def test_invalid_setting_on_one_stage_raises_on_all_ranks(change, kind, named, how, checkpoint, rows, two, four):
    ranks, size = (four, 4) if "tp" in how else (two, 2)
    given = checkpoint("qwen3", torch.bfloat16, **FOUR), torch.bfloat16, rows
    for outcome in ranks.outcomes(size, partial(layouts.pipeline, how=how, fields={}, change=change), *given):
        assert isinstance(outcome, Failed) and outcome.kind is kind and named in outcome.message, outcome


def test_ranks_with_different_versions_of_megatron_raise(checkpoint, rows, two):
    """A version counts by its files, or by the certificate that proves it on the rank's machine."""
    given = checkpoint("qwen3", torch.bfloat16, **FOUR), torch.bfloat16, rows
    run = partial(layouts.pipeline_beside_another_megatron, how=dict(pp=2), fields={})
    for outcome in two.outcomes(2, run, *given):
        assert isinstance(outcome, Failed) and outcome.kind is InputError, outcome
        assert "Megatron-core: must be equal on all ranks of the pipeline-parallel group" in outcome.message


def test_stage_without_hidden_states_raises(checkpoint, two):
    first, last = two.outcomes(2, layouts.second_stage_without_schedule, checkpoint())
    assert first is None
    assert last.kind is InputError and "input_tensor: expected bfloat16 [any, any, 256], got None" in last.message
