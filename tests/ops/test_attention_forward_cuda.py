"""The CUDA forward of attention gives Triton's bits on a GPU, for every tile, page, batch and neighboring sequence.

test_attention_cuda.py tests Triton's kernels and holds the input functions.
"""

import random

import pytest
import torch

from alignkit import ops
from alignkit.runtime import dispatch
from alignkit.runtime.families import SM90
from alignkit.testing import assert_bitwise_equal

from .helpers import CPU, randn, times
from .test_attention_cuda import caches, capture, last, packed

pytestmark = pytest.mark.skipif(CPU, reason="needs a GPU")

BF16 = torch.bfloat16
BORDERS = [1, 2, 63, 64, 65, 127, 128, 129, 191, 192, 193, 511, 512, 513, 575, 576, 577, 1023, 1024, 1025, 1100, 1536]
"""Lengths around multiples of 64 and of a leaf."""
DIMS = [64, 96, 128, 256]
HEADS = [
    *((128, 8, 2), (128, 8, 8), (128, 7, 1), (128, 16, 1), (128, 6, 2)),
    *((64, 8, 2), (64, 8, 8), (64, 12, 1)),
    *((96, 8, 2), (96, 6, 6), (96, 7, 1)),
    *((256, 8, 2), (256, 4, 4), (256, 5, 1)),
]
"""head_dim, query heads, KV heads."""
PAGED = [
    (128, 8, 2, 16),
    (128, 7, 1, 48),
    (128, 16, 1, 32),
    (128, 4, 4, 64),
    (64, 8, 2, 16),
    (64, 5, 1, 96),
    (64, 8, 8, 256),
    (96, 8, 2, 16),
    (96, 7, 1, 48),
    (96, 4, 4, 64),
    (256, 8, 2, 16),
    (256, 5, 1, 96),
    (256, 4, 4, 64),
]
"""head_dim, query heads, KV heads, rows of a page."""


@pytest.fixture(scope="module")
def kernels():
    if dispatch.backend_of("cuda") != "cuda":
        pytest.skip("the CUDA kernels are not built")
    from alignkit.ops.attention import cuda_backend, triton_backend

    return cuda_backend, triton_backend


def same(got, want, what):
    for name, a, b in zip(("out", "shift"), got, want, strict=True):
        assert_bitwise_equal(a, b, f"{name}, {what}")


