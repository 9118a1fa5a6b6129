"""The gated delta rule: a token's bits do not depend on packing, chunks or the cache; values against float64."""

import itertools
import random

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given

from alignkit import ops
from alignkit.errors import InputError
from alignkit.ops.delta_rule.layout import CHUNK
from alignkit.testing import assert_bitwise_equal

from .helpers import EXP, U32, UNIT, assert_within, dtypes, gamma, randn, seeds


def ints(*values):
    return torch.tensor(values)


def rows(n, key_heads, heads, k, v, dtype, seed, fastest=0.0):
    """Return q, k, v, g and beta; `fastest` is the logarithm of the largest decay rate."""
    keys = [torch.nn.functional.normalize(randn(n, key_heads, k, seed=seed + i), dim=-1).to(dtype) for i in (1, 2)]
    g = -torch.rand(n, heads).pow(3) * 10**fastest
    return [*keys, randn(n, heads, v, dtype=dtype, seed=seed), g, torch.rand(n, heads)]


def bounds(lengths):
    return torch.tensor([0, *lengths]).cumsum(0)


@given(lengths=st.lists(st.integers(0, 50), min_size=1, max_size=4), dtype=dtypes, seed=seeds)
def test_a_sequence_does_not_depend_on_packing_or_later_rows(lengths, dtype, seed):
    starts = bounds(lengths)
    given = rows(int(starts[-1]), 1, 2, 16, 9, dtype, seed, fastest=seed % 3)
    packed = ops.delta_rule(*given, starts)
    for low, high in itertools.pairwise(starts):
        alone = [t[low:high] for t in given]
        longer = [torch.cat([t, more]) for t, more in zip(alone, rows(3, 1, 2, 16, 9, dtype, seed + 5), strict=True)]
        for name, args in (("alone", alone), ("with later rows", longer)):
            out = ops.delta_rule(*args, ints(0, len(args[0])))[: high - low]
            assert_bitwise_equal(out, packed[low:high], name)
        one = [t[:, :1] if i < 2 else t[:, 1:] for i, t in enumerate(alone)]
        assert_bitwise_equal(ops.delta_rule(*one, ints(0, high - low)), packed[low:high, 1:], "one head")


@given(count=st.integers(1, 4), dtype=dtypes, seed=seeds)
def test_cached_chunks_have_the_bits_of_the_whole(count, dtype, seed):
    """Requests advance by random chunks in one batch; a request may begin with a copy of another's page."""
    rng = random.Random(seed)
    k, v, heads = 16, 9, 2
    prefix, lengths = rng.randint(1, 40), [rng.randint(1, 50) for _ in range(count)]
    shared = rows(prefix, 1, heads, k, v, dtype, seed)
    own = [rows(n, 1, heads, k, v, dtype, seed + i) for i, n in enumerate(lengths)]
    whole = [[torch.cat(pair) for pair in zip(shared, mine, strict=True)] for mine in own]
    pages = torch.full((count + 2, heads, ops.delta_page_words(k, v, dtype)), float("nan"))
    pages = torch.cat([pages, pages], dim=1)[:, :heads]  # the pages hold something else too
    ops.paged_delta_rule(*shared, pages, ints(count), ints(0, prefix), ints(prefix))
    pages[:count] = pages[count]
    done, parts = [0] * count, [[] for _ in range(count)]
    while any(n < length for n, length in zip(done, lengths, strict=True)):
        news = [min(length - n, rng.choice((0, 1, 2, 17))) for n, length in zip(done, lengths, strict=True)]
        batch = [[t[n : n + new] for t in mine] for mine, n, new in zip(own, done, news, strict=True)]
        joint = [torch.cat(ts) for ts in zip(*batch, rows(2, 1, heads, k, v, dtype, seed), strict=True)]
        done = [n + new for n, new in zip(done, news, strict=True)]
        starts = bounds(news)
        lens = ints(*(prefix + n for n in done))
        y = ops.paged_delta_rule(*joint, pages, ints(*range(count)), starts, lens)
        assert (y[starts[-1] :] == 0).all()
        for part, low, high in zip(parts, starts[:-1], starts[1:], strict=True):
            part.append(y[low:high])
    for part, args in zip(parts, whole, strict=True):
        want = ops.delta_rule(*args, ints(0, len(args[0])))[prefix:]
        assert_bitwise_equal(torch.cat(part), want, "cached in chunks")
    assert pages[count + 1].isnan().all(), "an unused page"


@pytest.mark.parametrize(
    "given, message",
    [
        ((0, 64, torch.bfloat16), "k_dim: must be at least 1, got 0"),
        ((64, 2.5, torch.bfloat16), "v_dim: expected an integer, got float 2.5"),
        ((64, 64, torch.float16), "dtype: must be one of torch.float32, torch.bfloat16, got torch.float16"),
        ((64, 64, "bfloat16"), "dtype: must be one of .*, got bfloat16"),
    ],
)
def test_invalid_sizes_of_a_page_are_rejected_by_name(given, message):
    with pytest.raises(InputError, match=message):
        ops.delta_page_words(*given)


def test_a_page_holds_the_state_and_a_chunk():
    sizes = 128 * 128 * 4, 2 * CHUNK * 128 * 2, CHUNK * 4, CHUNK * CHUNK * 4
    assert ops.delta_page_words(128, 128, torch.bfloat16) * 4 == sum(sizes)


