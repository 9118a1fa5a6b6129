"""A row's bits do not depend on the batch, its order, chunks, padding or paging, for every op and on each device.

The first test follows from the ops' samples: their arguments state which are rows.
"""

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given

from alignkit import ops
from alignkit.ops import library
from alignkit.ops.linear import matmul
from alignkit.testing import assert_bitwise_equal
from tests.samples import GENERATORS, arguments, assert_same, generate, leaves_of, random_gradient, results

from .helpers import CPU, dtypes, linear_dtypes, randn, seeds

ROW_WISE = [g for g in GENERATORS if any(t.rows for t in generate(g, 0, rows=3).tensors().values())]


@pytest.mark.parametrize("generator", ROW_WISE, ids=lambda g: f"{g.__module__.split('.')[-2]} {g.__name__}")
@given(n=st.integers(1, 300), scale=st.sampled_from([1, 8]), seed=seeds)
def test_a_row_and_its_gradient_do_not_depend_on_the_other_rows(generator, n, scale, seed):
    """A permutation, two chunks and a single row change no bit of a row's results, or of the gradient of its inputs."""
    sample = generate(generator, seed, rows=n, scale=scale)
    args, rows = arguments(sample), [name for name, t in sample.tensors().items() if t.rows and t.value.ndim]
    leaves = [name for name in leaves_of(sample) if name in rows]
    gradients = {}

    def whole_gradient(i, t):
        gradients[i] = random_gradient(i, t)
        return gradients[i]

    whole = results(sample.call, args, leaves, whole_gradient)
    torch.manual_seed(seed)
    cut, one = int(torch.randint(0, n + 1, ())), int(torch.randint(0, n, ()))
    for part in (torch.randperm(n), torch.arange(cut), torch.arange(cut, n), torch.tensor([one])):
        some = args | {name: args[name][part] for name in rows}
        got = results(sample.call, some, leaves, lambda i, t, part=part: gradients[i][part])
        assert_same(got, {name: t[part] for name, t in whole.items()}, f"{sample.op}, rows {part.tolist()}")


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("generator", ROW_WISE, ids=lambda g: f"{g.__module__.split('.')[-2]} {g.__name__}")
def test_an_empty_batch_gives_empty_results_and_zero_gradients(generator, seed):
    sample = generate(generator, seed, rows=0)
    for name, t in results(sample.call, arguments(sample), leaves_of(sample)).items():
        assert t.numel() == 0 or (not name.startswith("result") and bool((t == 0).all())), name


