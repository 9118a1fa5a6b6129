"""short_conv: a sequence's bits do not depend on packing, chunks or the cache; nothing else is read or written."""

import itertools
import random

import hypothesis.strategies as st
import torch
from hypothesis import given

from alignkit import ops
from alignkit.testing import assert_bitwise_equal

from .helpers import dtypes, randn, seeds


def ints(*values):
    return torch.tensor(values)


@given(lengths=st.lists(st.integers(0, 30), min_size=1, max_size=5), taps=st.integers(1, 8), dtype=dtypes, seed=seeds)
def test_a_sequence_and_its_gradient_do_not_depend_on_packing(lengths, taps, dtype, seed):
    """Padding rows with gradient 0 change nothing, the gradient of the filter included."""
    starts = torch.tensor([0, *lengths]).cumsum(0)
    x, w = randn(int(starts[-1]), 9, dtype=dtype, seed=seed), randn(9, taps, dtype=dtype)
    g, joint = randn(*x.shape, dtype=dtype, seed=seed + 1), x.clone().requires_grad_()
    y = ops.short_conv(joint, w, starts)
    y.backward(g)
    for low, high in itertools.pairwise(starts):
        alone, padded = x[low:high].clone().requires_grad_(), torch.cat([x[low:high], randn(3, 9, dtype=dtype)])
        padded, filters = padded.requires_grad_(), [w.clone().requires_grad_() for _ in range(2)]
        out = ops.short_conv(alone, filters[0], ints(0, high - low))
        out.backward(g[low:high])
        longer = ops.short_conv(padded, filters[1], ints(0, high - low + 3))
        longer.backward(torch.cat([g[low:high], g.new_zeros(3, 9)]))
        for got in (out, longer[: high - low]):
            assert_bitwise_equal(got, y[low:high], "result")
        for got in (alone.grad, padded.grad[: high - low]):
            assert_bitwise_equal(got, joint.grad[low:high], "gradient of x")
        assert_bitwise_equal(filters[1].grad, filters[0].grad, "gradient of the filter")


@given(count=st.integers(1, 4), taps=st.integers(1, 8), dtype=dtypes, seed=seeds)
def test_cached_chunks_have_the_bits_of_the_whole(count, taps, dtype, seed):
    """Requests advance by random chunks in one batch, in slots whose old contents are garbage."""
    rng = random.Random(seed)
    lengths = [rng.randint(1, 30) for _ in range(count)]
    w, xs = randn(9, taps, dtype=dtype, seed=seed), [randn(n, 9, dtype=dtype) for n in lengths]
    pages = randn(len(xs) + 1, 2 * taps, 9, dtype=dtype).fill_(float("nan"))
    state = pages[:, 1:taps]  # part of a page
    slots = [(seed + i) % len(pages) for i in range(len(xs))]
    done, parts = [0] * len(xs), [[] for _ in xs]
    while any(n < len(x) for n, x in zip(done, xs, strict=True)):
        news = [min(len(x) - n, rng.choice((0, 1, 2, 9))) for n, x in zip(done, xs, strict=True)]
        starts = torch.tensor([0, *news]).cumsum(0)
        rows = torch.cat(
            [x[n : n + new] for x, n, new in zip(xs, done, news, strict=True)] + [randn(2, 9, dtype=dtype)]
        )
        done = [n + new for n, new in zip(done, news, strict=True)]
        y = ops.paged_short_conv(rows, w, state, ints(*slots), starts, ints(*done))
        assert (y[starts[-1] :] == 0).all()
        for part, low, high in zip(parts, starts, starts[1:], strict=False):
            part.append(y[low:high])
    for x, part, slot in zip(xs, parts, slots, strict=True):
        assert_bitwise_equal(torch.cat(part), ops.short_conv(x, w, ints(0, len(x))), "result")
        last = torch.cat([x.new_zeros(taps, 9), x])[len(x) + 1 :]
        assert_bitwise_equal(state[slot], last, "cached rows")
    assert pages[:, 0].isnan().all() and pages[:, taps:].isnan().all(), "the rest of the pages"
    (unused,) = {*range(len(pages))} - {*slots}
    assert pages[unused].isnan().all()