def test_rounded_exp2_reaches_2_at_a_single_threshold():
    """The kernel may test all probabilities of a block, because the contract tests that of the largest score."""
    import triton
    import triton.language as tl

    @triton.jit
    def powers(X, Y, BLOCK: tl.constexpr):
        i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
        tl.store(Y + i, tl.exp2(tl.load(X + i)))

    x = torch.arange(0x3F000000, 0x40000000, dtype=torch.int32, device="cuda").view(torch.float32)  # all of [0.5, 2)
    y = torch.empty_like(x)
    powers[(len(x) // 1024,)](x, y, BLOCK=1024)
    for dtype in (BF16, torch.float32):
        too_great = y.to(dtype) >= 2
        first = int(too_great.int().argmax())
        assert 0 < first and not too_great[:first].any() and too_great[first:].all()


@pytest.mark.parametrize("dim,heads,kv", HEADS)
def test_packed_batches_have_tritons_bits(kernels, dim, heads, kv):
    cuda, triton = kernels
    for seed in times(3):
        rng = random.Random(f"{dim} {heads} {kv} {seed}")
        lens = [rng.choice(BORDERS) for _ in range(rng.randint(1, 9))] + [0] * rng.randint(0, 2)
        rng.shuffle(lens)
        q, k, v, _, cu = packed(lens, heads, kv, dim, seed=seed)
        q *= (1.0, 5.0, 12.0)[seed]  # the shift changes in no block, in some, in most
        want = triton.forward(q, k, v, cu, dim**-0.5)
        for together in {1, heads // kv}:
            same(cuda.forward(q, k, v, cu, dim**-0.5, together), want, f"{lens}, together {together}")
        same(cuda.forward(q, k, v, cu.long(), dim**-0.5), want, f"{lens}, int64 starts")
        joint = torch.cat([q, k, v], 1)
        parts = joint.split([heads, kv, kv], 1)
        same(cuda.forward(*parts, cu, dim**-0.5), want, f"{lens}, of a joint tensor")
        for scale in (1.0, 1e-3, 30.0):
            same(cuda.forward(q, k, v, cu, scale), triton.forward(q, k, v, cu, scale), f"{lens}, scale {scale}")


@pytest.mark.parametrize("dim", DIMS)
def test_many_sequences(kernels, dim):
    """Use more sequences than a warp has lanes, and more tiles than CTAs."""
    cuda, triton = kernels
    rng = random.Random(dim)
    lens = [rng.choice([0, 1, 5, 64, 100, 129, 200, 600]) for _ in range(203)] + [5000]
    rng.shuffle(lens)
    q, k, v, _, cu = packed(lens, 8, 2, dim)
    same(cuda.forward(q, k, v, cu, 0.1), triton.forward(q, k, v, cu, 0.1), "203 sequences and a long one")


@pytest.mark.parametrize("dim", DIMS)
def test_long_contexts(kernels, dim):
    cuda, triton = kernels
    q, k, v, _, cu = packed([33000, 7000], 8, 2, dim)
    want = triton.forward(q, k, v, cu, dim**-0.5)
    for _ in range(5):  # a race would make two runs differ
        same(cuda.forward(q, k, v, cu, dim**-0.5), want, "again")


@pytest.mark.parametrize("dim,heads,kv,page", PAGED)
def test_paged_batches_have_tritons_bits(kernels, dim, heads, kv, page):
    """Mix prefill, chunks, decode, sequences without queries, and padding, whose output is zero."""
    cuda, triton = kernels
    rng = random.Random(f"{dim} {heads} {page}")
    lens = [rng.choice(BORDERS) for _ in range(6)] + [2500, 3]
    q, k, v, _, cu = packed(lens, heads, kv, dim)
    q *= 12.0  # the shift changes in some blocks
    want, _ = triton.forward(q, k, v, cu, dim**-0.5)
    k_cache, v_cache, table = caches(k, v, lens, page)
    flat = [c.flatten(0, 1) for c in (k_cache, v_cache)]
    assert flat[0].data_ptr() == k_cache.data_ptr(), "the flattened cache must be a view"
    for x in times(6):
        take = [rng.choice([0, 1, min(n, 9), min(n, 70), min(n, 130), max(n - 64, 0), n]) for n in lens]
        rows, starts = last(lens, take)
        queries = torch.cat([q[rows], torch.full((5, heads, dim), 3.0, dtype=BF16)])
        ints = torch.int64 if page == 16 and x == 5 else torch.int32
        arguments = table.to(ints), starts.to(ints), torch.tensor(lens, dtype=ints), page, dim**-0.5
        for together in {1, heads // kv}:
            out = torch.full_like(queries, float("nan"))
            cuda.paged(queries, *flat, *arguments, out, together)
            what = f"{take} of {lens}, together {together}"
            assert_bitwise_equal(out[: len(rows)], want[rows], what)
            assert not out[len(rows) :].any(), what


def test_op_uses_the_cuda_kernel_where_it_applies(kernels):
    """The op uses Triton for all other problems."""
    calls = []

    def counted(module):
        def forward(*arguments, inner=module.forward):
            calls.append(module.__name__.rpartition(".")[2].removesuffix("_backend"))
            return inner(*arguments)

        return forward

    with pytest.MonkeyPatch.context() as patch:
        for module in kernels:
            patch.setattr(module, "forward", counted(module))
        for dim, dtype, chosen in (
            (128, BF16, "cuda"),
            (64, BF16, "cuda"),
            (96, BF16, "cuda"),
            (256, BF16, "cuda"),
            (80, BF16, "triton"),
            (128, torch.float32, "triton"),
        ):
            q, k, v, _, cu = packed([70, 3], 8, 2, dim, dtype)
            calls.clear()
            ops.attention(q, k, v, cu)
            assert calls == [chosen], (dim, dtype)
        q, k, v, _, cu = packed([70, 3], 8, 2, 64)
        wide = torch.cat([q, q[..., :4]], -1)[..., :64]  # rows not aligned to 16 bytes
        calls.clear()
        assert_bitwise_equal(
            ops.attention(wide, k, v, cu), ops.attention(q, k, v, cu), "strides that TMA supports, and others"
        )
        assert calls == ["triton", "cuda"]


@pytest.mark.parametrize("dim", DIMS)
@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_non_finite_value_reaches_only_rows_that_see_it(kernels, dim, value):
    """A non-finite value in v may also reach up to a block of earlier rows."""
    cuda, triton = kernels
    lens, row = [300, 700, 90], 300 + 333
    q, k, v, _, cu = packed(lens, 8, 2, dim)
    clean, _ = cuda.forward(q, k, v, cu, dim**-0.5)
    for name, t in (("q", q), ("k", k)):
        saved = t[row, 1].clone()
        t[row, 1] = value
        same(cuda.forward(q, k, v, cu, dim**-0.5), triton.forward(q, k, v, cu, dim**-0.5), name)
        t[row, 1] = saved
    v[row, 1, 3] = value
    out, _ = cuda.forward(q, k, v, cu, dim**-0.5)
    assert out[row : 300 + 700, 4:, 3].isnan().all()
    reached = torch.zeros_like(out, dtype=torch.bool)
    reached[row - SM90.kv_block : 300 + 700, 4:, 3] = True
    assert_bitwise_equal(out[~reached], clean[~reached], "all else")


def test_wrong_starts_give_nan(kernels):
    cuda, triton = kernels
    q, k, v, _, _ = packed([20, 30], 8, 2, 64)
    for wrong in ([0, 20, 49], [1, 20, 50], [0, 20, 51], [0], [0, 30, 20, 50], [0, -5, 50]):
        starts = torch.tensor(wrong).int()
        got = cuda.forward(q, k, v, starts, 0.1)
        if wrong[0] == 0 and wrong[-1] == 50:
            continue  # unspecified rows; compute-sanitizer checks for stray writes
        same(got, triton.forward(q, k, v, starts, 0.1), f"{wrong}")
        assert got[0].isnan().all()


@pytest.mark.parametrize("dim", [128, 256])
def test_graph_replays_with_other_lengths(kernels, dim):
    cuda, triton = kernels
    q, k, v, _, _ = packed([1200], 8, 2, dim)
    starts = torch.tensor([0, 700, 1200]).int()
    graph, got = capture(lambda: cuda.forward(q, k, v, starts, 0.1))
    for middle in (700, 0, 64, 513, 1200):
        starts[1] = middle
        graph.replay()
        same(got, triton.forward(q, k, v, starts, 0.1), f"cut at {middle}")


@pytest.mark.parametrize("dim", DIMS)
def test_kernel_waits_for_its_inputs(kernels, dim):
    """Programmatic dependent launch starts the kernel early; it still waits for its predecessors."""
    cuda, triton = kernels
    q, k, v, _, cu = packed([4000], 8, 2, dim)
    want = triton.forward(q, k, v, cu, 0.1)
    for _ in times(20):
        moved = [torch.empty_like(t) for t in (q, k, v)]
        for target, t in zip(moved, (q, k, v), strict=True):
            target.copy_(randn(*t.shape, dtype=BF16))
            target.copy_(t)
        same(cuda.forward(*moved, cu, 0.1), want, "right after its inputs were written")
