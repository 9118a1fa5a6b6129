"""The CUDA backward of attention gives Triton's bits on a GPU, for every batch, stride and neighboring sequence.

test_attention_cuda.py tests Triton's kernels; helpers are there and in test_attention_forward_cuda.py.
"""

import random

import pytest
import torch

from alignkit import ops
from alignkit.runtime import dispatch
from alignkit.testing import assert_bitwise_equal

from .helpers import CPU, randn, times
from .test_attention_cuda import capture, packed
from .test_attention_forward_cuda import BF16, BORDERS, DIMS, HEADS, kernels

__all__ = ["kernels"]  # a fixture
pytestmark = pytest.mark.skipif(CPU, reason="needs a GPU")


def same(got, want, what):
    for name, a, b in zip(("dq", "dk", "dv"), got, want, strict=True):
        assert_bitwise_equal(a, b, f"{name}, {what}")


def with_triton(kernels, q, k, v, g, cu, scale):
    """Return the arguments of `backward`, and Triton's gradients."""
    _, triton = kernels
    arguments = q, k, v, cu, *triton.forward(q, k, v, cu, scale), g, scale
    return arguments, triton.backward(*arguments)


@pytest.mark.parametrize("dim,heads,kv", HEADS)
def test_packed_batches_have_tritons_bits(kernels, dim, heads, kv):
    cuda, _ = kernels
    for seed in times(4):
        rng = random.Random(f"{dim} {heads} {kv} {seed}")
        lens = [rng.choice(BORDERS) for _ in range(rng.randint(1, 9))] + [0] * rng.randint(0, 2)
        rng.shuffle(lens)
        q, k, v, g, cu = packed(lens, heads, kv, dim, seed=seed)
        for scale in (dim**-0.5, 1.0, 1e-3):
            arguments, want = with_triton(kernels, q, k, v, g, cu, scale)
            same(cuda.backward(*arguments), want, f"{lens}, scale {scale}")
        arguments, want = with_triton(kernels, q, k, v, g, cu, 0.1)
        same(cuda.backward(*arguments[:3], cu.long(), *arguments[4:]), want, f"{lens}, int64 starts")
        parts = torch.cat([q, k, v], 1).split([heads, kv, kv], 1)
        same(cuda.backward(*parts, *arguments[3:]), want, f"{lens}, of a joint tensor")
        off = torch.cat([g.flatten()[:4], g.flatten()])[4:].view_as(g)  # not aligned to 16 bytes
        same(cuda.backward(*arguments[:6], off, 0.1), want, f"{lens}, a gradient within another tensor")


@pytest.mark.parametrize("dim", DIMS)
def test_many_sequences(kernels, dim):
    """Use more sequences than a warp has lanes, and more tiles than CTAs."""
    cuda, _ = kernels
    rng = random.Random(dim)
    lens = [rng.choice([0, 1, 5, 64, 100, 129, 200, 600]) for _ in range(203)] + [5000]
    rng.shuffle(lens)
    arguments, want = with_triton(kernels, *packed(lens, 8, 2, dim), 0.1)
    same(cuda.backward(*arguments), want, "203 sequences and a long one")


@pytest.mark.parametrize("dim", DIMS)
def test_long_contexts(kernels, dim):
    cuda, _ = kernels
    arguments, want = with_triton(kernels, *packed([33000, 7000], 8, 2, dim), dim**-0.5)
    for _ in range(5):  # a race would make two runs differ
        same(cuda.backward(*arguments), want, "long contexts")