class Bounded:
    """A float64 value with a bound of the error of its computation in fp32 (running error analysis)."""

    def __init__(self, value, error=0.0):
        self.value, self.error = value, torch.as_tensor(error, dtype=torch.float64).expand_as(value)

    def rounded(self, unit=U32):
        return Bounded(self.value, self.error + unit * (self.value.abs() + self.error))

    def __add__(self, other):
        return Bounded(self.value + other.value, self.error + other.error).rounded()

    def __sub__(self, other):
        return Bounded(self.value - other.value, self.error + other.error).rounded()

    def __mul__(self, other):
        error = self.value.abs() * other.error + other.value.abs() * self.error + self.error * other.error
        return Bounded(self.value * other.value, error).rounded()

    def __matmul__(self, other):
        a, b = self.value.abs() + self.error, other.value.abs() + other.error
        error = self.value.abs() @ other.error + self.error @ b + gamma(self.value.shape[-1]) * (a @ b)
        return Bounded(self.value @ other.value, error)

    def __getitem__(self, at):
        return Bounded(self.value[at], self.error[at])

    def exp(self):
        value = self.value.exp()
        return Bounded(value, value * self.error.expm1() + EXP * value * self.error.exp())

    @property
    def mT(self):
        return Bounded(self.value.mT, self.error.mT)


def recurrence(state, q, k, v, g, beta, scale):
    """Return o of one head and the last state, token by token."""
    out = []
    for t in range(len(q)):
        state = g[t].exp() * state
        state = state + torch.outer(k[t], beta[t] * (v[t] - state.T @ k[t]))
        out.append(scale * state.T @ q[t])
    return torch.stack(out), state


def chunk(state, q, k, v, g, beta, scale, unit):
    """Return o and the next state of one head and chunk by the contract's formula, with the errors of its roundings.

    `state` is exact; `unit` is the unit roundoff of T.
    """
    n, state = len(q), Bounded(state)
    sums = Bounded(g.cumsum(0), gamma(n) * g.abs().cumsum(0))
    seen = torch.ones(n, n, dtype=torch.bool).tril()
    apart = sums[:, None] - sums[None, :]
    decay = Bounded(apart.value.where(seen, 0), apart.error.where(seen, 0)).exp()
    a, b, c, step = (Bounded(t) for t in (q, k, v, beta[:, None]))
    lower = step * (decay * (b @ b.mT))
    inverse = Bounded(torch.eye(n, dtype=torch.float64))
    for i in range(n - 1):
        product = lower[i + 1 :, i, None] * inverse[i]
        below, worst = inverse.value[i + 1 :] - product.value, inverse.error[i + 1 :] + product.error
        inverse = Bounded(
            torch.cat([inverse.value[: i + 1], below]),
            torch.cat([inverse.error[: i + 1], worst + U32 * (below.abs() + worst)]),
        )
    grown, rounded = sums.exp()[:, None], state.rounded(unit)
    side = (step * (c - grown * (b @ rounded))).rounded(unit)
    u = (inverse.rounded(unit) @ side).rounded(unit)
    weights = decay * (a @ b.mT)
    weights = Bounded(weights.value.tril(), weights.error.tril()).rounded(unit)
    out = (Bounded(torch.tensor(scale, dtype=torch.float64)) * (grown * (a @ rounded) + weights @ u)).rounded(unit)
    tail = (u * (sums[-1] - sums).exp()[:, None]).rounded(unit)
    return out, sums[-1].exp() * state + b.mT @ tail


@pytest.mark.parametrize("alike", [False, True], ids=["random keys", "keys alike"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_error_of_a_chunk_is_within_the_bound_of_its_roundings(dtype, alike):
    """Each chunk starts at the cached state, which is exact. Decays are from none to exp(-80) per token."""
    n, k, v, heads, scale = 6 * CHUNK, 32, 24, 4, 32**-0.5
    keys = [torch.nn.functional.normalize(randn(n, heads, k, seed=i) + 3 * alike, dim=-1).to(dtype) for i in (1, 2)]
    g = -torch.rand(n, heads) * torch.tensor([0.0, 0.01, 1.0, 80.0])
    given = [*keys, randn(n, heads, v, dtype=dtype, seed=3), g, torch.rand(n, heads)]
    pages = torch.zeros(1, heads, ops.delta_page_words(k, v, dtype))
    for low in range(0, n, CHUNK):
        before = pages[0, :, : k * v].unflatten(1, (k, v)).double()
        new = [t[low : low + CHUNK] for t in given]
        got = ops.paged_delta_rule(*new, pages, ints(0), ints(0, CHUNK), ints(low + CHUNK), scale)
        after = pages[0, :, : k * v].unflatten(1, (k, v))
        for h in range(heads):
            exact = [t[:, h].double() for t in new]
            want = recurrence(before[h], *exact, scale)
            bounded = chunk(before[h], *exact, scale, UNIT[dtype])
            for name, mine, right, bound in zip(("o", "state"), (got[:, h], after[h]), want, bounded, strict=True):
                assert_within(bound.value, right, 1e-12 * right.abs().max(), f"formula of {name}")
                assert_within(mine, right, bound.error + 1e-12 * right.abs().max(), f"{name}, head {h}, row {low}")
                if dtype == torch.float32:
                    assert (bound.error < 0.01 * right.abs().max()).all(), "a bound that no result misses"
