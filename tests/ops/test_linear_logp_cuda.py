"""linear_logp on a GPU: no synchronization, schedules that change no bit, and more than 2^31 elements.

test_linear_logp_sm90.py compares its CUDA kernels with Triton's.
"""

import threading

import pytest
import torch

from alignkit import ops
from alignkit.dist import TP
from alignkit.ops.linear_logp import blocks
from alignkit.runtime.families import SM90
from alignkit.testing import assert_bitwise_equal

from .helpers import CPU, randn

pytestmark = pytest.mark.skipif(CPU, reason="needs a GPU")

BF16 = torch.bfloat16


def grads(function, *tensors, g=None):
    leaves = [t.detach().clone().requires_grad_() for t in tensors]
    out = function(*leaves)
    out = out if isinstance(out, tuple) else (out,)
    torch.autograd.backward(out, [g if g is not None else torch.ones_like(o) for o in out])
    return [*(o.detach() for o in out), *(t.grad for t in leaves)]


def assert_all_equal(got, want, what):
    for i, (a, b) in enumerate(zip(got, want, strict=True)):
        assert_bitwise_equal(a, b, f"{what}, tensor {i}")


def head(n=300, d=256, v=9000, dtype=BF16):
    return randn(n, d, dtype=dtype, seed=n), randn(v, d, dtype=dtype, scale=0.05), torch.randint(0, v, (n,))


def test_ops_do_not_synchronize():
    h, w, target = head()
    norm, table, positions = randn(256, dtype=BF16), ops.rope_table(64, 4096, 1e6, h.device), torch.arange(300)
    cu, ids = torch.tensor([0, 100, 300]).int(), torch.randint(0, 9000, (300, 3))
    target[5:90:3] = -100

    def step():
        def forward(h, w, norm):
            x, r = ops.rms_norm(h, norm, 1e-6, h)
            x = ops.row_parallel_linear(ops.linear(x, w[:256]), w[:256], norm)
            q = ops.rope(x.view(300, 4, 64), positions, table)
            x = ops.silu_mul(ops.attention(q, q, q, cu).reshape(300, 256), r)
            logp, entropy = ops.linear_logp(x, w, target, temperature=0.7, return_entropy=True)
            return logp, entropy, ops.linear_logp(x, w, target, temperature=torch.full((300,), 1.3))

        logits = ops.head_logits(h, w)
        return [
            *grads(forward, h, w, norm),
            *grads(lambda z: ops.logp_from_logits(z, target), logits),
            ops.log_softmax(logits),
            ops.token_logp(logits, ids, temperature=2.0),
        ]

    want = step()  # compiles kernels and selects GEMM algorithms
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        got = step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert_all_equal(got, want, "again")


def test_graph_capture():
    h, w, target = head()
    target[::5] = -100
    ids = torch.randint(0, 9000, (300, 3))

    def step():
        logits = ops.head_logits(h, w, soft_cap=30.0)
        return [
            ops.linear_logp(h, w, target, soft_cap=30.0, temperature=0.7),
            ops.log_softmax(logits, temperature=0.7),
            ops.token_logp(logits, ids),
        ]

    step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = step()
    h.copy_(randn(300, 256, dtype=BF16, seed=8))
    target.copy_(target.roll(1))
    graph.replay()
    assert_all_equal(out, step(), "replayed")


@pytest.mark.parametrize("kwargs", [{}, {"soft_cap": 8.0, "logit_scale": 0.5, "temperature": 0.7}])
def test_rollout_and_training_agree(kwargs):
    """`token_logp` of sampled tokens, `log_softmax` and the training's `linear_logp` give the same bits."""
    h, w, target = head(d=1000, v=9001)
    temperature = kwargs.get("temperature", 1.0)
    logits = ops.head_logits(h, w, **{k: v for k, v in kwargs.items() if k != "temperature"})
    want = ops.linear_logp(h, w, target, **kwargs)
    ids = torch.stack([target, torch.randint(0, 9001, (300,))], 1)
    whole = ops.log_softmax(logits, temperature=temperature)
    assert_bitwise_equal(whole.gather(1, ids), ops.token_logp(logits, ids, temperature=temperature), "token_logp")
    assert_bitwise_equal(whole.gather(1, ids)[:, 0], want, "linear_logp")
    assert_bitwise_equal(
        ops.token_logp(logits / torch.full((300, 1), temperature), ids)[:, 0], want, "temperature taken before"
    )
    for n in (1, 7, 16, 17):
        assert_bitwise_equal(ops.token_logp(logits[:n], ids[:n], temperature=temperature)[:, 0], want[:n], f"{n} rows")


def test_bf16_logits_have_the_bits_of_fp32_logits():
    _, _, target = head()
    z = randn(300, 9000, dtype=BF16, scale=3)
    got, want = (grads(lambda z: ops.logp_from_logits(z, target, temperature=0.7), t) for t in (z, z.float()))
    assert_bitwise_equal(got[0], want[0], "logp")
    assert_bitwise_equal(got[1], want[1].to(BF16), "gradient")


def test_strides_change_no_bit():
    h, w, target = head()
    g = randn(300)
    want = grads(lambda h, w: ops.linear_logp(h, w, target), h, w, g=g)
    wide = torch.stack([h, h], 2)
    for name, hh, ww, t in (
        ("columns", wide[..., 1], w, target),
        ("transposed", h.t().contiguous().t(), w.t().contiguous().t(), target.repeat(2, 1).t()[:, 1]),
    ):
        leaves = [x.detach().requires_grad_() for x in (hh, ww)]
        logp = ops.linear_logp(*leaves, t)
        logp.backward(g)
        assert_all_equal([logp.detach(), *(x.grad for x in leaves)], want, name)
    logits = ops.head_logits(h, w)
    assert_bitwise_equal(ops.logp_from_logits(logits.t().contiguous().t(), target), want[0], "logits transposed")
    assert_bitwise_equal(ops.logp_from_logits(torch.cat([logits, logits], 1)[:, :9000], target), want[0], "a slice")


