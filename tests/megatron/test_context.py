"""Context parallelism: the logprobs of one process, whatever part of its sequences a rank has, and gradients near float64's."""

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


def joined(parts):
    """The tensors of several ranks in the order of their places, each of which has to be there once."""
    places = torch.cat([place for place, *_ in parts])
    assert len(places.unique()) == len(places)
    return [torch.cat(values)[places.argsort()] for values in list(zip(*parts, strict=True))[1:]]


def check(results, alone, size, *, flow=False):
    """Ranks (t, c) of `results` against one process: the same logprobs and entropies, and with `flow` the same gradient
    of the embeddings."""
    for t in range(len(results) // size):
        ranks = [results[i] for i in range(len(results)) if i % (len(results) // size) == t]
        for actual, expected in zip(joined([said for said, *_ in ranks]), joined([alone[0]]), strict=True):
            assert_bitwise_equal(actual, expected)
        assert {count for *_, count in ranks} == {alone[3] // size}
        if flow:
            (actual,), (expected,) = joined([of for _, of, *_ in ranks]), joined([alone[1]])
            assert_bitwise_equal(actual, expected, "the gradient of the embeddings")
    for *_, grads, _ in results:
        for name, gradient in grads.items():
            assert_bitwise_equal(gradient, results[0][2][name], name)


def near(grads, path, rows, dtype):
    """Gradients are within their bound of float64's."""
    arch, weights = read_architecture(path), reference.weights64(Checkpoint(path))
    scores = [reference.logits(arch, weights, row[:-1]) / 0.7 for row in rows]
    logp = [s.log_softmax(-1).gather(1, torch.tensor(row)[1:, None]) for s, row in zip(scores, rows, strict=True)]
    (-torch.cat(logp).mean()).backward()
    most = bound(arch, dtype)
    assert grads.keys() == weights.keys()
    for name, w in weights.items():
        error = ((grads[name].double() - w.grad).norm() / w.grad.norm()).item()
        assert error < most, f"{name} is off by {error:.2e}, more than {most:.2e}"


@given(chunks=st.lists(st.integers(0, 5), min_size=1, max_size=6).filter(any), size=st.sampled_from([1, 2, 4, 8]))
def test_places_of_rows(chunks, size):
    """As TransformerEngine divides them; sequences may be empty."""
    starts = [0, *itertools.accumulate(2 * size * n for n in chunks)]
    cu_seqlens, together = torch.tensor(starts), []
    for rank in range(size):
        cp = CP()
        cp.size, cp.rank = size, rank
        index = layouts.of_rank(starts, size, rank)
        begins = [max(s for s in starts if s <= i) for i in index]
        places = cp.positions(len(index), cu_seqlens, cu_seqlens.device)
        assert places.tolist() == [i - begin for i, begin in zip(index, begins, strict=True)]
        together += index
        assert len(index) * size == starts[-1]
    assert cp.order(starts[-1] // size, cu_seqlens).tolist() == together


@pytest.mark.parametrize("packed", [False, True], ids=["padded", "packed"])
@pytest.mark.parametrize("model", [("qwen3", torch.bfloat16), ("qwen2", torch.float32)], ids=["bf16", "fp32"])
def test_two_ranks(model, packed, checkpoint, rows, world, two):
    """Each has whole KV heads in the attention, so what flows back through it is the same bytes too."""
    arch, dtype = model
    path = checkpoint(arch, dtype)
    run = partial(layouts.context, fields=dict(cp_comm_type="p2p"), packed=packed)
    alone = run(None, path, dtype, rows, dict())
    split = partial(run, how=dict(cp=2))
    results = two.run(2, split, path, dtype, rows)
    check(results, alone, 2, flow=True)
    near(results[0][2], path, rows, dtype)
    for first, again in zip(results, two.run(2, split, path, dtype, rows), strict=True):
        for name, gradient in again[2].items():
            assert_bitwise_equal(gradient, first[2][name], f"{name}, another time")


@pytest.mark.parametrize("how", [dict(cp=4), dict(tp=2, cp=2)], ids=["cp4", "tp2-cp2"])
@pytest.mark.parametrize("packed", [False, True], ids=["padded", "packed"])
def test_four_ranks(how, packed, checkpoint, rows, world, four):
    """In the attention two ranks have the same KV head, whose gradient they add."""
    path = checkpoint("qwen3", torch.bfloat16)
    run = partial(layouts.context, packed=packed, mask=not packed)
    alone = run(None, path, torch.bfloat16, rows, dict(), {})
    fields = dict(sequence_parallel="tp" in how, recompute_granularity="selective", recompute_modules=["core_attn"])
    results = four.run(4, partial(run, how=how, fields=fields), path, torch.bfloat16, rows)
    check(results, alone, how["cp"])
    near(results[0][2], path, rows, torch.bfloat16)


@pytest.mark.parametrize(
    "change, packed, kind, named",
    [
        (layouts.wrong_token, False, InputError, "input_ids: .*300"),
        (layouts.other_lengths, True, InputError, "packed_seq_params: differs .* of the context-parallel group"),
        (layouts.odd_lengths, True, InputError, "cu_seqlens must be multiples of 4"),
        (layouts.wrong_label, False, InputError, "labels: id 300"),
        (layouts.wrong_mask, False, UnsupportedError, "attention_mask"),
    ],
    ids=["tokens", "lengths", "chunks", "labels", "mask"],
)
def test_what_is_wrong_on_one_rank_raises_on_all(change, packed, kind, named, checkpoint, rows, two):
    run = partial(layouts.context, how=dict(cp=2), fields={}, packed=packed, mask=not packed, change=change)
    for outcome in two.outcomes(2, run, checkpoint(), torch.bfloat16, rows):
        assert isinstance(outcome, Failed) and outcome.kind is kind, outcome
        assert re.search(named, outcome.message), outcome.message
