"""CUDA kernels of linear_logp, and of skinny GEMMs for its logits, give Triton's bits on a GPU."""

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import example, given

from alignkit import ops
from alignkit.ops.linear import matmul
from alignkit.ops.linear_logp.source import Transform
from alignkit.runtime import cuda, dispatch
from alignkit.runtime.families import SM90
from alignkit.testing import assert_bitwise_equal

from .helpers import CPU, randn, seeds

pytestmark = pytest.mark.skipif(CPU or not cuda.available(), reason="needs a GPU, and the CUDA kernels built")

BF16 = torch.bfloat16
rows, depths, ids = st.integers(257, 1500), st.integers(1, 40).map(lambda n: 8 * n), st.integers(1, 3000)


def padded_nans(n: int, width: int, dtype: torch.dtype = BF16):
    """Return NaNs [n, width], with a row stride that is a multiple of 8 elements."""
    return torch.full((n, width + -width % 8), float("nan"), dtype=dtype)[:, :width]


def operands(n, d, v, seed):
    return randn(n, d, dtype=BF16, seed=seed), randn(v, d, dtype=BF16, scale=2.5 / d**0.5)


def transform(v, bias, cap, scale):
    return Transform(randn(v) if bias else None, cap, scale)


options = {
    "bias": st.booleans(),
    "cap": st.sampled_from([None, 5.0]),
    "scale": st.sampled_from([None, 0.5]),
    "temperature": st.booleans(),
    "entropy": st.booleans(),
    "first": st.sampled_from([0, 128, 151936]),
    "seed": seeds,
}