@pytest.mark.parametrize("dtype", [torch.float32, BF16])
def test_schedules_change_no_bit(monkeypatch, dtype):
    h, w, target = head(n=900, d=64, dtype=dtype)
    target[::3] = -100

    def run(h, w):
        return ops.linear_logp(h, w, target, bias=w[:, 0].detach(), soft_cap=9.0, return_entropy=True)

    want = grads(run, h, w)
    monkeypatch.setitem(blocks.WORKSPACE, SM90, 1 << 16)
    for rows in (64, 96):
        monkeypatch.setitem(blocks.PART_ROWS, SM90, rows)
        assert_all_equal(grads(run, h, w), want, f"{rows} rows at a time")


def test_dweight_adds_the_chains_of_row_blocks():
    """If rows exceed one chain, dweight is the sum of the chains' fp32 results, in order."""
    n = SM90.head_rows
    h, w, target = head(n=2 * n + 100, d=32, v=600, dtype=torch.float32)
    target[torch.rand(len(target)) < 0.02] = -100
    rows = (target != -100).nonzero()[:, 0]
    g = randn(len(target))
    whole = grads(lambda w: ops.linear_logp(h, w, target), w, g=g)[1]
    parts = [grads(lambda w, r=r: ops.linear_logp(h[r], w, target[r]), w, g=g[r])[1] for r in rows.split(n)]
    want = parts[0]
    for part in parts[1:]:
        want = want + part
    assert_bitwise_equal(whole, want)


def test_ignored_rows_change_no_bit():
    h, w, target = head()
    ignored = torch.rand(300) < 0.4
    g = randn(300)
    want = grads(lambda h, w: ops.linear_logp(h, w, target[~ignored]), h[~ignored], w, g=g[~ignored])
    logp, dh, dw = grads(
        lambda h, w: ops.linear_logp(h, w, target.masked_fill(ignored, -100)),
        h.masked_fill(ignored[:, None], float("nan")),
        w,
        g=g.masked_fill(ignored, float("inf")),
    )
    assert_all_equal([logp[~ignored], dh[~ignored], dw], want, "the rest")
    assert (logp[ignored] == 0).all() and (dh[ignored] == 0).all()


def test_beyond_2_to_the_31_elements():
    n, v = 15000, 151936
    target = torch.randint(0, v, (n,))
    last = slice(n - 20, n)
    z = torch.empty(n, v, dtype=BF16).normal_()
    logp, grad = grads(lambda z: ops.logp_from_logits(z, target), z)
    want = grads(lambda z: ops.logp_from_logits(z, target[last]), z[last])
    assert_all_equal([logp[last], grad[last]], want, "logp_from_logits")
    del grad
    assert_bitwise_equal(ops.token_logp(z, target[:, None])[:, 0], logp, "token_logp")
    assert_bitwise_equal(ops.log_softmax(z)[last].gather(1, target[last, None])[:, 0], want[0], "log_softmax")
    del z
    h, w, _ = head(n=n, d=64, v=v)
    (logp, dh, _) = grads(lambda h, w: ops.linear_logp(h, w, target), h, w)
    want = grads(lambda h, w: ops.linear_logp(h, w, target[last]), h[last], w)
    assert_all_equal([logp[last], dh[last]], want[:2], "linear_logp")
    logits = ops.head_logits(h, w)
    assert_bitwise_equal(ops.logp_from_logits(logits, target), logp, "head_logits")


class _Threads(TP):
    """A tensor-parallel group of threads on one GPU, forward only."""

    def __init__(self, rank, slots, barrier):
        super().__init__(None)
        self.rank, self.size, self.slots, self.barrier = rank, len(slots), slots, barrier

    def all_gather(self, t):
        self.slots[self.rank] = t
        self.barrier.wait(60)
        seen = list(self.slots)
        self.barrier.wait(60)
        return seen

    def check(self, op, checks):
        return self.all_gather(checks())


@pytest.mark.parametrize("sizes", [(4500, 4500), (300, 43, 8657), (10, 20, 8940, 30), (8000, 990, 10)])
def test_vocabulary_shards_change_no_bit(sizes):
    """Shard borders may be anywhere, several in one tile; the last rank has padding."""
    h, w, target = head()
    target %= 8970
    target[::7] = -100
    kwargs = {"vocab_size": 8970, "temperature": 0.7, "soft_cap": 8.0, "return_entropy": True}
    bias = randn(9000, dtype=BF16)
    want = ops.linear_logp(h, w, target, bias=bias, **kwargs)
    slots, barrier, out = [None] * len(sizes), threading.Barrier(len(sizes)), [None] * len(sizes)

    def rank(r):
        s = slice(sum(sizes[:r]), sum(sizes[: r + 1]))
        with torch.device("cuda"), torch.no_grad():
            out[r] = ops.linear_logp(
                h, w[s], target, bias=bias[s], vocab_start=s.start, tp=_Threads(r, slots, barrier), **kwargs
            )

    threads = [threading.Thread(target=rank, args=(r,)) for r in range(len(sizes))]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    for r, got in enumerate(out):
        assert_all_equal(got, want, f"rank {r}")