@given(m=st.integers(1, 300), n=st.integers(1, 200), k=st.integers(1, 640), dtype=linear_dtypes, seed=seeds)
def test_columns_of_a_linear_layer_are_independent(m, n, k, dtype, seed):
    x, w = randn(m, k, dtype=dtype, seed=seed), randn(n, k, dtype=dtype)
    assert_bitwise_equal(ops.linear(x, w[n // 2 :]), ops.linear(x, w)[:, n // 2 :], "columns of a shard")


@given(t=st.integers(1, 70), half=st.integers(1, 40), rest=st.integers(0, 40), dtype=dtypes, seed=seeds)
def test_partial_rope_equals_rope_of_a_smaller_head(t, half, rest, dtype, seed):
    """The other dimensions stay unchanged; gradients and strided inputs too."""
    rotary = 2 * half
    x, g = (randn(t, 3, rotary + 2 * rest, dtype=dtype, seed=s) for s in (seed, seed + 1))
    positions, table = torch.randint(0, 50, (t,)), ops.rope_table(rotary, 50, 1e4, x.device)
    leaf, small = x.requires_grad_(), x.detach()[..., :rotary].requires_grad_()
    y, part = ops.rope(leaf, positions, table, rotary_dim=rotary), ops.rope(small, positions, table)
    assert_bitwise_equal(y, torch.cat([part, x[..., rotary:]], -1))
    y.backward(g)
    part.backward(g[..., :rotary])
    assert_bitwise_equal(leaf.grad, torch.cat([small.grad, g[..., rotary:]], -1), "dx")
    q, k = library.rope_qk(x.detach()[:, :2], x.detach()[:, 2:], positions, table, rotary)
    assert_bitwise_equal(torch.cat([q, k], 1), y.detach(), "q and k")


@given(n=st.integers(1, 260), v=st.integers(1, 700), dtype=dtypes, seed=seeds)
def test_linear_logp_does_not_depend_on_padding_or_the_form_of_the_call(n, v, dtype, seed):
    """A padded vocabulary, ignored rows, given logits and log_softmax change no bit."""
    h, w = randn(n, 48, dtype=dtype, seed=seed), randn(v, 48, dtype=dtype)
    target = torch.randint(0, v, (n,))
    whole = ops.linear_logp(h, w, target)
    logits = ops.head_logits(h, w)
    assert_bitwise_equal(ops.logp_from_logits(logits, target), whole, "logits given")
    assert_bitwise_equal(ops.log_softmax(logits).gather(1, target[:, None])[:, 0], whole, "log_softmax")
    padded = torch.cat([w, randn(37, 48, dtype=dtype, scale=100)])
    assert_bitwise_equal(ops.linear_logp(h, padded, target, vocab_size=v), whole, "padded vocabulary")
    some = torch.where(torch.rand(n) < 0.3, -100, target)
    assert_bitwise_equal(ops.linear_logp(h, w, some), torch.where(some == -100, 0.0, whole), "ignored rows")
    masked = torch.cat([logits, torch.full((n, 200), float("-inf"))], 1)
    assert_bitwise_equal(ops.logp_from_logits(masked, target), whole, "ids masked with -inf")


@given(n=st.integers(2, 60), dtype=dtypes, seed=seeds)
def test_main_grad_accumulates_over_passes(n, dtype, seed):
    """The CPU continues one chain over the rows of both passes; a GPU adds the chains of the passes."""
    h, w = randn(n, 48, dtype=dtype, seed=seed), randn(300, 48, dtype=dtype)
    target, g = torch.randint(0, 300, (n,)), randn(n)
    target[0] = -100

    def add(main_grad, rows):
        weight = w.clone().requires_grad_()
        logp = ops.linear_logp(h[rows], weight, target[rows], main_grad=main_grad, keep_logits=n % 2 == 0)
        logp.backward(g[rows])
        assert weight.grad is None
        return main_grad

    whole, first, second, both = slice(0, n), slice(0, n // 2), slice(n // 2, n), torch.zeros(300, 48)
    for rows in (first, second):
        add(both, rows)
    expected = (
        add(torch.zeros(300, 48), whole) if CPU else sum(add(torch.zeros(300, 48), rows) for rows in (first, second))
    )
    assert_bitwise_equal(both, expected, "two passes")
    weight = w.clone().requires_grad_()
    ops.linear_logp(h, weight, target).backward(g)
    assert_bitwise_equal(add(torch.zeros(300, 48), whole).to(dtype), weight.grad, "rounded")


@given(lens=st.lists(st.integers(1, 150), min_size=1, max_size=5), dtype=dtypes, seed=seeds)
def test_packed_attention_equals_each_sequence_in_isolation(lens, dtype, seed):
    """Padding sequences into one micro-batch changes no bit either."""
    total, cu = sum(lens), torch.tensor([0, *lens]).cumsum(0)
    q, k, v = (randn(total, h, 32, dtype=dtype, seed=seed + h) for h in (4, 2, 2))
    packed = ops.attention(q, k, v, cu)
    width = max(lens) + 5
    pads = [torch.full((len(lens), width, *t.shape[1:]), 3.0, dtype=dtype) for t in (q, k, v)]
    for i, n in enumerate(lens):
        s = slice(int(cu[i]), int(cu[i + 1]))
        assert_bitwise_equal(ops.attention(q[s], k[s], v[s], torch.tensor([0, n])), packed[s], f"sequence {i} alone")
        for pad, t in zip(pads, (q, k, v), strict=True):
            pad[i, :n] = t[s]
    padded = ops.attention(*(p.flatten(0, 1) for p in pads), torch.arange(len(lens) + 1) * width).unflatten(
        0, (-1, width)
    )
    for i, n in enumerate(lens):
        assert_bitwise_equal(padded[i, :n], packed[int(cu[i]) : int(cu[i + 1])], f"sequence {i} padded")


@given(
    length=st.integers(1, 700 if not CPU else 150),
    batch=st.integers(1, 5),
    kv=st.integers(1, 3),
    group=st.integers(1, 4),
    dim=st.sampled_from([32, 64, 128]),
    dtype=dtypes,
    seed=seeds,
)
def test_micro_batch_rows_can_be_passed_as_heads(length, batch, kv, group, dim, dtype, seed):
    """A strided [S, B, H, D] tensor equals one sequence of B x H heads, gradients included."""
    joint = randn(length, batch, kv, (group + 2) * dim, dtype=dtype, seed=seed)
    g, results = randn(length, batch, kv * group, dim, dtype=dtype), []
    for heads in (True, False):
        leaf = joint.clone().requires_grad_()
        q, k, v = leaf.split([group * dim, dim, dim], dim=-1)
        q = q.reshape(length, batch, kv * group, dim)
        if heads:
            out = ops.attention(*(t.flatten(1, 2) for t in (q, k, v)), torch.tensor([0, length])).view(g.shape)
        else:
            starts = torch.arange(batch + 1) * length
            out = ops.attention(*(t.transpose(0, 1).flatten(0, 1) for t in (q, k, v)), starts)
            out = out.view(batch, length, *g.shape[2:]).transpose(0, 1)
        out.backward(g)
        results.append((out.detach().contiguous(), leaf.grad))
    for name, one, other in zip(("outputs", "gradients"), *results, strict=True):
        assert_bitwise_equal(one, other, name)


@given(
    lens=st.lists(st.integers(1, 150), min_size=1, max_size=4),
    block=st.sampled_from([1, 16, 32, 48]),
    dtype=dtypes,
    seed=seeds,
)
def test_paged_attention_equals_training(lens, block, dtype, seed):
    """Prefill chunks of any size and decode over a shuffled cache with NaN in unused rows."""
    total, cu = sum(lens), torch.tensor([0, *lens]).cumsum(0)
    q, k, v = (randn(total, h, 32, dtype=dtype, seed=seed + h) for h in (4, 2, 2))
    want = ops.attention(q, k, v, cu)
    need = [-(-n // block) for n in lens]
    table = torch.zeros(len(lens), max(need), dtype=torch.int32)
    blocks = torch.randperm(sum(need) + 3).int()
    caches = [torch.full((sum(need) + 3, block, 2, 32), float("nan"), dtype=dtype) for _ in range(2)]
    for i, n in enumerate(need):
        table[i, :n], blocks = blocks[:n], blocks[n:]
    got, done = torch.zeros_like(want), [0] * len(lens)
    while any(d < n for d, n in zip(done, lens, strict=True)):
        step = [
            min(n - d, int(torch.randint(0, 60, ())) if torch.rand(()) < 0.5 else 1)
            for d, n in zip(done, lens, strict=True)
        ]
        rows = [torch.arange(int(cu[i]) + done[i], int(cu[i]) + done[i] + s) for i, s in enumerate(step)]
        for i, r in enumerate(rows):
            for row in r.tolist():
                p = row - int(cu[i])
                for cache, t in zip(caches, (k, v), strict=True):
                    cache[table[i, p // block], p % block] = t[row]
        done = [d + s for d, s in zip(done, step, strict=True)]
        index = torch.cat(rows)
        got[index] = ops.paged_attention(
            q[index], *caches, table, torch.tensor([0, *step]).cumsum(0).int(), torch.tensor(done).int()
        )
    assert_bitwise_equal(got, want)


@given(lens=st.lists(st.integers(1, 90), min_size=2, max_size=4), dtype=dtypes, seed=seeds)
def test_attention_gradients_depend_on_their_sequence_only(lens, dtype, seed):
    total, cu = sum(lens), torch.tensor([0, *lens]).cumsum(0)
    q, k, v = (randn(total, h, 32, dtype=dtype, seed=seed + h) for h in (4, 2, 2))
    d_out = randn(total, 4, 32, dtype=dtype)

    def grads(s, cu):
        leaves = [t[s].clone().requires_grad_() for t in (q, k, v)]
        ops.attention(*leaves, cu).backward(d_out[s])
        return [t.grad for t in leaves]

    whole = grads(slice(None), cu)
    for i, n in enumerate(lens):
        s = slice(int(cu[i]), int(cu[i + 1]))
        for name, a, b in zip("qkv", grads(s, torch.tensor([0, n])), whole, strict=True):
            assert_bitwise_equal(a, b[s], f"d{name} of sequence {i}")


@given(n=st.integers(2, 200), dtype=dtypes, seed=seeds)
def test_attention_gradients_that_underflow_do_not_depend_on_masked_rows(n, dtype, seed):
    """The sign of a sum that underflows is the same with and without masked rows after it."""
    torch.manual_seed(seed)
    q, k, v, g = (torch.randn(n, 2, 64) for _ in range(4))
    factors = 10.0 ** torch.empty(4).uniform_(-40, 0)
    q, k, v, g = (t.mul(f).to(dtype) for t, f in zip((q, k, v, g), factors.tolist(), strict=True))

    def gradients(rows: int):
        given = [t[:rows].detach().requires_grad_() for t in (q, k, v)]
        out = ops.attention(*given, cu_seqlens=torch.tensor([0, rows]))
        return torch.autograd.grad(out, given, g[:rows])

    whole, half = gradients(n), gradients(n // 2)
    assert_bitwise_equal(whole[0][: n // 2], half[0], "the gradient of q")


@given(n=st.integers(2, 300), dtype=dtypes, seed=seeds)
def test_head_gradients_do_not_depend_on_padding(n, dtype, seed):
    """A row of dhidden depends only on its row; dweight depends only on the valid rows and their order."""
    h, w = randn(n, 32, dtype=dtype, seed=seed), randn(300, 32, dtype=dtype)
    target, g = torch.randint(0, 300, (n,)), randn(n)

    def grads(h, target, g):
        h, wt = h.clone().requires_grad_(), w.clone().requires_grad_()
        ops.linear_logp(h, wt, target).backward(g)
        return h.grad, wt.grad

    dh, dw = grads(h, target, g)
    where = torch.arange(n) + torch.randint(0, 2, (n,)).cumsum(0)
    size = int(where[-1]) + 3
    padded = grads(
        torch.ones(size, 32, dtype=dtype).index_copy(0, where, h),
        torch.full((size,), -100).index_copy(0, where, target),
        torch.ones(size).index_copy(0, where, g),
    )
    assert_bitwise_equal(padded[0][where], dh, "dhidden")
    assert_bitwise_equal(padded[1], dw, "dweight")


@given(m=st.integers(1, 40), k=st.integers(1, 300), n=st.integers(1, 40), dtype=dtypes, seed=seeds)
def test_accumulation_continues_the_chain(m, k, n, dtype, seed):
    a, b = randn(m, k, dtype=dtype, seed=seed), randn(n, k, dtype=dtype)
    cut = int(torch.randint(0, k + 1, ())) if CPU else int(torch.randint(0, k // 16 + 1, ())) * 16
    part, rest = matmul(a[:, :cut], b[:, :cut]), matmul(a[:, cut:], b[:, cut:])
    want = matmul(a, b) if CPU else part + rest
    assert_bitwise_equal(matmul(a[:, cut:], b[:, cut:], out=part), want, f"cut at {cut}")