@given(n=rows, d=depths, v=ids, **options)
@example(n=4097, d=4096, v=4096 + 3, bias=False, cap=None, scale=None, temperature=False, entropy=True, first=0, seed=0)
def test_statistics_have_tritons_bits(n, d, v, bias, cap, scale, temperature, entropy, first, seed):
    from alignkit.ops.linear_logp import cuda_backend as kernels
    from alignkit.ops.linear_logp import triton_backend

    hidden, weight = operands(n, d, v, seed)
    logit_transform, t = transform(v, bias, cap, scale), torch.rand(n) + 0.5 if temperature else None
    target = torch.randint(0, 2 * v, (n,)) + first  # half of them in another shard
    tiles = -(-v // 128)

    def outputs():
        return (
            torch.full((n, tiles), float("nan")),
            *(torch.full((n, tiles), -1, dtype=torch.int32) for _ in range(2)),
            torch.zeros(n),
        )

    got, want, products = outputs(), outputs(), torch.full((n, v + -v % 4), float("nan"))[:, :v]
    (m, q, u, z), (m0, q0, u0, z0) = got, want
    kernels.head_statistics(
        hidden, weight, logit_transform, t, target, first, m, q, u if entropy else None, z, None, 0, products
    )
    logits = matmul(hidden, weight)
    triton_backend.statistics(logits, logit_transform, t, target, first, m0, q0, u0 if entropy else None, z0)
    assert_bitwise_equal(products, logits, "products")
    for name, a, b in zip(("m", "q", "u", "z_target"), got, want, strict=True):
        assert_bitwise_equal(a, b, name)


@given(n=rows, d=depths, v=ids, counted=st.floats(0, 1), **options)
def test_gradient_has_tritons_bits(n, d, v, counted, bias, cap, scale, temperature, entropy, first, seed):
    from alignkit.ops.linear_logp import cuda_backend as kernels
    from alignkit.ops.linear_logp import triton_backend

    hidden, weight = operands(n, d, v, seed)
    logit_transform, t = transform(v, bias, cap, scale), torch.rand(n) + 0.5 if temperature else None
    target, count = torch.randint(0, 2 * v, (n,)) + first, int(counted * n)
    target[count:] = -1
    lse, g = 6 + randn(n), randn(n)
    ent, g_ent = (torch.rand(n) * 3, randn(n)) if entropy else (None, None)
    got, want = padded_nans(n, v), padded_nans(n, v)
    triton_backend.gradient(matmul(hidden, weight), logit_transform, first, want, t, target, lse, ent, g, g_ent)
    for before in (None, 0, 100):
        got.fill_(float("nan"))
        counter = None if before is None else torch.tensor(count + before).int()
        kernels.head_gradient(
            hidden, weight, logit_transform, t, target, first, lse, ent, g, g_ent, got, counter, before or 0
        )
        assert_bitwise_equal(got, want, f"dz, {before}")


@given(
    n=st.integers(1, 1000),
    d=st.integers(1, 80).map(lambda n: 8 * n),
    c=st.integers(1, 1000),
    resume=st.booleans(),
    add=st.booleans(),
    counted=st.sampled_from([None, 0.0, 0.3, 1.0]),
    computed=st.sampled_from(["both", "dh", "dw"]),
    seed=seeds,
)
@example(n=700, d=4096, c=4096 + 8, resume=True, add=False, counted=1.0, computed="both", seed=0)
@example(n=1000, d=1536, c=40000 + 8, resume=False, add=False, counted=0.3, computed="both", seed=0)
@example(n=4096, d=1536, c=9000, resume=True, add=True, counted=None, computed="both", seed=0)
def test_products_have_tritons_bits(n, d, c, resume, add, counted, computed, seed):
    """Products cover only the counted rows.

    In the explicit examples, dweight starts on SMs that dhidden leaves idle.
    """
    from alignkit.ops.linear.triton_backend import chain
    from alignkit.ops.linear.triton_backend import resume as resume_chain
    from alignkit.ops.linear_logp import cuda_backend as kernels

    torch.manual_seed(seed)
    counted_rows = None if counted is None else int(counted * n)
    dz = padded_nans(n, c).copy_(randn(n, c, dtype=BF16))
    hidden, weight = randn(n, d, dtype=BF16), randn(c, d, dtype=BF16)
    if counted_rows is not None:
        dz[counted_rows:] = 0
    base = randn(n, d), randn(c, d)
    for dtype in (torch.float32,) if add else (torch.float32, BF16):
        (dh, dw), (dh0, dw0) = ((base[0].clone(), base[1].to(dtype, copy=True)) for _ in range(2))
        if resume:
            resume_chain(dz, weight.t(), dh0)
        else:
            chain(dz, weight.t(), None, dh0, False)
        chain(dz.t(), hidden.t(), None, dw0, add)
        count = None if counted_rows is None else torch.tensor(counted_rows + 7).int()
        kernels.head_products(
            dz,
            hidden,
            weight,
            dh if computed != "dw" else None,
            dw if computed != "dh" else None,
            resume,
            add,
            count,
            7 if counted_rows is not None else 0,
        )
        if computed != "dw":
            assert_bitwise_equal(dh, dh0, "dhidden")
        if computed != "dh":
            assert_bitwise_equal(dw, dw0, f"dweight, {dtype}")


@given(m=st.integers(1, 64), k=st.integers(1, 60).map(lambda n: 8 * n), more=st.integers(0, 300), seed=seeds)
def test_small_m_products_have_tritons_bits(m, k, more, seed):
    from alignkit.ops.linear import cuda_backend as kernels
    from alignkit.ops.linear.triton_backend import chain

    n = kernels.FEW_MIN_OUTPUTS + more
    a, b = operands(m, k, n, seed)
    got, want = torch.full((m, n + 3), float("nan"))[:, :n], torch.empty(m, n)
    kernels.few(a, b, None, got)
    chain(a, b, None, want, False)
    assert_bitwise_equal(got, want)


@pytest.mark.parametrize(
    "kwargs",
    [
        {},
        {"workspace": 1},
        {"temperature": 0.7, "return_entropy": True},
        {"soft_cap": 8.0},
        {"vocab_size": 4990, "keep_logits": True},
    ],
)
def test_op_has_tritons_bits(kwargs):
    """Use several blocks of rows, and ignored rows."""
    hidden, weight, bias = *operands(9000, 256, 5000, 0), randn(5000, dtype=BF16)
    target = torch.randint(0, 4990, (9000,))
    target[torch.rand(9000) < 0.4] = -100

    def run():
        leaves = [t.clone().requires_grad_() for t in (hidden, weight, bias)]
        out = ops.linear_logp(*leaves[:2], target, bias=leaves[2], **kwargs)
        out = out if isinstance(out, tuple) else (out,)
        return *out, *torch.autograd.grad(out, leaves, [torch.linspace(-1, 1, 9000) for _ in out])

    with dispatch.use("triton"):
        want = run()
    got = run()
    for i, (a, b) in enumerate(zip(got, want, strict=True)):
        assert_bitwise_equal(a, b, f"tensor {i}")


@pytest.mark.parametrize("keep", [False, True])
@pytest.mark.parametrize("n", [700, SM90.head_rows + 700])
def test_slabs_in_the_weight_gradient_change_no_bit(keep, n):
    """Slabs and fp32 sums over chains may use the weight gradient's memory or their own."""
    hidden, weight = operands(n, 512, 40000, 0)
    target, g = torch.randint(0, 40000, (n,)), randn(n)
    target[::5] = -100
    main = torch.zeros(40000, 512)

    def run(**options):
        leaves = [t.clone().requires_grad_() for t in (hidden, weight)]
        return torch.autograd.grad(
            ops.linear_logp(*leaves, target, keep_logits=keep, **options), leaves, g, allow_unused=True
        )

    dh, dw = run()
    assert_bitwise_equal(run(main_grad=main, workspace=1)[0], dh, "dhidden")
    assert_bitwise_equal(main.to(BF16), dw, "dweight")


def test_unsupported_inputs_use_triton():
    """Odd strides and few rows give the same bits without an error."""
    hidden, weight = operands(600, 72, 300, 0)
    target = torch.randint(0, 300, (600,))
    with dispatch.use("triton"):
        want = ops.linear_logp(hidden, weight, target)
    for h, w in (
        (hidden[:100], weight),
        (randn(600, 73, dtype=BF16)[:, 1:].copy_(hidden), weight),
        (hidden, randn(300, 73, dtype=BF16)[:, :72].copy_(weight)),
        (hidden.t().contiguous().t(), weight),
    ):
        assert_bitwise_equal(ops.linear_logp(h, w, target[: len(h)]), want[: len(h)])


def test_graph_capture():
    hidden, weight = operands(600, 64, 1000, 0)
    target = torch.randint(0, 1000, (600,))
    leaves = [t.clone().requires_grad_() for t in (hidden, weight)]

    def step():
        logp = ops.linear_logp(*leaves, target)
        return logp, *torch.autograd.grad(logp, leaves, torch.ones_like(logp))

    step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = step()
    target[::3] = -100
    with torch.no_grad():
        leaves[0].copy_(randn(600, 64, dtype=BF16, seed=1))
    graph.replay()
    for i, (a, b) in enumerate(zip(got, step(), strict=True)):
        assert_bitwise_equal(a, b, f"tensor {i}")


def test_row_does_not_depend_on_other_rows():
    """Another order, more rows, fewer rows, ignored rows and concurrent kernels change no bit."""
    n, v = 700, 3000
    hidden, weight = operands(n, 256, v, 0)
    target, g = torch.randint(0, v, (n,)), randn(n)

    def run(rows, ignored=()):
        """Return logp, entropy and dhidden of these rows, in this order."""
        h, t = hidden[rows].requires_grad_(), target[rows]
        t[list(ignored)] = -100
        out = ops.linear_logp(h, weight, t, return_entropy=True)
        return *(o.detach() for o in out), *torch.autograd.grad(out, h, [g[rows]] * 2)

    every, order = torch.arange(n), torch.randperm(n)
    want = run(every)
    for name, rows, ignored in (
        ("another order", order, ()),
        ("twice", torch.cat([every, order]), ()),
        ("fewer", order[:300], ()),
        ("some ignored", order, range(0, n, 3)),
    ):
        counts = torch.ones(len(rows), dtype=torch.bool)
        counts[list(ignored)] = False
        for i, (a, b) in enumerate(zip(run(rows, ignored), want, strict=True)):
            assert_bitwise_equal(a[counts], b[rows[counts]], f"{name}, tensor {i}")
    beside, noise = torch.cuda.Stream(), randn(2048, 2048, dtype=BF16)
    beside.wait_stream(torch.cuda.current_stream())
    for i in range(5):
        with torch.cuda.stream(beside):
            for _ in range(20):
                noise @ noise
        for j, (a, b) in enumerate(zip(run(every), want, strict=True)):
            assert_bitwise_equal(a, b, f"beside other work, run {i}, tensor {j}")
    torch.cuda.synchronize()


def test_error_is_not_above_that_of_torch():
    """The reference is torch's fp32 log-softmax of unrounded logits by cuBLAS."""
    hidden, weight = operands(1000, 4096, 20000, 0)
    target = torch.randint(0, 20000, (1000,))
    exact = torch.log_softmax(hidden.double() @ weight.t().double(), 1).gather(1, target[:, None])[:, 0]

    def error(logp):
        return (logp.double() - exact).abs().max().item()

    logits = torch.mm(hidden, weight.t(), out_dtype=torch.float32)
    theirs = torch.log_softmax(logits, 1).gather(1, target[:, None])[:, 0]
    # Logprobs from -16 to -32 are multiples of 2^-19; the tolerance is one such step.
    assert error(ops.linear_logp(hidden, weight, target)) <= error(theirs) + 2**-19