@pytest.mark.parametrize("dim", DIMS)
@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_non_finite_value_stays_in_its_sequence_and_gqa_group(kernels, dim, value):
    """A NaN or infinity does not reach another sequence or GQA group."""
    cuda, _ = kernels
    lens, row = [300, 700, 90], 300 + 333
    q, k, v, g, cu = packed(lens, 8, 2, dim)
    clean = with_triton(kernels, q, k, v, g, cu, dim**-0.5)[1]
    for t in (q, k, v, g):
        group = slice(t.shape[1] // 2, None)  # heads of the second KV head
        saved = t[row, group].clone()
        t[row, group] = value
        arguments, _ = with_triton(kernels, q, k, v, g, cu, dim**-0.5)
        got = cuda.backward(*arguments)
        for name, a, b in zip(("dq", "dk", "dv"), got, clean, strict=True):
            for rows in (slice(0, 300), slice(1000, None)):
                assert_bitwise_equal(a[rows], b[rows], f"{name}, other sequences")
            half = a.shape[1] // 2
            assert_bitwise_equal(a[:, :half], b[:, :half], f"{name}, other heads")
        assert any(a.isnan().any() for a in got)
        t[row, group] = saved


def test_wrong_starts_give_nan(kernels):
    cuda, triton = kernels
    q, k, v, g, cu = packed([20, 30], 8, 2, 64)
    out, shift = triton.forward(q, k, v, cu, 0.1)
    for wrong in ([0, 20, 49], [1, 20, 50], [0, 20, 51], [0], [0, 30, 20, 50], [0, -5, 50]):
        starts = torch.tensor(wrong).int()
        _, shift = triton.forward(q, k, v, starts, 0.1)
        got = cuda.backward(q, k, v, starts, out, shift, g, 0.1)
        if wrong[0] == 0 and wrong[-1] == 50:
            continue  # unspecified rows; compute-sanitizer checks for stray writes
        assert all(t.isnan().all() for t in got)


def test_autograd_uses_the_cuda_kernels_where_they_apply(kernels):
    """The op's gradients use Triton for all other problems."""
    calls = []

    def counted(module):
        def backward(*arguments, inner=module.backward):
            calls.append(module.__name__.rpartition(".")[2].removesuffix("_backend"))
            return inner(*arguments)

        return backward

    with pytest.MonkeyPatch.context() as patch:
        for module in kernels:
            patch.setattr(module, "backward", counted(module))
        for dim, dtype, backend, chosen in (
            (128, BF16, "auto", "cuda"),
            (64, BF16, "auto", "cuda"),
            (96, BF16, "auto", "cuda"),
            (256, BF16, "auto", "cuda"),
            (128, BF16, "triton", "triton"),
            (80, BF16, "auto", "triton"),
            (128, torch.float32, "auto", "triton"),
        ):
            q, k, v, g, cu = packed([70, 3], 8, 2, dim, dtype)
            leaves = [t.requires_grad_() for t in (q, k, v)]
            calls.clear()
            with dispatch.use(backend):
                torch.autograd.grad(ops.attention(*leaves, cu), leaves, g)
            assert calls == [chosen], (dim, dtype, backend)


@pytest.mark.parametrize("dim", [128, 256])
def test_graph_replays_with_other_lengths(kernels, dim):
    cuda, triton = kernels
    q, k, v, g, _ = packed([1200], 8, 2, dim)
    starts = torch.tensor([0, 700, 1200]).int()

    def run():
        return cuda.backward(q, k, v, starts, *triton.forward(q, k, v, starts, 0.1), g, 0.1)

    graph, got = capture(run)
    for middle in (700, 0, 64, 513, 1200):
        starts[1] = middle
        graph.replay()
        same(got, with_triton(kernels, q, k, v, g, starts, 0.1)[1], f"cut at {middle}")


@pytest.mark.parametrize("dim", DIMS)
def test_kernels_wait_for_their_inputs(kernels, dim):
    """Programmatic dependent launch starts kernels early; each still waits for its predecessors."""
    cuda, _ = kernels
    q, k, v, g, cu = packed([4000], 8, 2, dim)
    arguments, want = with_triton(kernels, q, k, v, g, cu, 0.1)
    for _ in times(20):
        moved = [torch.empty_like(t) for t in (q, k, v, g)]
        for target, t in zip(moved, (q, k, v, g), strict=True):
            target.copy_(randn(*t.shape, dtype=BF16))
            target.copy_(t)
        got = [t.clone() for t in cuda.backward(*moved[:3], *arguments[3:6], moved[3], 0.1)]
        same(got, want, "right after its inputs were written")
