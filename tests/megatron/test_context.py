"""Context parallelism over gloo ranks with real Megatron-core: logprobs have the bits of one process.

Gradients agree with float64 (reference.py) within a bound. layouts.py holds the functions that run on the ranks.
"""

import itertools
import re
from functools import partial

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from alignkit.convert import Checkpoint, read_architecture
from alignkit.dist import CP
from alignkit.errors import InputError, UnsupportedError
from alignkit.testing import Failed, assert_bitwise_equal
from tests.megatron import layouts, reference
from tests.megatron.test_gradients import bound


def concatenate_in_order(parts):
    """Return the tensors of all ranks in the order of their positions, which must be unique."""
    places = torch.cat([place for place, *_ in parts])
    assert len(places.unique()) == len(places)
    return [torch.cat(values)[places.argsort()] for values in list(zip(*parts, strict=True))[1:]]


def check(results, alone, size, *, flow=False):
    """Check results of `layouts.context` against `alone`, the result of one process.

    Logprobs and entropies must be bit-equal, and with `flow` also the gradients of the embeddings. The outer index of
    the ranks is the context-parallel one, of `size` ranks; all ranks must have the same weight gradients.
    """
    for t in range(len(results) // size):
        ranks = [results[i] for i in range(len(results)) if i % (len(results) // size) == t]
        for actual, expected in zip(
            concatenate_in_order([outputs for outputs, *_ in ranks]), concatenate_in_order([alone[0]]), strict=True
        ):
            assert_bitwise_equal(actual, expected)
        assert {count for *_, count in ranks} == {alone[3] // size}
        if flow:
            (actual,), (expected,) = concatenate_in_order([of for _, of, *_ in ranks]), concatenate_in_order([alone[1]])
            assert_bitwise_equal(actual, expected, "the gradient of the embeddings")
    for *_, grads, _ in results:
        for name, gradient in grads.items():
            assert_bitwise_equal(gradient, results[0][2][name], name)


def check_against_float64(grads, path, rows, dtype):
    """Check that gradients agree with float64 within `bound`."""
    arch, weights = read_architecture(path), reference.weights64(Checkpoint(path))
    scores = [reference.logits(arch, weights, row[:-1]) / 0.7 for row in rows]
    logp = [s.log_softmax(-1).gather(1, torch.tensor(row)[1:, None]) for s, row in zip(scores, rows, strict=True)]
    (-torch.cat(logp).mean()).backward()
    limit = bound(arch, dtype)
    assert grads.keys() == weights.keys()
    for name, w in weights.items():
        error = ((grads[name].double() - w.grad).norm() / w.grad.norm()).item()
        assert error < limit, f"{name} is off by {error:.2e}, more than {limit:.2e}"


@given(chunks=st.lists(st.integers(0, 5), min_size=1, max_size=6).filter(any), size=st.sampled_from([1, 2, 4, 8]))
def test_cp_positions_match_transformer_engines_layout(chunks, size):
    starts = [0, *itertools.accumulate(2 * size * n for n in chunks)]
    cu_seqlens, together = torch.tensor(starts), []
    for rank in range(size):
        cp = CP()
        cp.size, cp.rank = size, rank
        index = layouts.cp_indices(starts, size, rank)
        begins = [max(s for s in starts if s <= i) for i in index]
        places = cp.positions(len(index), cu_seqlens, cu_seqlens.device)
        assert places.tolist() == [i - begin for i, begin in zip(index, begins, strict=True)]
        together += index
        assert len(index) * size == starts[-1]
    assert cp.order(starts[-1] // size, cu_seqlens).tolist() == together


@pytest.mark.parametrize("packed", [False, True], ids=["padded", "packed"])
@pytest.mark.parametrize("model", [("qwen3", torch.bfloat16), ("qwen2", torch.float32)], ids=["bf16", "fp32"])
def test_two_ranks_give_the_bits_of_one(model, packed, checkpoint, rows, world, two):
    """A KV head is on one rank only, so gradients through attention are bit-equal too."""
    arch, dtype = model
    path = checkpoint(arch, dtype)
    run = partial(layouts.context, fields=dict(cp_comm_type="p2p"), packed=packed)
    alone = run(None, path, dtype, rows, dict())
    split = partial(run, how=dict(cp=2))
    results = two.run(2, split, path, dtype, rows)
    check(results, alone, 2, flow=True)
    check_against_float64(results[0][2], path, rows, dtype)
    for first, again in zip(results, two.run(2, split, path, dtype, rows), strict=True):
        for name, gradient in again[2].items():
            assert_bitwise_equal(gradient, first[2][name], f"{name}, repeated")


@pytest.mark.parametrize("how", [dict(cp=4), dict(tp=2, cp=2)], ids=["cp4", "tp2-cp2"])
@pytest.mark.parametrize("packed", [False, True], ids=["padded", "packed"])
def test_four_ranks_give_the_logprob_bits_of_one(how, packed, checkpoint, rows, world, four):
    """Two ranks share each KV head, so its gradient is a sum over ranks; only logprobs and entropies are bit-equal."""
    path = checkpoint("qwen3", torch.bfloat16)
    run = partial(layouts.context, packed=packed, mask=not packed)
    alone = run(None, path, torch.bfloat16, rows, dict(), {})
    fields = dict(sequence_parallel="tp" in how, recompute_granularity="selective", recompute_modules=["core_attn"])
    results = four.run(4, partial(run, how=how, fields=fields), path, torch.bfloat16, rows)
    check(results, alone, how["cp"])
    check_against_float64(results[0][2], path, rows, torch.bfloat16)


@pytest.mark.parametrize(
    "change, packed, kind, named",
    [
        (layouts.wrong_token, False, InputError, "input_ids: .*300"),
        (layouts.other_lengths, True, InputError, "packed_seq_params: must be equal .* of the context-parallel group"),
        (
            layouts.odd_lengths,
            True,
            InputError,
            r"cu_seqlens_q(_padded)?: must contain only multiples of 2 \* context_parallel_size = 4, got \d+ at index",
        ),
        (layouts.wrong_label, False, InputError, r"labels: must be in \[0, 300\) .*, got 300 at"),
        (layouts.wrong_mask, False, UnsupportedError, "attention_mask"),
    ],
    ids=["tokens", "lengths", "chunks", "labels", "mask"],
)
def test_invalid_input_on_one_rank_raises_on_all_ranks(change, packed, kind, named, checkpoint, rows, two):
    run = partial(layouts.context, how=dict(cp=2), fields={}, packed=packed, mask=not packed, change=change)
    for outcome in two.outcomes(2, run, checkpoint(), torch.bfloat16, rows):
        assert isinstance(outcome, Failed) and outcome.kind is kind, outcome
        assert re.search(named, outcome.message), outcome.message
